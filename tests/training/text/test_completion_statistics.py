# SPDX-License-Identifier: Apache-2.0
"""Repetition within completions and between those of a group, counted by hand and by plain sets."""

from __future__ import annotations

import math

import pytest
import torch

from visalign.training.text.collect import distinct_pairs, repetition


def test_repetition_counts_runs_of_four_that_came_before():
    """1 2 1 2 1 2 1 has the runs 1212, 2121, 1212, 2121: half of them are new."""
    tokens = torch.tensor([[1, 2, 1, 2, 1, 2, 1], [1, 2, 3, 4, 5, -1, -1], [1, 1, 1, -1, -1, -1, -1]])
    repeated = repetition(tokens).tolist()
    assert repeated[:2] == [0.5, 0.0] and math.isnan(repeated[2])


def test_pairs_are_counted_over_a_group():
    """Group 7: 12 23, 12 24: 3 of 4 differ. Group 5: 11 11: 1 of 2."""
    tokens = torch.tensor([[1, 2, 3], [1, 1, 1], [1, 2, 4]])
    assert distinct_pairs(tokens, torch.tensor([7, 5, 7])) == pytest.approx((0.75 + 0.5) / 2)
    assert math.isnan(distinct_pairs(tokens[:, :1], torch.tensor([7, 5, 7])))
