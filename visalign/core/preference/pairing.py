# SPDX-License-Identifier: Apache-2.0
"""Choose the next pairs of a group to compare: Swiss rounds, or the most informative pairs."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_choice

from .ranking import RankingFit

Method = Literal["active", "swiss"]
CLOSE = 0.7  # A pair asked once is asked in the other order only while the likelier winner wins with at most this


def next_pairs(
    fit: RankingFit, asked: Tensor, count: int, *, method: Method = "active", both_orders: bool = True
) -> Tensor:
    """Choose the next calls [M, 2] (left, right), M ≤ count, no image twice in a round while that is possible.

    "active": the pairs with the largest √V_ij · Φ(−|s_i − s_j| / √V_ij), V_ij the variance of s_i − s_j: the
    probability that the present order of the two is wrong, times the size of the gap that is at stake. "swiss":
    neighbours in the present order that have not met. A new pair is shown so that each sample stands on the left about
    as often as on the right, which keeps the position bias apart from the scores. A pair that was asked is asked again
    only in the other order (if `both_orders`; not for a judge that averages both itself) and only while it is close
    (`CLOSE`); a call is never repeated. `asked` [N, 2] are the calls so far, failed ones too; `fit` is of them.
    """
    check_choice("method", method, get_args(Method))
    size = len(fit.score)
    met = torch.zeros(size, size, dtype=torch.bool)
    lefts = torch.zeros(size, dtype=torch.int64)
    for left, right in asked.tolist():
        met[left, right] = True
        lefts[left] += 1
        lefts[right] -= 1
    win = fit.win_probability()
    close = (torch.maximum(win, win.T) <= CLOSE) & both_orders
    once, twice = met | met.T, met & met.T
    allowed = torch.ones_like(met).triu(1) & ~twice & (~once | close)
    if method == "active":  # √V_ij Φ(−|s_i − s_j| / √V_ij)
        diagonal = fit.covariance.diagonal()
        spread = (diagonal[:, None] + diagonal[None, :] - 2 * fit.covariance).clamp(min=1e-12).sqrt()
        gap = (fit.score[:, None] - fit.score[None, :]).abs()
        gain = spread * torch.special.ndtr(-gap / spread)
    else:  # minus the distance in the present order; equal scores are ordered by number
        rank = torch.empty(size, dtype=torch.float64)
        rank[fit.score.argsort(descending=True, stable=True)] = torch.arange(size).double()
        gain = -(rank[:, None] - rank[None, :]).abs()
    return _matching(gain.masked_fill(~allowed, -math.inf), met, lefts, count)


def _matching(gain: Tensor, met: Tensor, lefts: Tensor, count: int) -> Tensor:
    """Greedy: best pair first, each sample once per sweep, until `count` calls or nothing is left."""
    values, order = gain.flatten().sort(descending=True, stable=True)
    open_pairs = [divmod(at, len(gain)) for at in order[values > -math.inf].tolist()]
    chosen: list[tuple[int, int]] = []
    while open_pairs and len(chosen) < count:
        busy: set[int] = set()
        later = []
        for i, j in open_pairs:
            if len(chosen) == count or i in busy or j in busy:
                later.append((i, j))
                continue
            busy |= {i, j}
            has_met = met[i, j] or met[j, i]  # again in the other order only
            left, right = (i, j) if (met[j, i] if has_met else lefts[i] <= lefts[j]) else (j, i)
            lefts[left] += 1
            lefts[right] -= 1
            chosen.append((left, right))
        open_pairs = later
    return torch.tensor(chosen, dtype=torch.int64).reshape(-1, 2)
