# SPDX-License-Identifier: Apache-2.0
"""ICT, "image contains text": the cosine of a CLIP trained not to punish details that the text omits.

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
from visalign.rewards.base.contract import check_rules
from visalign.rewards.base.identity import Identity
from visalign.rewards.clip.encoder import ClipEncoder
from visalign.rewards.clip.loading import load_fine_tuned_clip
from visalign.rewards.clip.towers import ClipJudge, cosine


class IctModel(nn.Module):
    """Trainable network: two towers, shared with the reward, and the cosine of their embeddings."""

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
        """Cosines [N] float32 of N images and N texts."""
        return cosine(self.encoder.encode_image(pixels), self.encoder.encode_text(tokens))


class Ict(ClipJudge):
    """cos(image, prompt) of the fine-tuned towers; with a threshold θ the paper's ICT score min(cos/θ, 1).

    The paper labels images by a plain CLIP model and θ, E = min(cos/θ, 1), and trains the towers to predict
    them; so θ belongs to plain towers (`Ict("shapes-clip", threshold=...)`), not to trained ones.

    Args:
        model: a folder that `save` wrote, a packaged name, the folder of 8y/ICT, its hub id, or its
            pytorch_model.bin by itself.
        threshold: θ in (0, 1], or None for the cosine itself.
    """

    name = "ict"

    def __init__(
        self,
        model: str | Path = "shapes-ict",
        *,
        threshold: float | None = None,
        device: str | torch.device = "cpu",
        **towers: Any,
    ) -> None:
        bounds = f"threshold is {threshold}; allowed are numbers above 0 up to 1, or None"
        check_rules(self.name, {bounds: threshold is None or 0 < threshold <= 1})
        self.threshold = threshold
        self.unit = "cosine" if threshold is None else "cosine / θ, at most 1"
        self.range = (-1.0, 1.0) if threshold is None else (-1.0 / threshold, 1.0)
        super().__init__(
            model,
            device=device,
            load=lambda precision: load_fine_tuned_clip(
                model, subfolder="ict_model", device=device, precision=precision
            ),
            **towers,
        )

    @property
    def module(self) -> IctModel:
        """Network for a trainer; it shares this reward's weights, whose gradients are off at first."""
        return IctModel(self.towers.encoder)

    def save(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Save towers, config and tokenizer for `Ict`."""
        self.towers.parts.save(folder, dtype)

    def scaled(self, cosine: Tensor) -> Tensor | None:
        return None if self.threshold is None else truncated_score(cosine, theta=self.threshold)

    @property
    def identity(self) -> Identity:
        return self.towers.identity(self.name, threshold=self.threshold)
