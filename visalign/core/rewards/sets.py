# SPDX-License-Identifier: Apache-2.0
"""Rewards of a whole set of samples, and what each sample adds to its set.

Everything is float64 and works on stacks: the last dimensions are one set of embeddings [n, d].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from visalign.core.checks import check_embeddings


def vendi_score(embedding: Tensor) -> Tensor:
    """Effective number of different samples: exp(−Σ λ ln λ), λ the eigenvalues of Z Zᵀ/n, rows of unit norm.

    1 for copies of one sample, n for n orthogonal ones. Not monotone: another sample can lower it.

    Args:
        embedding: [..., n, d]; rows are brought to unit norm here, so that similarity is the cosine.

    Returns:
        [...] float64.

    Friedman and Dieng, The Vendi score, arXiv 2210.02410.
    """
    value = _unit(check_embeddings(embedding))
    # Z Zᵀ and Zᵀ Z have the same eigenvalues but for zeros: the squared singular values of Z.
    share = torch.linalg.svdvals(value).square() / value.shape[-2]
    return torch.special.entr(share).sum(-1).exp()


def frechet_distance(embedding: Tensor, reference: Tensor) -> Tensor:
    """Squared Fréchet distance of two sets as Gaussians: |μ − μ_r|² + tr(Σ + Σ_r − 2 (Σ Σ_r)^½).

    With Σ = AᵀA and Σ_r = BᵀB the trace of the root is the sum of the singular values of A Bᵀ, which exists
    for sets of any size. Σ divides by n, where programs for the FID divide by n − 1, as a set may lose all
    but one of its samples here. A small set has too small a Σ: compare sets of one size alone.

    Args:
        embedding: [..., n, d], any unit.
        reference: [m, d], in the same unit.

    Returns:
        [...] float64, in that unit squared, ≥ 0 but for rounding.

    Raises:
        ValueError: widths that differ.

    Heusel et al., FID, arXiv 1706.08500, eq. 6; Dowson and Landau 1982.
    """
    value = check_embeddings(embedding)
    return _to_gaussian(value, *_gaussian(reference, value.shape[-1]))


def set_gains(score: Callable[[Tensor], Tensor], embedding: Tensor) -> Tensor:
    """What each sample adds to the reward of its set: g_i = R(S) − R(S∖{i}).

    The reward of a set, handed to its samples: a policy gradient with g_i follows the gradient of E[R(S)], as
    R(S∖{i}) does not depend on sample i. It asks R n + 1 times.

    Args:
        score: R, from [..., m, d] to [...], for m of n − 1 and n.
        embedding: [..., n, d] with n ≥ 2.

    Returns:
        [..., n], the dtype of R.

    Raises:
        ValueError: a set of one sample, which leaves none behind.

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
    """`set_gains` of the Vendi score: negative for a sample that repeats others.

    Args:
        embedding: [..., n, d], as in `vendi_score`.

    Returns:
        [..., n] float64; 1 for a single sample, the empty set having score 0.
    """
    value = _unit(check_embeddings(embedding))
    if value.shape[-2] == 1:
        return vendi_score(value)[..., None]
    if value.shape[-1] > value.shape[-2]:  # n coordinates hold all inner products of n rows
        value = torch.linalg.qr(value.mT, mode="r").R.mT
    return set_gains(vendi_score, value)


def frechet_gains(embedding: Tensor, reference: Tensor) -> Tensor:
    """`set_gains` of R = −`frechet_distance`: positive for a sample that brings its set to the reference.

    Args:
        embedding: [..., n, d] with n ≥ 2.
        reference: [m, d].

    Returns:
        [..., n] float64, the unit of the embeddings squared.

    Raises:
        ValueError: widths that differ, or a set of one sample.
    """
    value = check_embeddings(embedding)
    mean, root = _gaussian(reference, value.shape[-1])
    return set_gains(lambda rows: -_to_gaussian(rows, mean, root), value)


def _gaussian(reference: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(μ [d], B [k, d] with Σ = BᵀB) of a set."""
    value = check_embeddings(reference)
    if value.ndim != 2 or value.shape[-1] != width:
        raise ValueError(
            f"the reference is one set [m, {width}], as wide as the embeddings; got {tuple(value.shape)}."
        )
    mean = value.mean(0)
    root = (value - mean) / len(value) ** 0.5
    return mean, torch.linalg.qr(root, mode="r").R if len(root) > width else root


def _to_gaussian(value: Tensor, mean: Tensor, root: Tensor) -> Tensor:
    """[...] squared Fréchet distance of sets [..., n, d] to (μ, B)."""
    own = value.mean(-2, keepdim=True)
    a = (value - own) / value.shape[-2] ** 0.5
    spread = a.square().sum((-2, -1)) + root.square().sum()
    return (own - mean).square().sum((-2, -1)) + spread - 2 * torch.linalg.svdvals(a @ root.mT).sum(-1)


def _unit(rows: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    if not (norm > 0).all():
        raise ValueError("embeddings must not be zero: a row of zeros has no direction.")
    return rows / norm
