# SPDX-License-Identifier: Apache-2.0
"""The core's refusals: what passes, and what each message says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import visalign.core as core
from visalign.core.checks import check_axes, check_choice, check_integer_pairs, check_same

B, BT = torch.zeros(2), torch.zeros(2, 3)


def test_what_fits_passes() -> None:
    check_same(reward=BT, value=BT, weight=None)
    check_axes(reward=(B, "B"), weight=(BT, "B T"), value=(None, "B T"))
    check_choice("mode", "mean", ("mean", "sum"))
    check_integer_pairs(torch.zeros(0, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    "bad, message",
    [
        (lambda: check_same(a=B, b=BT), r"^a \(2,\) and b \(2, 3\) must have one shape\.$"),
        (lambda: check_axes(a=(B, "B T")), r"^a must be \[B, T\]; got shape \(2,\)\.$"),
        (lambda: check_choice("mode", "max", ("mean", "sum")), "^mode must be one of mean, sum; got 'max'"),
        (lambda: check_integer_pairs(torch.ones(1, 2, dtype=torch.bool)), "got torch.bool"),
    ],
)
def test_bad_input_is_named(bad: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bad()


SHAPES: dict[Any, Callable[[Any], object]] = {
    core.aggregate: lambda f: f(BT, BT[0], "token_mean", core.count_step(BT)),
    core.binary_tv: lambda f: f(BT, B),
    core.bradley_terry_loss: lambda f: f(B[:1], B),
    core.categorical_kl: lambda f: f(BT, BT[:1]),
    core.dro: lambda f: f(BT, B, B, beta=0.1),
    core.entropy_aware_advantages: lambda f: f(B, BT[:1], BT),
    core.explained_variance: lambda f: f(BT, BT[0]),
    core.fidelity_loss: lambda f: f(B[:1], B),
    core.gae: lambda f: f(BT, BT[:1]),
    core.gaussian_log_prob: lambda f: f(BT, BT[:1], B, log_prob_reduction="mean"),
    core.kl_estimate: lambda f: f(BT, BT[0]),
    core.kl_in_reward: lambda f: f(BT, BT, B, beta=0.1),
    core.kl_penalty: lambda f: f(BT, BT, log_ratio=BT[0]),
    core.log_ratio: lambda f: f(BT, B),
    core.opo_advantages: lambda f: f(B, B[:1], [0, 0]),
    core.outcome_loss: lambda f: f(BT, BT[0]),
    core.ppo_clip: lambda f: f(BT, BT[0], eps_low=0.2, eps_high=0.2),
    core.ppo_kl: lambda f: f(BT, B, beta=1.0, kl=B),
    core.preference_loss: lambda f: f(BT[:, :2], BT[:1, :2]),
    core.reinforce: lambda f: f(BT, B, B),
    core.tea_weights: lambda f: f(B[:1], B),
    core.uncertain_preference_loss: lambda f: f(B[:1], B[:1], B[:1], B),
    core.value_loss: lambda f: f(BT, BT[0]),
    core.vespo: lambda f: f(BT, B, B),
    core.yes_no_loss: lambda f: f(core.yes_no_answer(BT[:1], [0], [1]), B),
}
"""Function -> a call with shapes that torch would broadcast to a wrong number."""


@pytest.mark.parametrize("function", SHAPES, ids=lambda f: f.__name__)
def test_shapes_that_would_broadcast_are_refused(function: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=r"must have one shape|must be \[|the same shape"):
        SHAPES[function](function)
