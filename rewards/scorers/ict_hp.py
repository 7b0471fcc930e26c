# SPDX-License-Identifier: Apache-2.0
"""ICT-HP: product of the ICT score (text contained in the image) and the HP score (preference).

Source: Ba et al., arXiv 2507.19002 (ICCV 2025). The paper multiplies the two scores; the released evaluation
    applies a sigmoid to the HP head first, so that it is positive. `mode` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import check_choices, make_scores
from visalign.rewards.base.identity import Identity

from .hp import Hp
from .ict import Ict


class IctHp:
    """ICT · σ(r) ("upstream"), or ICT · r ("paper"), with r the HP head's output; both among the parts.

    The sign of r is arbitrary, because the head was trained on differences. With "paper" a negative r
    reverses the order of the ICT scores; the sigmoid keeps it. So the released form is the default.

    Args:
        ict: the model of `Ict`.
        hp: the model of `Hp`.
        mode: "upstream" or "paper".
        **towers: options of `ClipJudge`, for each of the two.
    """

    name = "ict_hp"
    unit = "cosine × probability"
    higher_is_better = True

    def __init__(
        self,
        ict: str | Path = "shapes-ict",
        hp: str | Path = "shapes-hp",
        *,
        mode: str = "upstream",
        device: str | torch.device = "cpu",
        **towers: Any,
    ) -> None:
        check_choices(self.name, mode=(mode, ("paper", "upstream")))
        self.mode = mode
        self.unit = "cosine × HP score" if mode == "paper" else self.unit
        self.range = (-math.inf, math.inf) if mode == "paper" else (-1.0, 1.0)
        self.ict, self.hp = Ict(ict, device=device, **towers), Hp(hp, device=device, **towers)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score each (image, prompt), with parts "ict", "hp" and "cut"; metadata is ignored."""
        ict = self.ict.score(images, prompts, metadata)
        hp = self.hp.score(images, prompts, metadata)
        factor = hp.value if self.mode == "paper" else hp.value.sigmoid()
        reasons = [first or second for first, second in zip(ict.reason or [], hp.reason or [], strict=True)]
        parts = {"ict": ict.value, "hp": factor, **ict.parts}
        return make_scores(ict.value * factor, reasons, self.unit, parts=parts, text=ict.text)

    def score_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores [B] float32 of images [B, 3, H, W] in [0, 1], differentiable in the pixels."""
        hp = self.hp.score_with_gradient(images)
        return self.ict.score_with_gradient(images, prompts) * (hp if self.mode == "paper" else hp.sigmoid())

    @property
    def identity(self) -> Identity:
        ict, hp = self.ict.identity, self.hp.identity
        return Identity(
            judge=self.name,
            model=f"{ict.model} × {hp.model}",
            weights=f"{ict.weights} × {hp.weights}",
            preprocessing={"ict": ict.preprocessing, "hp": hp.preprocessing},
            dtype=ict.dtype,
            options={"mode": self.mode},
        )
