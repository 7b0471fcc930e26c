# SPDX-License-Identifier: Apache-2.0
"""ICT and HP as the reward trainer sees them: contrastive towers, and a head on the picture's embedding."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visalign.core.preference.ict import ict_labels
from visalign.errors import UserError, suggestion
from visalign.rewards.clip.towers import cosine
from visalign.rewards.scorers.hp import Hp
from visalign.rewards.scorers.ict import Ict
from visalign.training.reward.batch import Outputs, RewardBatch

from .batches import pair_images, pair_labels, pair_rows
from .config import TrainRewardConfig
from .examples import Example


class IctJudge:
    """Two towers that learn the truncated cosines of what they were before.

    Args:
        config: of the job.
        device: where it is trained.
    """

    def __init__(self, config: TrainRewardConfig, device: torch.device) -> None:
        self.judge = Ict.from_pretrained(config.model.path, device=device, cache_bytes=0)
        self.module = self.judge.module
        self.teacher = copy.deepcopy(self.module).eval().requires_grad_(False)
        self.theta, self.autocast = config.data.theta, config.model.autocast
        self.save_dtype = getattr(torch, config.model.save_dtype)
        self.module.requires_grad_(True)
        freeze(self.module.encoder.model, config.model.frozen)
        self.module.encoder.logit_scale.requires_grad_(False)  # the cosine has none

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        """Triples, with the labels that the teacher gives them; or pairs, to be measured on."""
        towers = self.judge.towers
        easy = towers.tokens([example.prompt for example in examples])
        pixels = towers.pixels(pair_images(examples))
        if len(examples[0].images) == 2:
            inputs = {"pixels": pixels, "easy": easy}
            labels = pair_labels(examples, heldout=heldout)
            return RewardBatch(inputs=inputs, size=len(examples), **pair_rows(len(examples)), **labels)  # type: ignore[arg-type]
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
        with self._precision():
            pictures = self.teacher.image_features(pixels[: 2 * count])
            texts = self.teacher.text_features(easy)
            between = (
                torch.ones(count)
                if refined is easy
                else cosine(texts, self.teacher.text_features(refined)).cpu()
            )
        scores = cosine(pictures, texts.repeat(2, 1)).cpu()
        return ict_labels(scores[:count], scores[count:], between, theta=self.theta)

    def __call__(self, inputs: Any) -> Outputs:
        with self._precision():
            image = self.module.image_features(inputs["pixels"]).float()
            easy = self.module.text_features(inputs["easy"]).float()
            refined = inputs.get("refined", inputs["easy"])
            other = easy if refined is inputs["easy"] else self.module.text_features(refined).float()
        rows = len(image) // len(easy)
        value = (image * easy.repeat(rows, 1)).sum(-1)
        return {"value": value, "image": image, "easy": easy, "refined": other}

    def save(self, folder: Path) -> None:
        """What `Ict.from_pretrained` reads."""
        self.module.eval()
        self.judge.save(folder, dtype=self.save_dtype)

    def _precision(self) -> Any:
        return precision(self.module.encoder.device, self.autocast)


class HpJudge:
    """A tower and a new head that score the picture alone.

    Args:
        config: of the job.
        device: where it is trained.
    """

    def __init__(self, config: TrainRewardConfig, device: torch.device) -> None:
        model = config.model
        widths = None if model.head is None else [*model.head, 1]
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.judge = Hp.untrained(model.path, widths=widths, device=device, cache_bytes=0)
        self.module, self.autocast = self.judge.module, model.autocast
        self.save_dtype = getattr(torch, model.save_dtype)
        self.module.requires_grad_(False)
        self.module.head.requires_grad_(True)
        if model.train == "full":
            self._picture_tower().requires_grad_(True)
            freeze(self.module.encoder.model, model.frozen)
        self.path = model.path

    def _picture_tower(self) -> nn.Module:
        """The part of the encoder that pictures go through."""
        model: Any = self.module.encoder.model
        if self.module.encoder.is_open_clip:
            return model.visual
        return nn.ModuleList([model.vision_model, model.visual_projection])

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        """Pairs."""
        return RewardBatch(
            inputs=self.judge.towers.pixels(pair_images(examples)),
            size=len(examples),
            **pair_rows(len(examples)),  # type: ignore[arg-type]
            **pair_labels(examples, heldout=heldout),  # type: ignore[arg-type]
        )

    def __call__(self, inputs: Any) -> Outputs:
        with precision(self.module.encoder.device, self.autocast):
            return {"value": self.module(inputs)}

    def save(self, folder: Path) -> None:
        """What `Hp.from_pretrained` reads."""
        self.module.eval()
        self.judge.save(folder, dtype=self.save_dtype, base=base_name(self.path, folder))


def precision(device: torch.device, name: str | None) -> Any:
    """Autocast to the dtype of that name, or nothing."""
    dtype = torch.float32 if name is None else getattr(torch, name)
    return torch.autocast(device.type, dtype, enabled=name is not None)


def base_name(path: str, folder: Path) -> str:
    """What a folder calls the model it was trained from: a packaged name or hub id as it is, another folder
    or file by the way to it."""
    return os.path.relpath(path, folder) if Path(path).exists() else path


def freeze(model: nn.Module, beginnings: Sequence[str]) -> None:
    """Keep parameters as they are.

    Args:
        model: whose parameters are frozen.
        beginnings: of their names.

    Raises:
        UserError: no name of a parameter that would move begins so.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for beginning in beginnings:
        if not any(name.startswith(beginning) for name in names):
            first = sorted({".".join(name.split(".")[:2]) for name in names})
            raise UserError(
                f"model.frozen has {beginning!r}, and no name of a parameter that would move begins so. "
                f"{suggestion(beginning, first)}They begin with {', '.join(first)}."
            )
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(beginnings)):
            parameter.requires_grad_(False)
