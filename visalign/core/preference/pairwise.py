# SPDX-License-Identifier: Apache-2.0
"""From comparisons of two samples to one reward per sample: win rates within a group.

The rewards go through `group_advantages` like any other. A comparison that failed is no tie: it is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_integer_pairs
from visalign.core.groups.labels import Labels, group_index
from visalign.core.precision import float32_dtype


def group_pairs(group: Labels, size: int, device: torch.device | None = None) -> Tensor:
    """List all pairs i < j of samples of one group: [N, 2] ascending; G(G − 1)/2 of a group of G."""
    index, _ = group_index(group, size, device)
    pairs = torch.triu_indices(size, size, offset=1, device=index.device)
    return pairs[:, index[pairs[0]] == index[pairs[1]]].T


def win_rates(pairs: Tensor, preference: Tensor, size: int) -> Tensor:
    """Average how often each sample wins: w_i = (Σ_{(i,j)} p + Σ_{(j,i)} (1 − p)) / #comparisons of i.

    p is 1 if the first of the pair is better, 0 if the second is, 1/2 for a tie, or anything between if the
    judge gives a probability. Pref-GRPO has p in {0, 1} and all pairs of a group. Its released code rounds to
    3 decimals and counts a failed answer as a tie; here a failure (NaN) is left out of both sums.

    `pairs` [N, 2] holds sample numbers below `size` B, in any order; repetitions count. `preference` is [N], or [N, C]
    for C criteria, and the result [B] or [B, C], without gradient; NaN for a sample without a valid comparison.

    Wang et al., Pref-GRPO, arXiv 2508.20751, the win rate of a group.
    """
    check_integer_pairs(pairs)
    if preference.ndim not in (1, 2) or preference.shape[0] != pairs.shape[0]:
        raise ValueError(
            f"preference must be [N] or [N, C], N = {pairs.shape[0]} pairs; got {tuple(preference.shape)}."
        )
    prob = preference.detach().double()
    prob = prob[:, None] if prob.ndim == 1 else prob
    valid = torch.isfinite(prob)
    first, second = pairs.long().unbind(1)
    empty = prob.new_zeros(size, prob.shape[1])
    won = empty.index_add(0, first, torch.where(valid, prob, 0.0))
    won = won.index_add(0, second, torch.where(valid, 1 - prob, 0.0))
    compared = empty.index_add(0, first, valid.double()).index_add(0, second, valid.double())
    rate = torch.where(compared > 0, won / compared.clamp(min=1), float("nan"))
    return rate.reshape(size, *preference.shape[1:]).to(float32_dtype(preference))
