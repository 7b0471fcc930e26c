# SPDX-License-Identifier: Apache-2.0
"""Who votes how well: reliability and side bias of each annotator, soft labels, agreement of ratings.

V votes of A annotators on N pairs. Pair i has a true difference d_i ~ N(0, 1); annotator a votes for its
left image with

    P(left | d_i) = σ(γ_a d_i + c_a x),   x = 1 where it stood on the left of the screen, −1 elsewhere

so γ_a, what a difference is worth to a, is near 0 for somebody who clicks without looking, and c_a is what
the place on the screen is worth. A tie is half a vote for either side. γ and c maximise the likelihood with
d integrated out (Gauss-Hermite), with weak
normal priors: γ_a ~ N(mean γ, 1), mean γ ~ N(1.5, 1), c_a ~ N(0, 1).

Source: Bradley and Terry 1952 with the two-parameter logistic model of item response (Birnbaum 1968), by
marginal maximum likelihood: Bock and Aitkin, Psychometrika 46 (1981) 443.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as F

from .intervals import ratio

Array = NDArray[np.float64]
Objective = Callable[[Tensor], Tensor]

NODES = 31
"""Of the quadrature over d."""
USUAL = 1.5
"""γ where votes say little of it: .73 of typical pairs right."""


@dataclass(frozen=True, kw_only=True)
class AnnotatorFit:
    """What votes say of annotators and of pairs."""

    reliability: Array
    """[A] γ: what a difference of one standard deviation adds to the log-odds; the sign is fixed by the
    majority, so below 0 is somebody who votes against the others."""
    reliability_std: Array
    """[A] of γ, from the curvature of the log-posterior."""
    side_bias: Array
    """[A] c: log-odds that standing on the left of the screen is worth."""
    agreement: Array
    """[A] E|d|[σ(γ |d|)]: how often the annotator prefers the better image of a pair like these; ½ is a
    coin."""
    soft_label: Array
    """[N] P(a typical annotator, of the mean γ, prefers the left image | the pair's votes); NaN without."""
    posterior_std: Array
    """[N] of d, 1 where a pair has no vote."""


def fit_annotators(
    pair: ArrayLike, annotator: ArrayLike, said: ArrayLike, place: ArrayLike, *, pairs: int, annotators: int
) -> AnnotatorFit:
    """Fit the model of this module.

    Args:
        pair: [V] number of each vote's pair, 0 to N − 1.
        annotator: [V] number of who voted, 0 to A − 1.
        said: [V] 1 for the pair's left image, 0 for its right one, ½ for a tie.
        place: [V] 1 where the left image stood on the left of the screen, −1 elsewhere.
        pairs: N.
        annotators: A.

    Raises:
        ValueError: no vote, lengths that differ, or numbers and votes out of range.
    """
    i, a = np.asarray(pair, dtype=np.int64), np.asarray(annotator, dtype=np.int64)
    s, x = np.asarray(said, dtype=np.float64), np.asarray(place, dtype=np.float64)
    _check(i, a, s, x, pairs, annotators)
    z, log_w = _normal_nodes()
    votes = (torch.from_numpy(i), torch.from_numpy(a), torch.from_numpy(s), torch.from_numpy(x))

    def joint(params: Tensor) -> Tensor:
        """[N, K] log P(votes of a pair, d = z_k)."""
        rows, who, share, side = votes
        odds = params[0][who, None] * z + (params[1][who] * side)[:, None]
        each = share[:, None] * F.logsigmoid(odds) + (1 - share)[:, None] * F.logsigmoid(-odds)
        return torch.zeros(pairs, len(z), dtype=torch.float64).index_add(0, rows, each) + log_w

    def objective(params: Tensor) -> Tensor:
        """The negative log-posterior."""
        gamma, c = params
        mean = gamma.mean()
        prior = (gamma - mean).square().sum() + (mean - USUAL).square() + c.square().sum()
        return -joint(params).logsumexp(1).sum() + prior / 2

    params = _minimum(objective, torch.tensor([[USUAL], [0.0]], dtype=torch.float64).repeat(1, annotators))
    gamma, c = params
    if gamma.mean() < 0:  # d and −d fit alike: the majority says which is which
        gamma = -gamma
    posterior = joint(torch.stack([gamma, c])).softmax(1)
    mean = posterior @ z
    label = posterior @ (gamma.mean() * z).sigmoid()
    voted = np.bincount(i, minlength=pairs) > 0
    return AnnotatorFit(
        reliability=gamma.numpy(),
        reliability_std=_deviation(objective, torch.stack([gamma, c])),
        side_bias=c.numpy(),
        agreement=((gamma[:, None] * z.abs()).sigmoid() @ log_w.exp()).numpy(),
        soft_label=np.where(voted, label.numpy(), math.nan),
        posterior_std=(posterior @ z.square() - mean.square()).clamp(min=0).sqrt().numpy(),
    )


def rating_sums(rating: ArrayLike, item: ArrayLike, *, items: int) -> Array:
    """[N, 4] what `alpha_of_rating_sums` needs of each item's ratings [V]; 0 for a single rating."""
    v, i = np.asarray(rating, dtype=np.float64), np.asarray(item, dtype=np.int64)
    m, total, square = (
        np.bincount(i, weights=w, minlength=items).astype(np.float64) for w in (np.ones_like(v), v, v * v)
    )
    apart = ratio(2.0 * (m * square - total**2), m - 1.0)
    return np.where((m >= 2)[:, None], np.stack([apart, m, total, square], axis=1), 0.0)


def alpha_of_rating_sums(sums: Array) -> Array:
    """Krippendorff's α [R] for interval data, from sums [R, 4] of `rating_sums`; NaN where nothing varies.

    α = 1 − (n − 1) Σ_u Σ_{i≠j} (v_ui − v_uj)² / (m_u − 1) / Σ_{i≠j} (v_i − v_j)², over items with two ratings
    or more.

    Source: Krippendorff, Content Analysis (2004), 11.4.
    """
    apart, n, total, square = sums.T
    return 1 - ratio((n - 1) * apart, 2 * (n * square - total**2))


def _check(i: NDArray, a: NDArray, s: Array, x: Array, pairs: int, annotators: int) -> None:
    if not len(i) == len(a) == len(s) == len(x) or not len(i):
        raise ValueError(
            f"pair, annotator, said and place need one entry for each vote, at least one; got {len(i)}, "
            f"{len(a)}, {len(s)} and {len(x)}."
        )
    for name, numbers, size in (("pair", i, pairs), ("annotator", a, annotators)):
        if not (0 <= numbers.min() and numbers.max() < size):
            raise ValueError(
                f"{name} holds numbers {numbers.min()} to {numbers.max()}; allowed: 0 to {size - 1}."
            )
    if not ((s >= 0) & (s <= 1)).all() or not (np.abs(x) == 1).all():
        raise ValueError("said must be between 0 and 1, and place 1 or -1.")


def _normal_nodes() -> tuple[Tensor, Tensor]:
    """Nodes and log-weights [K] of E over a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return torch.from_numpy(nodes), torch.from_numpy(np.log(weights / weights.sum()))


def _minimum(objective: Objective, start: Tensor) -> Tensor:
    params = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [params], max_iter=200, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(params)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return params.detach()


def _deviation(objective: Objective, params: Tensor) -> Array:
    """[A] standard deviations of γ: the inverse of the Hessian of the negative log-posterior."""
    count = params.shape[1]
    hessian = torch.autograd.functional.hessian(lambda flat: objective(flat.view(2, -1)), params.flatten())
    variance = torch.linalg.pinv(hessian).diagonal()[:count]  # type: ignore[union-attr]
    return variance.clamp(min=0).sqrt().numpy()
