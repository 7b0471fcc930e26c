# SPDX-License-Identifier: Apache-2.0
"""Squared-residual objectives: they pull log π towards a target made of the reward, and stop there."""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_same

from . import ratios
from .ppo import bounded_ratio, surrogate_inputs


def flow_balance(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    log_z: Tensor,
    reward: Tensor,
    weight: Tensor,
    *,
    beta: float = 15.0,
    log_ratio: Tensor | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    length_normalised: bool = True,
) -> Tensor:
    """FlowRL's trajectory balance: match π to π_ref e^{βR}/Z instead of maximising R.

    ℓ_i = sg[ω_i] δ_i², δ_i = log Z(x_i) + (1/n_i) Σ_t log π − β R_i − (1/n_i) Σ_t log π_ref,
    ω_i = clip(r_i, 1 − ε_low, 1 + ε_high). The released code computes the clipped weight and uses the
    unclipped one (here ε_low = 1, ε_high = ∞). With length_normalised=False and no ratio it is plain
    trajectory balance.

    Args:
        log_prob: [B, T] log π, differentiable; tokens or denoising steps of whole sequences.
        ref_log_prob: [B, T]; detached here.
        log_z: [B] log-partition of each sample's prompt, learned: differentiable, one value per prompt.
        reward: [B], group-normalised in the paper; detached here.
        weight: [B, T], 0 for absent decisions.
        beta: β, nats per unit of reward; 15 in the paper.
        log_ratio: [B, T] of whole sequences, `ratio_level(…, "sequence_sum")` in the paper; detached here.
            None for ω = 1.
        eps_low: distance of the lower bound of ω from 1, in [0, 1].
        eps_high: distance of the upper bound of ω from 1, ≥ 0.
        length_normalised: divide the sums of log-probabilities by n_i = Σ_t w; FlowRL does.

    Returns:
        [B, T] float32 or better, constant along T, 0 where weight is 0: "seq_mean_token_mean" averages it
        over the sequences.

    Zhu et al., FlowRL, arXiv 2509.15207; Malkin et al., trajectory balance, arXiv 2201.13259.
    """
    difference = ratios.log_ratio(log_prob, ref_log_prob, weight)
    _check_balance(log_prob, log_z, reward, weight, log_ratio, eps_low, eps_high)
    total = ratios.ratio_level(difference, weight, "sequence" if length_normalised else "sequence_sum")
    target = beta * reward.detach().to(total.dtype) - log_z.to(total.dtype)
    inside = weight != 0
    # ω (log Z + Σ_t log π/π_ref − β R̂)²
    loss = torch.where(inside, total - target[:, None], 0.0).square()
    if log_ratio is None:
        return loss
    value = torch.where(inside, log_ratio.detach().to(loss.dtype), 0.0)
    omega = bounded_ratio(value).clamp(1 - eps_low, 1 + eps_high)
    return omega * loss


def _check_balance(
    log_prob: Tensor,
    log_z: Tensor,
    reward: Tensor,
    weight: Tensor,
    log_ratio: Tensor | None,
    eps_low: float,
    eps_high: float,
) -> None:
    check_axes(log_prob=(log_prob, "B T"), log_z=(log_z, "B"), reward=(reward, "B"))
    check_same(log_ratio=log_ratio, weight=weight)
    if not 0 <= eps_low <= 1 or not eps_high >= 0:
        raise ValueError(
            "the weight is clipped to [1 − eps_low, 1 + eps_high], eps_low in [0, 1] and eps_high ≥ 0; got "
            f"eps_low={eps_low}, eps_high={eps_high}."
        )


def dro(
    log_prob: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    beta: float,
    weight: Tensor | None = None,
) -> Tensor:
    """Direct reward optimization: the policy gradient with a quadratic pull towards the rollout policy.

    ℓ = −(A log π − (β/2)(log r)²). Up to a constant and the factor β this is the squared residual
    ½ (A − β log r)², least where log r = A/β. The paper takes whole sequences and A = R − V: pass sums over
    the sequence as [B]; per token it is the form of public trainers.

    Args:
        log_prob: [B] or [B, T] log π, differentiable.
        log_ratio: the shape of log_prob, log π − log π_old, differentiable.
        advantage: [B], or the shape of log_prob; detached here.
        beta: β ≥ 0, units of advantage per nat.
        weight: the shape of log_prob; where it is 0 the loss is 0 and log_prob gets exactly zero gradient,
            even if it is NaN.

    Returns:
        The shape of log_prob, float32 or better.

    Richemond et al., DRO, arXiv 2405.19107, eq. 4; Kimi k1.5, arXiv 2501.12599.
    """
    if not beta >= 0:
        raise ValueError(f"beta must be ≥ 0; got {beta}.")
    score, gain = surrogate_inputs(log_prob, advantage)
    pull, _ = surrogate_inputs(log_ratio, advantage)
    check_same(log_prob=score, log_ratio=pull, weight=weight)
    if weight is not None:
        inside = weight != 0
        score, gain, pull = (torch.where(inside, part, 0.0) for part in (score, gain, pull))
    # −(A log π − (β/2)(log r)²)
    return beta / 2 * pull.square() - gain * score
