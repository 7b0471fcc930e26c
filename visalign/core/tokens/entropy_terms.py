# SPDX-License-Identifier: Apache-2.0
"""Terms of a loss that hold a token policy's entropy: SIREN's anchor, EPO's band, TEA's protected tokens.

SIREN, in order of use: `nucleus_entropy` of the logits; `siren_keep` for the peak tokens (a row needs no
other row); `peak_entropy` of both; once per optimizer step its aggregate over all micro-batches; then
`anchored_entropy_loss` on each of them.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_choice, check_same, check_share
from visalign.core.precision import float32, float32_dtype

from .statistics import masked_quantile, present_decisions

Boundary = Literal["inside", "crossing"]


def nucleus_mask(logits: Tensor, *, p: float, boundary: Boundary = "inside") -> Tensor:
    """Tokens of the nucleus: the most probable ones whose probabilities add up to p.

    Args:
        logits: [..., V].
        p: in [0, 1]; 1 keeps the whole vocabulary.
        boundary: "inside" keeps what fits into p, Σ ≤ p, and always the first (SIREN as released); "crossing"
            also keeps the token with which the sum passes p (nucleus sampling).

    Returns:
        bool, the shape of logits.

    SIREN, Rethinking Entropy Regularization in Large Reasoning Models, arXiv 2509.25133; Holtzman et al.,
    arXiv 1904.09751 (crossing).
    """
    check_share(p=p)
    check_choice("boundary", boundary, get_args(Boundary))
    if p == 1:
        return torch.ones_like(logits, dtype=torch.bool)
    probability, order = float32(logits.detach()).softmax(-1).sort(dim=-1, descending=True, stable=True)
    total = probability.cumsum(-1)
    keep = total <= p if boundary == "inside" else total - probability < p
    keep[..., :1] = True
    return torch.zeros_like(keep).scatter(-1, order, keep)


def nucleus_entropy(logits: Tensor, *, p: float = 0.8, boundary: Boundary = "inside") -> Tensor:
    """Entropy of the policy renormalised to its nucleus: H = −Σ_{i ∈ nucleus} q_i log q_i, q_i = p_i/Σ p.

    Differentiable in the logits of the nucleus; the choice of the nucleus is not. p = 1 gives the entropy.

    Args:
        logits: [..., V]; float16 and bfloat16 are computed in float32.
        p: mass of the nucleus, in [0, 1]; 0.8 in the paper.
        boundary: "inside" or "crossing", see `nucleus_mask`.

    Returns:
        [...], in nats, float32 or better.

    SIREN, arXiv 2509.25133.
    """
    value = float32(logits)
    keep = nucleus_mask(value, p=p, boundary=boundary) & (value.detach() > float("-inf"))
    log_q = torch.where(keep, value, float("-inf")).log_softmax(-1)
    log_q = torch.where(keep, log_q, 0.0)
    return -torch.where(keep, log_q.exp() * log_q, 0.0).sum(-1)


def siren_keep(entropy: Tensor, weight: Tensor, *, quantile: float = 0.8) -> Tensor:
    """Peak tokens of each completion: nucleus entropy above the row's own quantile, and present.

    Args:
        entropy: [B, T] from `nucleus_entropy`; rows are whole sequences.
        weight: the same shape; 0 for absent decisions.
        quantile: τ in [0, 1].

    Returns:
        bool, the shape of entropy; nothing in a row whose entropies are all equal.

    SIREN, arXiv 2509.25133. Deviation from the released code: there, padding above the quantile is kept too.
    """
    check_axes(entropy=(entropy, "B T"))
    threshold = masked_quantile(entropy, weight, quantile, per_row=True)
    return present_decisions(entropy, weight) & (entropy.detach().double() > threshold)


def peak_entropy(entropy: Tensor, weight: Tensor, keep: Tensor) -> Tensor:
    """Entropies whose mean over all present tokens of a row is the mean over its peaks: keep · H · n_i/k_i.

    n_i present and k_i peak tokens. A row without a peak has entropy 0 and stays in the mean over rows, which
    a mean with the weight `weight * keep` would leave it out of.

    Args:
        entropy: [B, T] from `nucleus_entropy`, differentiable.
        weight: [B, T], 0 for absent decisions.
        keep: bool [B, T] from `siren_keep`.

    Returns:
        [B, T], float32 or better; aggregate it with `weight` and "seq_mean_token_mean".
    """
    value = float32(entropy)
    scale = weight.to(value.dtype)
    present, peaks = scale.sum(1, keepdim=True), (scale * keep).sum(1, keepdim=True)
    return torch.where(keep, value, 0.0) * present / torch.where(peaks == 0, 1.0, peaks)


def anchored_entropy_loss(
    entropy: Tensor,
    measured: float | Tensor,
    anchor: float | Tensor,
    *,
    coefficient: float = 0.005,
) -> Tensor:
    """Hold an aggregated entropy at its anchor: L = β (H_agg − H_anchor)², exact over micro-batches.

    The square of a mean does not add up over micro-batches. Its derivative 2β (H_agg − H_anchor) ∂H_agg does,
    once H_agg is known: returned is the loss per decision whose aggregate has the value and gradient of L,

        ℓ_t = β (H_agg − H_anchor) [(H_agg − H_anchor) + 2 (H_t − sg H_t)].

    Args:
        entropy: H_t [B, T] of a micro-batch, from `peak_entropy`, differentiable.
        measured: H_agg of the whole step, without gradient: the shares of
            `aggregate(entropy, weight, "seq_mean_token_mean", counts)` added up.
        anchor: H_anchor; the H_agg of the first step, to be stored in the checkpoint.
        coefficient: β ≥ 0.

    Returns:
        The shape of entropy, float32 or better; aggregate it with the weight, mode and counts of `measured`.


    SIREN, arXiv 2509.25133. Deviation from the released code: its H_agg and its anchor are a micro-batch's.
    """
    value = float32(entropy)
    mean, goal = (torch.as_tensor(number, dtype=value.dtype).detach() for number in (measured, anchor))
    away = mean - goal
    return coefficient * away * (away + 2 * (value - value.detach()))


def entropy_band_penalty(
    entropy: Tensor, weight: Tensor, low: float | Tensor, high: float | Tensor
) -> Tensor:
    """EPO's smoothing as a hinge: how far a sample's mean entropy has left its band.

    pen_i = max(0, H̄_i − high) + max(0, low − H̄_i), H̄_i = Σ_t w H/Σ_t w; gradient ±∂H̄_i outside, 0 inside.

    Args:
        entropy: [B, T], in nats, differentiable; rows are whole samples.
        weight: [B, T], 0 for absent decisions.
        low: κ_l times the mean entropy of the past, in nats, a number or [B, 1]; NaN, no past, gives 0.
        high: κ_r times it.

    Returns:
        [B, T], the row's penalty at each of its decisions, float32 or better, to be aggregated like any other
        loss.

    EPO, arXiv 2509.22576 (κ = 0.8 and 1.2). Deviation from the released code, whose penalty is a constant
    outside the band and has no gradient.
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
    """TEA's weights of the entropy bonus: w = softmax(cov/τ) over all present decisions.

    Decisions whose likelihood rises with their advantage would lose entropy fastest; they are protected most.
    Clip-Cov drops the same decisions instead.

    Args:
        covariance: [B, T] (A_t − Ā)(log π_t − mean log π), from `token_covariance`; no gradient.
        weight: [B, T], 0 for absent decisions, such as those outside the reasoning.
        tau: temperature τ > 0, in the unit of the covariance; infinity weighs all alike.
        cap: c: no weight above c/n, n present decisions; None for no cap. Capped weights sum to less than 1.

    Returns:
        [B, T], ≥ 0, float32 or better; 0 where absent. They sum to 1 without a cap.

    Light-IF, arXiv 2508.03178. Deviation: weights sum to 1, where the paper's n Σ w H grows with the number
    of decisions and swamps the policy loss. The constants of the paper are not published.
    """
    if not tau > 0 or (cap is not None and not cap > 0):
        raise ValueError(f"tau and cap must be positive; got tau={tau}, cap={cap}.")
    check_same(covariance=covariance, weight=weight)
    present = torch.isfinite(covariance) if weight is None else torch.isfinite(covariance) & (weight != 0)
    score = torch.where(present, covariance.detach().double() / tau, float("-inf"))
    score = torch.where(present.any(), score, 0.0)
    share = torch.where(present, score.flatten().softmax(0).reshape(score.shape), 0.0)
    if cap is not None:
        share = torch.minimum(share, cap / present.sum().clamp(min=1))
    return share.to(float32_dtype(covariance))
