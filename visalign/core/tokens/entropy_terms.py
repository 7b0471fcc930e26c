# SPDX-License-Identifier: Apache-2.0
"""Loss terms that hold a token policy's entropy: SIREN's anchor, EPO's band, TEA's protected tokens.

SIREN, in order of use: `nucleus_entropy` of the logits; `siren_keep` for the peak tokens; `peak_entropy` of both; once
per optimizer step its aggregate over all micro-batches; then `anchored_entropy_loss` on each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_same
from visalign.core.precision import float32, float32_dtype

from .statistics import masked_quantile, present_decisions


def nucleus_mask(logits: Tensor, *, p: float) -> Tensor:
    """Mark the nucleus of logits [..., V]: the most probable tokens whose probabilities fit into p in [0, 1].

    The first is always kept. SIREN, Rethinking Entropy Regularization in Large Reasoning Models, arXiv 2509.25133.
    """
    if p == 1:
        return torch.ones_like(logits, dtype=torch.bool)
    probability, order = float32(logits.detach()).softmax(-1).sort(dim=-1, descending=True, stable=True)
    keep = probability.cumsum(-1) <= p
    keep[..., :1] = True
    return torch.zeros_like(keep).scatter(-1, order, keep)


def nucleus_entropy(logits: Tensor, *, p: float = 0.8) -> Tensor:
    """Compute the entropy within the nucleus, [...]: H = −Σ_{i ∈ nucleus} q_i log q_i, q_i = p_i/Σ p.

    Differentiable in the logits [..., V] of the nucleus; the choice of the nucleus is not. p = 1 gives the
    entropy. SIREN, arXiv 2509.25133 (p = 0.8).
    """
    value = float32(logits)
    keep = nucleus_mask(value, p=p) & (value.detach() > float("-inf"))
    log_q = torch.where(keep, value, float("-inf")).log_softmax(-1)
    log_q = torch.where(keep, log_q, 0.0)
    return -torch.where(keep, log_q.exp() * log_q, 0.0).sum(-1)


def siren_keep(entropy: Tensor, weight: Tensor, *, quantile: float = 0.8) -> Tensor:
    """Mark the peak tokens of each completion: nucleus entropy above the row's own quantile τ, and present.

    Rows are whole sequences; a row of equal entropies has no peak. SIREN, arXiv 2509.25133. Deviation from
    the released code: there, padding above the quantile is kept too.
    """
    check_axes(entropy=(entropy, "B T"))
    threshold = masked_quantile(entropy, weight, quantile, per_row=True)
    return present_decisions(entropy, weight) & (entropy.detach().double() > threshold)


def peak_entropy(entropy: Tensor, weight: Tensor, keep: Tensor) -> Tensor:
    """Scale entropies by keep · n_i/k_i, so that a row's mean over present tokens is that over its peaks.

    n_i present and k_i peak tokens. Aggregate with `weight` and "seq_mean_token_mean": a row without a peak
    counts as 0, which the weight `weight * keep` would leave out of the mean over rows.
    """
    value = float32(entropy)
    scale = weight.to(value.dtype)
    present, peaks = scale.sum(1, keepdim=True), (scale * keep).sum(1, keepdim=True)
    return torch.where(keep, value, 0.0) * present / torch.where(peaks == 0, 1.0, peaks)


def anchored_entropy_loss(
    entropy: Tensor, measured: float | Tensor, anchor: float | Tensor, *, coefficient: float = 0.005
) -> Tensor:
    """Hold an aggregated entropy at its anchor: L = β (H_agg − H_anchor)², exact over micro-batches.

    The square of a mean does not add up over micro-batches. Its derivative 2β (H_agg − H_anchor) ∂H_agg does,
    once H_agg is known. The aggregate of the returned loss per decision has the value and gradient of L:

        ℓ_t = β (H_agg − H_anchor) [(H_agg − H_anchor) + 2 (H_t − sg H_t)].

    `entropy` H_t [B, T] is of `peak_entropy`; `measured` H_agg is of the whole step: the shares of
    `aggregate(entropy, weight, "seq_mean_token_mean", counts)` added up. Aggregate the loss with the same
    weight, mode and counts. `anchor` is the H_agg of the first step, to be stored in the checkpoint. SIREN,
    arXiv 2509.25133. Deviation from the released code: its H_agg and its anchor are a micro-batch's.
    """
    value = float32(entropy)
    mean, goal = (torch.as_tensor(number, dtype=value.dtype).detach() for number in (measured, anchor))
    gap = mean - goal
    return coefficient * gap * (gap + 2 * (value - value.detach()))


def entropy_band_penalty(entropy: Tensor, weight: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Penalise a sample's mean entropy outside its band (EPO's smoothing as a hinge).

    pen_i = max(0, H̄_i − high) + max(0, low − H̄_i), H̄_i = Σ_t w H/Σ_t w; gradient ±∂H̄_i outside, 0 inside.
    Rows are whole samples. `low` and `high` are κ times the mean entropy of the past, numbers or [B, 1]; NaN,
    no past, gives 0. EPO, arXiv 2509.22576 (κ = 0.8 and 1.2). Deviation from the released code, whose penalty
    is a constant outside the band and has no gradient.
    """
    check_axes(entropy=(entropy, "B T"), weight=(weight, "B T"))
    value, share = torch.where(weight != 0, float32(entropy), 0.0), float32(weight)
    mean = (value * share).sum(1, keepdim=True) / share.sum(1, keepdim=True).clamp(min=1e-12)
    edges = [torch.as_tensor(edge, dtype=value.dtype, device=value.device).detach() for edge in (low, high)]
    below, above = (torch.where(edge.isnan(), mean.detach(), edge) for edge in edges)
    return ((mean - above).relu() + (below - mean).relu()).expand(entropy.shape)


def tea_weights(
    covariance: Tensor, weight: Tensor | None = None, *, tau: float = 1.0, cap: float | None = None
) -> Tensor:
    """Compute TEA's weights of the entropy bonus: w = softmax(cov/τ) over all present decisions.

    Decisions whose likelihood rises with their advantage would lose entropy fastest; they are protected most,
    where Clip-Cov drops them. `covariance` is from `token_covariance`; infinite τ weighs all alike. With
    `cap` c no weight is above c/n, n present decisions, and the sum is below 1. Light-IF, arXiv 2508.03178.
    Deviation: weights sum to 1, where the paper's n Σ w H grows with the number of decisions and swamps the
    policy loss. The constants of the paper are not published.
    """
    check_same(covariance=covariance, weight=weight)
    present = torch.isfinite(covariance) if weight is None else torch.isfinite(covariance) & (weight != 0)
    score = torch.where(present, covariance.detach().double() / tau, float("-inf"))
    score = torch.where(present.any(), score, 0.0)
    share = torch.where(present, score.flatten().softmax(0).reshape(score.shape), 0.0)
    if cap is not None:
        share = torch.minimum(share, cap / present.sum().clamp(min=1))
    return share.to(float32_dtype(covariance))
