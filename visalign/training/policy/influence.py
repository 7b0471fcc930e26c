# SPDX-License-Identifier: Apache-2.0
"""Influence of samples on a policy that Adam trains: how far a step on one lowers the loss of all.

Over checkpoints θ_i of a run, with learning rates η_i,

    INF(z) = Σ_i η_i cos(∇L(θ_i), Γ(z, θ_i))

Γ is Adam's step on the gradient g of the sample's loss, from the moments m and v of the checkpoint after t steps:
m′ = β₁ m + (1 − β₁) g, v′ = β₂ v + (1 − β₂) g², Γ = m′/(1 − β₁ᵗ⁺¹) / (√(v′/(1 − β₂ᵗ⁺¹)) + ε).

Source: LESS, Xia et al., arXiv 2402.04333, section 4; UGDA (Sun et al., ICLR 2025) relabels the samples of the
largest influence. Deviation: L is the mean loss of all samples, where the paper has a set of its own; gradients are
not projected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AdamState:
    """Moments of Adam for each trained parameter, and its settings."""

    exp_avg: Sequence[Tensor]
    exp_avg_sq: Sequence[Tensor]
    steps: int  # Steps taken so far, t
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-15

    def step(self, gradient: Tensor) -> Tensor:
        """Compute the step Γ [D] on a gradient [D], without learning rate and weight decay."""
        first, second = self.betas
        m = first * _flat(self.exp_avg) + (1 - first) * gradient
        v = second * _flat(self.exp_avg_sq) + (1 - second) * gradient.square()
        m, v = m / (1 - first ** (self.steps + 1)), v / (1 - second ** (self.steps + 1))
        return m / (v.sqrt() + self.eps)


def adam_influence(
    loss_of: Callable[[int], Tensor], count: int, parameters: Sequence[Tensor], state: AdamState
) -> Tensor:
    """Compute cos(∇L, Γ(z)) [N], float64, at one checkpoint; 0 where either is 0.

    `loss_of` gives the loss of sample 0 … N − 1 with gradient; each gradient is computed twice.
    """

    def gradient(number: int) -> Tensor:
        return _flat(torch.autograd.grad(loss_of(number), list(parameters), allow_unused=True, materialize_grads=True))

    total = gradient(0)
    for number in range(1, count):
        total += gradient(number)
    steps = (state.step(gradient(number)) for number in range(count))
    return torch.stack([(total @ step / (total.norm() * step.norm())).nan_to_num() for step in steps])


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten().double() for value in values])
