# SPDX-License-Identifier: Apache-2.0
"""Rewards before any advantage, bounded by references.

What is not finite counts as missing and stays missing (NaN); it never becomes a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_positive
from visalign.core.precision import float32


def preference_as_reward(reward: Tensor, reference: Tensor, *, k: float = 1.0) -> Tensor:
    """PAR: the probability of being preferred to what the reference model makes of the same prompt.

    R′_b = mean_m σ(k (R_b − R_bm^ref)). Bounded in (0, 1), steepest at the reference: the excess that a
    hacked reward reports is worth little. An affine map of R would leave a standardised group as it is;
    this one does not.

    Args:
        reward: [B], in the unit of the reward model; differentiable.
        reference: [B, M] rewards of M samples of the reference model, in the same unit; no gradient. One is
            enough; what is not finite is left out of the mean.
        k: steepness, in 1/unit; 1/std of the reference rewards makes reward models comparable.

    Returns:
        [B], float32 or better; NaN where the reward or all its references are missing.

    Fu et al., Reward shaping to mitigate reward hacking in RLHF, arXiv 2502.18770 (k = 1, M ≤ 10).
    """
    check_positive(k=k)
    check_axes(reward=(reward, "B"), reference=(reference, "B M"))
    value, anchor = float32(reward)[:, None], float32(reference).detach()
    present = torch.isfinite(value) & torch.isfinite(anchor)
    # Both are made finite before σ, so that no NaN reaches its gradient.
    gap = torch.where(torch.isfinite(value), value, 0.0) - torch.where(torch.isfinite(anchor), anchor, 0.0)
    preferred = torch.where(present, torch.sigmoid(k * gap), 0.0).sum(1)
    count = present.sum(1)
    return torch.where(count > 0, preferred / count.clamp(min=1), float("nan"))
