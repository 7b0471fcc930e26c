# SPDX-License-Identifier: Apache-2.0
"""PickScore: the cosine of a CLIP ViT-H/14 fine-tuned on Pick-a-Pic, times its checkpoint's logit scale.

Source: Kirstain et al., "Pick-a-Pic", arXiv 2305.01569, eq. 1; checkpoint yuvalkirstain/PickScore_v1, a
    `CLIPModel` folder of transformers. The difference of two scores is the log-odds of the preference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.rewards.base.contract import check_choices
from visalign.rewards.base.identity import Identity
from visalign.rewards.clip.loading import TRANSFORMERS
from visalign.rewards.clip.towers import ClipJudge

from .units import INFINITE, SCALES, convert

PUBLISHED = TRANSFORMERS + "yuvalkirstain/PickScore_v1"


class PickScore(ClipJudge):
    """exp(logit_scale) · cos(image, prompt), float32; about 17 to 24 with the published checkpoint.

    The factor is read from the checkpoint.

    Args:
        model: the folder of PickScore_v1, its hub id after "transformers:", or any model of `load_clip`
            ("shapes-clip").
        scale: that of another project, see `units.SCALES`: "logit" (as published), "cosine", "cosine × 100",
            "logit / 26" or "(logit − 18) / 8".
    """

    name = "pick_score"
    unit = "cosine × exp(logit_scale)"

    def __init__(
        self, model: str | Path = PUBLISHED, *, scale: str = "logit", device: str | torch.device = "cpu", **towers: Any
    ) -> None:
        allowed = [key for key, row in SCALES.items() if row.family == "cosine" and not row.refusal]
        check_choices(self.name, scale=(scale, allowed))
        self.scale = scale
        self.unit = self.unit if scale == "logit" else scale
        ends = {"cosine": (-1.0, 1.0), "cosine × 100": (-100.0, 100.0)}
        self.range = ends.get(scale, INFINITE)
        super().__init__(model, device=device, **towers)

    @property
    def logit_scale(self) -> float:
        """exp(logit_scale) of the checkpoint: the factor on the cosine."""
        return float(self.towers.encoder.logit_scale.detach().double().exp())

    def scaled(self, cosine: Tensor) -> Tensor:
        """Convert a cosine to the chosen scale."""
        return convert(cosine, "cosine", self.scale, logit_scale=self.logit_scale)

    @property
    def identity(self) -> Identity:
        return self.towers.identity(self.name, scale=self.scale, logit_scale=self.logit_scale)
