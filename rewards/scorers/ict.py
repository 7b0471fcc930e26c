# SPDX-License-Identifier: Apache-2.0
"""ICT, "image contains text": the cosine of a CLIP that was trained not to punish what the text leaves out.

Source: Ba et al., arXiv 2507.19002 (ICCV 2025); checkpoint 8y/ICT, a fine-tuned CLIP ViT-H/14 of transformers
    whose published evaluation is the plain cosine, without logit_scale.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visalign.core.preference.ict import truncated_score
from visalign.rewards.base.identity import Identity
from visalign.rewards.clip.encoder import ClipEncoder
from visalign.rewards.clip.loading import load_fine_tuned_clip
from visalign.rewards.clip.towers import ClipJudge, cosine


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
        """[N] float32 cosines of N images and N texts."""
        return cosine(self.encoder.encode_image(pixels), self.encoder.encode_text(tokens))


class Ict(ClipJudge):
    """cos(image, prompt) of the fine-tuned towers; with a threshold θ the paper's ICT score min(cos/θ, 1).

    The paper defines ICT labels by a plain CLIP model and θ, E = min(cos/θ, 1), and trains the towers to give
    them; so θ belongs to plain towers (`Ict("shapes-clip", threshold=...)`), not to trained ones.
    """

    name = "ict"

    def __init__(
        self,
        model: str | Path = "shapes-ict",
        *,
        threshold: float | None = None,
        device: str | torch.device = "cpu",
        precision: str = "fp32",
        **towers: Any,
    ) -> None:
        """Note the model, which is loaded at the first score.

        Args:
            model: a folder that `save` wrote, a packaged name, the folder of 8y/ICT, its hub id, or its
                pytorch_model.bin alone.
            threshold: θ in (0, 1], or None for the cosine itself.
            device: where the towers run.
            precision: of the towers: "fp32", "bf16" or "fp16"; the cosine is float32 always.
            **towers: of `ClipJudge`.
        """
        if threshold is not None and not 0 < threshold <= 1:
            raise ValueError(f"ict: threshold is {threshold}; allowed are numbers above 0 up to 1, or None.")
        self.threshold = threshold
        self.unit = "cosine" if threshold is None else "cosine / θ, at most 1"
        self.range = (-1.0, 1.0) if threshold is None else (-1.0 / threshold, 1.0)
        super().__init__(
            model,
            device=device,
            precision=precision,
            load=lambda: load_fine_tuned_clip(
                model, subfolder="ict_model", device=device, precision=precision
            ),
            **towers,
        )

    @property
    def module(self) -> IctModel:
        """The network for a trainer; it holds the judge's own weights, whose gradients are off at first."""
        return IctModel(self.towers.encoder)

    def save(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write towers, config and tokenizer, which `from_pretrained` reads again."""
        self.towers.parts.save(folder, dtype)

    def scaled(self, cosine: Tensor) -> Tensor | None:
        """The ICT score, where there is a θ."""
        return None if self.threshold is None else truncated_score(cosine, theta=self.threshold)

    @property
    def identity(self) -> Identity:
        """What the numbers depend on."""
        return self.towers.identity(self.name, threshold=self.threshold)
