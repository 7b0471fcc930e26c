# SPDX-License-Identifier: Apache-2.0
"""OPO, GPG, pass@k and best of a group: hand values, enumeration, and what all advantages have in common."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from visalign.core.advantages.baselines import (
    best_of_group_advantages,
    decoupled_advantages,
    gpg_advantages,
    opo_advantages,
    pass_at_k_advantages,
)
from visalign.core.advantages.group import group_advantages

NAN = float("nan")


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


ALL: dict[str, Callable[..., Tensor]] = {
    "opo": lambda reward, group, **o: opo_advantages(reward, torch.ones_like(reward) * 7, group, **o),
    "gpg": gpg_advantages,
    "gpg_std": lambda reward, group, **o: gpg_advantages(reward, group, f_norm="std", **o),
    "pass_at_k": pass_at_k_advantages,
    "pass_at_2": lambda reward, group, **o: pass_at_k_advantages(reward, group, k=2, scale="group", **o),
    "best": best_of_group_advantages,
    "best_and_worst": lambda reward, group, **o: best_of_group_advantages(reward, group, worst=-1.0, **o),
}


@pytest.mark.parametrize("name", ALL)
def test_what_all_have_in_common(name: str) -> None:
    """Permutation, labels, shift; missing rewards; singletons, equal groups, no rewards, no samples."""
    function = ALL[name]
    generator = torch.Generator().manual_seed(0)
    reward = torch.randn(9, generator=generator, dtype=torch.float64)
    group = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 1])
    order = torch.randperm(9, generator=generator)
    result = function(reward, group)
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(function(reward[order], group[order]), result[order], **close)
    torch.testing.assert_close(function(reward, [f"p{-g}" for g in group.tolist()]), result, **close)
    torch.testing.assert_close(function(reward + 2.0**20, group), result, rtol=1e-7, atol=1e-7)
    valid = torch.tensor([True] * 8 + [False])
    valid[2] = False
    valid_rows = valid.nonzero()[:, 0]
    expected = function(reward[valid_rows], group[valid_rows])
    for result in (function(reward, group, valid=valid), function(reward.masked_fill(~valid, NAN), group)):
        torch.testing.assert_close(result[valid_rows], expected, **close)
        assert result[~valid].eq(0).all()
    assert expected[valid_rows == 5].eq(0).all(), "the only one left of its group"
    for dtype in (torch.float32, torch.bfloat16):
        equal = (torch.rand(20, generator=generator) * 10).repeat_interleave(12).to(dtype)
        zero = function(equal, torch.arange(20).repeat_interleave(12))
        assert zero.eq(0).all() and zero.dtype == torch.float32
    assert function(torch.full((4,), NAN), [0, 0, 1, 1]).eq(0).all()
    assert function(torch.zeros(0), []).shape == (0,)
    assert not function(reward.clone().requires_grad_(), group).requires_grad


def test_opo() -> None:
    result = opo_advantages(vector(1, 3, 10), torch.tensor([30, 10, 4]), ["x", "x", "y"])
    torch.testing.assert_close(result, vector(-0.5, 1.5, 0))
    reward, group = torch.randn(8, generator=torch.Generator().manual_seed(1)).double(), [0, 1] * 4
    plain = group_advantages(reward, group, scale="none")
    for flat in (torch.full((8,), 5.0), torch.zeros(8)):
        torch.testing.assert_close(opo_advantages(reward, flat, group), plain)


def test_gpg() -> None:
    """Four of eight samples are in a group without signal: α = 8/4."""
    reward, group = vector(0, 0, 0, 0, 0, 0, 1, 0), [0, 0, 0, 0, 1, 1, 1, 1]
    centred = vector(0, 0, 0, 0, -0.25, -0.25, 0.75, -0.25)
    torch.testing.assert_close(gpg_advantages(reward, group), 2 * centred)
    torch.testing.assert_close(gpg_advantages(1 - reward, group), -2 * centred)
    torch.testing.assert_close(gpg_advantages(reward, group, f_norm=0.5), 4 * centred)
    torch.testing.assert_close(gpg_advantages(reward, group, counted="nonzero_reward"), 8 * centred)
    torch.testing.assert_close(gpg_advantages(reward, group, f_norm="std", eps=0.0), 4 * centred)
    graded = vector(0, 1, 2, 5, 5, 5)
    torch.testing.assert_close(gpg_advantages(graded, [0, 0, 0, 1, 1, 1]), vector(-2, 0, 2, 0, 0, 0))


def best_of_k_credit(reward: list[float], k: int) -> list[float]:
    """Mean over all sets of k − 1 others of max(with) − max(without)."""
    result = []
    for i, value in enumerate(reward):
        sets = list(itertools.combinations(reward[:i] + reward[i + 1 :], k - 1))
        result.append(math.fsum(max(value, *rest) - max(rest) for rest in sets) / len(sets))
    return result


@pytest.mark.parametrize("k", [2, 3, 4, None])
def test_pass_at_k_equals_enumeration(k: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    members = {"a": [0, 3, 4, 8, 9], "b": [1, 2, 5, 6], "c": [7, 10]}
    group = [next(name for name, m in members.items() if i in m) for i in range(11)]
    graded = torch.randn(11, generator=generator, dtype=torch.float64)
    coarse = torch.randint(0, 3, (11,), generator=generator).double()
    for reward in (graded, coarse, (coarse > 0).double()):
        result = pass_at_k_advantages(reward, group, k=k)
        scaled = pass_at_k_advantages(reward, group, k=k, scale="group", eps=0.01)
        for m in members.values():
            if k is not None and k > len(m):
                assert result[m].eq(0).all()
                continue
            expected = vector(*best_of_k_credit(reward[m].tolist(), k or len(m)))
            torch.testing.assert_close(result[m], expected, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(scaled[m], expected / (reward[m].std() + 0.01))


def test_pass_at_k_has_the_gradient_of_the_best_of_k() -> None:
    """Exact expectation over all draws of n = 4 from a policy with three answers, k = 2."""
    reward, n, k = vector(0.3, 1.0, -0.5), 4, 2
    logits = vector(0.2, -0.7, 0.4).requires_grad_()
    log_prob = logits.log_softmax(0)
    best = torch.zeros((), dtype=torch.float64)
    for draw in itertools.product(range(3), repeat=k):
        best = best + log_prob[list(draw)].sum().exp() * reward[list(draw)].max()
    (expected,) = torch.autograd.grad(best, logits, retain_graph=True)
    draws = torch.tensor(list(itertools.product(range(3), repeat=n)))
    labels = torch.arange(len(draws)).repeat_interleave(n)
    advantages = pass_at_k_advantages(reward[draws].flatten(), labels, k=k).reshape(draws.shape)
    surrogate = (log_prob[draws].sum(1).exp().detach() * (advantages * log_prob[draws]).mean(1) * k).sum()
    torch.testing.assert_close(torch.autograd.grad(surrogate, logits)[0], expected)


def test_best_of_group() -> None:
    reward, group = vector(1, 3, 2, 7, 7, 4), ["x", "x", "x", "y", "y", "y"]
    assert torch.equal(best_of_group_advantages(reward, group), vector(0, 1, 0, 1, 1, 0))
    assert torch.equal(best_of_group_advantages(reward, group, worst=-1), vector(-1, 1, 0, 1, 1, -1))


def test_decoupled_by_hand() -> None:
    """Samples 0, 2 and 4 of "a" are actions taken: the mean is of the two that have a reward."""
    reward, group = vector(1, 5, 3, 0, NAN, 7), ["a", "a", "a", "a", "a", "b"]
    expected = vector(NAN, 3, NAN, -2, NAN, NAN)
    torch.testing.assert_close(decoupled_advantages(reward, group), expected, equal_nan=True)
    plain = vector(NAN, 5, NAN, 0, NAN, NAN)
    torch.testing.assert_close(decoupled_advantages(reward, group, baseline="none"), plain, equal_nan=True)
    assert decoupled_advantages(vector(NAN, 2), [0, 0])[1] == 0, "no action taken has an approval"


@pytest.mark.parametrize(("name", "follows"), [("da_pg", "approval"), ("grpo", "tampering")])
def test_decoupled_approval_does_not_learn_to_tamper(name: str, follows: str) -> None:
    """Answer 1 is worth less; whenever it is the action taken, all approvals of that prompt rise by 4.

    Exact expectation over all pairs (action taken, query). By DA-PG the gradient is that of the approval; where the
    approval of the action taken is learnt from, it is that of the approval with the rise.
    """
    approval, rise = vector(1.0, 0.5), vector(0.0, 4.0)
    logits = vector(0.2, -0.3).requires_grad_()
    log_prob = logits.log_softmax(0)
    draws = torch.tensor(list(itertools.product(range(2), repeat=2)))
    chance = log_prob[draws].sum(1).exp().detach()
    if name == "da_pg":
        reward = approval[draws] + rise[draws[:, :1]]
        gain = decoupled_advantages(reward.flatten(), torch.arange(4).repeat_interleave(2)).view(4, 2)[:, 1]
        loss = -(chance * gain * log_prob[draws[:, 1]]).sum()
    else:
        loss = -(log_prob.exp().detach() * (approval + rise) * log_prob).sum()
    worth = approval if follows == "approval" else approval + rise
    (expected,) = torch.autograd.grad(-(log_prob.exp() * worth).sum(), logits, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, expected)
    assert (gradient[1] > 0) == (name == "da_pg"), "answer 1 becomes less likely by DA-PG alone"
