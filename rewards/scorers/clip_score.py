# SPDX-License-Identifier: Apache-2.0
"""CLIP score: the cosine between an image's and its prompt's embedding, through open_clip or transformers.

Source: Radford et al., arXiv 2103.00020; as a metric Hessel et al., "CLIPScore", arXiv 2104.08718 (whose
    score is 2.5·max(cos, 0)). Here it is the plain cosine; `units` has the scales of the peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.identity import Identity
from visalign.rewards.clip.towers import IMAGE_CACHE_BYTES, ClipTowers


class ClipScore:
    """Cosine of image and prompt, float32; each unique image and each unique prompt is encoded once.

    A prompt longer than the model's context is cut before the end token; the sample's `text` says so, and its
    part "cut" is 1, which is 0 elsewhere. A prompt that spells out the end token in its middle is invalid:
    the model would stop reading there.
    """

    name = "clip_score"
    unit = "cosine"
    range = (-1.0, 1.0)
    higher_is_better = True

    def __init__(
        self,
        model: str | Path = "shapes-clip",
        *,
        device: str | torch.device = "cpu",
        precision: str = "fp32",
        batch_size: int = 64,
        cache_bytes: int = IMAGE_CACHE_BYTES,
    ) -> None:
        """Note the model, which is loaded at the first score.

        Args:
            model: what `load_clip` takes: a folder of open_clip or transformers, a packaged name, a hub id of
                open_clip, "transformers:organisation/model", or "architecture:tag".
            device: where the towers run.
            precision: of the towers: "fp32", "bf16" or "fp16"; the cosine is float32 always.
            batch_size: images or prompts in one forward pass.
            cache_bytes: limit of the image features kept between calls; 0 keeps none.

        Raises:
            ValueError: batch_size below 1, or cache_bytes below 0.
        """
        self.towers = ClipTowers(
            model, device=device, precision=precision, batch_size=batch_size, cache_bytes=cache_bytes
        )

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Cosine per (image, prompt); metadata is not looked at."""
        return self.towers.score(self, images, prompts, metadata)

    def score_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] float32 scores of images [B, 3, H, W] in [0, 1], differentiable in the pixels."""
        return self.towers.cosine_with_gradient(images, prompts)

    @property
    def identity(self) -> Identity:
        """What the numbers depend on."""
        return self.towers.identity(self.name)
