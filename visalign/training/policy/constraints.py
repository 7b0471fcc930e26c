# SPDX-License-Identifier: Apache-2.0
"""Rewards with a lower bound: Lagrange multipliers that move with each iteration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from visalign.core.rewards.terms import constraint_multiplier
from visalign.training.loop.algorithm import Context
from visalign.training.loop.judging import reward_weights

KEY = "reward_multipliers"  # Key of λ in the counters and in a checkpoint


class RewardConstraints:
    """Maximise E[Σ_m w_m n_m] under E[w_k n_k] ≥ c_k for the terms k of a weighted sum that have a bound.

    The objective is Σ_m w_m n_m + Σ_k λ_k w_k n_k, m the terms without a bound. In each iteration λ_k ←
    max(0, λ_k + η (c_k − mean of w_k n_k)) before the update, λ_k = 0 at first: λ rises while the bound is
    missed and falls while it holds. η is `rate`, per unit of the weighted term.

    Altman, Constrained Markov decision processes, 1999; updates as in RCPO, arXiv 1805.11074, section 4.
    """

    def __init__(self, reward: Any, rate: float) -> None:
        self.bounds: Mapping[str, float] = reward.capabilities.constraints
        self.labels, self.rate = list(reward_weights(reward)), rate

    def apply(self, valid: Tensor, parts: Mapping[str, Tensor], run: Context) -> tuple[Tensor, dict[str, float]]:
        """Move λ by an iteration's samples (valid: bool [B] of all processes), and weight the terms by it.

        Returns (reward [B], NaN where not valid; λ by reward as metrics).
        """
        terms = {label: parts[f"{label}.weighted"] for label in self.labels}
        before, after = run.counters.own.get(KEY, {}), {}
        for label, bound in self.bounds.items():
            mean = terms[label][valid].mean()
            after[label] = float(constraint_multiplier(before.get(label, 0.0), mean, bound=bound, rate=self.rate))
        run.counters.own[KEY] = after
        # summed from the terms: subtracting one from the sum leaves rounding in groups of equal rewards
        reward = torch.stack([after.get(label, 1.0) * term for label, term in terms.items()]).sum(0)
        metrics = {f"reward_multiplier/{label}": value for label, value in after.items()}
        return torch.where(valid, reward, torch.nan), metrics
