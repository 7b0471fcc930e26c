# SPDX-License-Identifier: Apache-2.0
"""Repetition within completions and diversity within groups."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def repetition(tokens: Tensor) -> Tensor:
    """Compute the share [B] of a completion's 4-grams (tokens [B, T], −1 for none) that occurred before; NaN
    below four tokens.

    seq-rep-4 of Welleck et al., arXiv 1908.04319, section 6.
    """
    return 1 - _distinct(_pair_ids(_pair_ids(tokens, 1), 2))


def distinct_pairs(tokens: Tensor, group: Tensor) -> float:
    """Compute distinct bigrams over all bigrams of a group's completions, mean over groups; NaN without any.

    distinct-2 of Li et al., arXiv 1510.03055, section 5. It falls with length, too.
    """
    pairs = _pair_ids(tokens, 1)
    shares = [_distinct(pairs[group == label].reshape(1, -1)) for label in group.unique()]
    return float(torch.cat(shares).nanmean())


def _pair_ids(ids: Tensor, apart: int) -> Tensor:
    """Number pairs of ids `apart` positions apart, [B, T − apart]; −1 where one is missing."""
    first, second = ids[:, :-apart], ids[:, apart:]
    radix = int(ids.max()) + 1 if ids.numel() else 1
    numbers = torch.unique(first * radix + second, return_inverse=True)[1]
    return torch.where((first < 0) | (second < 0), -1, numbers)


def _distinct(ids: Tensor) -> Tensor:
    """Distinct ids over all ids of each row [B, M] except −1; NaN for none."""
    ordered = ids.sort(1).values
    is_new = pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)[:, : ids.shape[1]]
    present = ordered >= 0
    return (is_new & present).sum(1) / present.sum(1)
