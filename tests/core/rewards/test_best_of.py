# SPDX-License-Identifier: Apache-2.0
"""Edges of pass@k and best-of-k, whose values stand in tests/golden; the KL of best-of-n."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visalign.core.rewards.best_of import (
    best_of_n_kl_bound,
    best_of_n_kl_estimate,
    expected_best_of_k,
    filtration_weights,
    pass_at_k,
)


def test_pass_at_k_edges_are_exact() -> None:
    n = torch.tensor([10, 10, 10, 10])
    result = pass_at_k(n, torch.tensor([0, 1, 8, 10]), torch.tensor([10, 10, 3, 1]))
    assert result.tolist() == [0.0, 1.0, 1.0, 1.0] and math.copysign(1, result[0].item()) == 1
    assert pass_at_k(10**7, torch.tensor([0, 10**7 - 5]), 6).tolist() == [0, 1]


def test_binary_rewards_give_pass_at_k_and_equal_rewards_themselves() -> None:
    reward = torch.tensor([1.0] * 7 + [0.0] * 93)
    for k in (1, 5, 50, 94):
        torch.testing.assert_close(expected_best_of_k(reward, k), pass_at_k(100, 7, k), rtol=1e-12, atol=0.0)
    assert expected_best_of_k(torch.full((50,), 0.1, dtype=torch.float64), 7) == 0.1
    shifted = expected_best_of_k(reward.double() + 1e6, 5) - 1e6
    torch.testing.assert_close(shifted, expected_best_of_k(reward, 5), rtol=0.0, atol=1e-9)


def best_of_n(prob: Tensor, n: int) -> Tensor:
    """Exact best-of-n over outputs in rising order of a reward without ties."""
    upto = prob.cumsum(0)
    return upto**n - (upto - prob) ** n


def test_kl_bound_by_hand_and_above_the_exact_kl() -> None:
    torch.testing.assert_close(
        best_of_n_kl_bound(torch.tensor([1, 2, 4])), torch.tensor([0, 0.1931471806, 0.6362943611]).double()
    )
    assert best_of_n_kl_bound(1) == 0 and best_of_n_kl_bound(0).isnan()
    for n in (2, 5, 64):
        for seed in range(5):
            prob = torch.randn(9, generator=torch.Generator().manual_seed(seed)).double().softmax(0)
            policy = best_of_n(prob, n)
            assert torch.special.xlogy(policy, policy / prob).sum() < best_of_n_kl_bound(n)
        fine = torch.full((100_000,), 1e-5, dtype=torch.float64)
        policy = best_of_n(fine, n)
        kl = torch.special.xlogy(policy, policy / fine).sum()
        torch.testing.assert_close(kl, best_of_n_kl_bound(n), rtol=1e-3, atol=0.0)


def test_kl_estimate_is_exact_for_one_likely_best_output() -> None:
    """The others are tiny; the bound is far off here."""
    for eps, n in ((0.3, 4), (0.02, 64), (0.9, 1000)):
        tiny = torch.full((200_000,), (1 - eps) / 200_000, dtype=torch.float64)
        prob = torch.cat([tiny, torch.tensor([eps], dtype=torch.float64)])
        policy = best_of_n(prob, n)
        kl = torch.special.xlogy(policy, policy / prob).sum()
        ours = best_of_n_kl_estimate(torch.tensor(math.log(eps)), n)
        torch.testing.assert_close(ours, kl, rtol=1e-4, atol=1e-7)
        assert ours < best_of_n_kl_bound(n)


def test_samples_without_a_reward_are_never_drawn() -> None:
    reward = torch.tensor([-2.0, math.nan, 1.0, 0.5, 1.0])
    expected = {"pow": [4, 0, 1, 0.25, 1], "max_min": [1, 0, 1, 0, 1], "max_random": [0.1, 0, 0.4, 0.1, 0.4]}
    for method, weights in expected.items():
        result = filtration_weights(reward, method=method)  # type: ignore[arg-type]
        torch.testing.assert_close(result, torch.tensor(weights).double(), rtol=1e-6, atol=2e-8)
        assert result[1] == 0 < result[3]
