# SPDX-License-Identifier: Apache-2.0
"""Pref-GRPO (arXiv 2508.20751): Flow-GRPO on win rates inside each group instead of scores.

Differs from the published code, on purpose: each pair is asked in both orders and the log-odds are averaged;
a judge's probability counts as it is, neither rounded nor cut at one half; a failed comparison is left out
and is no tie; an image without a valid comparison leaves its group's statistics and the loss.
`comparison.hard` and `comparison.both_orders=false` give the published rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visalign.pipelines.shared.sections import RewardsConfig, RewardTerm

from . import job as flow_grpo
from .config import FlowGRPOConfig
from .win_rates import ComparisonConfig

__all__ = ["PrefGRPOConfig", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class PrefGRPOConfig(FlowGRPOConfig):
    """A Pref-GRPO job: as Flow-GRPO, with judges that compare."""

    rewards: RewardsConfig = field(
        default_factory=lambda: RewardsConfig(terms={"reward_dance_pairs": RewardTerm()})
    )
    """The judges, pairwise or pointwise; the sum is over their win rates."""
    comparison: ComparisonConfig = field(default_factory=ComparisonConfig)
    """How the images of a group are compared."""


def run(config: PrefGRPOConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; see `visalign.pipelines.flow_grpo.job.run`."""
    return flow_grpo.run(config, output, resume, pipeline="pref_grpo")


plan = flow_grpo.plan
