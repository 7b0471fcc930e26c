# SPDX-License-Identifier: Apache-2.0
"""Rewards before any advantage: bounded by references, fused with neighbours, read off a likelihood.

What is not finite counts as missing and stays missing (NaN); it never becomes a number. Rewards of single
steps are in `step_rewards`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_choice, check_positive
from visalign.core.groups.labels import Labels, group_index, group_min, group_sum
from visalign.core.precision import float32, float32_dtype

Likelihood = Literal["log_prob", "mean_log_prob", "prob", "mean_prob"]


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


def neighbour_weights(
    similarity: Tensor, valid: Tensor | None = None, *, threshold: float = 0.9, top: int = 5
) -> Tensor:
    """Weights of RewardFusion's neighbours: the similarity of the `top` most similar above the threshold.

    w_m = sim_m if sim_m ≥ threshold and m is among the `top` largest, else 0; equal similarities are taken
    in their order.

    Args:
        similarity: [B, M], e.g. cosines of prompt embeddings; what is not finite is no neighbour.
        valid: bool [B, M]; False is no neighbour.
        threshold: least similarity, > 0, so that no weight is negative.
        top: largest number of neighbours, ≥ 1.

    Returns:
        [B, M], float32 or better, no gradient.

    Shen et al., The trickle-down impact of reward (in-)consistency on RLHF, arXiv 2309.16155.
    """
    check_positive(threshold=threshold)
    if top < 1:
        raise ValueError(f"top must be at least 1; got {top}.")
    check_axes(similarity=(similarity, "B M"), valid=(valid, "B M"))
    value = float32(similarity).detach()
    present = torch.isfinite(value) if valid is None else torch.isfinite(value) & valid
    value = torch.where(present, value, float("-inf"))
    rank = value.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return torch.where((rank < top) & (value >= threshold), value, 0.0)


def reward_fusion(
    reward: Tensor, neighbour_reward: Tensor, similarity: Tensor, *, threshold: float = 0.9, top: int = 5
) -> Tensor:
    """RewardFusion: average a reward with those of similar prompts or pictures.

    R′_b = (R_b + Σ_m w_bm R_bm)/(1 + Σ_m w_bm), w as in `neighbour_weights`. The result lies between the
    smallest and the largest reward that enters; without neighbours it is R_b exactly. The neighbours are an
    argument: the released code changes its pool while it scores, which makes scores depend on their order.

    Args:
        reward: [B], any unit.
        neighbour_reward: [B, M], the same unit; what is not finite is no neighbour and takes no place.
        similarity: [B, M] to the sample itself, whose own similarity is 1.
        threshold: least similarity that counts, in [0, 1].
        top: most neighbours beside the sample itself.

    Returns:
        [B], float32 or better, no gradient; NaN where the reward itself is missing.

    Shen et al., The trickle-down impact of reward (in-)consistency on RLHF, arXiv 2309.16155.
    """
    check_axes(
        reward=(reward, "B"), neighbour_reward=(neighbour_reward, "B M"), similarity=(similarity, "B M")
    )
    present = torch.isfinite(neighbour_reward)
    weight = neighbour_weights(similarity, present, threshold=threshold, top=top)
    own = float32(reward).detach()
    nearby = torch.where(present, float32(neighbour_reward).detach(), own[:, None])
    fused = own + (weight * (nearby - own[:, None])).sum(1) / (1 + weight.sum(1))
    return torch.where(torch.isfinite(own), fused, float("nan"))


def likelihood_reward(log_prob: Tensor, weight: Tensor, *, kind: Likelihood = "log_prob") -> Tensor:
    """Reward a sample by the likelihood of the reference answer after it; no verifier is needed.

    R_i = Σ_t w log π(a*_t | prompt, z_i, a*_<t) ("log_prob"), that over Σ_t w ("mean_log_prob"), its
    exponential ("prob", which underflows for long answers), or Σ_t w π/Σ_t w ("mean_prob"). Within a group
    the answer is one, so sums are comparable. R depends on θ itself: the exact gradient of E[R] is the policy
    gradient with R plus the gradient of this value.

    Args:
        log_prob: [B, T] of the answer's tokens, teacher forced; differentiable.
        weight: [B, T], 0 for padding.
        kind: see above; "log_prob" is the one that works with long and short answers alike.

    Returns:
        [B], float32 or better; NaN for a row without a token.

    Likelihood-based reward designs, arXiv 2602.03979.
    """
    check_choice("kind", kind, get_args(Likelihood))
    check_axes(log_prob=(log_prob, "B T"), weight=(weight, "B T"))
    inside = weight != 0
    value = torch.where(inside, float32(log_prob), 0.0)
    total = weight.sum(1).to(value.dtype)
    summed = ((value.exp() if kind == "mean_prob" else value) * weight).sum(1)
    if kind in ("mean_log_prob", "mean_prob"):
        summed = summed / torch.where(total == 0, 1.0, total)
    reward = summed.exp() if kind == "prob" else summed
    return torch.where(inside.any(1), reward, float("nan"))


def jepo_credit(log_likelihood: Tensor, group: Labels) -> tuple[Tensor, Tensor]:
    """JEPO: the group's log mean likelihood, and what each sample adds to it.

    bound = log mean_j exp ℓ_j over the group; credit_i = bound − log mean_{j≠i} exp ℓ_j. The credit is the
    advantage. One sample that explains the answer earns nearly all of it.

    Args:
        log_likelihood: [B] ℓ_i = log π(a* | prompt, z_i), in nats; what is not finite is missing.
        group: [B] labels.

    Returns:
        (bound [B], NaN for a group without members; credit [B], 0 where missing, alone in the group, or all
        are equal). Float32 or better, no gradient.

    Likelihood-based reward designs, arXiv 2602.03979 (JEPO with leave-one-out).
    """
    check_axes(log_likelihood=(log_likelihood, "B"))
    size = log_likelihood.shape[0]
    index, groups = group_index(group, size, log_likelihood.device)
    present = torch.isfinite(log_likelihood)
    value = log_likelihood.detach().double()[:, None]
    member = present[:, None]
    place = torch.arange(size, device=value.device, dtype=value.dtype)[:, None]

    def log_sum(among: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(largest ℓ, Σ exp(ℓ − largest), exp(ℓ − largest)) per sample, over the marked of its group."""
        low = group_min(torch.where(among, -value, float("inf")), index, groups)
        top = -torch.where(torch.isfinite(low), low, 0.0)[index]
        each = torch.where(among, (torch.where(among, value, top) - top).exp(), 0.0)
        return top, group_sum(each, index, groups)[index], each

    count = group_sum(member.to(value.dtype), index, groups)[index]
    top, total, each = log_sum(member)
    # The largest term is taken out by summing the others anew: subtracting it would leave nothing.
    at_top = torch.where(member & (value == top), place, float("inf"))
    leader = place == group_min(at_top, index, groups)[index]
    second, rest, _ = log_sum(member & ~leader)
    beside = top + _log_mean(total - each, count - 1)
    without = torch.where(leader, second + _log_mean(rest, count - 1), beside)
    bound = torch.where(count > 0, top + _log_mean(total, count), float("nan"))
    credit = torch.where(member & (count > 1), bound - without, 0.0)
    dtype = float32_dtype(log_likelihood)
    return bound[:, 0].to(dtype), credit[:, 0].to(dtype)


def _log_mean(total: Tensor, count: Tensor) -> Tensor:
    """log(total/count), exactly 0 where they are equal; finite where there is nothing."""
    return torch.where(total > 0, total, 1.0).log() - count.clamp(min=1).log()
