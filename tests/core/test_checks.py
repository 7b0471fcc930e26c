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
        (lambda: core.group_advantages(B, [0]), "one label per sample, 2 in all; got a list"),
        (lambda: core.group_advantages(B, B), r"labels must be integers, .* got torch.float32"),
        (lambda: core.effective_rank(B), r"must be \[..., n, d\] with n, d ≥ 1; got \(2,\)"),
        (lambda: core.effective_rank(BT / 0), "embeddings must be finite; leave out"),
        (lambda: core.listwise_choice_loss(B + 1, B + 1, [0, 0]), r"sum to 1; got \[2.0\]"),
        (lambda: core.bradley_terry_loss(B, B, B + 1.5), r"lie in \[0, 1\].*got 1.5 to 1.5"),
        (lambda: core.fit_ranking(torch.tensor([[0, 1]]), B, 2), r"prob must be \[N\], N = 1 pairs"),
        (lambda: core.yes_no_answer(B, [], [1]), r"must each name a token, .* got \[\] and \[1\]"),
        (lambda: core.yes_no_answer(B, [0], [2]), r"different ones in 0 … 1; got \[0\] and \[2\]"),
        (lambda: core.expected_best_of_k(torch.ones(3), -1), "k must be ≥ 1 .* got -1 and"),
        (lambda: core.expected_best_of_k(torch.ones(2, 0), 1), r"got 1 and \(2, 0\)"),
        (lambda: core.convex_vertices(BT / 0), "embedding holds a number that is not finite"),
        (lambda: core.vendi_score(BT), "a row of zeros has no direction"),
        (lambda: core.set_gains(core.vendi_score, torch.ones(1, 2)), "got 1 sample. Give at least 2"),
        (lambda: core.frechet_distance(BT / 0, BT), "embeddings must be finite"),
        (lambda: core.adaptive_kl_coefficient(0.1, 1.0, samples=50_000), "got 50000/10000. Use a longer horizon"),
        (lambda: core.soft_overlong(B, max_length=10, cache=11), "got cache=11, max_length=10"),
        (lambda: core.combine_members(BT, how="inverse_variance"), "needs std"),
        (lambda: core.aggregate(BT, BT, "group_token_mean", core.count_step(BT)), "and denominator=row_tokens"),
        (lambda: core.kl_penalty(B, B, gradient="k1"), r"k1' is refused: .* under π is zero.* Use gradient='k2'"),
        (lambda: core.gaussian_log_prob(BT, BT, B[:1], log_prob_reduction="mean"), "std must have the leading"),
        (lambda: core.gaussian_log_prob(BT, BT, BT, log_prob_reduction="mean"), "at least one and not all; got shape"),
        (lambda: core.ppo_clip(BT[..., None], B, eps_low=0.2, eps_high=0.2), r"must be \[B\] or \[B, T\]"),
        (lambda: core.value_loss(BT, BT, clip=0.2), "give old_values and clip, or neither; got clip=0.2"),
    ],
)
def test_bad_input_is_named(bad: Callable[[], object], message: str) -> None:
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
