# SPDX-License-Identifier: Apache-2.0
"""Training a reward on old pairs for a policy that has moved on: relative density ratios as weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visalign.core.checks import check_same
from visalign.core.precision import float32_dtype


def relative_log_density(log_prob: Tensor, ref_log_prob: Tensor, *, alpha: float = 0.1) -> Tensor:
    """ln of π/(α π + (1 − α) π_ref) ≤ ln(1/α), the density ratio bounded by 1/α, without leaving log space.

    The released code exponentiates summed log-probabilities, which is 0 for any sentence of usual length.
    OCRM, arXiv 2507.15507; relative density ratios: Yamada et al., 1106.4729.
    """
    check_same(log_prob=log_prob, ref_log_prob=ref_log_prob)
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
    """Weigh [N] old pairs by how likely the policy of today would show them: w = d(chosen)^m · d(rejected)^m.

    Log-probs are of the policy of today, `ref_*` of the one that made the pairs. α is of the relative density d; m =
    `multiplier` flattens ratios of whole sequences or trajectories, which are huge. `normalise` divides by the mean
    over the N pairs: give the whole data set, not a batch. OCRM, arXiv 2507.15507; released code for m and the mean.
    """
    check_same(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    both = relative_log_density(chosen.detach(), ref_chosen.detach(), alpha=alpha)
    both = both + relative_log_density(rejected.detach(), ref_rejected.detach(), alpha=alpha)
    weight = torch.exp(multiplier * both)
    return weight / weight.mean() if normalise else weight
