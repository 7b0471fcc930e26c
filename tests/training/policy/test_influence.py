# SPDX-License-Identifier: Apache-2.0
"""Influence: against retraining with another reward, sketches against whole gradients, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from visalign.training.policy.influence import gradient_influence, gradient_sketches

N, ACTIONS, FEATURES = 60, 5, 8


class Softmax:
    """A policy over five actions, linear in the features of a state, and what it sampled."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.state = torch.randn(N, FEATURES, generator=draw, dtype=torch.float64)
        scale = torch.logspace(-2, 1, FEATURES, dtype=torch.float64)  # so that Adam's scaling matters
        self.state *= scale
        self.action = torch.randint(0, ACTIONS, (N,), generator=draw)
        self.advantage = torch.randn(N, generator=draw, dtype=torch.float64)
        self.start = 0.1 * torch.randn(FEATURES, ACTIONS, generator=draw, dtype=torch.float64) / scale[:, None]

    def gain(self, weight: torch.Tensor) -> torch.Tensor:
        """[N] log-probs of the actions."""
        return (self.state @ weight).log_softmax(-1)[torch.arange(N), self.action]

    def second_moment(self) -> torch.Tensor:
        weight = self.start.clone().requires_grad_()
        rows = [torch.autograd.grad(self.gain(weight)[n], weight)[0].square() for n in range(N)]
        return torch.stack(rows).mean(0)

    def retrained(self, advantage: torch.Tensor, steps: int = 5, lr: float = 3e-3) -> torch.Tensor:
        """The gain Σ A log π / N under the true advantages, after Adam from warm moments on other ones."""
        weight = self.start.clone().requires_grad_()
        optimizer = torch.optim.Adam([weight], lr=lr, betas=(0.0, 0.999), eps=1e-12)
        v = self.second_moment()
        optimizer.state[weight] = {"step": torch.tensor(1e5), "exp_avg": torch.zeros_like(v), "exp_avg_sq": v}
        for _ in range(steps):
            optimizer.zero_grad()
            (-(advantage * self.gain(weight)).mean()).backward()
            optimizer.step()
        return (self.advantage * self.gain(weight)).mean().detach()


def rank_correlation(one, other) -> float:
    return float(np.corrcoef(stats.rankdata(one), stats.rankdata(other))[0, 1])


def influence(policy: Softmax, **more) -> torch.Tensor:
    weight = policy.start.clone().requires_grad_()
    sketches = gradient_sketches(lambda n: policy.gain(weight)[n], N, [weight], **more)
    return gradient_influence(sketches, policy.advantage)


def test_it_ranks_samples_as_retraining_with_another_reward_does():
    policy = Softmax(seed=0)
    exact = []
    for number in range(N):
        ends = []
        for change in (0.5, -0.5):
            advantage = policy.advantage.clone()
            advantage[number] += change
            ends.append(policy.retrained(advantage))
        exact.append(float(ends[0] - ends[1]))
    found = influence(policy)
    assert rank_correlation(exact, found) > 0.98
    unaware = influence(policy, second_moment=[torch.ones_like(policy.start)])
    assert rank_correlation(exact, unaware) < rank_correlation(exact, found) - 0.01


def test_sketches_keep_inner_products():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 30_000, generator=draw, dtype=torch.float64)
    x += 2 * torch.randn(30_000, generator=draw, dtype=torch.float64)  # what all share
    weight = torch.zeros(30_000, dtype=torch.float64, requires_grad=True)
    ones = [torch.ones(30_000, dtype=torch.float64)]
    sketched = gradient_sketches(lambda n: x[n] @ weight, 40, [weight], second_moment=ones, size=512)
    whole = gradient_sketches(lambda n: x[n] @ weight, 40, [weight], second_moment=ones, size=30_000)
    assert sketched.shape == (40, 512) and torch.allclose(whole, x)
    advantage = torch.randn(40, generator=draw, dtype=torch.float64)
    exact, near = (gradient_influence(s, advantage) for s in (whole, sketched))
    assert rank_correlation(exact, near) > 0.8
    gram = whole @ whole.T
    assert ((sketched @ sketched.T - gram).abs() / gram.diagonal().mean()).mean() < 2 / 512**0.5


def test_by_hand():
    """Gains 2w and 4w: v = (4 + 16)/2 = 10, P = 10^(−1/2), u = (1·2 − 1·4)/2 = −1; I = (−2, −4)/√10."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    sketches = gradient_sketches(lambda n: ((2, 4)[n] * weight).sum(), 2, [weight])
    found = gradient_influence(sketches, torch.tensor([1.0, -1.0]))
    assert found.tolist() == pytest.approx([-2 / 10**0.5, -4 / 10**0.5])
    missing = gradient_influence(sketches, torch.tensor([1.0, torch.nan]))
    assert missing.tolist() == pytest.approx([2 / 10**0.5, 4 / 10**0.5])
