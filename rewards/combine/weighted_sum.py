# SPDX-License-Identifier: Apache-2.0
"""Several rewards as one, with every term on record."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.errors import excerpt
from visalign.interfaces import (
    NOT_FOR_SAMPLE,
    Metadata,
    RewardCapabilities,
    Scores,
    score_named,
    with_capabilities,
)
from visalign.rewards.base.contract import (
    RewardError,
    check_rules,
    check_scales,
    make_scores,
    read_metadata,
    read_request,
    scatter,
    without_group,
)
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.base.images import on_cpu
from visalign.settings import MOST

from .uncertainty import with_deviation

NO_REWARD = "no reward is for this sample (all returned None, or have another where)"
Normalise = str | Mapping[str, tuple[float, float]]
Noun = Literal["image", "completion"]


class WeightedSum:
    """value = Σ_m w_m · d_m · n_m(r_m) over rewards m; d_m is −1 where lower is better, so higher always is.

    n_m is the identity, (r − mean_m) / std_m with fixed numbers, or the z-score over the valid images of the batch. A
    sample is invalid when any reward with w_m > 0 could not judge it, with `allow_missing` when none could. A reward
    that is not for a sample (`NOT_FOR_SAMPLE`) adds 0, and one must be for it. A weight of 0 only records a reward.

    The parts hold, for each m, "m" (raw, in its own unit), "m.weighted" (its term of the sum) and "m.x" for
    each part x of m; "m.std" is the judge's own standard deviation where it gives one. Normalisation within a
    group of one prompt belongs to the advantage (`visalign.core`), which gets the raw columns from the parts.

    Args:
        rewards: label -> (reward, weight); weights are at least 0, one of them above.
        normalise: "none"; "batch" (z-scores over the images of one call: a score then depends on its neighbours, and
            several processes would each have their own scale); or label -> (mean, std) for every reward with a weight.
        allow_mixed_units: sum raw scores of different units all the same.
        allow_missing: sum the rewards that judged a sample, also where some of them failed.
        bounds: label -> what a trainer is to hold the reward's mean at, in its own unit: at least that, or at
            most where lower is better. `score` does not look at them.
        schedules: label -> function of the iterations finished that returns its weight; `rewards` has the largest.
        advantage_weights: label -> λ, by which a trainer of texts scales advantages with the reward's own standard
            deviations (`visalign.core.relative_uncertainty_weight`). A sample without one is invalid.
        name: name of the sum; "weighted_sum", or of texts "weighted_text_sum", when None.
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
        allow_missing: bool = False,
        bounds: Mapping[str, float] | None = None,
        schedules: Mapping[str, Callable[[int], float]] | None = None,
        advantage_weights: Mapping[str, float] | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name or ("weighted_sum" if self.noun == "image" else "weighted_text_sum")
        if not isinstance(rewards, Mapping) or not all(map(_is_term, rewards.items())):
            form = (
                "{label: (reward, weight)}, each reward loaded (load_reward, load_text_reward), each weight a number"
            )
            raise TypeError(f"{self.name}: rewards are {excerpt(rewards, 300)}; needed is {form}.")
        self.rewards = {label: (with_capabilities(reward), weight) for label, (reward, weight) in rewards.items()}
        units = {label: reward.unit for label, (reward, weight) in rewards.items() if weight}
        self._per_batch, self._allow_missing = normalise == "batch", allow_missing
        self._schedules = dict(schedules or {})
        self._scales = dict(normalise) if isinstance(normalise, Mapping) else {}
        bounds, strengths = dict(bounds or {}), dict(advantage_weights or {})
        check_rules(self.name, self._rules(normalise, units, bounds, strengths, allow_mixed_units))
        if isinstance(normalise, Mapping):
            check_scales("normalise", self._scales, units)
        self.unit = self._unit(units)
        self.range = (-math.inf, math.inf)
        if not self._per_batch:
            ends = [sorted(self._term(label, end) for end in rewards[label][0].range) for label in units]
            self.range = (sum((low for low, _ in ends), 0.0), sum((high for _, high in ends), 0.0))
        terms = [reward for reward, _ in self.rewards.values()]
        needs = [term.capabilities for term in terms]
        weights = {label: weight for label, (_, weight) in rewards.items()}
        self.capabilities = RewardCapabilities.of(
            terms,
            **{"needs_batch": True} if self._per_batch else {},
            takes_gpu_images=any(term.takes_gpu_images for term in needs),
            term_weights={label: weight for label, weight in weights.items() if weight},
            recorded_terms={label: self._sign(label) for label, weight in weights.items() if not weight},
            constraints={label: self._term(label, value) for label, value in bounds.items()},
            discriminators={
                n: d for n, term in zip(rewards, needs, strict=True) for d in term.discriminators.values()
            },
            advantage_weights=strengths,
            at_iteration=self.at if self._schedules or any(term.at_iteration for term in needs) else None,
            read_answer=next((term.read_answer for term in needs if term.read_answer), None),
        )

    def at(self, iteration: int) -> WeightedSum:
        """Return the sum with its weights, and its terms, after `iteration` iterations."""
        weights, changed = self._weights(iteration), copy(self)
        terms = {label: (term, term.capabilities.at_iteration) for label, (term, _) in self.rewards.items()}
        changed.rewards = {key: (at(iteration) if at else term, weights[key]) for key, (term, at) in terms.items()}
        term_weights = {label: weights[label] for label in self.capabilities.term_weights}
        changed.capabilities = replace(self.capabilities, term_weights=term_weights)
        return changed

    def _weights(self, iteration: int) -> dict[str, float]:
        weights = {label: weight for label, (_, weight) in self.rewards.items()}
        return weights | {label: schedule(iteration) for label, schedule in self._schedules.items()}

    def _rules(
        self,
        normalise: Normalise,
        units: Mapping[str, str],
        bounds: Mapping[str, float],
        strengths: Mapping[str, float],
        allow_mixed_units: bool,
    ) -> dict[str, bool]:
        """Message -> whether its rule holds; `units` are of the rewards with a weight above 0."""
        weights = {label: weight for label, (_, weight) in self.rewards.items()}
        of_images = [label for label, (reward, _) in self.rewards.items() if not reward.capabilities.takes_clips]
        terms, is_raw = ", ".join(units), normalise == "none"
        listed = ", ".join(f"{label} in {unit!r}" for label, unit in units.items())
        return {
            f"the labels are {list(weights)}; rename one that begins with another and a dot, as parts do": (
                not any(label.startswith(f"{other}.") for label in weights for other in weights)
            ),
            f"the weights are {weights}; allowed are finite numbers from 0, one above it; none needs a minus": (
                all(0 <= weight < math.inf for weight in weights.values()) and any(weights.values())
            ),
            f"it would add rewards of clips and of images: {', '.join(of_images)} takes no clip. Let the reward "
            "'frames' ask it, with frames=1 for the middle frame": len(of_images) in (0, len(weights)),
            f"the weights of {', '.join(self._schedules)} leave no term at their beginning or end; let one stay": (
                not self._schedules or all(any(self._weights(iteration).values()) for iteration in (0, MOST))
            ),
            f"normalise is {normalise!r}; allowed are 'none', 'batch', or {{label: (mean, std)}}": (
                isinstance(normalise, Mapping) or normalise in ("none", "batch")
            ),
            f"it would add different units: {listed}. Allowed: normalise='batch' or fixed, allow_mixed_units=True": (
                not is_raw or len(set(units.values())) < 2 or allow_mixed_units
            ),
            f"bounds are {bounds}; needed are finite numbers of weighted rewards ({terms}), not normalise='batch'": (
                not (bounds and self._per_batch)
                and all(label in units and math.isfinite(value) for label, value in bounds.items())
            ),
            "allow_missing goes without bounds, which hold means of all samples": not (bounds and self._allow_missing),
            "each term has a bound, so none is maximised; leave one without": not bounds
            or bool(units.keys() - bounds),
            f"advantage_weights are {strengths}; needed are a finite λ ≥ 0 and rewards with a weight above "
            f"0 ({terms})": all(label in units and 0 <= value < math.inf for label, value in strengths.items()),
        }

    def _unit(self, units: Mapping[str, str]) -> str:
        if self._per_batch or self._scales:
            return "batch standard deviations" if self._per_batch else "reference standard deviations"
        distinct = list(dict.fromkeys(units.values()))
        return distinct[0] if len(distinct) == 1 else "mixed: " + " + ".join(distinct)

    def gradient_terms(self) -> Iterator[tuple[str, Any, float, float]]:
        """(label, reward, w_m d_m / std_m, mean_m) of the terms w_m d_m (r_m − mean_m) / std_m."""
        if self._per_batch:
            raise RewardError(
                f"{self.name} takes z-scores of the batch, which couple gradients. Set normalise to none or fixed."
            )
        for label, (reward, weight) in self.rewards.items():
            if weight:
                mean, std = self._scales.get(label, (0.0, 1.0))
                yield label, reward, weight / std * self._sign(label), mean

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Judge with every reward and add up; images are read once for all of them."""
        if self.capabilities.takes_clips:
            rows, reasons = list(range(len(prompts))), [None] * len(prompts)
            records = read_metadata(self.name, metadata, len(rows), noun="clip")
        else:
            request = read_request(self.name, images, prompts, metadata)
            rows, reasons = request.rows, request.images.reasons
            images, prompts, records = request.select(rows)

        def judge(label: str, reward: Any) -> Scores:
            metadata = records if reward.capabilities.needs_group else without_group(records)
            samples = images if reward.capabilities.takes_gpu_images else on_cpu(images)
            return score_named(reward, samples, prompts, metadata, name=label)

        return self.add_up(judge, rows, reasons)

    def add_up(self, judge: Callable[[str, Any], Scores], usable: list[int], unusable: Sequence[str | None]) -> Scores:
        """Score all B samples by what `judge` gets from each label and reward for the usable rows.

        `unusable` [B] says why the other rows are not judged.
        """
        total = torch.zeros(len(unusable), dtype=torch.float64)
        judged = torch.zeros(len(unusable), dtype=torch.bool)
        reasons = list(unusable)
        parts: dict[str, Tensor] = {}
        for label, (reward, weight) in self.rewards.items():
            scores = spread_scores(judge(label, reward), usable, len(reasons))
            if label in self.capabilities.advantage_weights:
                scores, _ = with_deviation(label, scores)
            parts[label] = scores.value
            stds = {} if scores.std is None else {"std": scores.std}
            parts |= {f"{label}.{key}": part for key, part in {**stds, **scores.parts}.items()}
            if label not in self.capabilities.term_weights:
                continue
            if label in self._schedules:
                parts[f"{label}.weight"] = torch.full_like(scores.value, weight)
            value = scores.value.double()
            term = self._term(label, _standardise(value, scores.valid) if self._per_batch else value)
            failures = failure_reasons(scores)
            # a schedule at 0 counts nowhere; a constraint is on the mean of all samples, so its reward is for each
            absent = [
                not weight or (str(reason).endswith(NOT_FOR_SAMPLE) and not self.capabilities.constraints)
                for reason in failures
            ]
            term = torch.where(torch.tensor(absent, dtype=torch.bool), 0.0, term)
            parts[f"{label}.weighted"] = term.float()
            total += torch.where(scores.valid, term, 0.0)
            judged |= scores.valid & bool(weight)
            for row, (reason, is_absent) in enumerate(zip(failures, absent, strict=True)):
                reasons[row] = reasons[row] or (reason and not is_absent and f"{label}: {reason}") or None
        reasons = [why or (None if ok else NO_REWARD) for why, ok in zip(reasons, judged.tolist(), strict=True)]
        if self._allow_missing:
            failures = dict.fromkeys(
                reason for ok, reason in zip(judged.tolist(), reasons, strict=True) if ok and reason
            )
            for reason in list(failures)[:3]:
                warnings.warn(f"allow_missing: samples are scored without a reward. {reason}", stacklevel=2)
            reasons = [None if ok else reason for ok, reason in zip(judged.tolist(), reasons, strict=True)]
        for row in (~total.float().isfinite()).nonzero().flatten().tolist():
            reasons[row] = reasons[row] or f"the weighted sum {total[row].item():.3g} is beyond float32"
        # parts keep a validity of their own: a term may be known where the sum is not
        return replace(make_scores(total.float(), reasons, self.unit), parts=parts)

    def _sign(self, label: str) -> float:
        return 1.0 if self.rewards[label][0].higher_is_better else -1.0

    def _term(self, label: str, value: Any) -> Any:
        """w d (r − mean) / std of a number or tensor r."""
        mean, std = self._scales.get(label, (0.0, 1.0))
        return self.rewards[label][1] * ((value - mean) / std) * self._sign(label)


def _is_term(item: tuple[Any, Any]) -> bool:
    """Check label -> (reward, weight) for its types."""
    label, term = item
    is_pair = isinstance(label, str) and isinstance(term, tuple | list) and len(term) == 2
    return is_pair and hasattr(term[0], "score") and isinstance(term[1], Real)


ROUNDING = 1e-6
"""Valid scores whose std is below this share of their size differ by float32 rounding, and count as equal."""


def _standardise(value: Tensor, valid: Tensor) -> Tensor:
    """Compute z-scores over the valid entries, population std; zeros when they are equal up to rounding."""
    scores = value[valid]
    spread = scores.std(correction=0) if scores.numel() else torch.zeros(())
    if scores.numel() == 0 or bool(spread <= ROUNDING * scores.abs().max()):
        return torch.where(valid, 0.0, value)
    return (value - scores.mean()) / spread


def spread_scores(scores: Scores, rows: list[int], size: int, *, missing: str = "not judged") -> Scores:
    """Put the scores of some rows among all; rows not asked are invalid (`missing`)."""
    reasons: list[str | None] = [missing] * size
    texts = [""] * size
    remarks = scores.text or [""] * len(rows)
    for row, reason, text in zip(rows, failure_reasons(scores), remarks, strict=True):
        reasons[row], texts[row] = reason, text
    return Scores(
        value=scatter(scores.value, rows, size),
        valid=torch.tensor([reason is None for reason in reasons], dtype=torch.bool),
        unit=scores.unit,
        std=None if scores.std is None else scatter(scores.std, rows, size),
        parts={key: scatter(part, rows, size) for key, part in scores.parts.items()},
        text=None if scores.text is None else texts,
        reason=reasons,
    )
