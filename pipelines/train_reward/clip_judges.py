# SPDX-License-Identifier: Apache-2.0
"""ICT and HP to be trained: contrastive towers, and a head on the image's embedding."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visalign.core.preference.ict import ict_labels
from visalign.rewards.clip.towers import cosine
from visalign.rewards.scorers.hp import Hp
from visalign.rewards.scorers.ict import Ict
from visalign.training.reward.batch import Outputs, RewardBatch

from .config import TrainRewardConfig
from .examples import Example, pair_batch, pair_images
from .judges import TrainedJudge, base_name, freeze


class IctJudge(TrainedJudge):
    """Towers that learn their own truncated cosines: from `data.theta` on an image contains all of its prompt."""

    def __init__(self, config: TrainRewardConfig, device: torch.device) -> None:
        self.judge = Ict(config.model.path, device=device, cache_bytes=0)
        self.theta = config.data.theta
        super().__init__(config, self.judge.module, device)
        self.teacher = copy.deepcopy(self.module).eval().requires_grad_(False)
        self.module.requires_grad_(True)
        freeze(self.module.encoder.model, config.model.frozen)
        self.module.encoder.logit_scale.requires_grad_(False)  # the cosine has none

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        """Encode triples, with the labels that the teacher gives them; or pairs, to be measured on."""
        towers = self.judge.towers
        easy = towers.tokens([example.prompt for example in examples])
        pixels = towers.pixels(pair_images(examples))
        if len(examples[0].images) == 2:
            return pair_batch({"pixels": pixels, "easy": easy}, examples, heldout=heldout)
        same = all(example.refined is None for example in examples)
        refined = easy if same else towers.tokens([example.refined or example.prompt for example in examples])
        return RewardBatch(
            inputs={"pixels": pixels, "easy": easy, "refined": refined},
            size=len(examples),
            ict=self._labels(pixels, easy, refined),
        )

    @torch.no_grad()
    def _labels(self, pixels: Tensor, easy: Tensor, refined: Tensor) -> Any:
        count = len(easy)
        with self.precision():
            images = self.teacher.image_features(pixels[: 2 * count])
            texts = self.teacher.text_features(easy)
            between = torch.ones(count)
            if refined is not easy:
                between = cosine(texts, self.teacher.text_features(refined)).cpu()
        scores = cosine(images, texts.repeat(2, 1)).cpu()
        return ict_labels(scores[:count], scores[count:], between, theta=self.theta)

    def __call__(self, inputs: Any) -> Outputs:
        with self.precision():
            image = self.module.image_features(inputs["pixels"]).float()
            easy, refined = inputs["easy"], inputs.get("refined", inputs["easy"])
            texts = easy if refined is easy else torch.cat([easy, refined])  # one pass in either case
            both = self.module.text_features(texts).float()
        easy, other = both[: len(easy)], both[-len(easy) :]
        rows = len(image) // len(easy)
        value = (image * easy.repeat(rows, 1)).sum(-1)
        return {"value": value, "image": image, "easy": easy, "refined": other}

    def save(self, folder: Path) -> None:
        self.module.eval()
        self.judge.save(folder, dtype=self.save_dtype)


class HpJudge(TrainedJudge):
    """A tower and a new head that score the image alone."""

    def __init__(self, config: TrainRewardConfig, device: torch.device) -> None:
        model: Any = config.model
        widths = None if model.head is None else [*model.head, 1]
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.judge = Hp.untrained(model.path, widths=widths, device=device, cache_bytes=0)
        super().__init__(config, self.judge.module, device)
        self.module.requires_grad_(False)
        self.module.head.requires_grad_(True)
        self.ict = None if model.ict is None else Ict(model.ict, device=device, cache_bytes=0)
        if self.ict is not None:
            _ = self.ict.module  # a broken folder shows before the run begins
        if model.train == "full":
            encoder: Any = self.module.encoder.model
            is_open = self.module.encoder.is_open_clip
            tower = [encoder.visual] if is_open else [encoder.vision_model, encoder.visual_projection]
            nn.ModuleList(tower).requires_grad_(True)
            freeze(encoder, model.frozen)

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        images = pair_images(examples)
        pixels = self.judge.towers.pixels(images)
        if len(examples[0].images) == 2:
            return pair_batch({"pixels": pixels}, examples, heldout=heldout)
        if len(examples[0].images) == 1:  # a rating from 1 to 5 as the probability of no artefact
            target = (torch.tensor([example.target for example in examples]) - 1) / 4
            return RewardBatch(inputs={"pixels": pixels}, size=len(examples), target=target)
        assert self.ict is not None  # of ict_hp, which alone reads triples
        towers = self.ict.towers
        with torch.no_grad():
            image = self.ict.module.image_features(towers.pixels(images))
            text = self.ict.module.text_features(towers.tokens([example.prompt for example in examples]))
        inputs = {"pixels": pixels, "cosine": cosine(image, text.repeat(3, 1))}
        return RewardBatch(inputs=inputs, size=len(examples))

    def __call__(self, inputs: Any) -> Outputs:
        with self.precision():
            return {**inputs, "value": self.module(inputs["pixels"])}

    def save(self, folder: Path) -> None:
        self.module.eval()
        self.judge.save(folder, dtype=self.save_dtype, base=base_name(self.settings.path, folder))
