# SPDX-License-Identifier: Apache-2.0
"""Scores from few comparisons: Bradley-Terry, Thurstone or log-odds fit, position bias, intervals.

The order of n samples needs far fewer than n(n − 1)/2 comparisons when the fit shares what each says. Which
to ask next is `next_pairs` in `pairing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_choice, check_integer_pairs

Model = Literal["bradley_terry", "thurstone", "log_odds"]
SPREAD_SCALE = 5.0
"""Scale of the half-Cauchy prior on the spread of the scores (Gelman, Bayesian Analysis 1 (2006) 515)."""
BIAS_STD = 2.0  # Prior standard deviation of the position bias, in the unit of the scores
MAX_LOG_ODDS = 12.0  # Answers surer than σ(12) count as σ(12)


@dataclass(frozen=True, kw_only=True)
class RankingFit:
    """Ranking of n samples fitted to comparisons; float64."""

    score: Tensor
    """[n], mean 0: logits for "bradley_terry" and "log_odds", standard normal units for "thurstone"."""
    covariance: Tensor
    """[n, n] of the scores, posterior (Laplace), given that their mean is 0."""
    bias: float
    """What the place on the left adds to the difference of the scores."""
    bias_std: float
    noise: float
    """Standard deviation of one answer in the unit of the scores; 0 where the model itself is the noise."""
    spread: float
    """Standard deviation of the scores' prior, as the same comparisons have it."""
    model: Model

    @property
    def std(self) -> Tensor:
        """[n] standard deviation of each score."""
        return self.covariance.diagonal().clamp(min=0).sqrt()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Ends [n] of the interval that holds each score with probability `level`: score ± z std."""
        z = float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))
        return self.score - z * self.std, self.score + z * self.std

    def win_probability(self) -> Tensor:
        """[n, n] probability that the row beats the column at the fitted scores, without a position bias."""
        gap = self.score[:, None] - self.score[None, :]
        return torch.special.ndtr(gap) if self.model == "thurstone" else gap.sigmoid()


def fit_ranking(pairs: Tensor, prob: Tensor, size: int, *, model: Model = "bradley_terry") -> RankingFit:
    """Fit one score per sample to comparisons: P(left better) = F(s_left − s_right + b).

    F is σ ("bradley_terry") or Φ ("thurstone"). For a prior s ~ N(0, τ²), b ~ N(0, τ_b²) the scores are the
    maximum of Σ p ln F + (1 − p) ln(1 − F) − Σ s²/2τ² − b²/2τ_b², found by Newton steps, with Laplace's
    covariance. "log_odds" takes ln p/(1 − p) = s_left − s_right + b + ε, ε ~ N(0, σ²), solved exactly; it
    suits a judge whose probabilities are finer than votes. τ and σ are averaged over by their evidence on a
    grid, so that the intervals know that the scale is uncertain; the prior keeps all finite where one sample
    wins always. A probability strictly between 0 and 1 counts as a split vote in the first two models, whose
    intervals are then not those of a judge that answers in probabilities.

    `pairs` [N, 2] holds (left, right), sample numbers below `size`; repetitions and both orders count. `prob` [N] is
    1/2 for a tie, NaN where the judge failed. A sample without a valid comparison has score 0 and the prior's std.

    Bradley and Terry, Biometrika 39 (1952) 324; Thurstone, Psychological Review 34 (1927) 273, case V.
    """
    check_choice("model", model, get_args(Model))
    check_integer_pairs(pairs)
    if prob.shape != pairs.shape[:1]:
        raise ValueError(f"prob must be [N], N = {len(pairs)} pairs; got {tuple(prob.shape)}.")
    valid = torch.isfinite(prob)
    ends, target = pairs[valid].long().cpu(), prob[valid].detach().double().cpu()
    design = torch.zeros(len(ends), size + 1, dtype=torch.float64)
    rows = torch.arange(len(ends))
    design[rows, ends[:, 0]], design[rows, ends[:, 1]] = 1.0, -1.0
    design[:, size] = 1.0
    spread, noise = _grid(model)
    score_prior = spread.square().reciprocal()[:, None].expand(-1, size)
    prior = torch.cat([score_prior, spread.new_full((len(spread), 1), BIAS_STD**-2)], 1)
    if model == "log_odds":
        target = torch.logit(target).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)
        fitted = _linear(design, target, prior, noise)
    else:
        fitted = _newton(design, target, prior, model)
    return _mixture(*fitted, spread, noise, size=size, model=model)


def _grid(model: Model) -> tuple[Tensor, Tensor]:
    """Prior spreads τ [K] and noises σ [K] that are averaged over; log-spaced, all combinations."""
    spread = torch.logspace(-2, 5, 15, base=2, dtype=torch.float64)
    if model != "log_odds":
        return spread, torch.zeros_like(spread)
    both = torch.cartesian_prod(spread, torch.logspace(-5, 3, 17, base=2, dtype=torch.float64))
    return both[:, 0], both[:, 1]


def _linear(design: Tensor, target: Tensor, prior: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [K, n + 1], covariance [K, n + 1, n + 1], log-evidence [K] of the normal model, exact."""
    weight = noise.square().reciprocal()
    precision = weight[:, None, None] * (design.T @ design) + torch.diag_embed(prior)
    theta = torch.linalg.solve(precision, weight[:, None] * (design.T @ target))
    rest = (target - theta @ design.T).square().sum(1)
    fit = -0.5 * weight * rest - len(target) * noise.log()
    return theta, torch.linalg.inv(precision), fit + _log_volume(theta, prior, precision)


def _newton(design: Tensor, target: Tensor, prior: Tensor, model: Model) -> tuple[Tensor, Tensor, Tensor]:
    """Mode, inverse Hessian and Laplace's log-evidence for each prior [K], by damped Newton steps."""
    theta = torch.zeros_like(prior)
    precision = torch.diag_embed(prior)
    for _ in range(100):
        slope, curvature = _derivatives(theta @ design.T, target, model)
        gradient = slope @ design - prior * theta
        precision = torch.einsum("nd,kn,ne->kde", design, curvature, design) + torch.diag_embed(prior)
        step = torch.linalg.solve(precision, gradient)
        largest = step.abs().amax(1, keepdim=True)
        # The objective is concave; the bound keeps the first steps from overshooting.
        theta = theta + step * (2.0 / largest.clamp(min=1e-300)).clamp(max=1.0)
        if float(largest.max()) < 1e-8:
            break
    z, log_cdf = theta @ design.T, torch.special.log_ndtr if model == "thurstone" else torch.nn.functional.logsigmoid
    fit = (target * log_cdf(z) + (1 - target) * log_cdf(-z)).sum(1)  # Σ p ln F(z) + (1 − p) ln F(−z)
    return theta, torch.linalg.inv(precision), fit + _log_volume(theta, prior, precision)


def _log_volume(theta: Tensor, prior: Tensor, precision: Tensor) -> Tensor:
    """ln prior(θ̂) + ½ ln |Σ| up to a constant, [K]."""
    return 0.5 * (prior.log().sum(1) - (prior * theta.square()).sum(1) - torch.linalg.slogdet(precision)[1])


def _mixture(
    theta: Tensor, covariance: Tensor, evidence: Tensor, spread: Tensor, noise: Tensor, *, size: int, model: Model
) -> RankingFit:
    """Mean and covariance over the grid, weighted by evidence and a half-Cauchy prior on the spread."""
    # On a logarithmic grid a density of τ gets the factor τ.
    prior = spread.log() - (1 + (spread / SPREAD_SCALE).square()).log()
    weight = (evidence + prior).softmax(0)
    mean = weight @ theta
    deviation = theta - mean
    total = torch.einsum("k,kij->ij", weight, covariance) + torch.einsum("k,ki,kj->ij", weight, deviation, deviation)
    centre = torch.eye(size, dtype=torch.float64) - 1 / size
    return RankingFit(
        score=centre @ mean[:size],
        covariance=centre @ total[:size, :size] @ centre,
        bias=float(mean[size]),
        bias_std=math.sqrt(float(total[size, size])),
        noise=float(weight @ noise),
        spread=float(weight @ spread),
        model=model,
    )


def _derivatives(z: Tensor, target: Tensor, model: Model) -> tuple[Tensor, Tensor]:
    """Slope [N] and negative second derivative [N] of p ln F(z) + (1 − p) ln F(−z)."""
    if model == "bradley_terry":
        mean = z.sigmoid()
        return target - mean, mean * (1 - mean)
    # λ(z) = φ(z)/Φ(z), the inverse Mills ratio, through logarithms: Φ underflows far below 0.
    log_density = -0.5 * z.square() - 0.5 * math.log(2 * math.pi)
    up = (log_density - torch.special.log_ndtr(z)).exp()
    down = (log_density - torch.special.log_ndtr(-z)).exp()
    slope = target * up - (1 - target) * down
    return slope, target * up * (up + z) + (1 - target) * down * (down - z)
