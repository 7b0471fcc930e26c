# SPDX-License-Identifier: Apache-2.0
"""Panel of the reward that a token policy bought with entropy over a run: R = −a e^H + b and its ceiling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from visalign.core import fit_entropy_curve

from .curves import HEIGHT, WIDTH, Curve, Panel, limits
from .plots import Frame

POINTS = 5
"""Fewest points of a fit, which has two parameters."""


def entropy_panels(metrics: Sequence[Mapping[str, Any]]) -> tuple[Panel, ...]:
    """Draw reward over entropy with its fit (Cui et al., arXiv 2505.22617, eq. 6); empty without entropies.

    The reward is the held-out accuracy where that was measured often enough on the way, else the training reward.
    """
    for key, name in (("heldout/accuracy", "held-out accuracy"), ("reward_mean", "training reward")):
        pairs = [(row.get("entropy"), row.get(key)) for row in metrics]
        points = [(h, r) for h, r in pairs if all(isinstance(v, int | float) and math.isfinite(v) for v in (h, r))]
        if len(points) >= POINTS and len({h for h, _ in points}) > 1:
            return (_draw(np.array(points, dtype=np.float64), name),)
    return ()


def _draw(points: np.ndarray, name: str) -> Panel:
    entropy, reward = points[np.argsort(points[:, 0])].T
    fit = fit_entropy_curve(torch.from_numpy(entropy), torch.from_numpy(reward))
    a, b, ceiling, error = (float(value) for value in (fit.a, fit.b, fit.ceiling, fit.ceiling_std))
    curve = Curve(("entropy",), "Reward bought with entropy", name, "R = −a e^H + b, a point per iteration")
    at = np.linspace(0.0, entropy[-1], 60)
    line = b - a * np.exp(at)
    drawn = np.concatenate([reward, line])
    frame = Frame(
        x=(0.0, float(entropy[-1]) * 1.02),
        y=limits(curve, float(drawn.min()), float(drawn.max())),
        x_name="entropy, nats",
        width=WIDTH,
        height=HEIGHT,
    )
    parts = [frame.path("line", zip(at.tolist(), line.tolist(), strict=True))]
    parts.append(frame.dots(zip(entropy.tolist(), reward.tolist(), strict=True), radius=2.5))
    note = f"a {a:.3g}, b {b:.3g}; ceiling b − a, where all entropy is spent: {ceiling:.3g} ± {error:.2g}"
    note += f" (one standard error, {len(points)} points as if independent)"
    alt = f"{curve.title}: {name} over entropy from {entropy[0]:.3g} to {entropy[-1]:.3g} nats; {note}."
    return Panel(curve=curve, svg=frame.svg(parts, alt), note=note)
