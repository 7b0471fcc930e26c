# SPDX-License-Identifier: Apache-2.0
"""PickScore: the cosine of a CLIP ViT-H/14 fine-tuned on Pick-a-Pic, times its checkpoint's logit scale.

Source: Kirstain et al., "Pick-a-Pic", arXiv 2305.01569, eq. 1; checkpoint yuvalkirstain/PickScore_v1, a
    `CLIPModel` folder of transformers. The difference of two scores is the log-odds of the preference.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.rewards.base.contract import check_choices
from visalign.rewards.base.identity import Identity
from visalign.rewards.clip.loading import TRANSFORMERS
from visalign.rewards.clip.towers import ClipJudge

PUBLISHED = TRANSFORMERS + "yuvalkirstain/PickScore_v1"
SCALES: dict[str, tuple[float | None, float, float]] = {
    "logit": (None, 0.0, 1.0),
    "cosine": (1.0, 0.0, 1.0),
    "cosine × 100": (100.0, 0.0, 1.0),
    "logit / 26": (None, 0.0, 26.0),
    "(logit − 18) / 8": (None, -18.0, 8.0),
}
"""Scale -> (a, b, d) of (a cosine + b) / d, a None for exp(logit_scale): as published; in Pref-GRPO; the same in
percent; in flow_grpo, verl-omni and Flow-Factory; in MixGRPO."""


class PickScore(ClipJudge):
    """exp(logit_scale) · cos(image, prompt), float32; about 17 to 24 with the published checkpoint.

    The factor is read from the checkpoint.

    Args:
        model: the folder of PickScore_v1, its hub id after "transformers:", or any model of `load_clip`
            ("shapes-clip").
        scale: that of another project, a key of `SCALES`: "logit" (as published), "cosine", "cosine × 100",
            "logit / 26" or "(logit − 18) / 8".
    """

    name = "pick_score"
    unit = "cosine × exp(logit_scale)"

    def __init__(
        self, model: str | Path = PUBLISHED, *, scale: str = "logit", device: str | torch.device = "cpu", **towers: Any
    ) -> None:
        check_choices(self.name, scale=(scale, SCALES))
        self.scale = scale
        self.unit = self.unit if scale == "logit" else scale
        ends = {"cosine": (-1.0, 1.0), "cosine × 100": (-100.0, 100.0)}
        self.range = ends.get(scale, (-math.inf, math.inf))
        super().__init__(model, device=device, **towers)

    @property
    def logit_scale(self) -> float:
        """exp(logit_scale) of the checkpoint: the factor on the cosine."""
        return float(self.towers.encoder.logit_scale.detach().double().exp())

    def scaled(self, cosine: Tensor) -> Tensor:
        slope, offset, divisor = SCALES[self.scale]
        return ((self.logit_scale if slope is None else slope) * cosine + offset) / divisor

    @property
    def identity(self) -> Identity:
        return self.towers.identity(self.name, scale=self.scale, logit_scale=self.logit_scale)
