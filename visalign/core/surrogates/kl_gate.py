# SPDX-License-Identifier: Apache-2.0
"""SAFE's gate: a KL penalty that acts beyond a threshold, which a controller moves with the reward."""

from __future__ import annotations

import math
from dataclasses import dataclass

from visalign.core.checks import check_not_negative, check_positive

WARMUP = 50
"""Steps of the first phase."""
TARGET = 0.001
"""Velocity of the reward that is aimed at, per step."""


@dataclass(frozen=True, kw_only=True)
class KLGate:
    """What the gate keeps from step to step."""

    kl: float = 0.0
    """Moving average (0.9) of the KL to the reference, nats per token."""
    reward: float | None = None
    """Mean of the last step."""
    velocity: float = 0.0
    """Moving average (0.95) of the reward's changes."""
    error: float = 0.0
    """velocity − `TARGET`, of the controller."""
    slope: float = 0.0
    """Change of the error in the last step."""
    integral: float = 0.0
    """Sum of the errors, held in [−1, 1]."""
    steps: int = 0


def next_gate(gate: KLGate, *, kl: float, reward: float) -> KLGate:
    """The gate after a step; numbers that are not finite, not measured, move nothing.

    Args:
        gate: before it.
        kl: mean KL(π‖π_ref) of the step, nats per token.
        reward: mean reward of the step.

    SAFE, arXiv 2602.04651, with the numbers of its released code.
    """
    known = math.isfinite(reward)
    change = reward - gate.reward if known and gate.reward is not None else 0.0
    velocity = 0.95 * gate.velocity + 0.05 * change
    error = velocity - TARGET
    return KLGate(
        kl=0.9 * gate.kl + 0.1 * kl if math.isfinite(kl) else gate.kl,
        reward=reward if known else gate.reward,
        velocity=velocity,
        error=error,
        slope=error - gate.error if gate.steps else 0.0,
        integral=min(1.0, max(-1.0, gate.integral + error)),
        steps=gate.steps + 1,
    )


def gate_threshold(gate: KLGate, *, base: float = 0.3) -> float:
    """The KL from which the penalty acts: clip((base + 0.3 e + 0.01 Σe + 0.05 Δe) · phase, base/3, 2 base).

    e is how much faster than `TARGET` the reward grows. Phases: 1.5 during the `WARMUP`, 1.2 while the reward
    grows faster than the target, 0.8 while it stands (|velocity| ≤ target), else 1.

    Args:
        gate: of the steps so far.
        base: nats per token; the code's is 0.3, its bounds 0.1 and 0.6.

    SAFE, arXiv 2602.04651. The sign of e and what tells the phases apart are our reading.
    """
    check_positive(base=base)
    if gate.steps < WARMUP:
        phase = 1.5
    elif gate.velocity > TARGET:
        phase = 1.2
    else:
        phase = 0.8 if abs(gate.velocity) <= TARGET else 1.0
    moved = base + 0.3 * gate.error + 0.01 * gate.integral + 0.05 * gate.slope
    return min(2 * base, max(base / 3, moved * phase))


def gated_coefficient(gate: KLGate, entropy: float, *, scale: float = 0.2, base: float = 0.3) -> float:
    """β of the KL term: scale · max(0, KL − threshold) · max(0.5, 2/(H + 0.1)).

    It is the derivative by the KL of the code's penalty, 0.1 (KL − threshold)² · max(0.5, 2/(H + 0.1)), which
    there is a number without gradient and moves nothing.

    Args:
        gate: of the steps so far.
        entropy: H of the policy, nats per token; the lower, the stronger.
        scale: twice the code's 0.1.
        base: see `gate_threshold`.

    SAFE, arXiv 2602.04651.
    """
    check_not_negative(scale=scale)
    return scale * max(0.0, gate.kl - gate_threshold(gate, base=base)) * max(0.5, 2 / (entropy + 0.1))
