# SPDX-License-Identifier: Apache-2.0
"""Fits of comparisons: scipy's optimum, the exact normal model, coverage; and the choice of pairs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import norm
from torch import Tensor

from visalign.core import group_pairs
from visalign.core.preference.pairing import CLOSE, next_pairs
from visalign.core.preference.ranking import BIAS_STD, SPREAD_SCALE, _grid, _newton, fit_ranking


def _answers(size: int, seed: int, *, spread: float, bias: float, noise: float) -> tuple[Tensor, Tensor]:
    """True scores [n], mean 0, and the log-odds [n, n] that a judge has for each ordered pair."""
    generator = torch.Generator().manual_seed(seed)
    true = spread * torch.randn(size, generator=generator, dtype=torch.float64)
    uniform = torch.rand(size, size, generator=generator, dtype=torch.float64)
    return true - true.mean(), true[:, None] - true[None, :] + bias + noise * torch.logit(uniform)


@pytest.mark.parametrize("model", ["bradley_terry", "thurstone"])
def test_the_mode_is_that_of_another_optimizer(model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    pairs = group_pairs([0] * 5, 5)
    prob = torch.randint(0, 3, (len(pairs),), generator=generator).double() / 2
    design = torch.zeros(len(pairs), 6, dtype=torch.float64)
    rows = torch.arange(len(pairs))
    design[rows, pairs[:, 0]], design[rows, pairs[:, 1]], design[:, 5] = 1.0, -1.0, 1.0
    prior = torch.tensor([[0.3] * 5 + [0.25], [2.0] * 5 + [0.25]], dtype=torch.float64)
    theta, covariance, _ = _newton(design, prob, prior, model)
    log_cdf = norm.logcdf if model == "thurstone" else lambda z: -np.log1p(np.exp(-z))
    for k in range(2):

        def loss(x: Any, k: int = k) -> float:
            z = design.numpy() @ x
            fit = prob.numpy() * log_cdf(z) + (1 - prob.numpy()) * log_cdf(-z)
            return float(-fit.sum() + 0.5 * (prior[k].numpy() * x**2).sum())

        optimum = minimize(loss, np.zeros(6), method="BFGS", options={"gtol": 1e-7})
        torch.testing.assert_close(theta[k], torch.tensor(optimum.x), rtol=1e-4, atol=1e-5)
        hessian = torch.autograd.functional.hessian(
            lambda t, k=k: _negative_log_posterior(t, design, prob, prior[k], model), theta[k]
        )
        torch.testing.assert_close(covariance[k], torch.linalg.inv(hessian), rtol=1e-6, atol=1e-8)


def _negative_log_posterior(t: Tensor, design: Tensor, prob: Tensor, prior: Tensor, model: str) -> Tensor:
    log_cdf = torch.special.log_ndtr if model == "thurstone" else torch.nn.functional.logsigmoid
    z = design @ t
    return -(prob * log_cdf(z) + (1 - prob) * log_cdf(-z)).sum() + 0.5 * (prior * t.square()).sum()


def test_two_samples_that_split_their_games_are_equal_and_the_rest_is_bias() -> None:
    pairs = torch.tensor([[0, 1], [1, 0]] * 20)
    fit = fit_ranking(pairs, torch.ones(40, dtype=torch.float64), 2)
    torch.testing.assert_close(fit.score, torch.zeros(2, dtype=torch.float64), atol=1e-9, rtol=0)
    assert fit.bias > 2 and fit.bias_std > 0
    fair = fit_ranking(torch.tensor([[0, 1], [1, 0]] * 20), torch.tensor([1.0, 0.0] * 20), 2)
    assert fair.score[0] > 1 and abs(fair.bias) < 1e-9


def test_the_normal_model_is_bayes_rule_on_the_grid() -> None:
    """Evidence and posterior of the linear model, by the marginal normal density and by conditioning."""
    _, odds = _answers(4, 1, spread=1, bias=0.3, noise=0.5)
    pairs = group_pairs([0] * 4, 4)
    y = odds[pairs[:, 0], pairs[:, 1]].clamp(-12, 12)
    fit = fit_ranking(pairs, y.sigmoid(), 4, model="log_odds")
    design = torch.zeros(6, 5, dtype=torch.float64)
    design[torch.arange(6), pairs[:, 0]], design[torch.arange(6), pairs[:, 1]], design[:, 4] = 1.0, -1.0, 1.0
    log_weight, means, covariances = [], [], []
    for spread, noise in zip(*_grid("log_odds"), strict=True):
        prior = torch.diag(torch.tensor([float(spread) ** 2] * 4 + [BIAS_STD**2], dtype=torch.float64))
        total = design @ prior @ design.T + noise**2 * torch.eye(6, dtype=torch.float64)
        marginal = torch.distributions.MultivariateNormal(torch.zeros(6, dtype=torch.float64), total)
        half_cauchy = torch.log(spread / (1 + (spread / SPREAD_SCALE) ** 2))
        log_weight.append(marginal.log_prob(y) + half_cauchy)
        gain = prior @ design.T @ torch.linalg.inv(total)
        means.append(gain @ y)
        covariances.append(prior - gain @ design @ prior)
    weight = torch.stack(log_weight).softmax(0)
    mean = weight @ torch.stack(means)
    deviation = torch.stack(means) - mean
    spread_out = torch.stack(covariances) + deviation[:, :, None] * deviation[:, None, :]
    centre = torch.eye(4, dtype=torch.float64) - 0.25
    covariance = centre @ torch.einsum("k,kij->ij", weight, spread_out)[:4, :4] @ centre
    torch.testing.assert_close(fit.covariance, covariance, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(fit.score, mean[:4] - mean[:4].mean(), rtol=1e-6, atol=1e-8)
    assert fit.bias == pytest.approx(float(mean[4]), rel=1e-6)


def test_a_sample_that_always_wins_stays_finite_and_no_data_is_the_prior() -> None:
    fit = fit_ranking(torch.tensor([[0, 1], [2, 0], [0, 3]]), torch.tensor([1.0, 0.0, 1.0]), 5)
    assert fit.score.argmax() == 0 and bool(torch.isfinite(fit.score).all()) and fit.score[0] < 50
    assert abs(float(fit.score.mean())) < 1e-9
    nothing = fit_ranking(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0), 3)
    assert nothing.score.tolist() == [0, 0, 0] and bool((nothing.std > 1).all())


@pytest.mark.parametrize("model", ["bradley_terry", "thurstone", "log_odds"])
def test_probabilities_follow_from_the_scores(model: Any) -> None:
    _, odds = _answers(5, 4, spread=1, bias=0, noise=1)
    pairs = group_pairs([0] * 5, 5)
    fit = fit_ranking(pairs, odds[pairs[:, 0], pairs[:, 1]].sigmoid(), 5, model=model)
    win = fit.win_probability()
    torch.testing.assert_close(win + win.T, torch.ones(5, 5, dtype=torch.float64))
    gap = float(fit.score[1] - fit.score[3])
    by_hand = norm.cdf(gap) if model == "thurstone" else 1 / (1 + math.exp(-gap))
    assert float(win[1, 3]) == pytest.approx(by_hand)
    low, high = fit.interval(0.9)
    torch.testing.assert_close(high - fit.score, 1.6448536 * fit.std, rtol=1e-6, atol=0)
    torch.testing.assert_close(low, 2 * fit.score - high)


def _budgeted(size: int, odds: Tensor, calls: int, *, hard: bool, method: Any) -> tuple[Tensor, Any]:
    prob = (odds > 0).double() if hard else odds.sigmoid()
    model: Any = "bradley_terry" if hard else "log_odds"
    compared = torch.zeros(0, 2, dtype=torch.int64)
    while len(compared) < calls:
        fit = fit_ranking(compared, prob[compared[:, 0], compared[:, 1]], size, model=model)
        new = next_pairs(fit, compared, min(size // 2, calls - len(compared)), method=method)
        compared = torch.cat([compared, new])
    return compared, fit_ranking(compared, prob[compared[:, 0], compared[:, 1]], size, model=model)


def _ranks(score: Tensor) -> Tensor:
    return score.argsort().argsort().double()


@pytest.mark.parametrize("method", ["active", "swiss"])
def test_a_third_of_the_calls_gives_the_order_of_all(method: Any) -> None:
    agreement, blind = [], []
    for seed in range(12):
        _, odds = _answers(16, seed, spread=2, bias=0.5, noise=0.3)
        pairs = group_pairs([0] * 16, 16)
        full = torch.zeros(16).double()
        full = full.index_add(0, pairs[:, 0], odds[pairs[:, 0], pairs[:, 1]].sigmoid())
        full = full.index_add(0, pairs[:, 0], 1 - odds[pairs[:, 1], pairs[:, 0]].sigmoid())
        full = full.index_add(0, pairs[:, 1], odds[pairs[:, 1], pairs[:, 0]].sigmoid())
        full = full.index_add(0, pairs[:, 1], 1 - odds[pairs[:, 0], pairs[:, 1]].sigmoid())
        compared, fit = _budgeted(16, odds, 36, hard=False, method=method)
        agreement.append(float(torch.corrcoef(torch.stack([_ranks(fit.score), _ranks(full)]))[0, 1]))
        blind.append(abs(fit.bias - 0.5))
        assert len(compared) == 36 == len({tuple(pair) for pair in compared.tolist()})
    assert sum(agreement) / 12 > 0.96 and sum(blind) / 12 < 0.2


def test_rounds_use_each_sample_once_and_balance_the_sides() -> None:
    empty = torch.zeros(0, 2, dtype=torch.int64)
    first = next_pairs(fit_ranking(empty, torch.zeros(0), 8), empty, 4)
    assert sorted(first.flatten().tolist()) == list(range(8))
    _, odds = _answers(8, 5, spread=1, bias=0, noise=0.5)
    compared, _ = _budgeted(8, odds, 28, hard=False, method="swiss")
    lefts = torch.bincount(compared[:, 0], minlength=8) - torch.bincount(compared[:, 1], minlength=8)
    assert int(lefts.abs().max()) <= 2


def test_only_close_pairs_are_asked_in_both_orders_and_no_call_twice() -> None:
    compared = group_pairs([0] * 3, 3)
    prob = torch.tensor([0.5, 0.99, 0.99], dtype=torch.float64)
    fit = fit_ranking(compared, prob, 3, model="log_odds")
    assert float(fit.win_probability()[0, 1]) < CLOSE < float(fit.win_probability()[1, 2])
    again = next_pairs(fit, compared, 6)
    assert again.tolist() == [[1, 0]] and len(next_pairs(fit, compared, 6, both_orders=False)) == 0
    assert len(next_pairs(fit, torch.cat([compared, again]), 6)) == 0
