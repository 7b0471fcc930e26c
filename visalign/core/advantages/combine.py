# SPDX-License-Identifier: Apache-2.0
"""Combine several rewards: weighted sum or mean, normalise-then-sum, and GDPO's advantage.

Rewards are [B, M], each column in its own unit, with one weight per column; NaN means missing. A reward of
weight 0 is only logged: it makes no sample missing. `missing` says what a sample with some missing rewards is
worth:
* "drop": the whole sample is missing, so it shifts no baseline and takes no part in the loss;
* "skip": the sum of its present rewards (TRL). Right when rewards do not apply to every sample; wrong for
  failed judges, because a missing term then acts as a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_choice
from visalign.core.groups.labels import Labels

from .group import group_advantages, whiten

Missing = Literal["drop", "skip"]


def weighted_sum(rewards: Tensor, weights: Sequence[float], *, missing: Missing = "drop") -> Tensor:
    """Combine rewards linearly, R_b = Σ_k w_k R_bk; [B], NaN where the sample is missing."""
    usable, row, weight = _usable(rewards, weights, missing)
    total = (torch.where(usable, rewards.detach().double(), 0.0) * weight).sum(1)
    return _finish(total, row, rewards.dtype)


def weighted_mean(rewards: Tensor, weights: Sequence[float], *, missing: Missing = "drop") -> Tensor:
    """Average rewards of one unit, R_b = Σ_k w_k R_bk / Σ_k w_k with w ≥ 0; [B], NaN where missing.

    With "skip" both sums run over the present rewards: a failed term leaves the average, instead of pulling it towards
    0 as in a sum. With win rates per category it is the blend of Pref-GRPO's flexible judge: weighted_mean([overall,
    weighted_mean(categories, c)], [w_overall, w_categories]). Wang et al., Pref-GRPO, arXiv 2508.20751, released code.
    """
    usable, row, weight = _usable(rewards, weights, missing)
    if min(weights) < 0:
        raise ValueError(f"weights of a mean must be ≥ 0; got {list(weights)}. For signs use weighted_sum.")
    total = (torch.where(usable, rewards.detach().double(), 0.0) * weight).sum(1)
    return _finish(total / torch.where(row, (usable * weight).sum(1), 1.0), row, rewards.dtype)


def normalise_then_sum(
    rewards: Tensor,
    weights: Sequence[float],
    group: Labels,
    *,
    ddof: int = 1,
    eps: float = 1e-4,
    missing: Missing = "drop",
) -> Tensor:
    """Standardise each reward within its group, then sum: R_b = Σ_k w_k (R_bk − mean_g,k)/(std_g,k + eps).

    No reward wins by its unit. Whiten the result over the batch (`whiten(..., eps=eps, eps_inside=False)`),
    per sample or per token. A skipped term counts as average. Returns [B], NaN where the sample is missing.
    Liu et al., GDPO, arXiv 2601.05242.
    """
    usable, row, weight = _usable(rewards, weights, missing)
    scores = group_advantages(rewards.double(), group, ddof=ddof, eps=eps, valid=usable)
    return _finish((scores * weight).sum(1), row, rewards.dtype)


def gdpo_advantages(
    rewards: Tensor,
    weights: Sequence[float],
    group: Labels,
    *,
    decision_weight: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-4,
    missing: Missing = "drop",
) -> Tensor:
    """Standardise each reward within its group, sum, and standardise the sum over the batch.

    Z_b = Σ_k w_k (R_bk − mean_g,k)/(std_g,k + eps);  A = (Z − mean_batch Z)/(std_batch Z + eps).

    The batch statistics run over samples (TRL), or over decisions if `decision_weight` [B, T] is given
    (verl): only its zeros matter, and a sample counts as often as it has decisions. Over samples mean_batch Z
    is 0 and groups of equal rewards stay at exactly 0; over decisions of uneven numbers they move. Returns
    [B], or [B, T] with `decision_weight`. Liu et al., GDPO, arXiv 2601.05242.
    """
    combined = normalise_then_sum(rewards, weights, group, ddof=ddof, eps=eps, missing=missing)
    if decision_weight is None:
        result = whiten(combined, ddof=ddof, eps=eps, eps_inside=False)
        return torch.where(combined == 0, 0.0, result)  # equal rewards stay without signal
    check_axes(rewards=(rewards, "B M"), decision_weight=(decision_weight, "B T"))
    spread_out = combined[:, None].expand(decision_weight.shape)
    return whiten(spread_out, decision_weight != 0, ddof=ddof, eps=eps, eps_inside=False)


def _usable(rewards: Tensor, weights: Sequence[float], missing: Missing) -> tuple[Tensor, Tensor, Tensor]:
    """Return the terms that count [B, M], the samples that have a sum [B], and the weights [M]."""
    if rewards.ndim != 2 or rewards.shape[1] != len(weights):
        raise ValueError(
            f"rewards must be [B, M] with one weight per column; got rewards {tuple(rewards.shape)} and "
            f"{len(weights)} weights."
        )
    if not all(math.isfinite(w) for w in weights) or not any(weights):
        raise ValueError(f"weights must be finite and not all 0; got {list(weights)}.")
    check_choice("missing", missing, get_args(Missing))
    present = torch.isfinite(rewards)
    counts = torch.tensor([w != 0 for w in weights], device=rewards.device)  # weight 0 is only logged
    row = (present | ~counts).all(1) if missing == "drop" else (present & counts).any(1)
    return present & row[:, None], row, torch.tensor(weights, dtype=torch.float64, device=rewards.device)


def _finish(total: Tensor, row: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(row, total, float("nan")).to(torch.promote_types(dtype, torch.float32))
