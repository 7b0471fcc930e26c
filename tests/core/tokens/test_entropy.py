# SPDX-License-Identifier: Apache-2.0
"""Entropy: covariance and its prediction against exact softmax steps, the curve fit, bonus, controllers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from visalign.core.surrogates.aggregation import aggregate, count_step
from visalign.core.tokens.entropy import covariance_statistics, entropy_bonus, fit_entropy_curve, token_covariance

NAN = float("nan")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def entropy_of(logits: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits).entropy()


def test_covariance_is_numpys_over_what_is_present() -> None:
    log_prob, advantage = -random(5, 7).abs(), random(5, 7, seed=1)
    weight = (random(5, 7, seed=2) > -0.5).double()
    log_prob[weight == 0] = NAN
    statistics = covariance_statistics(log_prob, advantage, weight)
    inside = weight.numpy() > 0
    expected = np.cov(log_prob.numpy()[inside], advantage.numpy()[inside], ddof=0)[0, 1]
    assert statistics.covariance.item() == pytest.approx(expected, rel=1e-12)
    parts = token_covariance(log_prob, advantage, weight, statistics)
    assert parts.sum().item() / weight.sum().item() == pytest.approx(expected, rel=1e-12)
    assert (parts[weight == 0] == 0).all() and not parts.requires_grad


def test_equal_advantages_have_exactly_no_covariance() -> None:
    log_prob, weight = -random(3, 4).abs().float(), torch.ones(3, 4)
    statistics = covariance_statistics(log_prob, torch.full((3,), 0.1), weight)
    assert statistics.covariance == 0
    assert (token_covariance(log_prob, torch.full((3,), 0.1), weight, statistics) == 0).all()


def test_nothing_present_is_missing_and_not_zero() -> None:
    statistics = covariance_statistics(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3))
    assert statistics.covariance.isnan() and statistics.mean_log_prob.isnan()
    empty = covariance_statistics(torch.zeros(0, 3), torch.zeros(0), torch.zeros(0, 3))
    assert empty.covariance.isnan()


def test_fit_and_its_errors_are_scipys() -> None:
    entropy = random(30).abs()
    reward = 0.7 - 0.1 * entropy.exp() + 0.02 * random(30, seed=1)
    fit = fit_entropy_curve(entropy, reward)
    line: Any = stats.linregress(entropy.exp().numpy(), reward.numpy())
    shifted: Any = stats.linregress(np.expm1(entropy.numpy()), reward.numpy())
    pairs = (
        (fit.a, -line.slope),
        (fit.b, line.intercept),
        (fit.ceiling, line.intercept + line.slope),
        (fit.a_std, line.stderr),
        (fit.b_std, line.intercept_stderr),
        (fit.ceiling_std, shifted.intercept_stderr),
    )
    for ours, theirs in pairs:
        assert ours.item() == pytest.approx(theirs, rel=1e-9)


def test_fit_leaves_out_what_is_missing() -> None:
    entropy = torch.tensor([1.0, 0.5, NAN, 0.2, 0.1])
    reward = torch.tensor([0.1, 0.3, 0.4, NAN, 0.5])
    few = fit_entropy_curve(torch.tensor([1.0, 0.5, 0.1]), torch.tensor([0.1, 0.3, 0.5]))
    for fit in (
        fit_entropy_curve(entropy, reward),
        fit_entropy_curve(torch.tensor([1.0, 9, 0.5, 0.1]), torch.tensor([0.1, 9, 0.3, 0.5]), reward[:4] != 0.3),
    ):
        torch.testing.assert_close(fit.ceiling, few.ceiling)
        torch.testing.assert_close(fit.ceiling_std, few.ceiling_std)


def test_fit_says_when_the_data_do_not_tell() -> None:
    two = fit_entropy_curve(torch.tensor([1.0, 0.5]), torch.tensor([0.2, 0.4]))
    assert two.ceiling.isfinite() and two.ceiling_std.isnan() and two.residual_std.isnan()
    for entropy in (torch.tensor([0.3, 0.3, 0.3]), torch.tensor([0.3]), torch.zeros(0)):
        fit = fit_entropy_curve(entropy, torch.zeros_like(entropy))
        assert fit.a.isnan() and fit.b.isnan() and fit.ceiling.isnan() and fit.ceiling_std.isnan()


def test_bonus_raises_the_entropy() -> None:
    logits = random(2, 3, 5).requires_grad_()
    weight = torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    entropy = torch.where(weight != 0, entropy_of(logits), NAN)
    loss = aggregate(entropy_bonus(entropy, 0.01), weight, "token_mean", count_step(weight))
    assert loss.item() == pytest.approx(-0.01 * entropy[weight != 0].mean().item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert entropy_of(logits - gradient)[weight != 0].sum() > entropy[weight != 0].sum()
    assert (gradient[weight == 0] == 0).all()
    tensor = entropy_bonus(torch.ones(2, dtype=torch.bfloat16), torch.tensor(0.5))
    assert tensor.dtype == torch.float32 and tensor.tolist() == [-0.5, -0.5]
