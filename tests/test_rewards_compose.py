# SPDX-License-Identifier: Apache-2.0
"""Weighted sums: values by hand, validity, units, breakdown; and the guard against failing judges."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image

from visalign.interfaces import Scores
from visalign.rewards import (
    FailureGuard,
    FunctionReward,
    RewardError,
    WeightedSum,
    check_reward,
    failure_reasons,
)
from visalign.rewards.jpeg import JpegSize

IMAGES = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
PROMPTS = ["p"] * 4


def fixed(values, **options) -> FunctionReward:
    """A reward that answers the same numbers to any four images."""
    return FunctionReward(lambda images: values, name="fixed", **{"unit": "points", **options})


def total(rewards, **options) -> Scores:
    return WeightedSum(rewards, **options).score(IMAGES, PROMPTS)


def test_sum_by_hand_with_breakdown():
    scores = total({"a": (fixed([1.0, 2, 3, 4]), 2.0), "b": (fixed([10.0, 0, 0, 10]), 0.5)})
    assert (
        scores.value.tolist() == [7, 4, 6, 13]
        and scores.unit == "points"
        and scores.value.dtype == torch.float32
    )
    assert scores.parts["a"].tolist() == [1, 2, 3, 4]
    assert scores.parts["b.weighted"].tolist() == [5, 0, 0, 5]
    assert torch.equal(scores.parts["a.weighted"] + scores.parts["b.weighted"], scores.value)


def test_lower_is_better_enters_with_a_minus():
    scores = total({"a": (fixed([1.0, 2, 3, 4], higher_is_better=False), 2.0)})
    assert scores.value.tolist() == [-2, -4, -6, -8]
    assert WeightedSum({"a": (fixed([1.0]), 1)}).higher_is_better is True


def test_fixed_normalisation():
    scores = total({"a": (fixed([1.0, 2, 3, 4]), 3.0)}, normalise={"a": (2.0, 0.5)})
    assert scores.value.tolist() == [-6, 0, 6, 12] and scores.unit == "reference standard deviations"


def test_batch_normalisation_leaves_out_the_invalid_and_is_zero_when_all_equal():
    scores = total({"a": (fixed([1.0, None, 3, 5]), 1.0)}, normalise="batch")
    spread = math.sqrt(8 / 3)
    assert scores.value[[0, 2, 3]].tolist() == pytest.approx([-2 / spread, 0, 2 / spread])
    assert scores.value[1].isnan() and not scores.valid[1]
    equal = total({"a": (fixed([0.1, 0.1, None, 0.1]), 1.0)}, normalise="batch")
    assert equal.value[[0, 1, 3]].tolist() == [0, 0, 0]


def test_invalid_part_makes_the_sum_invalid_with_its_reason():
    scores = total({"a": (fixed([1.0, None, 3, 4]), 1.0), "b": (fixed([1.0, 1, None, 1]), 1.0)})
    assert scores.valid.tolist() == [True, False, False, True]
    assert scores.reason == [
        None,
        "a: fixed returned None or NaN for it",
        "b: fixed returned None or NaN for it",
        None,
    ]
    assert scores.value[1:3].isnan().all() and scores.parts["b"][1] == 1


def test_weight_zero_only_records():
    scores = total(
        {"a": (fixed([1.0, 2, 3, 4]), 1.0), "watched": (fixed([None, 1, 1, 1], unit="other"), 0.0)}
    )
    assert scores.valid.all() and scores.value.tolist() == [1, 2, 3, 4] and scores.unit == "points"
    assert scores.parts["watched"][1] == 1 and "watched.weighted" not in scores.parts


def test_unreadable_image_and_nested_parts():
    inner = WeightedSum({"size": (JpegSize(), 1.0)})
    items = [Image.new("RGB", (8, 8)), "missing.png", Image.new("RGB", (9, 8))]
    scores = WeightedSum({"inner": (inner, 1.0)}).score(items, ["p"] * 3)
    assert scores.valid.tolist() == [True, False, True] and "no such image file" in str(
        failure_reasons(scores)[1]
    )
    assert scores.parts["inner.size"][0] == scores.value[0] > 0
    assert scores.parts["inner.size"][1].isnan()


def test_range_is_the_interval_sum():
    low_good = fixed([1.0], range=(0.0, 10.0), higher_is_better=False)
    rewards = {"a": (fixed([1.0], range=(-1.0, 1.0)), 2.0), "b": (low_good, 1.0), "c": (fixed([1.0]), 0.0)}
    assert WeightedSum(rewards).range == (-12, 2)
    assert WeightedSum(rewards, normalise={"a": (1.0, 0.5), "b": (0.0, 1.0)}).range == (-18, 0)
    assert WeightedSum(rewards, normalise="batch").range == (-math.inf, math.inf)


def test_units():
    rewards = {"a": (fixed([1.0] * 4), 1.0), "b": (fixed([1.0] * 4, unit="kB"), 1.0)}
    with pytest.raises(
        ValueError, match=r"different units: a in 'points', b in 'kB'. Allowed: normalise='batch'"
    ):
        WeightedSum(rewards)
    assert WeightedSum(rewards, allow_mixed_units=True).unit == "mixed: points + kB"
    assert total(rewards, normalise="batch").value.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ({}, {}, "A weighted sum of no rewards"),
        ({"a": (fixed([1]), -1.0)}, {}, "weight of 'a' is -1.0; allowed are finite numbers of at least 0"),
        ({"a": (fixed([1]), math.nan)}, {}, "weight of 'a' is nan"),
        ({"a": (fixed([1]), 0)}, {}, r"All weights are 0 \(a\)"),
        ({"a": (fixed([1]), 1)}, {"normalise": "group"}, "normalise is 'group'; allowed are 'none', 'batch'"),
        ({"a": (fixed([1]), 1)}, {"normalise": {"b": (0, 1)}}, r"no \(mean, std\) for a"),
        (
            {"a": (fixed([1]), 1)},
            {"normalise": {"a": (0, 0)}},
            r"normalise\['a'\] is \(0, 0\); needed are finite",
        ),
    ],
)
def test_refused(rewards, options, message):
    with pytest.raises(ValueError, match=message):
        WeightedSum(rewards, **options)


def test_part_of_the_wrong_length():
    class Short(JpegSize):
        def score(self, images, prompts, metadata=None):
            return super().score(images[:-1], prompts[:-1])

    with pytest.raises(RewardError, match="returned 3 scores for 4 images"):
        total({"short": (Short(), 1.0)})


def test_contract():
    rewards = {"small": (JpegSize(prefer="smaller"), 1.0), "again": (JpegSize(quality=20), 2.0)}
    assert len(check_reward(WeightedSum(rewards))) == 11
    with pytest.raises(RewardError, match="an image alone scores otherwise than in a batch"):
        check_reward(WeightedSum(rewards, normalise="batch"))


def judged(*reasons: str | None) -> Scores:
    valid = torch.tensor([reason is None for reason in reasons])
    return Scores(value=torch.where(valid, 1.0, torch.nan), valid=valid, unit="1", reason=reasons)


def test_failure_reasons():
    assert failure_reasons(judged(None, "late")) == [None, "late"]
    nameless = Scores(value=torch.tensor([torch.nan]), valid=torch.tensor([False]), unit="1")
    assert failure_reasons(nameless) == ["no reason given"]


def test_guard_counts_and_stops():
    guard = FailureGuard(0.25, window=8, min_samples=4)
    guard(judged("early", "early"))  # two samples are no verdict
    guard(judged(*[None] * 6))
    assert (guard.total, guard.failed, guard.rate) == (8, 2, 0.25)
    with pytest.raises(
        RewardError,
        match=r"clip could not judge 37.5% of the last 8 images; the limit is 25.0%.*3× late.*Mend",
    ):
        guard(judged("late", "late", "late", None), "clip")


def test_guard_notices_a_judge_that_dies_late():
    guard = FailureGuard(0.5, window=4, min_samples=4)
    for _ in range(100):
        guard(judged(None, None, None, None))
    with pytest.raises(RewardError, match=r"75.0% of the last 4"):
        guard(judged("gone", "gone", "gone"))


def test_guard_state_continues():
    guard = FailureGuard(0.5, window=4, min_samples=4)
    guard(judged("a", None, "b"))
    other = FailureGuard(0.5, window=4, min_samples=4)
    other.load_state_dict(guard.state_dict())
    assert (other.total, other.failed, other.rate) == (3, 2, guard.rate)
    with pytest.raises(RewardError, match=r"75.0%"):
        other(judged("c"))


def test_guard_refuses():
    with pytest.raises(ValueError, match=r"max_rate is 1.5; allowed is a share in \[0, 1\]"):
        FailureGuard(1.5)
    with pytest.raises(ValueError, match="min_samples is 9 and window 8"):
        FailureGuard(0.1, window=8, min_samples=9)
