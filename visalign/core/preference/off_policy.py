# SPDX-License-Identifier: Apache-2.0
"""Training a judge on old pairs for a policy that has moved on: relative density ratios as weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_not_negative, check_same
from visalign.core.precision import float32_dtype


def relative_log_density(log_prob: Tensor, ref_log_prob: Tensor, *, alpha: float = 0.1) -> Tensor:
    """ln of π/(α π + (1 − α) π_ref), the density ratio bounded by 1/α, without leaving log space.

    The released code exponentiates summed log-probabilities, which is 0 for any sentence of usual length.

    Args:
        log_prob: [*] summed log-probability of a completion, or of a sampling trajectory, under the policy.
        ref_log_prob: [*] the same under the policy that made the pairs.
        alpha: α in (0, 1).

    Returns:
        [*] ≤ ln(1/α), float32 or better.

    OCRM, arXiv 2507.15507; relative density ratios: Yamada et al., 1106.4729.
    """
    check_same(log_prob=log_prob, ref_log_prob=ref_log_prob)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie in (0, 1); got {alpha}.")
    dtype = float32_dtype(log_prob)
    log_policy, ref = log_prob.to(dtype), ref_log_prob.to(dtype)
    return log_policy - torch.logaddexp(log_policy + math.log(alpha), ref + math.log1p(-alpha))


def off_policy_pair_weights(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    alpha: float = 0.1,
    multiplier: float = 0.01,
    normalise: bool = True,
) -> Tensor:
    """Weigh old pairs by how likely the policy of today would show them: w = d(chosen)^m · d(rejected)^m.

    Args:
        chosen: [N] summed log-probabilities of the chosen completions under the policy of today.
        rejected: [N] of the rejected completions.
        ref_chosen: [N] under the policy that made the pairs.
        ref_rejected: [N].
        alpha: α of the relative density d.
        multiplier: m ≥ 0; flattens ratios of whole sequences or trajectories, which are huge.
        normalise: divide by the mean over the N pairs; give the whole data set, not a batch.

    Returns:
        [N] > 0, no gradient, float32 or better.

    OCRM, arXiv 2507.15507; released code for m and the mean.
    """
    tensors = {"chosen": chosen, "rejected": rejected, "ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    check_axes(**{name: (value, "N") for name, value in tensors.items()})
    check_not_negative(multiplier=multiplier)
    both = relative_log_density(chosen.detach(), ref_chosen.detach(), alpha=alpha)
    both = both + relative_log_density(rejected.detach(), ref_rejected.detach(), alpha=alpha)
    weight = torch.exp(multiplier * both)
    return weight / weight.mean() if normalise and weight.numel() else weight
