# SPDX-License-Identifier: Apache-2.0
"""Units, scales and standard deviations of the rewards' scores.

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
class JudgeUnit:
    """Unit of one reward's scores."""

    unit: str
    range: tuple[float, float]
    scale: str
    """Key of `SCALES` for `Scores.value`."""


@dataclass(frozen=True)
class Scale:
    """Scale of a score: y = (slope·x + offset) / divisor of its family's base x."""

    family: str
    """Scales of one family are affine to each other."""
    meaning: str
    slope: float | None = 1.0
    """None for exp(logit_scale) of the checkpoint."""
    offset: float = 0.0
    divisor: float = 1.0
    refusal: str = ""
    """Reason why it cannot be converted; "" where it can."""


JUDGE_UNITS: dict[str, JudgeUnit] = {
    "clip_score": JudgeUnit("cosine", (-1.0, 1.0), "cosine"),
    "pick_score": JudgeUnit("cosine × exp(logit_scale)", INFINITE, "logit"),
    "hps_v2": JudgeUnit("cosine", (-1.0, 1.0), "cosine"),
    "ict": JudgeUnit("cosine", (-1.0, 1.0), "cosine"),
    "hp": JudgeUnit("HP score", INFINITE, "hp"),
    "ict_hp": JudgeUnit("cosine × probability", (-1.0, 1.0), "ict × σ(hp)"),
    "laion_aesthetic": JudgeUnit("rating 1-10", INFINITE, "rating"),
    "image_reward": JudgeUnit("standard deviations", INFINITE, "image_reward"),
    "hpsv3": JudgeUnit("logit", INFINITE, "hpsv3"),
}
"""reward -> unit, range and scale of its `Scores.value`. exp(logit_scale) differs between checkpoints, so
PickScore has no bound before it is loaded."""

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


@dataclass(frozen=True)
class Deviation:
    """Meaning of `Scores.std` (or `Preferences.std`) of one reward."""

    kind: str
    """A key of `DEVIATION_KINDS`."""
    formula: str = ""
    """Formula, or why there is none; may be ""."""


DEVIATION_KINDS = {
    "none": "std is None: the reward gives no uncertainty, and a comparison of scores is certain.",
    "spread": "Deviation of a single judgement of this image, however many answers there were. With it "
    "`as_pairwise` gives the probability that one judgement prefers the left image (Thurstone), and μ − λσ "
    "is a low quantile of single judgements.",
    "standard error": "Deviation of the value if the judge is asked again: s/√n of n answers, or the same "
    "of their sum. With it `as_pairwise` gives the probability that the left image's mean is higher, and "
    "μ − λσ is a confidence bound of the mean.",
    "total": "√(aleatoric² + epistemic²) over members: the mean of the members' own variances, of whatever "
    "kind, and the variance between the members. Both are among the parts.",
    "passed on": "Deviation of the wrapped reward, in the unit of the value.",
}
"""Kinds of standard deviations, and their use in `as_pairwise` and lower bounds."""

_WITHOUT = (
    *("shapes_verifier", "geneval", "ocr", "heie", "reward_dance", "reward_dance_pairs", "vision_reward"),
    *("vqa_score", "soft_tifa"),
    *("clip_score", "pick_score", "hps_v2", "laion_aesthetic", "image_reward", "ict", "hp", "ict_hp"),
    *("brightness", "contrast", "saturation", "colourfulness", "edge_density", "sharpness", "jpeg_size"),
    *("yes_no_server", "rubric", "mps", "iqa", "vendi_gain", "frechet_gain", "video_align"),
)

DEVIATIONS: dict[str, Deviation] = {
    **dict.fromkeys(_WITHOUT, Deviation("none")),
    "hpsv3": Deviation("spread", "exp(log σ) of the head, trained as the deviation of one preference"),
    "visual_quality_r1": Deviation(
        "spread", "√Σ p (s − μ)² over the ratings it may write; of K answers their s (ddof 1), not s/√K"
    ),
    "edit_reward": Deviation("spread", "√(σ₁ σ₂), the geometric mean of its two heads' deviations"),
    "q_align": Deviation("spread", "√Σ p (s − μ)² over the five levels"),
    **dict.fromkeys(
        ("edit_score", "rational_rewards"), Deviation("standard error", "s/√n of the n readable answers")
    ),
    "unified_reward": Deviation("standard error", 's/√n of the n readable answers; s is the part "spread"'),
    "lift": Deviation("standard error", "√(Σ s²/n) / Q over Q questions with n readable answers each"),
    "deepseek_grm": Deviation("standard error", "K s/√n of the sum of K votes, n of them readable"),
    "unified_reward_pairs": Deviation("standard error", "½ √(s²/n + t²/m), of P(left better) in two orders"),
    "frames": Deviation("none", "deviations of single frames do not give that of their mean"),
    "calibrated": Deviation("none", "the wrapped reward's deviation enters the rank among the reference"),
    "lora_ensemble": Deviation("total", "√(mean of σ² + variance of μ) over the adapters' members"),
    "ensemble": Deviation("total", "√(mean of σ² + variance of μ) over the members"),
    "remote": Deviation("passed on", "as the server's reward gives it"),
}
"""reward -> meaning of its standard deviation. NaN never means certainty: such rows are masked or NaN."""


def convert(value: Value, source: str, target: str, *, logit_scale: float | None = None) -> Value:
    """Convert a score to another scale: y = (a_t·x + b_t)/d_t with x = (d_s·value − b_s)/a_s.

    Args:
        value: number or tensor on the scale `source`.
        source: a name of `SCALES`.
        target: a name of `SCALES`.
        logit_scale: exp(logit_scale) of the checkpoint (`PickScore.logit_scale`), where a scale needs it.

    Example:
        >>> convert(0.21, "cosine", "logit / 26", logit_scale=100.0)
        0.8076923076923077
    """
    start, end = _scale(source), _scale(target)
    if source == target:
        return value
    for name, scale in ((source, start), (target, end)):
        if scale.refusal:
            raise ValueError(f"{name!r} is not affine: {scale.refusal}; compute it from the scores instead.")
    if start.family != end.family:
        names = [name for name, scale in SCALES.items() if scale.family == start.family and not scale.refusal]
        raise ValueError(
            f"{source!r} and {target!r} measure different things, so no affine map joins them. "
            f"{source!r} can be converted to {', '.join(names)}."
        )
    base = (value * start.divisor - start.offset) / _slope(start, logit_scale, source)
    return (base * _slope(end, logit_scale, target) + end.offset) / end.divisor


def _scale(name: str) -> Scale:
    if name not in SCALES:
        raise ValueError(f"There is no scale {name!r}; allowed are {', '.join(SCALES)}.")
    return SCALES[name]


def _slope(scale: Scale, logit_scale: float | None, name: str) -> float:
    if scale.slope is not None:
        return scale.slope
    if logit_scale is None or not logit_scale > 0:
        raise ValueError(
            f"{name!r} needs logit_scale, the positive factor exp(logit_scale) of the checkpoint; given: "
            f"{logit_scale}. PickScore(...).logit_scale has it."
        )
    return logit_scale
