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

    α = 0 is the plain ratio, ln π/π_ref. The released code exponentiates summed log-probabilities, which is 0
    for any sentence of usual length. OCRM, arXiv 2507.15507; relative density ratios: Yamada et al., 1106.4729.
    """
    check_same(log_prob=log_prob, ref_log_prob=ref_log_prob)
    dtype = float32_dtype(log_prob)
    log_policy, ref = log_prob.to(dtype), ref_log_prob.to(dtype)
    if alpha == 0:
        return log_policy - ref
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

    Log-probs are of the policy of today, `ref_*` of the one that made the pairs. α is of the relative density d. The
    paper's weight π(a_w) π(a_l) / (π_ref(a_w) π_ref(a_l)) is α = 0, m = 1. The defaults are those of the released
    code, where m = `multiplier` flattens ratios of whole sequences, which are huge. `normalise` divides by the mean
    over the N pairs: give the whole data set, not a batch. OCRM, arXiv 2507.15507.
    """
    check_same(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    both = relative_log_density(chosen.detach(), ref_chosen.detach(), alpha=alpha)
    both = both + relative_log_density(rejected.detach(), ref_rejected.detach(), alpha=alpha)
    both = multiplier * both
    return both.softmax(0) * len(both) if normalise else both.exp()  # the softmax survives ratios beyond e^709
