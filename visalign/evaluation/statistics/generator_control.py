# SPDX-License-Identifier: Apache-2.0
"""The control for preference sets that only test "which generator made it".

Where one generator nearly always wins, a judge that recognises generators scores high without looking at what
is asked: refined-prompt images of a newer model beat their originals in 100 % of the pairs of some published
sets. Three numbers tell the two apart: how well the identity of the generators alone predicts the votes, how
well the judge does within pairs of one generator, and how well it does where people chose against the usual
order of the generators (a detector of generators gets 0 there).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize

Array = NDArray[np.float64]

FOLDS = 5


@dataclass(frozen=True, kw_only=True)
class GeneratorControl:
    """Per pair; NaN where the generators or the judge do not say."""

    identity_margin: Array
    """[N] difference of the strengths of the two generators, estimated without the pair's prompt; 0 within
    pairs of one generator."""
    same: NDArray[np.bool_]
    """[N] both images come from one generator."""
    known: NDArray[np.bool_]
    """[N] both generators are named."""
    strength: dict[str, float]
    """Bradley-Terry strength of each generator over all pairs, in log-odds, mean 0."""

    def against(self, label: ArrayLike) -> NDArray[np.bool_]:
        """[N] pairs of two generators where people chose the one that usually loses."""
        y = np.asarray(label, dtype=np.float64) - 0.5
        return self.known & ~self.same & (np.sign(y) * np.sign(self.identity_margin) < 0)

    def follows(self, margin: ArrayLike) -> float:
        """Share of the pairs of two generators where a judge prefers the usually better one."""
        d = np.asarray(margin, dtype=np.float64)
        chosen = self.known & ~self.same & np.isfinite(d) & (d != 0) & (self.identity_margin != 0)
        if not chosen.any():
            return math.nan
        return float(np.mean(np.sign(d[chosen]) == np.sign(self.identity_margin[chosen])))


def generator_control(
    left: Sequence[str | None],
    right: Sequence[str | None],
    label: ArrayLike,
    cluster: NDArray[np.int64],
) -> GeneratorControl:
    """Predict votes from the names of the generators alone, those of a fold by the strengths of the others.

    Args:
        left: [N] generator of each left image, None where it is not known.
        right: [N] of each right image.
        label: [N] share of the people in favour of the left image.
        cluster: [N] number of each pair's prompt; the pairs of a prompt are in one fold.

    Returns:
        The control.
    """
    y = np.asarray(label, dtype=np.float64)
    if not len(left) == len(right) == len(y) == len(cluster):
        raise ValueError(
            f"left, right, label and cluster need one entry per pair; got {len(left)}, {len(right)}, "
            f"{len(y)}, {len(cluster)}."
        )
    known = np.array([a is not None and b is not None for a, b in zip(left, right, strict=True)], dtype=bool)
    names = sorted({str(name) for name in (*left, *right) if name is not None})
    number = {name: place for place, name in enumerate(names)}
    i = np.array([number.get(str(name), 0) for name in left], dtype=np.int64)
    j = np.array([number.get(str(name), 0) for name in right], dtype=np.int64)
    same = known & (i == j)
    usable = known & ~same
    margin = np.full(len(y), np.nan)
    margin[same] = 0.0
    for fold in range(FOLDS):
        inside = usable & (cluster % FOLDS == fold)
        if inside.any():
            others = usable & (cluster % FOLDS != fold)
            strength = bradley_terry(i[others], j[others], y[others], len(names))
            margin[inside] = strength[i[inside]] - strength[j[inside]]
    overall = bradley_terry(i[usable], j[usable], y[usable], len(names))
    return GeneratorControl(
        identity_margin=margin,
        same=same,
        known=known,
        strength=dict(zip(names, overall.tolist(), strict=True)),
    )


def bradley_terry(
    left: NDArray[np.int64], right: NDArray[np.int64], label: Array, count: int, *, ridge: float = 0.5
) -> Array:
    """Strengths s [K] that maximise Σ y ln σ(s_l − s_r) + (1 − y) ln σ(s_r − s_l) − ½ ridge Σ s², mean 0.

    Players [N] on the left and right, shares [N] for the left, K = `count`. The ridge keeps strengths finite
    where one player always wins; without games all are 0.

    Source: Bradley and Terry, Biometrika 39 (1952) 324.
    """
    if not len(label) or count < 2:
        return np.zeros(count)
    games = np.bincount(left * count + right, minlength=count * count).reshape(count, count).astype(float)
    wins = np.bincount(left * count + right, weights=label, minlength=count * count).reshape(count, count)

    def objective(s: Array) -> tuple[float, Array]:
        gap = s[:, None] - s[None, :]
        loss = games * np.logaddexp(0.0, gap) - wins * gap
        slope = games / (1 + np.exp(-gap)) - wins
        gradient = slope.sum(1) - slope.sum(0) + ridge * s
        return float(loss.sum() + ridge / 2 * (s @ s)), gradient

    found = optimize.minimize(objective, np.zeros(count), jac=True, method="L-BFGS-B").x
    return found - found.mean()
