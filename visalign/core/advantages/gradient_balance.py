# SPDX-License-Identifier: Apache-2.0
"""Balance several rewards by their gradients: MARBLE's min-norm combination and its cheap form.

The cheap form: every few steps (10 in the paper) take one gradient per reward, solve for the weights, smooth
them; in between use `weighted_sum` of the per-reward advantages with the smoothed weights. This equals
combining gradients as long as the loss is linear in the advantage: for REINFORCE, for DiffusionNFT with |A|
below its bound, for PPO only while no ratio is clipped. Keep the KL term outside the combination.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_same
from visalign.core.precision import float32_dtype

MAX_REWARDS = 12  # All 2^K − 1 subsets of the rewards are solved at once


def min_norm_weights(gradient: Tensor, *, normalise: bool = True) -> Tensor:
    """Find the shortest convex combination, α = argmin_{α ≥ 0, Σα = 1} ‖Σ_k α_k ĝ_k‖², ĝ = g/‖g‖.

    Its direction d has d·ĝ_k ≥ ‖d‖² for every k: following it harms no reward. Solved exactly, by the
    optimality conditions of every subset of the rewards. A reward with zero gradient (constant in all groups)
    gets 0; with all gradients zero the weights are equal. One of the solutions where they are several.

    `gradient` [K, N] has one flat gradient per reward, already reduced over devices, K ≤ 12. `normalise` uses
    unit gradients, as published; False lets the smallest gradient take nearly all weight. MARBLE, arXiv
    2605.06507; Désidéri, MGDA, C. R. Math. 350 (2012) 313.
    """
    check_axes(gradient=(gradient, "K N"))
    size = gradient.shape[0]
    vectors, norm = _vectors(gradient, normalise)
    product = vectors @ vectors.T
    product = product / product.diagonal().mean().clamp(min=torch.finfo(product.dtype).tiny)
    number = torch.arange(1, 2**size, device=gradient.device)
    member = (number[:, None] >> torch.arange(size, device=gradient.device) & 1).bool()
    alpha = torch.where(member, _stationary(product, member).clamp(min=0), 0.0)
    total = alpha.sum(1, keepdim=True)
    alpha = alpha / torch.where(total > 0, total, 1.0)
    # Where the clamp changed a solution it is still a point of the simplex, no shorter than the shortest.
    length = torch.einsum("ck,kl,cl->c", alpha, product, alpha)
    usable = ~(member & (norm == 0)).any(1) & (total[:, 0] > 0)
    best = alpha[torch.where(usable, length, float("inf")).argmin()]
    return torch.where((norm > 0).any(), best, 1 / size).to(float32_dtype(gradient))


def combine_gradients(gradient: Tensor, alpha: Tensor, *, normalise: bool = True, rescale: bool = False) -> Tensor:
    """Combine gradients [K, N] to the direction d = Σ_k α_k ĝ_k, [N]; a zero gradient contributes 0.

    `alpha` [K] is from `min_norm_weights` with the same `normalise`. `rescale` multiplies d by the mean of
    ‖g_k‖ over the gradients that are not zero.
    """
    check_axes(gradient=(gradient, "K N"), alpha=(alpha, "K"))
    vectors, norm = _vectors(gradient, normalise)
    direction = alpha.detach().double() @ vectors
    if rescale:
        direction = direction * norm.sum() / (norm > 0).sum().clamp(min=1)
    return direction.to(float32_dtype(gradient))


def smooth_weights(previous: Tensor, alpha: Tensor, *, rho: float = 0.7) -> Tensor:
    """Average weights [K] over time, ᾱ ← ρ ᾱ + (1 − ρ) α; start from equal weights."""
    check_same(previous=previous, alpha=alpha)
    return rho * previous.detach() + (1 - rho) * alpha.detach()


def _stationary(product: Tensor, member: Tensor) -> Tensor:
    """Solve M α = λ 1, Σ α = 1 on the members of each subset; α [C, K] is 0 elsewhere."""
    count, size = member.shape
    inside = member[:, :, None] & member[:, None, :]
    outside = torch.diag_embed((~member).to(product.dtype))
    system = product.new_zeros(count, size + 1, size + 1)
    system[:, :size, :size] = torch.where(inside, product, outside)
    system[:, :size, size] = system[:, size, :size] = member.to(product.dtype)
    return torch.linalg.pinv(system, hermitian=True)[:, :size, size]


def _vectors(gradient: Tensor, normalise: bool) -> tuple[Tensor, Tensor]:
    value = gradient.detach().double()
    norm = torch.linalg.vector_norm(value, dim=1)
    return (value / torch.where(norm > 0, norm, 1.0)[:, None] if normalise else value), norm
