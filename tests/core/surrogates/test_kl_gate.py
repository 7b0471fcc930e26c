# SPDX-License-Identifier: Apache-2.0
"""SAFE's gate: hand values, the penalty that its coefficient is the derivative of, phases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from visalign.core.surrogates.kl_gate import TARGET, WARMUP, KLGate, gate_threshold, gated_coefficient, next_gate

STANDING = KLGate(steps=WARMUP, velocity=TARGET)
"""The error is 0, the phase that of a reward that does not grow."""


def test_the_coefficient_is_the_derivative_of_the_penalty() -> None:
    """Penalty 0.1 (KL − thr)² max(0.5, 2/(H + 0.1)): .0072727 at KL .5, thr .3, H 1."""

    def penalty(kl: float, threshold: float, entropy: float) -> float:
        return 0.1 * max(0.0, kl - threshold) ** 2 * max(0.5, 2 / (entropy + 0.1))

    assert penalty(0.5, 0.3, 1.0) == pytest.approx(0.0072727, abs=1e-7)
    for kl, entropy in ((0.5, 1.0), (0.9, 0.0), (0.4, 9.0)):
        gate = replace(STANDING, kl=kl)
        threshold, step = gate_threshold(gate), 1e-5
        slope = (penalty(kl + step, threshold, entropy) - penalty(kl - step, threshold, entropy)) / 2 / step
        assert gated_coefficient(gate, entropy) == pytest.approx(slope, rel=1e-6) and slope > 0
    assert gated_coefficient(replace(STANDING, kl=gate_threshold(STANDING)), 1.0) == 0


def test_the_threshold_has_phases_and_bounds() -> None:
    assert gate_threshold(STANDING) == pytest.approx(0.8 * 0.3)
    assert gate_threshold(replace(STANDING, steps=0)) == pytest.approx(1.5 * 0.3)
    assert gate_threshold(replace(STANDING, velocity=2 * TARGET)) == pytest.approx(1.2 * 0.3)
    assert gate_threshold(replace(STANDING, velocity=-2 * TARGET)) == pytest.approx(0.3)
    assert gate_threshold(replace(STANDING, error=0.1, integral=1.0, slope=-0.2)) == pytest.approx(
        0.8 * (0.3 + 0.03 + 0.01 - 0.01)
    )
    assert gate_threshold(replace(STANDING, error=9.0)) == 0.6
    assert gate_threshold(replace(STANDING, error=-9.0)) == pytest.approx(0.1)
    assert gate_threshold(STANDING, base=0.03) == pytest.approx(0.8 * 0.03)


def test_what_is_measured_moves_its_averages() -> None:
    first = next_gate(KLGate(), kl=1.0, reward=2.0)
    assert (first.kl, first.velocity, first.reward, first.steps) == (pytest.approx(0.1), 0.0, 2.0, 1)
    assert first.error == first.integral == -TARGET and first.slope == 0
    second = next_gate(first, kl=1.0, reward=3.0)
    assert second.kl == pytest.approx(0.19) and second.velocity == pytest.approx(0.05)
    assert second.slope == pytest.approx(second.error - first.error) and second.steps == 2
    lost = next_gate(second, kl=math.nan, reward=math.nan)
    assert (lost.kl, lost.reward) == (second.kl, 3.0) and lost.velocity == pytest.approx(0.95 * 0.05)
    far = KLGate()
    for step in range(3000):
        far = next_gate(far, kl=0.0, reward=float(step))
    assert far.integral == 1.0
