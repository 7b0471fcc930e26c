# SPDX-License-Identifier: Apache-2.0
"""Ranking with judges that say how sure they are: −ln E[σ(z)], z ~ N(μ_l − μ_r, σ_l² + σ_r²), by quadrature.

HPSv3 and PURM publish this likelihood; their code averages ln σ(z) instead. −ln σ is convex, so that average
rises with the spread of z, and training on it drives every σ to 0: it is here under its name, "upstream".

Two rules meet at `WIDE`. Below it, Gauss-Hermite over z. Above it the poles of σ(z) come too close for that,
and σ(z) = P(L ≤ z) of a logistic L turns the mean into E_L Φ((μ − L)/s), whose integrand has its poles at ±iπ
however large s is: the trapezoidal rule then errs by e^(−2π²/step).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from visalign.core.checks import check_choice, check_same
from visalign.core.precision import float32

from .bradley_terry import paired_scores

UncertainForm = Literal["paper", "upstream", "upstream_monte_carlo"]
WIDE = 1.5  # Standard deviation of z from which the second rule is used
NODES = 32  # Of the Gauss-Hermite rule
STEP, REACH = 0.75, 80.0  # Of the trapezoidal rule: spacing and half-width, in units of z


def soft_clamp(value: Tensor, low: float = -7.0, high: float = 3.0) -> Tensor:
    """Keep a log-deviation in (low, high) without ever taking its gradient away: c + h u/(1 + u⁴)^¼.

    u = (value − c)/h with c the middle and h half the width. Inside, it is close to the identity; outside,
    the slope falls as |u|⁻⁵, where a hard clamp has none and leaves a collapsed σ where it is.
    """
    half = (high - low) / 2
    raw = float32(value)
    # beyond 10⁴ half-widths the slope is below 10⁻²⁰ and u⁴ nears the end of float32
    u = ((raw - (low + high) / 2) / half).clamp(-1e4, 1e4)
    return (low + high) / 2 + half * u * (1 + u**4) ** -0.25


def pair_deviation(left: Tensor, right: Tensor) -> Tensor:
    """Standard deviation of a difference, √(σ_l² + σ_r²), [*]; at 0 its gradient is 0, not NaN."""
    total = left.square() + right.square()
    return torch.where(total > 0, torch.where(total > 0, total, 1.0).sqrt(), 0.0)


def log_win_probability(mean: Tensor, std: Tensor) -> Tensor:
    """ln E[σ(z)], z ~ N(μ, s²): the log-probability that a score whose lead is uncertain wins.

    Summed in log space: it neither under- nor overflows, and keeps its relative precision in the tail. ln(1 −
    P) is the same with −μ. In float64 it errs by less than 1e-8 for s up to 20 and μ down to −60; the MacKay
    approximation σ(μ/√(1 + πs²/8)) errs by up to 1.1. Differentiable in both; `std` s is that of the
    difference, see `pair_deviation`. HPSv3, arXiv 2508.03789; PURM 2503.22480, eq. 4.
    """
    mu, s = _moments(mean, std)
    narrow, wide = _split(s)
    x, log_weight = (part.to(mu) for part in gauss_hermite(NODES))
    below = (log_weight + F.logsigmoid(mu[..., None] + narrow[..., None] * x)).logsumexp(-1)
    grid, log_mass = _logistic_grid(mu, wide)
    above = (log_mass + torch.special.log_ndtr((mu[..., None] - grid) / wide[..., None])).logsumexp(-1)
    return torch.where(s > WIDE, above, below)


def mean_log_win(mean: Tensor, std: Tensor) -> Tensor:
    """E[ln σ(z)], z ~ N(μ, s²), the published code's objective without its sampling noise; it falls in s."""
    mu, s = _moments(mean, std)
    narrow, wide = _split(s)
    x, log_weight = (part.to(mu) for part in gauss_hermite(NODES))
    below = (log_weight.exp() * F.logsigmoid(mu[..., None] + narrow[..., None] * x)).sum(-1)
    # softplus(y) = E_L max(0, y − L), and E max(0, y − l) = s (t Φ(t) + φ(t)) with t = (E y − l)/s; y = −z
    grid, log_mass = _logistic_grid(-mu, wide)
    t = (-mu[..., None] - grid) / wide[..., None]
    density = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    above = -(log_mass.exp() * (t * torch.special.ndtr(t) + density)).sum(-1) * wide
    return torch.where(s > WIDE, above, below)


def uncertain_preference_loss(
    left: Tensor,
    right: Tensor,
    left_std: Tensor,
    right_std: Tensor,
    label: Tensor | None = None,
    *,
    mode: UncertainForm = "paper",
    samples: int = 1000,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Negative log-likelihood of a pair under two judged means and deviations, with soft labels.

    "paper": −p ln P − (1 − p) ln(1 − P), P = E[σ(z)]. "upstream": −p E[ln σ(z)] − (1 − p) E[ln σ(−z)],
    which always falls as σ → 0. "upstream_monte_carlo": the same by `samples` random draws per pair, as
    HPSv3's and PURM's code; it needs the generator.

    Only σ_l² + σ_r² and the ratio of the scores to it can be learned from a pair: σ means something where
    people disagreed (soft labels, votes) or where an image occurs in several pairs. See `soft_clamp`. HPSv3,
    arXiv 2508.03789; PURM 2503.22480, eq. 4.
    """
    check_choice("mode", mode, get_args(UncertainForm))
    left_score, other, prob, labelled = paired_scores(left, right, label)
    first, second, _, _ = paired_scores(left_std, right_std, label)
    mean, std = left_score - other, pair_deviation(first, second)
    if mode == "upstream_monte_carlo":
        noise = torch.randn(*mean.shape, samples, generator=generator, device=mean.device, dtype=mean.dtype)
        z = mean[..., None] + std[..., None] * noise
        won, lost = F.logsigmoid(z).mean(-1), F.logsigmoid(-z).mean(-1)
    else:
        log_win = log_win_probability if mode == "paper" else mean_log_win
        won, lost = log_win(mean, std), log_win(-mean, std)
    return torch.where(labelled, -prob * won - (1 - prob) * lost, 0.0)


@cache
def gauss_hermite(nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and log-weights [n] of the quadrature of a standard normal: E f(x) = Σ e^(w_i) f(x_i).

    Exact for polynomials up to degree 2n − 1. Eigenvalues of the Jacobi matrix, weights 1/Σ_k p_k(x_i)² from
    the orthonormal polynomials, which keeps the smallest of them relatively exact. Golub and Welsch 1969.
    """
    root = torch.arange(1, nodes, dtype=torch.float64).sqrt()
    x = torch.linalg.eigvalsh(torch.diag(root, 1) + torch.diag(root, -1))
    before, now = torch.zeros_like(x), torch.ones_like(x)
    total = now.square()
    for k in range(1, nodes):
        before, now = now, (x * now - math.sqrt(k - 1) * before) / math.sqrt(k)
        total = total + now.square()
    return x, -total.log()


def _moments(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    check_same(mean=mean, std=std)
    dtype = torch.promote_types(torch.promote_types(mean.dtype, std.dtype), torch.float32)
    return mean.to(dtype), std.to(dtype)


def _split(s: Tensor) -> tuple[Tensor, Tensor]:
    """s for the rule below `WIDE` and for the one above; a harmless value where the other one is used."""
    return torch.where(s > WIDE, 0.0, s), torch.where(s > WIDE, s, WIDE)


def _logistic_grid(mu: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Grid [*, J] around where λ(l) Φ((μ − l)/s) is largest, and ln(step λ(l)), λ the logistic density."""
    nodes = torch.arange(-REACH, REACH + STEP / 2, STEP, dtype=mu.dtype, device=mu.device)
    centre = (mu + s.square()).clamp(max=0).detach()[..., None]
    grid = centre + nodes
    return grid, F.logsigmoid(grid) + F.logsigmoid(-grid) + math.log(STEP)
