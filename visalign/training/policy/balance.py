# SPDX-License-Identifier: Apache-2.0
"""MARBLE: weights of several rewards, computed from their gradients while the policy learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from visalign.core.advantages.gradient_balance import MAX_REWARDS, min_norm_weights, smooth_weights
from visalign.errors import UserError
from visalign.training.loop.algorithm import Context
from visalign.training.loop.judging import reward_weights

from .update import PolicyStep

KEY = "reward_balance"  # Key of ᾱ in the counters and in a checkpoint


class RewardBalance:
    """Weights ᾱ of Ā = Σ_k ᾱ_k A_k, A_k the advantage of reward k alone, from one gradient each.

    α = argmin over the simplex of ‖Σ_k α_k g_k/‖g_k‖‖², ᾱ ← 0.7 ᾱ + 0.3 α every `every` iterations, equal at
    first. g_k is the gradient of the iteration's first update with A_k for the advantage, without the KL
    term, over all processes. The weights of the sum play no part; two rewards have one half each. Combining
    advantages is combining gradients while the loss is linear in the advantage: in the regressions below
    their clamp, in PPO where no ratio is clipped.

    MARBLE, arXiv 2605.06507 (every 10 steps, 0.7).
    """

    def __init__(self, reward: Any, every: int) -> None:
        self.labels, self.every = list(reward_weights(reward)), every
        if reward.capabilities.at_iteration is not None:
            raise UserError(
                "objective.balance_every chooses the weights of rewards.terms by their gradients, and a term has a "
                "weight that changes. Give numbers, or set objective.balance_every=null."
            )
        if not 2 <= len(self.labels) <= MAX_REWARDS:
            raise UserError(
                f"objective.balance_every is {every}, and rewards.terms has {len(self.labels)} terms of a weight "
                f"above 0 ({', '.join(self.labels)}). Give 2 to {MAX_REWARDS}, or set objective.balance_every=null."
            )

    def weights(self, run: Context) -> list[float]:
        """Return ᾱ, one number per reward."""
        return run.counters.own.get(KEY) or [1 / len(self.labels)] * len(self.labels)

    def is_due(self, run: Context) -> bool:
        """True if ᾱ is measured in this iteration."""
        return run.counters.iteration % self.every == 0

    def measure(
        self, run: Context, named: Sequence[tuple[str, nn.Parameter]], gradient: Callable[[Sequence[float]], None]
    ) -> None:
        """Measure the rewards' gradients and move ᾱ, unless one is not finite or all are 0.

        `gradient` adds the gradient of an update under given weights of the rewards.
        """
        rows = []
        for weights in torch.eye(len(self.labels)).tolist():
            gradient(weights)
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in named]
            rows.append(torch.cat([part.flatten() for part in parts]))
            for _, parameter in named:
                parameter.grad = None
        gradients = torch.stack(rows)
        if bool(torch.isfinite(gradients).all() & gradients.any()):
            before = torch.tensor(self.weights(run), dtype=torch.float64)
            run.counters.own[KEY] = smooth_weights(before, min_norm_weights(gradients).cpu().double()).tolist()

    def prepare(
        self,
        experience: Any,
        run: Context,
        named: Sequence[tuple[str, nn.Parameter]],
        steps: Callable[[Any], list[PolicyStep]],
        alone: Callable[[Any, Tensor], None],
    ) -> list[PolicyStep]:
        """Prepare the updates of an iteration under ᾱ, which is measured first if due.

        `alone` adds the gradient of an experience's update on given samples, of the rewards alone.
        """

        def under(weights: Sequence[float]) -> Any:
            return replace(experience, trajectories=replace(experience.trajectories, reward_weights=weights))

        if self.is_due(run) and (first := steps(under(self.weights(run)))[:1]):
            self.measure(run, named, lambda weights: alone(under(weights), first[0].sample))
        experience.trajectories = under(self.weights(run)).trajectories
        updates = steps(experience)
        experience.signal |= self.metrics(run)
        return updates

    def metrics(self, run: Context) -> dict[str, float]:
        """Return ᾱ by reward."""
        return dict(zip([f"reward_weight/{label}" for label in self.labels], self.weights(run), strict=True))
