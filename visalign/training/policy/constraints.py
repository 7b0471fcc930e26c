# SPDX-License-Identifier: Apache-2.0
"""Rewards held at a bound while others rise: Lagrange multipliers that move with each iteration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from visalign.core.rewards.terms import constraint_multiplier
from visalign.training.loop.algorithm import Context
from visalign.training.loop.judging import reward_weights

KEY = "reward_multipliers"
"""Where the counters, and so a checkpoint, keep λ."""


class RewardConstraints:
    """max E[Σ_m w_m n_m] under E[w_k n_k] ≥ c_k for the terms k of a weighted sum that have a bound.

    What is optimised is Σ_m w_m n_m + Σ_k λ_k w_k n_k, m the terms without a bound, and each iteration's
    λ_k ← max(0, λ_k + η (c_k − mean of w_k n_k)) before its samples are learnt from, λ_k = 0 at first. A
    bound that always held costs nothing; the longer it is missed the more its term says, and λ falls while
    it holds.

    Args:
        reward: with `capabilities.constraints`, label -> c_k, as `visalign.rewards.WeightedSum` has them.
        rate: η, per unit of the weighted term.

    Altman, Constrained Markov decision processes, 1999; updates as in RCPO, arXiv 1805.11074, section 4.
    """

    def __init__(self, reward: Any, rate: float) -> None:
        self.bounds: Mapping[str, float] = reward.capabilities.constraints
        self.labels, self.rate = list(reward_weights(reward)), rate

    def apply(
        self, valid: Tensor, parts: Mapping[str, Tensor], run: Context
    ) -> tuple[Tensor, dict[str, float]]:
        """Move λ by an iteration's samples, and weigh the terms by it.

        Args:
            valid: bool [B], of all processes.
            parts: name -> [B], of which "LABEL.weighted" are the terms.
            run: that keeps λ.

        Returns:
            ([B] what is optimised, NaN where not valid; λ by reward as metrics).
        """
        terms = {label: parts[f"{label}.weighted"] for label in self.labels}
        before, after = run.counters.own.get(KEY, {}), {}
        for label, bound in self.bounds.items():
            mean = terms[label][valid].mean()
            found = constraint_multiplier(before.get(label, 0.0), mean, bound=bound, rate=self.rate)
            after[label] = float(found)
        run.counters.own[KEY] = after
        # from the terms: taking one off the sum again would leave its rounding in groups of equal rewards
        value = torch.stack([after.get(label, 1.0) * term for label, term in terms.items()]).sum(0)
        metrics = {f"reward_multiplier/{label}": one for label, one in after.items()}
        return torch.where(valid, value, torch.nan), metrics
