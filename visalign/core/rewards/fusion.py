# SPDX-License-Identifier: Apache-2.0
"""Rewards fused with those of neighbours, and the rim of what several texts span.

Of rewards what is not finite counts as missing and stays so (NaN).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    """RewardFusion: average a reward with those of similar prompts or images.

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


def convex_vertices(embedding: Tensor) -> Tensor:
    """ConvexDA: which of some texts are the vertices of their convex hull, in the plane that they fill most.

    The plane is that of the two largest principal components. Of equal texts the first counts; of texts on a
    line the two ends.

    Args:
        embedding: [N, D] of N texts, any unit, finite.

    Returns:
        [V] int64, 1 ≤ V ≤ N for N ≥ 1, ascending.

    Shen et al., The trickle-down impact of reward (in-)consistency on RLHF, arXiv 2309.16155.
    """
    check_axes(embedding=(embedding, "N D"))
    if not bool(torch.isfinite(embedding).all()):
        raise ValueError("embedding holds a number that is not finite; leave that text out.")
    if not embedding.numel():
        return torch.arange(min(1, embedding.shape[0]))
    centred = embedding.detach().double().cpu()
    centred = centred - centred.mean(0)
    _, size, axes = torch.linalg.svd(centred, full_matrices=False)
    largest = max(float(size[0]), 1e-300)
    plane = pad(centred @ axes[:2].T * (size[:2] > 1e-6 * largest), (0, 2 - len(axes[:2])))
    points: list[Point] = []
    for number, (x, y) in enumerate(plane.tolist()):  # a second component of rounding is none
        if all(max(abs(x - a), abs(y - b)) > 1e-9 * largest for a, b, _ in points):
            points.append((x, y, number))
    sides = [_chain(sorted(points, reverse=back), (1e-9 * largest) ** 2) for back in (False, True)]
    return torch.tensor(sorted({number for side in sides for *_, number in side}))


Point = tuple[float, float, int]
"""Two coordinates, and which text it is."""


def _chain(points: list[Point], least: float) -> list[Point]:
    """One side of the hull of sorted points, by Andrew's monotone chain; `least` is the area of a turn."""
    chain: list[Point] = []
    for point in points:
        while len(chain) > 1:
            (ax, ay, _), (bx, by, _) = chain[-2:]
            if (bx - ax) * (point[1] - ay) - (by - ay) * (point[0] - ax) > least:
                break
            chain.pop()
        chain.append(point)
    return chain
