# SPDX-License-Identifier: Apache-2.0
"""SAFE's gated KL penalty: active above a threshold that a controller moves with the reward.

SAFE, arXiv 2602.04651, with the constants of its released code. The sign of the error and the conditions of
the phases are our reading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WARMUP = 50  # Steps of the first phase
TARGET = 0.001  # Target growth of the reward per step


@dataclass(frozen=True, kw_only=True)
class KLGate:
    """State of the gate between steps."""

    kl: float = 0.0
    """Moving average (0.9) of the KL to the reference, nats per token."""
    reward: float | None = None
    """Mean reward of the last step."""
    velocity: float = 0.0
    """Moving average (0.95) of the reward's changes."""
    error: float = 0.0
    """velocity − `TARGET`."""
    slope: float = 0.0
    """Change of the error in the last step."""
    integral: float = 0.0
    """Sum of the errors, clamped to [−1, 1]."""
    steps: int = 0


def next_gate(gate: KLGate, *, kl: float, reward: float) -> KLGate:
    """Update the gate with a step's mean KL(π‖π_ref), nats per token, and mean reward, where finite."""
    measured = math.isfinite(reward)
    change = reward - gate.reward if measured and gate.reward is not None else 0.0
    velocity = 0.95 * gate.velocity + 0.05 * change
    error = velocity - TARGET
    return KLGate(
        kl=0.9 * gate.kl + 0.1 * kl if math.isfinite(kl) else gate.kl,
        reward=reward if measured else gate.reward,
        velocity=velocity,
        error=error,
        slope=error - gate.error if gate.steps else 0.0,
        integral=min(1.0, max(-1.0, gate.integral + error)),
        steps=gate.steps + 1,
    )


def gate_threshold(gate: KLGate, *, base: float = 0.3) -> float:
    """Compute the KL above which the penalty acts: clip((b + 0.3 e + 0.01 Σe + 0.05 Δe) · phase, b/3, 2 b).

    Phase: 1.5 during the warm-up, 1.2 while the reward grows faster than the target, 0.8 while it stalls
    (|velocity| ≤ target), else 1. `base` b is in nats per token.
    """
    if gate.steps < WARMUP:
        phase = 1.5
    elif gate.velocity > TARGET:
        phase = 1.2
    else:
        phase = 0.8 if abs(gate.velocity) <= TARGET else 1.0
    threshold = base + 0.3 * gate.error + 0.01 * gate.integral + 0.05 * gate.slope
    return min(2 * base, max(base / 3, threshold * phase))


def gated_coefficient(gate: KLGate, entropy: float, *, scale: float = 0.2, base: float = 0.3) -> float:
    """Compute β of the KL term: scale · max(0, KL − threshold) · max(0.5, 2/(H + 0.1)).

    This is the derivative by the KL of the code's penalty 0.1 (KL − threshold)² · max(0.5, 2/(H + 0.1)),
    which has no gradient there. `entropy` H is the policy's, nats per token; `scale` is twice the code's 0.1.
    """
    return scale * max(0.0, gate.kl - gate_threshold(gate, base=base)) * max(0.5, 2 / (entropy + 0.1))
