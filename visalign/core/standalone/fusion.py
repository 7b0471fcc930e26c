# SPDX-License-Identifier: Apache-2.0
"""Rewards fused with those of neighbours; what is not finite counts as missing and stays so (NaN)."""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_positive
from visalign.core.precision import float32


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
