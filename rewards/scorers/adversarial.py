# SPDX-License-Identifier: Apache-2.0
"""Adversarial reward: a head on frozen image features that learns to tell a policy's samples from reference images.

Source: Mao et al., "The Image as Its Own Reward", Adv-GRPO, arXiv 2511.20256: one head on the unit features of the
    class token and of the patches of DINOv2, hinge loss, patches weighted 0.3. The released code normalises the
    features for the reward and not for the training of the head; here both see unit features, and all patches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.sources import CAPTIONED, shapes_images
from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.rewards.base.contract import Request, RewardError, check_counts, make_scores, read_request, scatter
from visalign.rewards.base.images import to_uint8
from visalign.rewards.catalogue import check_options
from visalign.rewards.clip.towers import ClipTowers
from visalign.rewards.weights.checkpoint_files import dtype_of, precision_on
from visalign.rewards.weights.hub import is_hub_id, local_folder

from .set_gain import image_files

PATCHES = 0.3
"""Share of the patches in the reward, and the weight of their loss."""
WIDTH = 512  # Hidden units of the head


def discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """½ (mean max(0, 1 − real) + mean max(0, 1 + fake)) of logits of any shapes. Adv-GRPO, arXiv 2511.20256."""
    return (F.relu(1 - real).mean() + F.relu(1 + fake).mean()) / 2


class Adversarial:
    """Logit that an image is a reference image and no sample of the policy, by a head that learns during training.

    The part "patches" is the mean logit of the patches, of towers that have them. The head begins with 0 for every
    image, and moves after each iteration is scored.

    Args:
        references: images to come close to, such as those of a better model for the same prompts: a folder, subfolders
            included, or shapes:images.
        model: frozen tower, as for `clip_score`, or a folder or hub id of transformers' DINOv2 or DINOv3.
        lr: learning rate of the head, by AdamW with β₁ = 0.5.
        steps: updates of the head in an iteration; batch: samples, and as many references, in each.
        **towers: precision, batch_size, ... of `ClipTowers`; of DINO precision alone.
    """

    name = "adversarial"
    unit = "discriminator logit"
    range = (-math.inf, math.inf)
    higher_is_better = True
    identity = None  # it changes from iteration to iteration, so nothing is cached

    def __init__(
        self,
        references: str | Path,
        model: str | Path = "shapes-clip",
        *,
        lr: float = 1e-4,
        steps: int = 10,
        batch: int = 64,
        device: str | torch.device = "cpu",
        **towers: Any,
    ) -> None:
        check_counts(self.name, steps=steps, batch=batch)
        if not (isinstance(lr, int | float) and 0 < lr < 1):
            raise ValueError(f"{self.name}: lr is {lr!r}; allowed are numbers between 0 and 1.")
        self.lr, self.steps, self.batch = float(lr), steps, batch
        options = {"model": model, "device": device, **towers}
        self._tower: Any = DinoTokens if _is_dino(model) else ClipTowers
        check_options(f"{self.name}'s tower", self._tower, options)
        self._tower = self._tower(**options)
        is_world = references == CAPTIONED
        self._references: list[Any] = (
            [image for image, _ in shapes_images()] if is_world else image_files(self.name, references)
        )
        if len(self._references) < 2:
            raise RewardError(f"{self.name}: {str(references)!r} holds {len(self._references)} images; give many.")
        self.capabilities = RewardCapabilities(needs_prompt=False, discriminators={self.name: self})
        self._device, self.head = torch.device(device), nn.Sequential()

    def begin(self, seed: int) -> None:
        """Make the head (Linear, GELU, Linear on each token), all 0, so that at first there is nothing to follow."""
        size = self._features(self._references[:1]).shape[-1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            last = nn.Linear(WIDTH, 1)
            self.head = nn.Sequential(nn.Linear(size, WIDTH), nn.GELU(), last).to(self._device)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)

    def _tokens(self, request: Request, reasons: list[str | None]) -> tuple[list[int], Tensor]:
        """Compute (rows that can be read, unit features [n, 1 + patches, D])."""
        rows, tokens = self._tower.image_features(request, reasons)
        tokens = tokens[:, None] if tokens.ndim == 2 else tokens
        return rows, F.normalize(tokens.float(), dim=-1).to(self._device)

    def _features(self, images: Sequence[Any]) -> Tensor:
        """Compute unit features of images that must all be readable."""
        opened = [image if isinstance(image, Tensor) else resolve_image(str(image)) for image in images]
        request = read_request(self.name, opened, [""] * len(images), None)
        reasons = list(request.images.reasons)
        _, tokens = self._tokens(request, reasons)
        if reason := next(filter(None, reasons), None):
            raise RewardError(f"{self.name}: a reference cannot be read: {reason}.")
        return tokens

    def discriminate(self, samples: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Compute the loss of samples uint8 [n, 3, H, W] against drawn references; the share told apart as a whole."""
        drawn = torch.randint(len(self._references), (len(samples),), generator=generator).tolist()
        real = self.head(self._features([self._references[i] for i in drawn]))[..., 0]
        fake = self.head(self._features(list(samples)))[..., 0]
        loss = discriminator_loss(real[:, 0], fake[:, 0])
        if real.shape[1] > 1:
            loss = loss + PATCHES * discriminator_loss(real[:, 1:], fake[:, 1:])
        return loss, torch.cat([real[:, 0] > 0, fake[:, 0] < 0]).float().mean()

    @torch.no_grad()
    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        if not len(self.head):
            raise RewardError(
                f"{self.name} learns from the samples of a run and scores nothing before. Name it in rewards.terms of "
                "visalign train; for images of files train a classifier: visalign train-reward model.kind=artefact."
            )
        request = read_request(self.name, images, prompts, metadata)
        reasons, parts = list(request.images.reasons), dict[str, Tensor]()
        rows, tokens = self._tokens(request, reasons)
        value = tokens
        if rows:
            logits = self.head(tokens)[..., 0].cpu()
            value = logits[:, 0]
            if logits.shape[1] > 1:  # (1 − w) class token + w mean of the patches
                patches = logits[:, 1:].mean(1)
                value, parts["patches"] = torch.lerp(value, patches, PATCHES), scatter(patches, rows, len(request))
        return make_scores(scatter(value, rows, len(request)), reasons, self.unit, parts=parts)


def _is_dino(model: str | Path) -> bool:
    """Return True for a folder or hub id of a DINO model of transformers."""
    folder = local_folder(model, ("config.json",)) if is_hub_id(model) and not Path(model).exists() else Path(model)
    config = folder / "config.json"
    return config.is_file() and str(json.loads(config.read_text("utf-8")).get("model_type")).startswith("dino")


class DinoTokens:
    """A frozen DINOv2 or DINOv3, which gives its class token and patches."""

    def __init__(self, model: str | Path, *, device: str | torch.device = "cpu", precision: str = "auto") -> None:
        self._source, self._device = model, torch.device(device)
        self._dtype = dtype_of(precision_on(device, precision), f"{Adversarial.name}: ")

    @cached_property
    def _model(self) -> tuple[Any, Any]:
        from transformers import AutoImageProcessor, AutoModel

        folder = local_folder(self._source, ("*.json", "*.safetensors", "*.bin"))
        with torch.inference_mode(False):
            model = AutoModel.from_pretrained(folder, dtype=self._dtype, trust_remote_code=False)
        return model.eval().requires_grad_(False).to(self._device), AutoImageProcessor.from_pretrained(folder)

    @torch.no_grad()
    def image_features(self, request: Request, reasons: list[str | None]) -> tuple[list[int], Tensor]:
        """Compute (rows, tokens [n, 1 + patches, D]) of the readable images."""
        model, process = self._model
        images, chunks = request.images.readable(), []
        for start in range(0, len(images), 64):
            levels = [to_uint8(image) for _, image in images[start : start + 64]]
            pixels = process(images=levels, return_tensors="pt")["pixel_values"].to(self._device, self._dtype)
            outputs, side = model(pixels), model.config.patch_size
            patches = (pixels.shape[2] // side) * (pixels.shape[3] // side)  # registers stand before them
            chunks.append(torch.cat([outputs.pooler_output[:, None], outputs.last_hidden_state[:, -patches:]], 1))
        return [row for row, _ in images], torch.cat(chunks) if chunks else torch.zeros(0)
