# SPDX-License-Identifier: Apache-2.0
"""RewardFusion, rewards averaged with those of neighbours, and ConvexDA, the vertices of a set of texts.

Shen et al., The trickle-down impact of reward (in-)consistency on RLHF, arXiv 2309.16155.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from visalign.core.checks import check_axes
from visalign.core.precision import float32


def neighbour_weights(
    similarity: Tensor, valid: Tensor | None = None, *, threshold: float = 0.9, top: int = 5
) -> Tensor:
    """Weigh neighbours: w_m = sim_m if sim_m ≥ threshold and m is among the `top` largest, else 0.

    `similarity` [B, M] holds e.g. cosines of prompt embeddings; entries that are not finite, or not `valid`,
    are no neighbours. The threshold is above 0, so that no weight is negative; ties go to the first.
    """
    check_axes(similarity=(similarity, "B M"), valid=(valid, "B M"))
    value = float32(similarity).detach()
    present = torch.isfinite(value) if valid is None else torch.isfinite(value) & valid
    value = torch.where(present, value, float("-inf"))
    rank = value.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return torch.where((rank < top) & (value >= threshold), value, 0.0)


def reward_fusion(
    reward: Tensor, neighbour_reward: Tensor, similarity: Tensor, *, threshold: float = 0.9, top: int = 5
) -> Tensor:
    """Average a reward with those of similar prompts or images (RewardFusion).

    R′_b = (R_b + Σ_m w_bm R_bm)/(1 + Σ_m w_bm), w as in `neighbour_weights`, from the `similarity` [B, M] to
    the sample itself. A missing `neighbour_reward` [B, M] is no neighbour. The result lies between the
    smallest and the largest reward that enters; without neighbours it is R_b exactly. The neighbours are an
    argument: the released code changes its pool while it scores, which makes scores depend on their order.
    """
    check_axes(reward=(reward, "B"), neighbour_reward=(neighbour_reward, "B M"), similarity=(similarity, "B M"))
    present = torch.isfinite(neighbour_reward)
    weight = neighbour_weights(similarity, present, threshold=threshold, top=top)
    value = float32(reward).detach()
    nearby = torch.where(present, float32(neighbour_reward).detach(), value[:, None])
    # (R_b + Σ w R_bm)/(1 + Σ w) = R_b + Σ w (R_bm − R_b)/(1 + Σ w)
    fused = value + (weight * (nearby - value[:, None])).sum(1) / (1 + weight.sum(1))
    return torch.where(torch.isfinite(value), fused, float("nan"))


def convex_vertices(embedding: Tensor) -> Tensor:
    """Find the vertices [V], ascending, of the convex hull of texts [N, D] in their main plane (ConvexDA)."""
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


Point = tuple[float, float, int]  # Two coordinates and the row of the text


def _chain(points: list[Point], least: float) -> list[Point]:
    """Build one side of the hull of sorted points by Andrew's monotone chain."""
    chain: list[Point] = []
    for point in points:
        while len(chain) > 1:
            (ax, ay, _), (bx, by, _) = chain[-2:]
            if (bx - ax) * (point[1] - ay) - (by - ay) * (point[0] - ax) > least:
                break
            chain.pop()
        chain.append(point)
    return chain
