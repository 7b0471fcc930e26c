# SPDX-License-Identifier: Apache-2.0
"""Win rates: by hand, failed comparisons, order of presentation, and the pairs of a group."""

from __future__ import annotations

import pytest
import torch

from visalign.core.preference.pairwise import group_pairs, win_rates

NAN = float("nan")


def test_pairs_of_a_group() -> None:
    pairs = group_pairs(["x", "y", "x", "x", "y"], 5)
    assert pairs.tolist() == [[0, 2], [0, 3], [1, 4], [2, 3]]
    assert group_pairs([1, 2, 3], 3).shape == (0, 2)


def test_win_rates_by_hand() -> None:
    pairs = torch.tensor([[0, 1], [0, 2], [1, 2]])
    preference = torch.tensor([1.0, 0.5, 0.25])
    torch.testing.assert_close(win_rates(pairs, preference, 3), torch.tensor([0.75, 0.125, 0.625]))
    columns = torch.stack([preference, 1 - preference], 1).double()
    result = win_rates(pairs, columns, 3)
    torch.testing.assert_close(result[:, 1], 1 - result[:, 0])


def test_a_failed_comparison_is_no_tie() -> None:
    pairs = torch.tensor([[0, 1], [0, 2], [1, 2], [2, 3], [3, 4], [4, 0]])
    result = win_rates(pairs, torch.tensor([1.0, NAN, NAN, 0.75, NAN, NAN]), 5)
    torch.testing.assert_close(result, torch.tensor([1.0, 0.0, 0.75, 0.25, NAN]), equal_nan=True)


def test_order_of_pairs_and_of_presentation_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = group_pairs(torch.arange(12) % 2, 12)
    preference = torch.rand(len(pairs), generator=generator, dtype=torch.float64)
    result = win_rates(pairs, preference, 12)
    swap = torch.rand(len(pairs), generator=generator) > 0.5
    turned = torch.where(swap[:, None], pairs.flip(1), pairs)
    answers = torch.where(swap, 1 - preference, preference)
    order = torch.randperm(len(pairs), generator=generator)
    torch.testing.assert_close(win_rates(turned[order], answers[order], 12), result)
    for label in (0, 1):
        assert result[label::2].mean().item() == pytest.approx(0.5)
    both = torch.cat([pairs, pairs.flip(1)]), torch.cat([preference, 1 - preference])
    torch.testing.assert_close(win_rates(*both, 12), result)
