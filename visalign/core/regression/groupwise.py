# SPDX-License-Identifier: Apache-2.0
"""Losses that join several samples of one prompt: GDRO's soft ranking, Diffusion-KTO's good and bad ones, DGPO."""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes
from visalign.core.precision import float32

from .few_step import preference_weights


def soft_plackett_luce(score: Tensor, reward: Tensor, *, tau: float = 0.05) -> Tensor:
    """Rank the samples of a prompt by their rewards, stage by stage, with soft targets: a loss per prompt [P].

    With the samples sorted by reward, best first: ℓ = Σ_{i<k} [ln Σ_{j≥i} e^{s_j} − Σ_{j≥i} q_i(j) s_j], q_i
    = softmax(R_{≥i}/τ). For two samples and τ → 0 this is −ln σ(s_best − s_worst), Diffusion-DPO's. Its
    gradient with respect to s [P, K] sums to 0 over the samples. Missing rewards take no part; 0 where fewer
    than two are there. Samples of equal reward keep the order given, and the first leaves the list first, so the
    loss depends on it: the trainer shuffles a prompt's samples in each update. GDRO, arXiv 2601.02036 (τ = 0.05).
    """
    check_axes(score=(score, "P K"), reward=(reward, "P K"))
    order, present = _ranking(reward)
    s = torch.where(present, float32(score).gather(1, order), 0.0)
    r = torch.where(present, float32(reward).detach().gather(1, order), 0.0)
    size = s.shape[1]
    # [P, i, j]: stage i looks at the samples j ≥ i that are there. The last one has nothing left to rank.
    stage = present & (torch.arange(size, device=s.device) < present.sum(1, keepdim=True) - 1)
    later = torch.ones(size, size, dtype=torch.bool, device=s.device).triu() & present[:, None, :]
    itself = torch.eye(size, dtype=torch.bool, device=s.device)
    compared = torch.where(stage[:, :, None], later, itself)  # no row is empty, so no gradient is NaN
    columns = s[:, None, :].expand(-1, size, -1)
    total = torch.where(compared, columns, float("-inf")).logsumexp(2)
    target = torch.where(compared, r[:, None, :] / tau, float("-inf")).softmax(2)
    return torch.where(stage, total - (target * columns).sum(2), 0.0).sum(1)


def gdro_loss(
    error: Tensor, ref_error: Tensor, reward: Tensor, *, beta: float, gamma: float, tau: float = 0.05
) -> Tensor:
    """GDRO: rank stored samples by how much better than the reference the policy denoises them; loss per prompt [P].

    ℓ = the soft ranking of s = −β (e − e_ref) against R, plus γ e of the best sample; e [P, K] is the
    flow-matching error ‖v − v_θ‖² at one noise level, with one noise for both. Offline: nothing is sampled,
    and no stochastic sampler is needed. Whether e is summed or averaged over the latent decides what β means,
    and the paper leaves it open: with the mean, tune β. Published β is 12 (text in images) and 6 (GenEval), γ
    0.5 and 1; τ is in the unit of the reward. GDRO, arXiv 2601.02036.
    """
    check_axes(error=(error, "P K"), ref_error=(ref_error, "P K"), reward=(reward, "P K"))
    value = float32(error)
    ranking = soft_plackett_luce(-beta * (value - float32(ref_error).detach()), reward, tau=tau)
    order, present = _ranking(reward)
    best = torch.where(present, value.gather(1, order), 0.0)[:, 0]
    return ranking + gamma * best


def group_gdro_loss(
    error: Tensor, anchor_error: Tensor, signal: Tensor, *, beta: float, gamma: float, tau: float = 0.05
) -> Tensor:
    """`gdro_loss` of the samples [K] of one group."""
    return gdro_loss(error[None], anchor_error[None], signal[None], beta=beta, gamma=gamma, tau=tau)[0]


def diffusion_kto_loss(error: Tensor, anchor_error: Tensor, signal: Tensor, *, beta: float = 5000.0) -> Tensor:
    """Diffusion-KTO: raise the likelihood of good samples [K], lower that of bad ones, without pairs; a number.

    ℓ is the mean of σ(−β (h − z)) for a signal above 0, σ(β (h − z)) below it, and 0 for none. h = e_ref − e stands in
    for log π/π_ref, and z = max(0, mean h), without gradient, for the KL; in the paper z is a mean over the batch.
    Li et al., arXiv 2404.04465, eq. 8; β is that of its code.
    """
    h = anchor_error.detach() - float32(error)
    z = h.detach().mean().clamp(min=0)
    return (signal.sign().abs() * torch.sigmoid(-signal.sign() * beta * (h - z))).mean()


def dgpo_loss(
    error: Tensor,
    anchor_error: Tensor,
    signal: Tensor,
    old_error: Tensor | None = None,
    *,
    beta: float = 100.0,
    eps_low: float = torch.inf,
    eps_high: float = torch.inf,
) -> Tensor:
    """Direct Group Preference Optimization: the better samples [K] of a prompt over the worse as one preference.

    ℓ = sg σ(z) mean A e, z = β mean A (e − e_ref), a surrogate: its gradient is that of the paper's −ln σ(−z), over β.
    With ε_low or ε_high samples whose e^(e_old − e) has left 1 − ε_low or 1 + ε_high as A asks carry no gradient, as
    in Flow-Factory. Luo et al., arXiv 2510.08425 (β = 100).
    """
    value = float32(error)
    weight, _ = preference_weights(value, anchor_error, signal, [0] * len(signal), beta=beta)
    if old_error is not None:
        shift = torch.expm1(old_error.detach() - value.detach())
        value = torch.where(torch.where(signal > 0, shift > eps_high, shift < -eps_low), value.detach(), value)
    return (weight * value).mean()


def _ranking(reward: Tensor) -> tuple[Tensor, Tensor]:
    """(order [P, K], best first, missing last, stable; bool [P, K] in that order: is there)."""
    present = torch.isfinite(reward)
    order = torch.where(present, reward, float("-inf")).argsort(dim=1, descending=True, stable=True)
    return order, present.gather(1, order)
