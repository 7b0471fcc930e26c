# SPDX-License-Identifier: Apache-2.0
"""Rewards of a whole set of samples, and what each sample adds to its set.

Everything is float64 and works on stacks: the last dimensions are one set of embeddings [n, d].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_embeddings


def vendi_score(embedding: Tensor) -> Tensor:
    """Count the effectively different samples, [...]: exp(−Σ λ ln λ), λ the eigenvalues of Z Zᵀ/n.

    Rows Z of [..., n, d] are brought to unit norm, so that similarity is the cosine. 1 for copies of one
    sample, n for n orthogonal ones. Not monotone: another sample can lower it. Friedman and Dieng, The Vendi
    score, arXiv 2210.02410.
    """
    value = _unit(check_embeddings(embedding))
    # Z Zᵀ and Zᵀ Z have the same eigenvalues but for zeros: the squared singular values of Z.
    share = torch.linalg.svdvals(value).square() / value.shape[-2]
    return torch.special.entr(share).sum(-1).exp()


def frechet_distance(embedding: Tensor, reference: Tensor) -> Tensor:
    """Compute the squared Fréchet distance of two sets as Gaussians: |μ − μ_r|² + tr(Σ + Σ_r − 2 (Σ Σ_r)^½).

    Sets [..., n, d] against one `reference` [m, d], [...] float64. With Σ = AᵀA and Σ_r = BᵀB the trace of the root is
    the sum of the singular values of A Bᵀ, which exists for sets of any size. Σ divides by n, where programs for the
    FID divide by n − 1, as a set may lose all but one of its samples here. A small set has too small a Σ: compare only
    sets of one size. Heusel et al., FID, arXiv 1706.08500, eq. 6; Dowson and Landau 1982.
    """
    value = check_embeddings(embedding)
    return _to_gaussian(value, *_gaussian(reference, value.shape[-1]))


def set_gains(score: Callable[[Tensor], Tensor], embedding: Tensor) -> Tensor:
    """Compute what each sample adds to the reward of its set: g_i = R(S) − R(S∖{i}), [..., n].

    A policy gradient with g_i follows the gradient of E[R(S)], as R(S∖{i}) does not depend on sample i.
    `score` is R, from [..., m, d] to [...] for m of n − 1 and n; it is called n + 1 times. n is at least 2.
    Rewards of sets: DRAGON, arXiv 2504.15217, which builds a better and a worse set by swapping samples. The
    difference: Wolpert and Tumer 2001.
    """
    size = embedding.shape[-2]
    if size < 2:
        raise ValueError(f"a gain compares a set with the rest of it; got {size} sample. Give at least 2.")
    rest = ~torch.eye(size, dtype=torch.bool, device=embedding.device)
    without = [score(embedding[..., others, :]) for others in rest]
    return score(embedding)[..., None] - torch.stack(without, -1)


def vendi_gains(embedding: Tensor) -> Tensor:
    """Compute `set_gains` of the Vendi score: negative for a sample that repeats others; 1 alone."""
    value = _unit(check_embeddings(embedding))
    if value.shape[-2] == 1:
        return vendi_score(value)[..., None]
    if value.shape[-1] > value.shape[-2]:  # n coordinates hold all inner products of n rows
        value = torch.linalg.qr(value.mT, mode="r").R.mT
    return set_gains(vendi_score, value)


def frechet_gains(embedding: Tensor, reference: Tensor) -> Tensor:
    """Compute `set_gains` of −`frechet_distance`: positive for a sample that brings its set closer."""
    value = check_embeddings(embedding)
    mean, root = _gaussian(reference, value.shape[-1])
    return set_gains(lambda rows: -_to_gaussian(rows, mean, root), value)


def _gaussian(reference: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return μ [d] and B [k, d], Σ = BᵀB, of a set."""
    value = check_embeddings(reference)
    check_axes(reference=(value, f"m {width}"))
    mean = value.mean(0)
    root = (value - mean) / len(value) ** 0.5
    return mean, torch.linalg.qr(root, mode="r").R if len(root) > width else root


def _to_gaussian(value: Tensor, mean: Tensor, root: Tensor) -> Tensor:
    centre = value.mean(-2, keepdim=True)
    a = (value - centre) / value.shape[-2] ** 0.5
    spread = a.square().sum((-2, -1)) + root.square().sum()
    # |μ − μ_r|² + tr(Σ) + tr(Σ_r) − 2 Σ singular values of A Bᵀ
    return (centre - mean).square().sum((-2, -1)) + spread - 2 * torch.linalg.svdvals(a @ root.mT).sum(-1)


def _unit(rows: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    if not (norm > 0).all():
        raise ValueError("embeddings must not be zero: a row of zeros has no direction.")
    return rows / norm
