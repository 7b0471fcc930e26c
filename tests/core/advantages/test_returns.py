# SPDX-License-Identifier: Apache-2.0
"""Returns and GAE against loops over the present decisions; holes, padding and NaN; ReMax; REINFORCE++."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from visalign.core.advantages.group import group_advantages, whiten
from visalign.core.advantages.returns import (
    BLOCK,
    discounted_returns,
    gae,
    optimal_token_baseline,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
)

NAN = float("nan")
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sample(length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(reward, value, weight) with holes, padding on both sides, an empty row, and NaN where absent."""
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(5, length, generator=generator, dtype=torch.float64)
    value = torch.randn(5, length, generator=generator, dtype=torch.float64)
    weight = (torch.rand(5, length, generator=generator) > 0.3).double() * 2.5
    weight[0] = 1
    weight[1, : length // 3] = 0
    weight[2, length // 2 :] = 0
    weight[4] = 0
    absent = weight == 0
    return reward.masked_fill(absent, NAN), value.masked_fill(absent, float("inf")), weight


def slow_gae(
    reward: Tensor, value: Tensor, weight: Tensor, gamma: float, lam: float, last: Tensor
) -> tuple[Tensor, Tensor]:
    """The recursion as written, over the present decisions of one row at a time."""
    advantages, returns = torch.zeros_like(reward), torch.zeros_like(reward)
    for b in range(reward.shape[0]):
        following, ahead = last[b].item(), 0.0
        for t in reversed(range(reward.shape[1])):
            if weight[b, t] == 0:
                continue
            now = value[b, t].item()
            ahead = reward[b, t].item() + gamma * following - now + gamma * lam * ahead
            advantages[b, t], returns[b, t], following = ahead, ahead + now, now
    return advantages, returns


@pytest.mark.parametrize("length", [1, 7, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.0, 0.5), (0.9, 0.0)])
def test_gae_equals_the_recursion(length: int, gamma: float, lam: float) -> None:
    reward, value, weight = sample(length)
    last = torch.linspace(-1, 1, 5, dtype=torch.float64)
    got = gae(reward, value, weight, gamma=gamma, lam=lam, last_value=last)
    for ours, expected in zip(got, slow_gae(reward, value, weight, gamma, lam, last), strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)
        assert ours[weight == 0].eq(0).all()
    zero = torch.zeros(5, dtype=torch.float64)
    expected, _ = slow_gae(reward, torch.zeros_like(value), weight, gamma, 1.0, zero)
    torch.testing.assert_close(discounted_returns(reward, weight, gamma=gamma), expected, **CLOSE)


def test_a_long_row_does_not_drift() -> None:
    reward = torch.full((1, 5000), 0.1, dtype=torch.float64)
    expected = 0.1 * torch.arange(5000, 0, -1, dtype=torch.float64)[None]
    torch.testing.assert_close(discounted_returns(reward), expected, rtol=1e-12, atol=0)


def test_a_missing_reward_makes_its_row_missing_and_no_other() -> None:
    reward, value = torch.ones(3, 4), torch.zeros(3, 4)
    weight = torch.tensor([[1.0, 1, 0, 1]] * 3)
    reward[0, 1] = NAN
    value[1, 3] = float("inf")
    clean = gae(torch.ones(3, 4), torch.zeros(3, 4), weight)
    for ours, expected in zip(gae(reward, value, weight), clean, strict=True):
        assert ours[:2, [0, 1, 3]].isnan().all() and ours[:2, 2].eq(0).all()
        assert torch.equal(ours[2], expected[2])
    last = torch.tensor([NAN, 0.0, 0.0])
    assert gae(torch.ones(3, 4), torch.zeros(3, 4), weight, last_value=last)[0][0, 0].isnan()
    whitened = whiten(gae(reward, value, weight)[0], weight != 0)
    assert whitened[:2].eq(0).all() and whitened[2].abs().sum() > 0


def test_remax() -> None:
    reward, weight = rows([1, NAN, 2, NAN], [1, 1, 1, NAN]), rows([1, 0, 1, 0], [1, 1, 1, 0])
    result = remax_advantages(reward, torch.tensor([0.5, NAN]), weight)
    assert torch.equal(result[0], torch.tensor([2.5, 0, 1.5, 0], dtype=torch.float64))
    assert result[1, :3].isnan().all() and result[1, 3] == 0


def test_reinforce_pp() -> None:
    reward, _, weight = sample(30, seed=2)
    present = weight != 0
    result = reinforce_pp_advantages(reward, weight, gamma=0.9)
    expected = whiten(discounted_returns(reward, weight, gamma=0.9), present)
    torch.testing.assert_close(result, expected)
    inside = result[present]
    assert inside.mean().abs() < 1e-12 and inside.std().item() == pytest.approx(1, abs=1e-7)
    assert result[~present].eq(0).all()
    shifted = discounted_returns(reward, weight) + 3
    torch.testing.assert_close(whiten(shifted, present), reinforce_pp_advantages(reward, weight))
    assert reinforce_pp_advantages(torch.tensor([[0.0, 0.3], [0.0, 0.3]])).eq(0).all()


def test_reinforce_pp_baseline() -> None:
    reward = torch.tensor([1.0, 3.0, 5.0, 5.0, NAN], dtype=torch.float64)
    weight = rows([1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1])
    group = ["a", "a", "b", "b", "b"]
    result = reinforce_pp_baseline_advantages(reward, group, weight)
    centred = torch.tensor([-1.0, -1, 1, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    expected = (centred - centred.mean()) / (centred.var() + 1e-8).sqrt()
    torch.testing.assert_close(result[:4][weight[:4] != 0], expected)
    assert result[4].eq(0).all() and result[weight == 0].eq(0).all()
    flagged = torch.tensor([True, True, True, True, False])
    flagged_result = reinforce_pp_baseline_advantages(reward.nan_to_num(9.0), group, weight, valid=flagged)
    assert torch.equal(flagged_result, result)
    equal = torch.ones(5, 3)
    plain = reinforce_pp_baseline_advantages(reward[:4], group[:4], equal[:4])
    per_sample = whiten(group_advantages(reward[:4], group[:4], scale="none")[:, None].expand(4, 3))
    torch.testing.assert_close(plain, per_sample)


def test_the_optimal_token_baseline_has_the_least_variance() -> None:
    """Against ‖∇ log π‖² of all tokens of a policy: each token is drawn as often as its probability says."""
    logits = rows([0.0, 1.0, 2.0])[0].requires_grad_()
    log_p, reward = logits.log_softmax(0), rows([1.0, 0.0, 5.0])[0]
    squares = torch.stack([torch.autograd.grad(x, logits, retain_graph=True)[0].square().sum() for x in log_p])
    share = log_p.detach().exp()
    best = (share * squares * reward).sum() / (share * squares).sum()
    draws = torch.repeat_interleave(torch.arange(3), (share * 20_000).round().int())
    ones = torch.ones(len(draws), 1).double()
    inputs = reward[draws][:, None], ones, [0] * len(draws), log_p.detach()[draws][:, None]
    gain = optimal_token_baseline(*inputs, share.square().sum() * ones)
    torch.testing.assert_close(reward[draws] - gain[:, 0], best.expand(len(draws)), rtol=1e-4, atol=0)


def test_turns_are_compared_token_by_token_or_column_by_column() -> None:
    reward, weight = rows([0, 0, 1], [0, 0, 3], [0, NAN, 0]), rows([1, 0, 1], [0, 1, 1], [1, 1, 1])
    inputs = reward, weight, [0, 0, 0], torch.full_like(reward, 0.5).log(), torch.full_like(reward, 0.5)
    by_token = optimal_token_baseline(*inputs)
    torch.testing.assert_close(by_token[:2], rows([-1, 0, -1], [0, 1, 1]), rtol=0, atol=1e-6)
    by_column = optimal_token_baseline(*inputs, multi_turn=False)
    torch.testing.assert_close(by_column[:2], rows([0, 0, -1], [0, 0, 1]), rtol=0, atol=1e-6)
    assert by_token[2].isnan().all()
    doubled = optimal_token_baseline(*inputs, rows([1, 1, 1], [2, 2, 2], [1, 1, 1]))
    torch.testing.assert_close(doubled[0, 0], torch.tensor(1 - (1 + 4 * 3) / 5).double())
