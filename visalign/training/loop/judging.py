# SPDX-License-Identifier: Apache-2.0
"""Samples judged by a reward: failures counted, direction turned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.interfaces import Scores


class RewardFailure(UserError):
    """The reward could not judge too many samples, or returned what is no score."""


def judge(reward: Any, samples: Any, records: Sequence[Mapping[str, Any]], *, what: str = "images") -> Scores:
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


def check_failures(scores: Scores, valid: Tensor, limit: float, name: str) -> None:
    """Stop a run whose judge fails.

    Args:
        scores: of this process, for the reasons.
        valid: [B] of all processes.
        limit: largest share of failures allowed.
        name: of the reward.

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
    return dict(getattr(reward, "term_weights", None) or {reward.name: 1.0})


def reward_columns(reward: Any, scores: Scores) -> Tensor:
    """[B, M] float64 on the CPU: what each term of a sum says by itself, higher is better, for advantages
    that normalise the terms one by one."""
    weights = reward_weights(reward)
    if f"{next(iter(weights))}.weighted" not in scores.parts:
        return scores.value.double().cpu()[:, None]
    columns = [scores.parts[f"{label}.weighted"].double().cpu() / w for label, w in weights.items()]
    return torch.stack(columns, 1)


class Reversed:
    """A reward whose smaller values are better, turned round: value and std as before, the sign of value
    changed."""

    higher_is_better = True

    def __init__(self, reward: Any) -> None:
        self.name, self.unit = reward.name, reward.unit
        self.range = (-reward.range[1], -reward.range[0])
        self.needs_group = getattr(reward, "needs_group", False)
        self.takes_clips = getattr(reward, "takes_clips", False)
        self._reward = reward

    def score(self, samples: Any, prompts: Sequence[Any], metadata: Any = None) -> Any:
        """The reward's scores with the sign of `value` changed."""
        scores = self._reward.score(samples, prompts, metadata)
        return replace(scores, value=-scores.value)


def oriented(reward: Any) -> Any:
    """The reward itself where higher is better, else its negative."""
    return reward if reward.higher_is_better else Reversed(reward)
