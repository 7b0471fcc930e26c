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
    return -frechet_closeness(reference)(embedding)


def set_gains(score: Callable[[Tensor], Tensor], embedding: Tensor) -> Tensor:
    """Compute what each sample adds to the reward of its set: g_i = R(S) − R(S∖{i}), [..., n].

    A policy gradient with g_i follows the gradient of E[R(S)], as R(S∖{i}) does not depend on sample i.
    `score` is R, from [..., m, d] to [...] for m of n − 1 and n; it is called n + 1 times. n is at least 2.
    The difference: Wolpert and Tumer 2001. It is not DRAGON, whose sets are those of `contrast_sets`.
    """
    size = embedding.shape[-2]
    if size < 2:
        raise ValueError(f"a gain compares a set with the rest of it; got {size} sample. Give at least 2.")
    rest = ~torch.eye(size, dtype=torch.bool, device=embedding.device)
    without = [score(embedding[..., others, :]) for others in rest]
    return score(embedding)[..., None] - torch.stack(without, -1)


def contrast_sets(score: Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Divide n pairs of samples [n, d] into a positive and a negative set: (bool [n], first in D₊; R of D₊, D₋ [2]).

    D₊ begins as the better of the two sets. Each pair in turn is swapped if that raises R(D₊) − R(D₋). If R is a mean
    over samples, D₊ gets the better one of each pair. `score` is R, from [2, n, d] to [2]; it is called n + 2 times.
    DRAGON, arXiv 2504.15217.
    """
    sets = torch.stack([first, second])
    value, is_first = score(sets), torch.ones(len(first), dtype=torch.bool)
    for rows in (slice(None), *range(len(first))):
        swapped = sets.clone()
        swapped[:, rows] = sets[:, rows].flip(0)
        swapped_value = score(swapped)
        if swapped_value[0] - swapped_value[1] > value[0] - value[1]:
            sets, value = swapped, swapped_value
            is_first[rows] = ~is_first[rows]
    return is_first, value


def vendi_gains(embedding: Tensor) -> Tensor:
    """Compute `set_gains` of the Vendi score: negative for a sample that repeats others; 1 alone."""
    value = _unit(check_embeddings(embedding))
    if value.shape[-2] == 1:
        return vendi_score(value)[..., None]
    if value.shape[-1] > value.shape[-2]:  # n coordinates hold all inner products of n rows
        value = torch.linalg.qr(value.mT, mode="r").R.mT
    return set_gains(vendi_score, value)


def frechet_closeness(reference: Tensor) -> Callable[[Tensor], Tensor]:
    """Return R of sets [..., n, d]: −`frechet_distance` to `reference` [m, d], whose Gaussian is computed once."""
    exemplars = check_embeddings(reference)
    mean = exemplars.mean(0)
    root = (exemplars - mean) / len(exemplars) ** 0.5
    root = torch.linalg.qr(root, mode="r").R if len(root) > len(mean) else root  # Σ_r = BᵀB

    def score(embedding: Tensor) -> Tensor:
        value = check_embeddings(embedding)
        check_axes(embedding=(value.flatten(0, -2), f"n {len(mean)}"))
        centre = value.mean(-2, keepdim=True)
        a = (value - centre) / value.shape[-2] ** 0.5
        spread = a.square().sum((-2, -1)) + root.square().sum()
        # −|μ − μ_r|² − tr(Σ) − tr(Σ_r) + 2 Σ singular values of A Bᵀ
        return 2 * torch.linalg.svdvals(a @ root.mT).sum(-1) - (centre - mean).square().sum((-2, -1)) - spread

    return score


def _unit(rows: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    if not (norm > 0).all():
        raise ValueError("embeddings must not be zero: a row of zeros has no direction.")
    return rows / norm
