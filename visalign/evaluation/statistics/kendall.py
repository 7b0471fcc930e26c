# SPDX-License-Identifier: Apache-2.0
"""Kendall's τ under weights, for many weightings of the same samples at once: its bootstrap without pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .correlations import check_sides

Array = NDArray[np.float64]

BLOCK = 256
"""Samples within which pairs are counted one by one; between such blocks halves are merged."""


class WeightedKendall:
    """τ-b and τ-c when sample i stands w_i times in the data; a copy of a sample is tied with it.

    With W = Σ w, A = Σ_{x_i < x_j, y_i < y_j} w_i w_j, and W_x, W_y, W_xy the weights of equal x, of equal y
    and of both equal:

        C − D = 2A − (W² − Σ W_x² − Σ W_y² + Σ W_xy²) / 2
        τ_b = (C − D) / √((W² − Σ W_x²)/2 · (W² − Σ W_y²)/2)
        τ_c = 2 (C − D) m / (W² (m − 1)),  m = the smaller number of distinct values that have weight

    A counts pairs of a fixed permutation that stand in order: pairs within blocks by a product with a fixed
    matrix, pairs of two blocks by merging halves, O(N (BLOCK + log N)) for each weighting. With whole weights
    all sums are exact.

    Args:
        x: [N] scores.
        y: [N] opinions.

    Raises:
        ValueError: Lengths differ, fewer than 2 values, NaN, or one side is constant.

    Source: Kendall, Biometrika 33 (1945) 239; Stuart, Biometrika 40 (1953) 105; merging: Knight, J. Am. Stat.
    Assoc. 61 (1966) 436.
    """

    def __init__(self, x: ArrayLike, y: ArrayLike) -> None:
        first, second = check_sides(x, y)
        self._x, self._y = (_Ties(side) for side in (first, second))
        self._both = _Ties(self._x.number * (self._y.number.max() + 1) + self._y.number)
        # Equal x in falling order of y, and equal y in falling order of place: no tie stands in order.
        self._order = np.lexsort((-self._y.number, self._x.number))
        place = np.lexsort((-np.arange(len(first)), self._y.number[self._order]))
        self._rank = np.empty(len(first), dtype=np.int64)
        self._rank[place] = np.arange(len(first))

    def taus(self, weights: Array) -> Array:
        """τ-b and τ-c under weights [R, N], at least 0.

        Returns:
            [R, 2]; NaN where a side does not vary among what has weight.
        """
        columns = np.ascontiguousarray(np.asarray(weights, dtype=np.float64).T)
        total = columns.sum(0) ** 2
        x, y, xy = (ties.squares(columns) for ties in (self._x, self._y, self._both))
        ordered = self._pairs_in_order(columns[self._order])
        balance = 2 * ordered - (total - x - y + xy) / 2
        scale = np.sqrt((total - x) / 2 * ((total - y) / 2))
        distinct = np.minimum(self._x.distinct(columns), self._y.distinct(columns))
        is_known = scale > 0
        found = np.full((len(total), 2), np.nan)
        np.divide(balance, scale, out=found[:, 0], where=is_known)
        np.divide(2 * balance * distinct, total * (distinct - 1), out=found[:, 1], where=is_known)
        return np.clip(found, -1.0, 1.0)

    def _pairs_in_order(self, weights: Array) -> Array:
        """[R] Σ w_i w_j over places i < j with rank_i < rank_j; weights [N, R] by place."""
        size = len(weights)
        found = np.zeros(weights.shape[1])
        for start in range(0, size, BLOCK):
            rank = self._rank[start : start + BLOCK]
            before = np.triu(rank[:, None] < rank, 1).astype(np.float64)
            part = weights[start : start + BLOCK]
            found += ((before.T @ part) * part).sum(0)
        half = BLOCK
        while half < size:
            for start in range(0, size - half, 2 * half):
                found += self._across(weights, start, half)
            half *= 2
        return found

    def _across(self, weights: Array, start: int, half: int) -> Array:
        """The same over pairs of a left half, of `half` places from `start`, and the right half beside it."""
        rank = self._rank[start : start + 2 * half]
        order = np.argsort(rank, kind="stable")
        is_left = order < half
        lower = np.cumsum(is_left)[~is_left]  # how many of the left half each of the right half stands above
        left, right = order[is_left] + start, order[~is_left] + start
        sums = np.concatenate([np.zeros((1, weights.shape[1])), np.cumsum(weights[left], axis=0)])
        return np.einsum("nr,nr->r", sums[lower], weights[right])


class _Ties:
    """Which samples have equal values."""

    def __init__(self, values: Array | NDArray[np.int64]) -> None:
        _, number = np.unique(values, return_inverse=True)
        self.number: NDArray[np.int64] = number.reshape(-1)
        self._order = np.argsort(self.number, kind="stable")
        changes = np.diff(self.number[self._order]) > 0
        self._starts = np.flatnonzero(np.append(True, changes))
        self._all_differ = len(self._starts) == len(self.number)

    def _sums(self, columns: Array) -> Array:
        """[values, R] weight of each value."""
        if self._all_differ:
            return columns
        return np.add.reduceat(columns[self._order], self._starts, axis=0)

    def squares(self, columns: Array) -> Array:
        """[R] sum of the squared weights of the values."""
        sums = self._sums(columns)
        return np.einsum("nr,nr->r", sums, sums)

    def distinct(self, columns: Array) -> Array:
        """[R] how many values have weight."""
        return (self._sums(columns) > 0).sum(0).astype(np.float64)
