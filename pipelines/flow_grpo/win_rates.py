# SPDX-License-Identifier: Apache-2.0
"""Win rates as reward: how the judges of a configuration become comparisons inside each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from visalign.errors import UserError, suggestion
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.pipelines.shared.sections import RewardsConfig


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """How images of one group are compared; each term of rewards.terms gives win rates of its own."""

    both_orders: bool = True
    """Ask each pair in both orders and average the log-odds. Published Pref-GRPO: false."""
    hard: bool = False
    """Count a pair as won or lost; false takes the judge's probability. Published Pref-GRPO: true."""
    budget: float | None = None
    """Share of a group's pairs that may be asked, in (0, 1]; null: all of them, each once."""
    scores: list[str] = field(default_factory=list)
    """Labels of terms that stay plain scores beside the win rates, e.g. a CLIP score that is only added."""

    def __post_init__(self) -> None:
        if self.budget is not None and not 0 < self.budget <= 1:
            raise UserError(f"comparison.budget is {self.budget}; it must be above 0 and at most 1, or null.")
        if self.budget is not None and self.hard:
            raise UserError(
                "comparison.budget and comparison.hard are both set; a budget estimates the win rates by a "
                "fit, which has no hard wins. Leave one of them out."
            )


def build_win_rates(
    config: ComparisonConfig, rewards: RewardsConfig, judges: Mapping[str, PointwiseReward | PairwiseReward]
) -> dict[str, PointwiseReward]:
    """The terms of the sum: a win rate for each judge, the score itself for those in `config.scores`.

    A pointwise judge compares by its mean and standard deviation, a pairwise one directly.

    Args:
        config: how to compare.
        rewards: the section with the terms.
        judges: label -> judge.

    Raises:
        UserError: `scores` names no term, all of them, or a judge that only compares.
    """
    from visalign.rewards.pairs.as_pairwise import as_pairwise
    from visalign.rewards.pairs.as_pointwise import GroupWinRate

    for label in config.scores:
        if label not in rewards.terms:
            raise UserError(
                f"comparison.scores names {label!r}, which is no term. {suggestion(label, rewards.terms)}"
                f"Terms: {', '.join(rewards.terms)}."
            )
    if set(config.scores) >= set(rewards.terms):
        raise UserError(
            "comparison.scores names every term, so nothing is compared. Take one out, or write "
            "'pipeline: flow_grpo' to train on scores."
        )
    built: dict[str, PointwiseReward] = {}
    for label in rewards.terms:
        judge: Any = judges[label]
        if label not in config.scores:
            pairwise = judge if isinstance(judge, PairwiseReward) else as_pairwise(judge)
            built[label] = GroupWinRate(
                pairwise, both_orders=config.both_orders, hard=config.hard, budget=config.budget
            )
        elif isinstance(judge, PointwiseReward):
            built[label] = judge
        else:
            raise UserError(f"comparison.scores names {label!r}, a judge that only compares; take it out.")
    return built


def check_whole_groups(prompts_per_iteration: int, world: int) -> None:
    """Refuse processes that would share a group: its images could not be compared.

    Raises:
        UserError: the groups cannot be divided among the processes.
    """
    if prompts_per_iteration % world:
        raise UserError(
            f"rollout.prompts_per_iteration is {prompts_per_iteration} and there are {world} processes: some "
            "group would be spread over two, and its images could not be compared. Use a multiple of "
            f"{world}."
        )
