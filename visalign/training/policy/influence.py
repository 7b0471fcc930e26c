# SPDX-License-Identifier: Apache-2.0
"""Gradient influence, aware of Adam, in sketches: how far the reward of one sample moves the policy.

The policy learns along u = Σ_y A_y g_y / N, g_y the gradient of what it gains from sample y (its log-prob, or
minus its matching error) and A_y its advantage, and Adam scales u by P = 1 / (√v + ε). To first order a
change of the reward of x by one unit then moves what the policy gains by

    I_x = g_xᵀ P u

Gradients are kept as sketches: √P g is hashed with random signs into a few hundred numbers, whose inner
products are those of the gradients in expectation.

Source: Adam-aware influence by projected gradients, LESS, Xia et al., arXiv 2402.04333, section 4; sketches:
Weinberger et al., Feature Hashing, arXiv 0902.2206. UGDA (Sun et al., ICLR 2025) relabels the samples of the
largest influence; its text does not say which, and this is our reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gradient_sketches(
    gain_of: Callable[[int], Tensor],
    count: int,
    parameters: Sequence[Tensor],
    *,
    second_moment: Sequence[Tensor] | None = None,
    size: int = 512,
    seed: int = 0,
    eps: float = 1e-12,
) -> Tensor:
    """Compute sketches [N, size] of √P g_n, float64; whole vectors if there are at most `size` parameters.

    Args:
        gain_of: sample number -> its scalar gain, with gradient.
        count: N.
        parameters: trained parameters, D numbers in all.
        second_moment: v of Adam, one tensor for each parameter; None takes the mean of g² over the
            samples, for which gradients are computed twice.
        size: numbers of a sketch; the error of an inner product is about |a| |b| / √size.
        seed: seed of the hash.
        eps: added to √v; the default is far below the trainers' gradients, whose rms is 5e-9 and more.
    """

    def gradient(number: int) -> Tensor:
        gradients = torch.autograd.grad(gain_of(number), list(parameters), allow_unused=True, materialize_grads=True)
        return torch.cat([part.detach().flatten().double() for part in gradients])

    if second_moment is None:
        v = gradient(0).square()
        for number in range(1, count):
            v += gradient(number).square()
        v /= count
    else:
        v = torch.cat([part.detach().flatten().double() for part in second_moment])
    root = (v.sqrt() + eps).rsqrt()  # √P
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (len(root),), generator=generator).to(root) * 2 - 1
    bucket = torch.randint(0, size, (len(root),), generator=generator).to(root.device)
    rows = []
    for number in range(count):
        scaled = root * gradient(number)
        if len(root) > size:
            scaled = torch.zeros(size, dtype=scaled.dtype, device=scaled.device).index_add_(0, bucket, signs * scaled)
        rows.append(scaled)
    return torch.stack(rows)


def gradient_influence(sketches: Tensor, advantage: Tensor) -> Tensor:
    """I_x = g_xᵀ P u, [N], from sketches [N, k] and advantages [N]; NaN advantages are left out of u."""
    advantage = torch.nan_to_num(advantage.to(sketches), nan=0.0)
    return sketches @ (sketches.T @ advantage) / len(sketches)
