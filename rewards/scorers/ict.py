# SPDX-License-Identifier: Apache-2.0
"""ICT, "image contains text": the cosine of a CLIP that was trained not to punish what the text leaves out.

Source: Ba et al., arXiv 2507.19002 (ICCV 2025); checkpoint 8y/ICT, a fine-tuned CLIP ViT-H/14 of transformers
    whose published evaluation is the plain cosine, without logit_scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visalign.core.preference.ict import truncated_score
from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.identity import Identity
from visalign.rewards.clip.encoder import ClipEncoder
from visalign.rewards.clip.loading import load_fine_tuned_clip
from visalign.rewards.clip.towers import IMAGE_CACHE_BYTES, ClipTowers, cosine


class IctModel(nn.Module):
    """The network that is trained: two towers, shared with the judge, and the cosine of what they say."""

    def __init__(self, encoder: ClipEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def image_features(self, pixels: Tensor) -> Tensor:
        """L2-normalised embeddings [N, D] float32 of pixels [N, 3, h, w] (`ClipTowers.pixels`)."""
        return F.normalize(self.encoder.encode_image(pixels), dim=-1)

    def text_features(self, tokens: Tensor) -> Tensor:
        """L2-normalised embeddings [N, D] float32 of token ids [N, L] (`ClipTowers.tokens`)."""
        return F.normalize(self.encoder.encode_text(tokens), dim=-1)

    def forward(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        """[N] float32 cosines of N pictures and N texts."""
        return cosine(self.encoder.encode_image(pixels), self.encoder.encode_text(tokens))


class Ict:
    """cos(image, prompt) of the fine-tuned towers; with a threshold θ the paper's ICT score min(cos/θ, 1).

    The paper defines ICT labels by a plain CLIP model and θ, E = min(cos/θ, 1), and trains the towers to give
    them; so θ belongs to plain towers (`Ict("shapes-clip", threshold=...)`), not to trained ones.
    """

    name = "ict"
    higher_is_better = True

    def __init__(
        self,
        model: str | Path = "shapes-ict",
        *,
        threshold: float | None = None,
        device: str | torch.device = "cpu",
        precision: str = "fp32",
        batch_size: int = 32,
        cache_bytes: int = IMAGE_CACHE_BYTES,
    ) -> None:
        """Note the model, which is loaded at the first score.

        Args:
            model: a folder that `save` wrote, a packaged name, the folder of 8y/ICT, its hub id, or its
                pytorch_model.bin alone.
            threshold: θ in (0, 1], or None for the cosine itself.
            device: where the towers run.
            precision: of the towers: "fp32", "bf16" or "fp16"; the cosine is float32 always.
            batch_size: images or prompts in one forward pass.
            cache_bytes: limit of the image features kept between calls; 0 keeps none.

        Raises:
            ValueError: threshold outside (0, 1], batch_size below 1, or cache_bytes below 0.
        """
        if threshold is not None and not 0 < threshold <= 1:
            raise ValueError(f"ict: threshold is {threshold}; allowed are numbers above 0 up to 1, or None.")
        self.threshold = threshold
        self.unit = "cosine" if threshold is None else "cosine / θ, at most 1"
        self.range = (-1.0, 1.0) if threshold is None else (-1.0 / threshold, 1.0)
        self.towers = ClipTowers(
            model,
            batch_size=batch_size,
            cache_bytes=cache_bytes,
            precision=precision,
            load=lambda: load_fine_tuned_clip(
                model, subfolder="ict_model", device=device, precision=precision
            ),
        )

    @classmethod
    def from_pretrained(cls, model: str | Path, **options: Any) -> Ict:
        """The judge of that folder or name, loaded at once; options as in the constructor."""
        judge = cls(model, **options)
        _ = judge.towers.parts  # loading now shows a broken folder here
        return judge

    @property
    def module(self) -> IctModel:
        """The network for a trainer; it holds the judge's own weights, whose gradients are off at first."""
        return IctModel(self.towers.encoder)

    def save(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write towers, config and tokenizer, which `from_pretrained` reads again."""
        self.towers.parts.save(folder, dtype)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score per (image, prompt); metadata is not looked at."""
        scaled = None if self.threshold is None else self._truncated
        return self.towers.score(self, images, prompts, metadata, scaled=scaled)

    def score_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] float32 scores of images [B, 3, H, W] in [0, 1], differentiable in the pixels."""
        return self._truncated(self.towers.cosine_with_gradient(images, prompts))

    def _truncated(self, value: Tensor) -> Tensor:
        return value if self.threshold is None else truncated_score(value, theta=self.threshold)

    @property
    def identity(self) -> Identity:
        """What the numbers depend on."""
        return self.towers.identity(self.name, threshold=self.threshold)
