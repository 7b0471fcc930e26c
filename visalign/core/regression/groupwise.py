# SPDX-License-Identifier: Apache-2.0
"""Losses that compare several samples of one prompt by their rewards: GDRO's soft ranking."""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_not_negative, check_positive
from visalign.core.precision import float32


def soft_plackett_luce(score: Tensor, reward: Tensor, *, tau: float = 0.05) -> Tensor:
    """Rank the samples of a prompt by their rewards, stage by stage, with soft targets.

    With the samples sorted by reward, best first: ℓ = Σ_{i<k} [ln Σ_{j≥i} e^{s_j} − Σ_{j≥i} q_i(j) s_j],
    q_i = softmax(R_{≥i}/τ). For two samples and τ → 0 this is −ln σ(s_best − s_worst), Diffusion-DPO's. Its
    gradient with respect to s sums to 0 over the samples.

    Samples of equal reward keep the order given, and the first leaves the list first: shuffle the samples of
    a prompt if rewards tie often (0/1 rewards).

    Args:
        score: [P, K] s, differentiable; one row per prompt.
        reward: [P, K], any unit, no gradient; what is not finite is missing and takes no part.
        tau: τ > 0, in the unit of the reward.

    Returns:
        Loss per prompt [P], float32 or better; 0 where fewer than two samples are there.

    GDRO, arXiv 2601.02036 (τ = 0.05).
    """
    check_axes(score=(score, "P K"), reward=(reward, "P K"))
    check_positive(tau=tau)
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
    """GDRO: rank stored samples by how much better than the reference the policy denoises them.

    ℓ = the soft ranking of s = −β (e − e_ref) against R, plus γ e of the best sample; e is the flow-matching
    error ‖v − v_θ‖² at one noise level. Offline: nothing is sampled, and no stochastic sampler is needed.

    Args:
        error: [P, K] e of the policy, differentiable. Whether it is summed or averaged over the latent
            decides what β means, and the paper leaves it open: with the mean, tune β.
        ref_error: [P, K] e of the reference, no gradient; same noise and noise level.
        reward: [P, K], any unit; what is not finite is missing.
        beta: β > 0; published 12 (text in images) and 6 (GenEval).
        gamma: γ ≥ 0; published 0.5 and 1.
        tau: τ > 0, in the unit of the reward.

    Returns:
        Loss per prompt [P], float32 or better, to be averaged; 0 for a prompt without a reward, γ e for one
        sample.

    GDRO, arXiv 2601.02036.
    """
    check_axes(error=(error, "P K"), ref_error=(ref_error, "P K"), reward=(reward, "P K"))
    check_positive(beta=beta)
    check_not_negative(gamma=gamma)
    value = float32(error)
    ranking = soft_plackett_luce(-beta * (value - float32(ref_error).detach()), reward, tau=tau)
    order, present = _ranking(reward)
    best = torch.where(present, value.gather(1, order), 0.0)[:, 0]
    return ranking + gamma * best


def _ranking(reward: Tensor) -> tuple[Tensor, Tensor]:
    """(order [P, K], best first, missing last, stable; bool [P, K] in that order: is there)."""
    present = torch.isfinite(reward)
    order = torch.where(present, reward, float("-inf")).argsort(dim=1, descending=True, stable=True)
    return order, present.gather(1, order)
