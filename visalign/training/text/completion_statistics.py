# SPDX-License-Identifier: Apache-2.0
"""What completions look like, whatever they are worth: how often they repeat themselves, and one another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def repetition(tokens: Tensor) -> Tensor:
    """[B] share of a completion's runs of four tokens that it had before; NaN of fewer than four tokens.

    Args:
        tokens: [B, T] int64, −1 where there is none.

    seq-rep-4 of Welleck et al., arXiv 1908.04319, section 6.
    """
    return 1 - _distinct(_joined(_joined(tokens, 1), 2))


def distinct_pairs(tokens: Tensor, group: Tensor) -> float:
    """Different pairs of neighbouring tokens over all pairs of a group's completions, mean over groups.

    Args:
        tokens: [B, T] int64, −1 where there is none.
        group: [B] integer labels.

    Returns:
        0 to 1; NaN where no completion has two tokens. It falls with length, too.

    distinct-2 of Li et al., arXiv 1510.03055, section 5.
    """
    pairs = _joined(tokens, 1)
    shares = [_distinct(pairs[group == label].reshape(1, -1)) for label in group.unique()]
    return float(torch.cat(shares).nanmean())


def _joined(ids: Tensor, apart: int) -> Tensor:
    """[B, T − apart] a number for each two ids so far apart, equal where both are; −1 where one lacks."""
    first, second = ids[:, :-apart], ids[:, apart:]
    most = int(ids.max()) + 1 if ids.numel() else 1
    found = torch.unique(first * most + second, return_inverse=True)[1]
    return torch.where((first < 0) | (second < 0), -1, found)


def _distinct(ids: Tensor) -> Tensor:
    """[B] different ids over all ids of each row [B, M], those of −1 apart; NaN where there is none."""
    ordered = ids.sort(1).values
    fresh = pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)[:, : ids.shape[1]]
    present = ordered >= 0
    return (fresh & present).sum(1) / present.sum(1)
