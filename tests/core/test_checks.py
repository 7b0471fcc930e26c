# SPDX-License-Identifier: Apache-2.0
"""The core's refusals: what passes, and what each message says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from visalign.core import aggregate, count_step, gaussian_log_prob, kl_penalty, value_loss
from visalign.core.checks import (
    check_axes,
    check_choice,
    check_integer_pairs,
    check_same,
)

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


@pytest.mark.parametrize(
    "broadcast",
    [
        lambda: aggregate(BT, BT[0], "token_mean", count_step(BT)),
        lambda: gaussian_log_prob(BT, BT[:1], B, log_prob_reduction="mean"),
        lambda: kl_penalty(BT, BT, log_ratio=BT[0]),
        lambda: value_loss(BT, BT[0]),
    ],
)
def test_shapes_that_would_broadcast_are_refused(broadcast: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must have one shape"):
        broadcast()
