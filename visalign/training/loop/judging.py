# SPDX-License-Identifier: Apache-2.0
"""Samples judged by a reward, at once or beside the making of others: failures counted, direction turned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from visalign.core.groups.labels import group_index, group_sum
from visalign.errors import UserError
from visalign.interfaces import Scores, with_capabilities

from .algorithm import Context


class RewardFailure(UserError):
    """The reward could not judge too many samples, or returned what is no score."""


def score_samples(
    reward: Any, samples: Any, records: Sequence[Mapping[str, Any]], *, what: str = "images"
) -> Scores:
    """Score samples against their prompts; a value that is not finite counts as a failure.

    Args:
        reward: of the kind that judges such samples.
        samples: images [b, 3, H, W], or b completions.
        records: b prompt records.
        what: the samples' name in messages.

    Raises:
        RewardFailure: the reward returned something other than one score per sample.
    """
    scores = reward.score(samples, [record["prompt"] for record in records], records)
    if not isinstance(scores, Scores) or len(scores) != len(records):
        given = f"{len(scores)} scores" if isinstance(scores, Scores) else type(scores).__name__
        raise RewardFailure(
            f"reward {reward.name!r} returned {given} for {len(records)} {what}; it must return one "
            f"Scores with one value for each of the {what}. visalign.rewards.check_reward(reward) (or "
            "check_text_reward) finds the fault."
        )
    return scores


class RewardScorer:
    """A reward that judges parts of an iteration in the order in which they are handed over.

    Args:
        reward: see `judge`.
        what: see `judge`.
        beside: judge in a thread, beside what the caller goes on with.
    """

    def __init__(self, reward: Any, *, what: str, beside: bool) -> None:
        self.reward, self._what = with_capabilities(reward), what
        self._thread = None
        if beside:  # a thread begins on the first GPU, whichever this process works on
            same = (
                partial(torch.cuda.set_device, torch.cuda.current_device())
                if torch.cuda.is_available()
                else None
            )
            self._thread = ThreadPoolExecutor(1, "judge", same)

    def ask(self, samples: Any, records: Sequence[Mapping[str, Any]]) -> Callable[[], Scores]:
        """Hand over a part; what is returned waits for its scores, and raises what the reward raised."""
        if self._thread is not None:
            return self._thread.submit(score_samples, self.reward, samples, records, what=self._what).result
        scores = score_samples(self.reward, samples, records, what=self._what)
        return lambda: scores

    def wait_for_rewards(self) -> None:
        """Wait until nothing is being judged: others, such as an evaluation, may ask the same reward then."""
        if self._thread is not None:
            self._thread.submit(int).result()

    def chunks(self, group: Sequence[Any], count: int, *, whole_groups: bool = False) -> list[Tensor]:
        """[b] places cut into at most `count` stretches; by whole groups, or not at all, where the reward
        compares.

        Args:
            group: [b] labels, those of a group side by side.
            count: wanted.
            whole_groups: cut no group.
        """
        if self.reward.capabilities.needs_batch:
            count = 1
        alone = not (whole_groups or self.reward.capabilities.needs_group)
        begins = [i for i in range(len(group)) if alone or i == 0 or group[i] != group[i - 1]]
        parts = torch.tensor(begins).tensor_split(min(count, len(begins)))
        return list(torch.arange(len(group)).tensor_split([int(part[0]) for part in parts[1:]]))


def concatenate_scores(parts: Sequence[Scores]) -> Scores:
    """Scores of stretches as those of all; a part or a deviation that a stretch lacks is NaN there."""
    if len(parts) == 1:
        return parts[0]

    def column(given: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(given, parts, strict=True)
        return torch.cat([torch.full_like(one.value, torch.nan) if x is None else x for x, one in pairs])

    def said(given: Sequence[Sequence[Any] | None], none: Any) -> list[Any] | None:
        if not any(given):
            return None
        pairs = zip(given, parts, strict=True)
        return [each for texts, one in pairs for each in (texts or [none] * len(one))]

    names = dict.fromkeys(name for one in parts for name in one.parts)
    return Scores(
        value=torch.cat([one.value for one in parts]),
        valid=torch.cat([one.valid for one in parts]),
        unit=parts[0].unit,
        std=column([one.std for one in parts]) if any(one.std is not None for one in parts) else None,
        parts={name: column([one.parts.get(name) for one in parts]) for name in names},
        text=said([one.text for one in parts], ""),
        reason=said([one.reason for one in parts], None),
    )


Made = TypeVar("Made")


class RolloutPrefetcher(Generic[Made]):
    """What the next iteration learns from, made before the weights move and judged while they do.

    It is one iteration old at most. Before a scheduled checkpoint nothing is made ahead, so that a run which
    is resumed from it begins as one that goes on does; a run that was stopped in between makes it anew.

    Args:
        make: (iterations finished, run) -> samples under the present weights, handed to the judge.
        staleness: 0: make each iteration's own when it begins; 1: an iteration ahead.
    """

    def __init__(self, make: Callable[[int, Context], Made], staleness: int) -> None:
        self._make, self._staleness = make, staleness
        self._next: tuple[int, Made] | None = None

    def take(self, run: Context) -> Made:
        """Those of the present iteration; those of the next are begun if one follows without a checkpoint."""
        iteration, waiting = run.counters.iteration, self._next
        self._next = None
        is_own = waiting is not None and waiting[0] == iteration
        made = waiting[1] if waiting is not None and is_own else self._make(iteration, run)
        if self._staleness and run.prefetch_next:
            self._next = iteration + 1, self._make(iteration + 1, run)
        return made


def check_failures(scores: Scores, valid: Tensor, limit: float, name: str) -> None:
    """Stop a run whose judge fails.

    Raises:
        RewardFailure: more failed, or none could be judged; the message counts the commonest reasons.
    """
    failed = int((~valid).sum())
    if failed <= limit * len(valid) and failed < len(valid):
        return
    own = [
        why or "no reason given"
        for why, ok in zip(scores.reason or [], scores.valid.tolist(), strict=False)
        if not ok
    ]
    reasons = (
        "; ".join(f"{why} ({count}×)" for why, count in Counter(own).most_common(3)) or "value not finite"
    )
    raise RewardFailure(
        f"reward {name!r} could not judge {failed} of {len(valid)} samples; at most {limit:.0%} may fail "
        f"(rollout.max_failure_rate). Reasons: {reasons}. Mend the reward, then go on with --resume."
    )


def reward_weights(reward: Any) -> dict[str, float]:
    """Label -> weight of what a reward adds up, as `visalign.rewards.WeightedSum` does; of another itself."""
    return dict(reward.capabilities.term_weights or {reward.name: 1.0})


def reward_columns(reward: Any, scores: Scores) -> Tensor:
    """[B, M] float64 on the CPU: what each term of a sum says by itself, higher is better, for advantages
    that normalise the terms one by one."""
    weights = reward_weights(reward)
    if f"{next(iter(weights))}.weighted" not in scores.parts:
        return scores.value.double().cpu()[:, None]
    columns = [scores.parts[f"{label}.weighted"].double().cpu() / w for label, w in weights.items()]
    return torch.stack(columns, 1)


def score_metrics(
    reward: Any, value: Tensor, valid: Tensor, group: Tensor, parts: Mapping[str, Tensor]
) -> dict[str, float]:
    """What an iteration's judged samples say: the reward, its parts, and the rewards that are only recorded.

    Args:
        reward: that `value` is of; its `capabilities.recorded_terms` are recorded.
        value: [B] float64, what is optimised.
        valid: bool [B].
        group: [B] integer labels.
        parts: name -> [B] float64.
    """
    found = reward_metrics(value, valid, group)
    found |= {f"reward_part/{name}": float(part.nanmean()) for name, part in parts.items()}
    for label, sign in reward.capabilities.recorded_terms.items():
        recorded = sign * parts[label]
        own = reward_metrics(recorded, recorded.isfinite(), group)
        found[f"recorded/{label}"] = own["reward_mean"]
        found[f"recorded_std/{label}"] = own["reward_group_std"]
        found[f"agreement/{label}"] = rank_agreement(torch.where(valid, value, torch.nan), recorded, group)
    return found


def reward_metrics(value: Tensor, valid: Tensor, group: Tensor) -> dict[str, float]:
    """Mean and spreads of the reward over the samples that could be judged.

    Args:
        value: [B].
        valid: bool [B].
        group: [B] integer labels.
    """
    known = value[valid]
    index, groups = group_index(group[valid], len(known))
    count = group_sum(torch.ones(len(known), 1, dtype=torch.float64), index, groups)[:, 0]
    mean = group_sum(known[:, None], index, groups)[:, 0] / count
    spread = group_sum((known - mean[index]).square()[:, None], index, groups)[:, 0] / count
    return {
        "reward_mean": float(known.mean()),
        "reward_std": float(known.std(correction=0)),
        "reward_group_std": float(spread.sqrt().mean()),
        "valid_share": float(valid.double().mean()),
    }


def rank_agreement(first: Tensor, second: Tensor, group: Tensor) -> float:
    """Kendall's τ-b within groups, the mean over those in which both rewards vary.

    τ_b = Σ_{i<j} s_ij t_ij / √(Σ s_ij² Σ t_ij²), s and t the signs of a pair's differences (Kendall 1945). A
    tie counts for neither side, so that a reward of 0 and 1 reaches 1 only against another of its kind.

    Args:
        first: [B], NaN where it is missing.
        second: [B].
        group: [B] integer labels.

    Returns:
        −1 to 1; NaN where no group has two samples that each of the two tells apart.
    """
    found = []
    for label in group.unique():
        own = (group == label) & first.isfinite() & second.isfinite()
        s, t = (torch.sign(each[own, None] - each[own]) for each in (first, second))
        scale = float((s.square().sum() * t.square().sum()).sqrt())
        if scale:
            found.append(float((s * t).sum()) / scale)
    return sum(found) / len(found) if found else math.nan


class NegatedReward:
    """A reward whose smaller values are better, turned round: value and std as before, the sign of value
    changed."""

    higher_is_better = True

    def __init__(self, reward: Any) -> None:
        self.name, self.unit = reward.name, reward.unit
        self.range = (-reward.range[1], -reward.range[0])
        self.capabilities, self.identity = reward.capabilities, None
        self._reward = reward

    def score(self, samples: Any, prompts: Sequence[Any], metadata: Any = None) -> Any:
        """The reward's scores with the sign of `value` changed."""
        scores = self._reward.score(samples, prompts, metadata)
        return replace(scores, value=-scores.value)


def as_higher_is_better(reward: Any) -> Any:
    """The reward itself where higher is better, else its negative."""
    reward = with_capabilities(reward)
    return reward if reward.higher_is_better else NegatedReward(reward)
