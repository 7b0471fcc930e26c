# SPDX-License-Identifier: Apache-2.0
"""Several rewards as one, with every term on record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.interfaces import Metadata, RewardCapabilities, Scores, with_capabilities
from visalign.rewards.base.contract import (
    RewardError,
    check_answer,
    check_rules,
    check_scales,
    make_scores,
    read_metadata,
    read_request,
    without_group,
)
from visalign.rewards.base.failure import Naming, failure_reasons
from visalign.rewards.base.images import as_contract

from .uncertainty import with_deviation

Normalise = str | Mapping[str, tuple[float, float]]
Noun = Literal["image", "completion"]


class WeightedSum:
    """value = Σ_m w_m · d_m · n_m(r_m) over rewards m; d_m is −1 where lower is better, so higher always is.

    n_m is the identity, (r − mean_m) / std_m with fixed numbers, or the z-score over the valid images of the
    batch. A sample is invalid when any reward with w_m > 0 could not judge it. A weight of 0 only records a
    reward.

    The parts hold, for each m, "m" (raw, in its own unit), "m.weighted" (its term of the sum) and "m.x" for
    each part x of m; "m.std" is the judge's own standard deviation where it gives one. Normalisation within a
    group of one prompt belongs to the advantage (`visalign.core`), which gets the raw columns from the parts.
    """

    higher_is_better = True
    noun: Noun = "image"
    """What is judged, for messages."""

    def __init__(
        self,
        rewards: Mapping[str, tuple[Any, float]],
        *,
        normalise: Normalise = "none",
        allow_mixed_units: bool = False,
        bounds: Mapping[str, float] | None = None,
        advantage_weights: Mapping[str, float] | None = None,
        name: str | None = None,
    ) -> None:
        """Check the terms.

        Args:
            rewards: label -> (reward, weight); weights are at least 0, one of them above.
            normalise: "none"; "batch" (z-scores over the images of one call: then a score depends on its
                neighbours, which the reward contract otherwise forbids, and several processes would each have
                their own scale); or label -> (mean, std) for every reward with a weight.
            allow_mixed_units: sum raw scores of different units all the same.
            bounds: label -> what a trainer is to hold the reward's mean at, in its own unit: at least that,
                or at most where lower is better. `score` does not look at them.
            advantage_weights: label -> λ, by which a trainer of texts scales advantages with the reward's own
                standard deviations (`visalign.core.relative_uncertainty_weight`). A sample without one
                is invalid.
            name: name of the sum; "weighted_sum", or of texts "weighted_text_sum", when None.

        Raises:
            ValueError: no rewards, a bad weight, an unknown normalisation, different units summed raw,
                a bound that no trainer could hold, or a λ of nothing that is added.
        """
        _check_weights(rewards)
        name = name or ("weighted_sum" if self.noun == "image" else "weighted_text_sum")
        self.name = name
        self.rewards = {
            label: (with_capabilities(reward), weight) for label, (reward, weight) in rewards.items()
        }
        needs = {label: reward.capabilities for label, (reward, _) in self.rewards.items()}
        images = [label for label, term in needs.items() if not term.takes_clips]
        takes_clips = len(images) < len(needs)
        if takes_clips and images:
            raise ValueError(
                f"{name} would add judges of clips and of images: {', '.join(images)} takes no clip. Let "
                "the reward 'frames' ask it, with frames=1 for the middle frame."
            )
        self._normalise = dict(normalise) if isinstance(normalise, Mapping) else normalise
        units = {label: reward.unit for label, (reward, weight) in rewards.items() if weight}
        if isinstance(self._normalise, dict):
            check_scales("normalise", self._normalise, units)
        elif self._normalise not in ("none", "batch"):
            raise ValueError(
                f"normalise is {normalise!r}; allowed are 'none', 'batch', or {{label: (mean, std)}}. "
                "Normalising within groups is done by the advantage (visalign.core)."
            )
        if self._normalise == "none" and len(set(units.values())) > 1 and not allow_mixed_units:
            listed = ", ".join(f"{label} in {unit!r}" for label, unit in units.items())
            raise ValueError(
                f"{name} would add different units: {listed}. Allowed: normalise='batch', normalise={{label: "
                "(mean, std)}, or allow_mixed_units=True when the weights already convert them."
            )
        self.unit = _unit(self._normalise, units)
        self.range = self._total_range()
        constraints = {label: self._bound(label, value) for label, value in (bounds or {}).items()}
        strengths = dict(advantage_weights or {})
        is_weighable = all(k in units and 0 <= v < math.inf for k, v in strengths.items())
        rules = {
            f"advantage_weights are {strengths}; needed are a finite λ ≥ 0 and rewards with a weight above 0 "
            f"({', '.join(units)})": is_weighable,
            "there is a bound on every term, so nothing is maximised; leave one without": (
                not constraints or not constraints.keys() >= units.keys()
            ),
        }
        check_rules(name, rules)
        terms = self.rewards.items()
        self.capabilities = RewardCapabilities(
            needs_group=any(term.needs_group for term in needs.values()),
            needs_batch=self._normalise == "batch" or any(term.needs_batch for term in needs.values()),
            takes_clips=takes_clips,
            term_weights={label: weight for label, (_, weight) in terms if weight},
            recorded_terms={
                label: 1.0 if reward.higher_is_better else -1.0
                for label, (reward, weight) in terms
                if not weight
            },
            constraints=constraints,
            advantage_weights=strengths,
        )

    def gradient_terms(self) -> Iterator[tuple[str, Any, float, float]]:
        """(label, reward, w_m d_m / std_m, mean_m) of the terms w_m d_m (r_m − mean_m) / std_m.

        Raises:
            RewardError: the terms are z-scores of the batch, whose gradient couples its images.
        """
        if self._normalise == "batch":
            raise RewardError(
                f"{self.name} brings its terms to z-scores of the batch, which couples the images' "
                "gradients. Set rewards.normalise to none or to fixed (each term's mean and std)."
            )
        for label, (reward, weight) in self.rewards.items():
            if weight:
                mean, std = self._normalise[label] if isinstance(self._normalise, dict) else (0.0, 1.0)
                yield label, reward, weight / std * (1.0 if reward.higher_is_better else -1.0), mean

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Judge with every reward and add up; images are read once for all of them."""
        if self.capabilities.takes_clips:
            rows = list(range(len(prompts)))
            arguments = (
                list(prompts),
                without_group(read_metadata(self.name, metadata, len(rows), noun="clip")),
            )
            return self.add_up(lambda reward: reward.score(images, *arguments), rows, [None] * len(rows))
        request = read_request(self.name, images, prompts, metadata)
        usable = [row for row, _ in request.images.readable()]
        loaded = as_contract([image for _, image in request.images.readable()])
        texts = [request.prompts[row] for row in usable]
        records = [request.metadata[row] for row in usable]

        def judge(reward: Any) -> Scores:
            metadata = records if reward.capabilities.needs_group else without_group(records)
            return reward.score(loaded, list(texts), list(metadata))

        return self.add_up(judge, usable, request.images.reasons)

    def add_up(
        self, judge: Callable[[Any], Any], usable: list[int], unusable: Sequence[str | None]
    ) -> Scores:
        """Scores of all B samples: `judge` asks one reward for its scores of the usable rows, and `unusable`
        [B] says why the others are not judged. A reward that raises, or does not return one score per
        sample, is named by its label.
        """
        total = torch.zeros(len(unusable), dtype=torch.float64)
        reasons = list(unusable)
        parts: dict[str, Tensor] = {}
        for label, (reward, weight) in self.rewards.items():
            with Naming(label):
                answer = judge(reward)
            scores = _spread(check_answer(label, answer, len(usable), self.noun), usable, len(reasons))
            if label in self.capabilities.advantage_weights:
                scores, _ = with_deviation(label, scores)
            parts[label] = scores.value
            stds = {} if scores.std is None else {"std": scores.std}
            parts |= {f"{label}.{key}": part for key, part in {**stds, **scores.parts}.items()}
            if not weight:
                continue
            term = weight * self._oriented(label, scores)
            parts[f"{label}.weighted"] = term.float()
            total += term
            _add_reasons(reasons, label, scores)
        # parts keep a validity of their own: a term may be known where the sum is not
        return replace(make_scores(total.float(), reasons, self.unit), parts=parts)

    def _oriented(self, label: str, scores: Scores) -> Tensor:
        """n_m(r_m) with higher better: [B] float64, NaN where invalid."""
        value = scores.value.double()
        if isinstance(self._normalise, dict):
            mean, std = self._normalise[label]
            value = (value - mean) / std
        elif self._normalise == "batch":
            value = _standardise(value, scores.valid)
        return value if self.rewards[label][0].higher_is_better else -value

    def _bound(self, label: str, value: float) -> float:
        """w d n(b) of a bound b."""
        reward, weight = self.rewards[label]
        if self._normalise == "batch" or not weight or not math.isfinite(value):
            raise ValueError(
                f"{label!r} has the bound {value}, the weight {weight} and normalise={self._normalise!r}; a "
                "bound is a finite number of a term with a weight above 0, and not of z-scores of the batch, "
                "whose mean is always 0."
            )
        mean, std = self._normalise[label] if isinstance(self._normalise, dict) else (0.0, 1.0)
        return weight * (value - mean) / std * (1.0 if reward.higher_is_better else -1.0)

    def _total_range(self) -> tuple[float, float]:
        if self._normalise == "batch":
            return (-math.inf, math.inf)
        low = high = 0.0
        for label, (reward, weight) in self.rewards.items():
            if not weight:
                continue
            mean, std = self._normalise[label] if isinstance(self._normalise, dict) else (0.0, 1.0)
            ends = [
                (end - mean) / std * weight * (1 if reward.higher_is_better else -1) for end in reward.range
            ]
            low, high = low + min(ends), high + max(ends)
        return (low, high)


ROUNDING = 1e-6
"""Valid scores whose std is below this share of their size differ by float32 rounding, and count as equal."""


def _standardise(value: Tensor, valid: Tensor) -> Tensor:
    """z-scores over the valid entries, population std; exact zeros when they are equal up to rounding."""
    scores = value[valid]
    spread = scores.std(correction=0) if scores.numel() else torch.zeros(())
    if scores.numel() == 0 or bool(spread <= ROUNDING * scores.abs().max()):
        return torch.where(valid, 0.0, value)
    return (value - scores.mean()) / spread


def _spread(scores: Scores, rows: list[int], size: int) -> Scores:
    """Scores of a subset of rows as scores of all rows; invalid are rows not asked and values not finite."""
    index = torch.tensor(rows, dtype=torch.long)

    def fill(column: Tensor) -> Tensor:
        return torch.full((size,), torch.nan).index_copy(0, index, column.detach().float().cpu())

    finite = torch.isfinite(scores.value).cpu()
    valid = torch.zeros(size, dtype=torch.bool).index_copy(0, index, scores.valid.cpu() & finite)
    reasons: list[str | None] = ["not judged"] * size
    for row, reason, ok in zip(rows, failure_reasons(scores), finite.tolist(), strict=True):
        reasons[row] = reason if ok or reason is not None else "the score is not a finite number"
    parts = {key: fill(part) for key, part in scores.parts.items()}
    std = None if scores.std is None else fill(scores.std)
    return Scores(
        value=fill(scores.value), valid=valid, unit=scores.unit, std=std, parts=parts, reason=reasons
    )


def _add_reasons(reasons: list[str | None], label: str, scores: Scores) -> None:
    for row, reason in enumerate(failure_reasons(scores)):
        if reason is not None and reasons[row] is None:
            reasons[row] = f"{label}: {reason}"


def _unit(normalise: str | dict[str, tuple[float, float]], units: dict[str, str]) -> str:
    if normalise == "none":
        distinct = list(dict.fromkeys(units.values()))
        return distinct[0] if len(distinct) == 1 else "mixed: " + " + ".join(distinct)
    return "batch standard deviations" if normalise == "batch" else "reference standard deviations"


def _check_weights(rewards: Mapping[str, tuple[Any, float]]) -> None:
    if not rewards:
        raise ValueError("A weighted sum of no rewards; give at least one as {label: (reward, weight)}.")
    for label, (_, weight) in rewards.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"The weight of {label!r} is {weight}; allowed are finite numbers of at least 0. The "
                "direction is the reward's own (higher_is_better), so no weight needs a minus sign."
            )
    if not any(weight for _, weight in rewards.values()):
        raise ValueError(
            f"All weights are 0 ({', '.join(rewards)}); give at least one reward a weight above 0."
        )
