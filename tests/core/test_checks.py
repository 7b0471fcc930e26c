# SPDX-License-Identifier: Apache-2.0
"""The core's refusals: what passes, and what each message says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from visalign.core.checks import (
    check_axes,
    check_choice,
    check_integer_pairs,
    check_not_negative,
    check_positive,
    check_same,
    check_share,
)

B, BT, BT_OTHER = torch.zeros(2), torch.zeros(2, 3), torch.zeros(4, 3)


def test_what_fits_passes() -> None:
    check_same(reward=BT, value=BT, weight=None)
    check_axes(reward=(B, "B"), weight=(BT, "B T"), value=(None, "B T"))
    check_choice("mode", "mean", ("mean", "sum"))
    check_share(low=0, high=1)
    check_positive(beta=0.1)
    check_not_negative(eps=0)
    check_integer_pairs(torch.zeros(0, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    "bad, message",
    [
        (lambda: check_same(a=B, b=BT), r"^a \(2,\) and b \(2, 3\) must have one shape\.$"),
        (lambda: check_same(", [B]", a=B, b=BT, c=B), r"^a \(2,\), b \(2, 3\), c .* one shape, \[B\]\.$"),
        (lambda: check_axes(a=(B, "B T")), r"^a must be \[B, T\]; got shape \(2,\)\.$"),
        (
            lambda: check_axes(a=(B, "B"), b=(BT_OTHER, "B T")),
            r"^a must be \[B\] and b \[B, T\]; got \(2,\) ",
        ),
        (lambda: check_axes(a=(BT, "N N")), r"^a must be \[N, N\]; got shape \(2, 3\)\.$"),
        (lambda: check_choice("mode", "max", ("mean", "sum")), "^mode must be one of mean, sum; got 'max'"),
        (lambda: check_share(low=0.5, high=1.1), r"^high must lie in \[0, 1\]; got 1\.1\.$"),
        (lambda: check_share(low=float("nan")), "got nan"),
        (lambda: check_positive(beta=0), "^beta must be positive and finite; got 0"),
        (lambda: check_positive(beta=float("inf")), "got inf"),
        (lambda: check_not_negative(eps=-1), "^eps must be finite and ≥ 0; got -1"),
        (lambda: check_integer_pairs(BT), r"^pairs must be integers \[N, 2\]; got torch.float32 \(2, 3\)"),
        (lambda: check_integer_pairs(torch.ones(1, 2, dtype=torch.bool)), "got torch.bool"),
    ],
)
def test_bad_input_is_named(bad: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bad()
