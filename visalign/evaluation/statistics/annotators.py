# SPDX-License-Identifier: Apache-2.0
"""Reliability and side bias of each annotator, soft labels of pairs, agreement of ratings.

V votes of A annotators on N pairs. Pair i has a true difference d_i ~ N(0, 1); annotator a votes for its
left image with

    P(left | d_i) = σ(γ_a d_i + c_a x),   x = 1 where it was on the left of the screen, −1 elsewhere

so γ_a, the weight of a difference, is near 0 for somebody who clicks without looking, and c_a is the weight
of the side of the screen. A tie is half a vote for either side. γ and c maximise the likelihood with d
integrated out (Gauss-Hermite) and weak priors: γ_a ~ N(mean γ, 1), mean γ ~ N(1.5, 1), c_a ~ N(0, 1).

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
"""Nodes of the quadrature over d."""
PRIOR_RELIABILITY = 1.5
"""γ where votes say little about it: .73 of typical pairs right."""


@dataclass(frozen=True, kw_only=True)
class AnnotatorFit:
    reliability: Array  # [A] γ: log-odds per standard deviation of difference; below 0 votes against the others
    reliability_std: Array  # [A] standard deviation of γ, from the curvature of the log-posterior
    side_bias: Array  # [A] c: log-odds for the image on the left of the screen
    agreement: Array  # [A] E|d|[σ(γ |d|)]: how often the annotator prefers the better image of such pairs; ½ is a coin
    soft_label: Array
    """[N] P(an annotator with the mean γ prefers the left image | the pair's votes); NaN without votes."""
    posterior_std: Array  # [N] posterior standard deviation of d; 1 where a pair has no vote


def fit_annotators(
    pair: ArrayLike, annotator: ArrayLike, vote: ArrayLike, side: ArrayLike, *, pairs: int, annotators: int
) -> AnnotatorFit:
    """Fit the model of this module to V votes on N = `pairs` by A = `annotators`.

    pair [V] and annotator [V] are numbers from 0; vote [V] is 1 for the pair's left image, 0 for its right
    one, ½ for a tie; side [V] 1 where the left image was on the left of the screen, −1 elsewhere.
    """
    rows, voters = (torch.from_numpy(np.asarray(part, dtype=np.int64)) for part in (pair, annotator))
    votes, sides = (torch.from_numpy(np.asarray(part, dtype=np.float64)) for part in (vote, side))
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    z, log_weight = torch.from_numpy(nodes), torch.from_numpy(np.log(weights / weights.sum()))

    def log_joint(params: Tensor) -> Tensor:
        """Return [N, K] log P(votes of a pair, d = z_k)."""
        gamma, c = params
        odds = gamma[voters, None] * z + (c[voters] * sides)[:, None]
        log_prob = votes[:, None] * F.logsigmoid(odds) + (1 - votes)[:, None] * F.logsigmoid(-odds)
        return torch.zeros(pairs, len(z), dtype=torch.float64).index_add(0, rows, log_prob) + log_weight

    def objective(params: Tensor) -> Tensor:
        gamma, c = params
        mean = gamma.mean()
        prior = (gamma - mean).square().sum() + (mean - PRIOR_RELIABILITY).square() + c.square().sum()
        return -log_joint(params).logsumexp(1).sum() + prior / 2

    start = torch.tensor([[PRIOR_RELIABILITY], [0.0]], dtype=torch.float64).repeat(1, annotators)
    gamma, c = _minimize(objective, start)
    if gamma.mean() < 0:  # d and −d fit alike: the majority fixes the sign
        gamma = -gamma
    posterior = log_joint(torch.stack([gamma, c])).softmax(1)
    mean = posterior @ z
    label = posterior @ (gamma.mean() * z).sigmoid()
    voted = np.bincount(rows.numpy(), minlength=pairs) > 0
    return AnnotatorFit(
        reliability=gamma.numpy(),
        reliability_std=_laplace_std(objective, torch.stack([gamma, c])),
        side_bias=c.numpy(),
        agreement=((gamma[:, None] * z.abs()).sigmoid() @ log_weight.exp()).numpy(),
        soft_label=np.where(voted, label.numpy(), math.nan),
        posterior_std=(posterior @ z.square() - mean.square()).clamp(min=0).sqrt().numpy(),
    )


def rating_sums(rating: ArrayLike, item: ArrayLike, *, items: int) -> Array:
    """Return the terms [N, 4] of `alpha_of_rating_sums` for ratings [V] of items [V]."""
    v, i = np.asarray(rating, dtype=np.float64), np.asarray(item, dtype=np.int64)
    m, total, square = (
        np.bincount(i, weights=w, minlength=items).astype(np.float64) for w in (np.ones_like(v), v, v * v)
    )
    disagreement = ratio(2.0 * (m * square - total**2), m - 1.0)
    return np.where((m >= 2)[:, None], np.stack([disagreement, m, total, square], axis=1), 0.0)


def alpha_of_rating_sums(sums: Array) -> Array:
    """Compute Krippendorff's α [R] for interval data from sums [R, 4]; NaN without variation.

    α = 1 − (n − 1) Σ_u Σ_{i≠j} (v_ui − v_uj)² / (m_u − 1) / Σ_{i≠j} (v_i − v_j)², over items with two ratings or more.

    Source: Krippendorff, Content Analysis (2004), 11.4.
    """
    disagreement, n, total, square = sums.T
    return 1 - ratio((n - 1) * disagreement, 2 * (n * square - total**2))


def _minimize(objective: Objective, start: Tensor) -> Tensor:
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


def _laplace_std(objective: Objective, params: Tensor) -> Array:
    """Return standard deviations [A] of γ: the inverse Hessian of the negative log-posterior."""
    hessian = torch.autograd.functional.hessian(lambda flat: objective(flat.view(2, -1)), params.flatten())
    variance = torch.linalg.pinv(hessian).diagonal()[: params.shape[1]]  # type: ignore[union-attr]
    return variance.clamp(min=0).sqrt().numpy()
