# SPDX-License-Identifier: Apache-2.0
"""Aggregation: hand values, micro-batches that sum to the full batch, padding, duplication, empty rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from visalign.core import MODES, aggregate, count_step, row_tokens

NAN = float("nan")
LOSS = torch.tensor([[1.0, 2.0, NAN], [5.0, NAN, NAN], [NAN, NAN, NAN], [3.0, 3.0, 6.0]], dtype=torch.float64)
WEIGHT = torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0.5]], dtype=torch.float64)
GROUP = ["a", "a", "b", "b"]


def reduce(loss: Tensor, weight: Tensor, mode: Any, **options: Any) -> Tensor:
    """The step as one batch."""
    group = list(range(loss.shape[0])) if mode == "group_token_mean" else None
    tokens = row_tokens(weight, group) if mode == "group_token_mean" else None
    return aggregate(loss, weight, mode, count_step(weight, group=group, **options), denominator=tokens)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 14 / 4.5),
        ("seq_mean_token_mean", (1.5 + 5 + 4) / 3),
        ("seq_mean_token_sum", 14 / 3),
        ("dr_grpo", 14 / 9),
        ("token_sum", 14),
    ],
)
def test_hand_values(mode: Any, expected: float) -> None:
    assert reduce(LOSS, WEIGHT, mode).item() == pytest.approx(expected, rel=1e-14)


def test_group_token_mean_by_hand() -> None:
    counts, tokens = count_step(WEIGHT, group=GROUP), row_tokens(WEIGHT, GROUP)
    assert tokens.tolist() == [3, 3, 1.5, 1.5] and counts.groups == 2
    value = aggregate(LOSS, WEIGHT, "group_token_mean", counts, denominator=tokens)
    assert value.item() == pytest.approx((8 / 3 + 6 / 1.5) / 2, rel=1e-14)


def test_counts() -> None:
    counts = count_step(WEIGHT)
    assert (counts.tokens, counts.sequences, counts.length) == (4.5, 3, 3) and counts.groups is None
    assert count_step(WEIGHT, empty="keep").sequences == 4
    assert count_step(WEIGHT, length=7).length == 7
    assert count_step(WEIGHT, group=["a", "a", "empty", "b"]).groups == 2
    gathered = row_tokens(WEIGHT)  # as of devices that each hold some rows
    assert count_step(gathered, group=GROUP, length=3) == count_step(WEIGHT, group=GROUP)


def test_empty_rows_are_left_out_or_kept_as_zero_loss() -> None:
    full = [0, 1, 3]
    for mode in MODES:
        assert torch.equal(reduce(LOSS, WEIGHT, mode), reduce(LOSS[full], WEIGHT[full], mode))
    with_empty = reduce(LOSS, WEIGHT, "seq_mean_token_mean", empty="keep")
    assert with_empty.item() == pytest.approx((1.5 + 5 + 4) / 4)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_micro_batches_sum_to_the_full_batch(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    loss = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    weight = torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    weight = torch.where(torch.rand(rows, columns, generator=generator) < 0.4, 0.0, weight)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    bounds = list(zip([0, *cuts], [*cuts, rows], strict=True))
    group = torch.randint(0, 3, (rows,), generator=generator)
    counts, tokens = count_step(weight, group=group), row_tokens(weight, group)
    for mode in MODES:
        divide = tokens if mode == "group_token_mean" else None
        leaf = loss.clone().requires_grad_()
        total = aggregate(leaf, weight, mode, counts, denominator=divide)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(total, leaf)
        for a, b in bounds:
            part = None if divide is None else divide[a:b]
            aggregate(leaf[a:b], weight[a:b], mode, counts, denominator=part).backward()  # type: ignore[arg-type]
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-14)


def test_counts_of_parts_add_up() -> None:
    counts = count_step(WEIGHT, group=GROUP, length=9)
    assert (count_step(WEIGHT) + counts).groups is None
    parts = count_step(WEIGHT[:2], group=GROUP[:2], length=9) + count_step(WEIGHT[2:], group=GROUP[2:], length=9)
    assert counts == parts


@pytest.mark.parametrize("mode", MODES)
def test_absent_decisions_have_exactly_zero_gradient(mode: Any) -> None:
    loss = LOSS.clone().requires_grad_()
    reduce(loss, WEIGHT, mode).backward()
    assert loss.grad is not None
    assert loss.grad[WEIGHT == 0].eq(0).all() and (loss.grad[WEIGHT > 0] > 0).all()


def test_a_sequence_split_over_micro_batches_keeps_its_own_mean() -> None:
    tokens, counts = row_tokens(WEIGHT), count_step(WEIGHT)
    halves = [
        aggregate(LOSS[:, part], WEIGHT[:, part], "seq_mean_token_mean", counts, denominator=tokens)
        for part in (slice(0, 1), slice(1, 3))
    ]
    torch.testing.assert_close(halves[0] + halves[1], reduce(LOSS, WEIGHT, "seq_mean_token_mean"))
