# SPDX-License-Identifier: Apache-2.0
"""Several judges as one: mean, or a careful bound, and how far the members are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visalign.core.rewards.uncertainty import combine_members, penalise
from visalign.interfaces import Metadata, PointwiseReward, RewardCapabilities, Scores, score_named, with_capabilities
from visalign.rewards.base.contract import check_rules, check_scales, make_scores, read_request
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.base.identity import Identity

HOW = ("mean", "min", "lower_bound", "uwo")


class Ensemble:
    """value = mean | min | mean − λ s | mean − λ s² over the members, s their standard deviation.

    "min" is the most careful member, "lower_bound" the lower confidence bound, "uwo" the uncertainty-weighted
    optimization of Coste et al. Where lower is better, "min" is the largest and the penalty is added.

    `Scores.std` is the total by the law of total variance: √(mean of the members' own variances (aleatoric)
    + variance between the members (epistemic)); a member that never gives a standard deviation counts as
    certain. Where one member alone judged a row, total and epistemic are NaN: no spread is known; where a
    member that gives one gave NaN, total and aleatoric are: that is no certainty. The parts hold each
    member's score under its label, calibrated where asked, "epistemic", "aleatoric", and "members", how many
    judged the row.

    Coste et al., Reward Model Ensembles Help Mitigate Overoptimization, arXiv 2310.02743.

    Args:
        members: label -> reward, two or more.
        how: "mean", "min", "lower_bound" or "uwo".
        strength: λ ≥ 0 of the last two.
        ddof: of the variance between members: 1 unbiased, 0 that of the members themselves.
        min_members: a row is valid if at least so many members judged it; all when None. Fewer than all lets
            rows be judged by different members, whose levels may differ.
        calibration: label -> (mean, std) for every member: its score becomes (r − mean)/std, higher better.
            Needed where units or directions differ.
    """

    def __init__(
        self,
        members: Mapping[str, PointwiseReward],
        *,
        how: str = "mean",
        strength: float = 1.0,
        ddof: int = 1,
        min_members: int | None = None,
        calibration: Mapping[str, tuple[float, float]] | None = None,
        name: str = "ensemble",
    ) -> None:
        labels = list(members)
        needed = len(labels) if min_members is None else min_members
        minimum = 2 if how in ("lower_bound", "uwo") else 1
        why = ", as one alone has no spread" if minimum == 2 else ""
        unknown = [label for label in calibration or () if label not in labels]
        rules = {
            f"{len(labels)} members; an ensemble needs at least two": len(labels) >= 2,
            f"how is {how!r}; allowed are {', '.join(HOW)}": how in HOW,
            f"strength is {strength}; allowed are finite numbers from 0": 0 <= strength < math.inf,
            f"ddof is {ddof}; allowed are 0 and 1": ddof in (0, 1),
            f"min_members is {needed}; allowed are {minimum} to {len(labels)}, the members{why}": needed
            in range(minimum, len(labels) + 1),
            f"calibration names {', '.join(unknown)}; the members are {', '.join(labels)}": not unknown,
        }
        for key, noun in (("unit", "units"), ("higher_is_better", "directions")):
            values = {label: getattr(member, key) for label, member in members.items()}
            listed = ", ".join(f"{label}: {value!r}" for label, value in values.items())
            message = f"the members have different {noun} ({listed}); give calibration={{label: (mean, std)}}"
            rules[message] = calibration is not None or len(set(values.values())) == 1
        check_rules(name, rules)
        if calibration is not None:
            check_scales("calibration", calibration, labels)
        self.name = name
        self.members = {label: with_capabilities(member) for label, member in members.items()}
        self.capabilities = RewardCapabilities.of(self.members.values(), takes_clips=False)
        self.how, self.strength, self.ddof, self.min_members = how, strength, ddof, needed
        first = members[labels[0]]
        self._scale = {label: (0.0, 1.0) for label in labels} | dict(calibration or {})
        self.unit = first.unit if calibration is None else "reference standard deviations"
        self.higher_is_better = first.higher_is_better if calibration is None else True
        self.range = self._range()

    @property
    def identity(self) -> Identity | None:
        """Identity made of each member's; None where a member has none."""
        identities = {label: member.identity for label, member in self.members.items()}
        if not all(isinstance(identity, Identity) for identity in identities.values()):
            return None
        digests: Any = {label: identity.digest for label, identity in identities.items() if identity}
        numbers = {"strength": self.strength, "ddof": self.ddof, "min_members": self.min_members}
        options = {"members": digests, "how": self.how, "scale": self._scale, **numbers}
        return Identity(judge="ensemble", model=" + ".join(digests), options=options)

    def _range(self) -> tuple[float, float]:
        ends = [self._convert(label, end) for label, member in self.members.items() for end in member.range]
        low, high = min(ends), max(ends)
        if self.how in ("mean", "min") or not self.strength:
            return (low, high)
        return (-math.inf, high) if self.higher_is_better else (low, math.inf)

    def _convert(self, label: str, value: Any) -> Any:
        mean, std = self._scale[label]
        sign = 1.0 if self.higher_is_better == self.members[label].higher_is_better else -1.0
        return sign * (value - mean) / std

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Judge with every member; images are read once for all of them."""
        request = read_request(self.name, images, prompts, metadata)
        samples = request.select(request.rows)

        def judge(label: str, member: PointwiseReward) -> Scores:
            return score_named(member, *samples, name=label)

        return self.judged_by(judge, request.rows, list(request.images.reasons))

    def judged_by(self, judge: Callable[[str, Any], Scores], usable: list[int], reasons: list[str | None]) -> Scores:
        """Score all B samples by what `judge` gets from each label and member for the usable rows.

        `reasons` [B] says why the other rows are not judged.
        """
        rows, size, count = torch.tensor(usable, dtype=torch.int64), len(reasons), len(self.members)
        mean = torch.full((count, size), torch.nan, dtype=torch.float64)
        variance = torch.zeros(count, size, dtype=torch.float64)
        failures: list[list[str]] = [[] for _ in range(size)]
        for number, (label, member) in enumerate(self.members.items()) if usable else ():
            scores = judge(label, member)
            mean[number, rows] = self._convert(label, scores.value.detach().cpu().double())
            if scores.std is not None:
                std = scores.std.detach().cpu().double() / self._scale[label][1]
                variance[number, rows] = std.square()
            for row, reason in zip(rows.tolist(), failure_reasons(scores), strict=True):
                if reason is not None:
                    failures[row].append(f"{label}: {reason}")
        options: Any = {"how": self.how, "strength": self.strength, "ddof": self.ddof, "min_members": self.min_members}
        options |= {"unit": self.unit, "higher_is_better": self.higher_is_better}
        return combine_scores(self.members, mean, variance, reasons, failures, **options)


def combine_scores(
    labels: Iterable[str],
    mean: Tensor,
    variance: Tensor,
    reasons: Sequence[str | None],
    failures: list[list[str]],
    *,
    unit: str,
    min_members: int,
    how: str = "mean",
    strength: float = 1.0,
    ddof: int = 1,
    higher_is_better: bool = True,
) -> Scores:
    """Combine scores [M, B] of labelled members, NaN where one did not judge, as `Ensemble` says.

    `variance` [M, B] is the members' own; `failures` says for each row which members did not judge it, and why.
    """
    present = torch.isfinite(mean)
    number = present.sum(0)
    reasons = list(reasons)
    for row in (number < min_members).nonzero().flatten().tolist():
        reason = "; ".join(failures[row]) or "the scores are not finite numbers"
        reasons[row] = reasons[row] or f"{int(number[row])} of {len(mean)} members judged it: {reason}"
    sign = 1.0 if higher_is_better else -1.0
    rule: Any = "mean" if how == "uwo" else how
    value, epistemic = combine_members(sign * mean, how=rule, strength=strength, ddof=ddof)
    epistemic = torch.where(number > 1, epistemic, torch.nan)  # one member has no spread
    if how == "uwo":
        value = penalise(value, epistemic.square(), strength=strength)
    # √(mean of σ_m²) over the members that judged the row
    aleatoric = (torch.where(present, variance, 0.0).sum(0) / number.clamp(min=1)).sqrt()
    own_parts = {"epistemic": epistemic.float(), "aleatoric": aleatoric.float(), "members": number.float()}
    scores = make_scores((sign * value).float(), reasons, unit, parts=own_parts)
    total = torch.where(scores.valid, torch.hypot(aleatoric, epistemic).float(), torch.nan)
    # a member's score stays known where the ensemble's is not
    parts = {label: part.float() for label, part in zip(labels, mean, strict=True)}
    return replace(scores, std=total, parts=parts | dict(scores.parts))
