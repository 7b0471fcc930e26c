# SPDX-License-Identifier: Apache-2.0
"""Scales of CLIP-type and other scores in other projects, and conversions between them.

A weight tuned on one scale of a CLIP-type score is wrong by up to 100 on another. `SCALES` lists the scales
of other projects; `convert` converts where the map is affine, and refuses where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from visalign.rewards.weights.affine_head import IMAGEREWARD_MEAN, IMAGEREWARD_STD

Value = TypeVar("Value", float, Tensor)

INFINITE = (float("-inf"), float("inf"))


@dataclass(frozen=True)
class Scale:
    """Scale of a score: y = (slope·x + offset) / divisor of its family's base x."""

    family: str  # Scales of one family are affine to each other
    meaning: str
    slope: float | None = 1.0  # None for exp(logit_scale) of the checkpoint
    offset: float = 0.0
    divisor: float = 1.0
    refusal: str = ""  # Reason why it cannot be converted; "" where it can


SCALES: dict[str, Scale] = {
    "cosine": Scale("cosine", "cos(image, text): HPSv2's img_score, ICT, PickScore in Pref-GRPO"),
    "cosine × 100": Scale("cosine", "percent: torchmetrics above 0, the benchmark tables of HPSv2", 100.0),
    "logit": Scale("cosine", "cos · exp(logit_scale): PickScore as published, about 17 to 24", None),
    "logit / 26": Scale("cosine", "PickScore in flow_grpo, verl-omni, Flow-Factory", None, 0.0, 26.0),
    "(logit − 18) / 8": Scale("cosine", "PickScore in MixGRPO", None, -18.0, 8.0),
    "clipscore": Scale(
        "cosine",
        "2.5 · max(cos, 0): CLIPScore of Hessel et al.",
        refusal="max(cos, 0) loses all negative cosines",
    ),
    "torchmetrics": Scale("cosine", "max(100 cos, 0)", refusal="max(100 cos, 0) loses all negative cosines"),
    "softmax": Scale(
        "cosine",
        "share among the images of one prompt: PickScore's demo, ICT-HP in training",
        refusal="a softmax over a group depends on the other images",
    ),
    "image_reward": Scale("image_reward", "(r − 0.16717) / 1.03334: ImageReward.score"),
    "image_reward raw": Scale("image_reward", "r, the head's output", IMAGEREWARD_STD, IMAGEREWARD_MEAN),
    "hp": Scale("hp", "r, the HP head's output: what the margin of training is on"),
    "sigmoid(hp)": Scale(
        "hp", "σ(r): ICTHP's evaluation script", refusal="σ(r) is not affine in r; use IctHp(mode='upstream')"
    ),
    "ict × σ(hp)": Scale("ict × σ(hp)", "cosine times σ of the HP score: ICTHP's evaluation script"),
    "ict × hp": Scale("ict × hp", "cosine times HP score, as the paper writes it: IctHp(mode='paper')"),
    "hpsv3": Scale("hpsv3", "μ: a difference of 1 is odds of e; unbounded, about −5 to 15 as published"),
    "rating": Scale("rating", "mean opinion on 1 to 10, unbounded in the model: LAION aesthetic"),
    "rating / 10": Scale("rating", "LAION aesthetic in several trainers", 0.1),
}
"""name -> meaning and affine map from the family's base."""


def convert(value: Value, source: str, target: str, *, logit_scale: float | None = None) -> Value:
    """Convert a score to another scale of `SCALES`: y = (a_t·x + b_t)/d_t with x = (d_s·value − b_s)/a_s.

    Some need exp(logit_scale) of the checkpoint (`PickScore.logit_scale`).

    Example:
        >>> convert(0.21, "cosine", "logit / 26", logit_scale=100.0)
        0.8076923076923077
    """
    if unknown := [name for name in (source, target) if name not in SCALES]:
        raise ValueError(f"There is no scale {unknown[0]!r}; allowed are {', '.join(SCALES)}.")
    start, end = SCALES[source], SCALES[target]
    if source == target:
        return value
    refused = [f"{name!r} is not affine: {SCALES[name].refusal}" for name in (source, target) if SCALES[name].refusal]
    if start.family != end.family:
        refused.append(f"{source!r} and {target!r} measure different things")
    if refused:
        raise ValueError(f"{refused[0]}, so no affine map joins them; compute it from the scores instead.")
    base = (value * start.divisor - start.offset) / _slope(start, logit_scale, source)
    return (base * _slope(end, logit_scale, target) + end.offset) / end.divisor


def _slope(scale: Scale, logit_scale: float | None, name: str) -> float:
    slope = logit_scale if scale.slope is None else scale.slope
    if slope is None or not slope > 0:
        raise ValueError(
            f"{name!r} needs logit_scale, the checkpoint's positive factor (PickScore has it); given: {logit_scale}."
        )
    return slope
