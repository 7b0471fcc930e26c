# SPDX-License-Identifier: Apache-2.0
"""Weighted sums: values by hand, validity, units, breakdown; rewards that break their contract."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from PIL import Image

from visalign.errors import UserError
from visalign.interfaces import RewardCapabilities, Scores, score_named
from visalign.rewards import FunctionReward, RewardError, WeightedSum, check_reward, failure_reasons
from visalign.rewards.combine.ensemble import Ensemble
from visalign.rewards.combine.frames import Frames
from visalign.rewards.pairs.ranking import rank
from visalign.rewards.statistics import JpegSize, Sharpness
from visalign.rewards.text.callables import TextFunctionReward
from visalign.rewards.text.combine import WeightedTextSum

IMAGES = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
PROMPTS = ["p"] * 4


def fixed(values, **options) -> FunctionReward:
    """A reward that gives any four images the same numbers."""
    return FunctionReward(lambda images: values, name="fixed", **{"unit": "points", **options})


def total(rewards, **options) -> Scores:
    return WeightedSum(rewards, **options).score(IMAGES, PROMPTS)


def test_sum_by_hand_with_breakdown():
    scores = total({"a": (fixed([1.0, 2, 3, 4]), 2.0), "b": (fixed([10.0, 0, 0, 10]), 0.5)})
    assert scores.value.tolist() == [7, 4, 6, 13] and scores.unit == "points"
    assert scores.parts["a"].tolist() == [1, 2, 3, 4]
    assert scores.parts["b.weighted"].tolist() == [5, 0, 0, 5]
    assert torch.equal(scores.parts["a.weighted"] + scores.parts["b.weighted"], scores.value)


def test_a_sum_beyond_float32_is_no_score():
    scores = total({"a": (fixed([1e38, 1.0, 2.0, -1e38]), 10.0)})
    assert scores.valid.tolist() == [False, True, True, False] and scores.value[0].isnan()
    assert failure_reasons(scores)[0] == "the weighted sum 1e+39 is beyond float32"


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


def test_rewards_of_some_prompts_alone_add_up_over_those_that_judged():
    terms = {"a": (fixed([1.0, math.nan, math.nan, 4]), 1.0), "b": (fixed([math.nan, 1.0, math.nan, 1]), 2.0)}
    scores = total(terms, allow_missing=True)
    assert scores.valid.tolist() == [True, True, False, True] and scores.value[[0, 1, 3]].tolist() == [1, 2, 6]
    assert str(failure_reasons(scores)[2]).startswith("a: ") and bool(scores.parts["a"].isnan()[1:3].all())
    with pytest.raises(ValueError, match="allow_missing goes without bounds"):
        WeightedSum(terms, allow_missing=True, bounds={"a": 1.0})


def test_invalid_part_makes_the_sum_invalid_with_its_reason():
    scores = total({"a": (fixed([1.0, math.nan, 3, 4]), 1.0), "b": (fixed([1.0, 1, math.nan, 1]), 1.0)})
    assert scores.valid.tolist() == [True, False, False, True]
    assert scores.reason == [None, "a: fixed returned NaN for it", "b: fixed returned NaN for it", None]
    assert scores.value[1:3].isnan().all() and scores.parts["b"][1] == 1


def test_weight_zero_only_records():
    scores = total({"a": (fixed([1.0, 2, 3, 4]), 1.0), "watched": (fixed([None, 1, 1, 1], unit="other"), 0.0)})
    assert scores.valid.all() and scores.value.tolist() == [1, 2, 3, 4] and scores.unit == "points"
    assert scores.parts["watched"][1] == 1 and "watched.weighted" not in scores.parts


def test_unreadable_image_and_nested_parts():
    inner = WeightedSum({"size": (JpegSize(), 1.0)})
    items = [Image.new("RGB", (8, 8)), "missing.png", Image.new("RGB", (9, 8))]
    scores = WeightedSum({"inner": (inner, 1.0)}).score(items, ["p"] * 3)
    assert scores.valid.tolist() == [True, False, True]
    assert "no such image file" in str(failure_reasons(scores)[1])
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
    with pytest.raises(ValueError, match=r"different units: a in 'points', b in 'kB'. Allowed: normalise='batch'"):
        WeightedSum(rewards)
    assert WeightedSum(rewards, allow_mixed_units=True).unit == "mixed: points + kB"
    assert total(rewards, normalise="batch").value.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ({}, {}, "the weights are {}"),
        ({"a": (fixed([1]), 1), "a.std": (fixed([1]), 1)}, {}, "labels are .* rename one that begins with another"),
        ({"a": (fixed([1]), -1.0)}, {}, "weights are {'a': -1.0}; allowed are finite numbers from 0, one above"),
        ({"a": (fixed([1]), 1)}, {"normalise": "group"}, "normalise is 'group'; allowed are 'none', 'batch'"),
        ({"a": (fixed([1]), 1)}, {"normalise": {"b": (0, 1)}}, r"no \(mean, std\) for a"),
        ({"a": (fixed([1]), 1)}, {"normalise": {"a": (0, 0)}}, r"normalise\['a'\] is \(0, 0\); needed are finite"),
    ],
)
def test_refused(rewards, options, message):
    with pytest.raises(ValueError, match=message):
        WeightedSum(rewards, **options)


class Answering(JpegSize):
    """Returns or raises its given answer."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    def score(self, images, prompts, metadata=None):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return answer(**self.answer) if isinstance(self.answer, dict) else self.answer


def answer(value, **fields) -> Scores:
    value = torch.tensor(value)
    return Scores(**{"value": value, "valid": torch.ones(len(value), dtype=torch.bool), "unit": "kB", **fields})


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (KeyError("gpu lost"), r"Reward 'mine' raised KeyError: 'gpu lost'.* For a sample"),
        ([1.0] * 4, r"Reward 'mine' returned a list for 4 samples; it must return visalign\.interfaces\.Scores"),
        (answer([1.0] * 3), "Reward 'mine' returned 3 scores for 4 samples"),
        (
            {"value": [1.0] * 4, "parts": {"x": torch.ones(3)}},
            r"'mine' raised .* got .*'valid': \[4\], 'part x': \[3\]}",
        ),
        ({"value": [1.0] * 4, "parts": {"x": None}}, r"'mine' raised .* got .*'valid': \[4\], 'part x': 'NoneType'}"),
        ({"value": [1.0] * 4, "valid": torch.ones(4)}, r"'mine' raised .* valid of dtype torch\.float32"),
        ({"value": [1.0] * 4, "valid": torch.tensor(True)}, r"'mine' raised .* 'valid': \[\]}"),
        ({"value": [1.0] * 4, "std": [1.0] * 4, "text": ["a"]}, r"'std': 'list', .*'text': \[1\]}"),
        (RewardError("my own words"), "^my own words$"),
    ],
)
def test_a_reward_that_breaks_its_contract_is_named(response, message):
    with pytest.raises(RewardError, match=message):
        total({"mine": (Answering(response), 1.0)})
    with pytest.raises(RewardError, match=message.replace("mine", "(mine|jpeg_size)")):
        Frames(Answering(response)).score(IMAGES, PROMPTS)


@pytest.mark.parametrize("normalise", ["none", "batch"])
def test_a_valid_score_that_is_no_number_costs_its_own_sample_only(normalise):
    scores = total({"mine": (Answering(answer([1.0, math.nan, 3.0, math.inf])), 1.0)}, normalise=normalise)
    assert scores.valid.tolist() == [True, False, True, False]
    assert scores.value[[0, 2]].tolist() == ([-1, 1] if normalise == "batch" else [1, 3])
    assert failure_reasons(scores)[1] == "mine: the reward returned nan, which is no score"


def test_rounding_is_no_signal_in_a_batch():
    last = math.nextafter(0.3, 1.0)
    for values in ([0.3, 0.3, 0.3, last], [0.3, 0.3, 0.3, 0.3 + 3e-8]):
        scores = total({"a": (fixed(values), 1.0)}, normalise="batch")
        assert scores.value.tolist() == [0, 0, 0, 0]
    tiny = total({"a": (fixed([1e-6, 2e-6, 1e-6, 2e-6]), 1.0)}, normalise="batch")
    assert tiny.value.tolist() == pytest.approx([-1, 1, -1, 1], rel=1e-5)


def test_contract():
    rewards = {"small": (JpegSize(prefer="smaller"), 1.0), "again": (JpegSize(quality=20), 2.0)}
    assert len(check_reward(WeightedSum(rewards))) == 11
    over_batch = WeightedSum(rewards, normalise="batch")
    assert over_batch.capabilities.needs_batch and len(check_reward(over_batch)) == 10
    with pytest.raises(RewardError, match="a single image scores otherwise than in a batch"):
        check_reward(lambda images, **_: [float(len(images))] * len(images))


def test_images_on_a_gpu_are_moved_for_the_terms_that_do_not_take_them_there(monkeypatch: pytest.MonkeyPatch):
    moved: list[str] = []
    monkeypatch.setattr("visalign.rewards.combine.weighted_sum.on_cpu", lambda images: moved.append("here") or images)
    taking: Any = fixed([1.0, 2, 3, 4])
    other = fixed([1.0, 2, 3, 4])
    taking.capabilities = RewardCapabilities(takes_gpu_images=True)
    both = WeightedSum({"taking": (taking, 1.0), "other": (other, 1.0)})
    assert both.capabilities.takes_gpu_images
    assert both.score(IMAGES, PROMPTS).value.tolist() == [2, 4, 6, 8] and moved == ["here"]
    assert not WeightedSum({"other": (other, 1.0)}).capabilities.takes_gpu_images


def test_a_reward_that_changes_its_images_is_named_and_later_ones_never_get_them():
    class InPlace(Sharpness):
        def score(self, images, prompts, metadata=None):
            images.mul_(0.5)
            return super().score(images, prompts, metadata)

    class ByNumpy(Sharpness):
        def score(self, images, prompts, metadata=None):
            images[0].numpy()[:] /= 2
            return super().score(images, prompts, metadata)

    images = torch.rand(4, 3, 8, 8)
    with pytest.raises(UserError, match=r"'a' changes its images in place. Have it work on images.clone"):
        WeightedSum({"a": (InPlace(), 1.0)}).score(images, PROMPTS)
    with torch.inference_mode():
        kinds = [(InPlace(), images), (ByNumpy(), images), (ByNumpy(), tuple(images)), (ByNumpy(), images.clone())]
    for reward, samples in kinds:
        with pytest.raises(UserError, match="'shown' changes its images in place"):
            score_named(reward, samples, PROMPTS, name="shown")


class Greedy:
    """A class that changes the records that it is given."""

    name, unit, range, higher_is_better = "greedy", "points", (-math.inf, math.inf), True

    def score(self, samples, prompts, metadata=()):
        counts = [float(len(record.pop("include")) + record["n"].pop()) for record in metadata]
        return Scores(value=torch.tensor(counts), valid=torch.ones(len(counts), dtype=torch.bool), unit="points")


def test_a_reward_gets_records_of_its_own():
    lock = threading.Lock()  # what cannot be copied is given as it is
    records = [{"include": ["circle"], "n": [1], "lock": lock} for _ in PROMPTS]
    one: Any = Greedy()
    terms = {"a": (one, 1.0), "b": (one, 1.0)}
    sums: Any = ((WeightedSum(terms), IMAGES), (WeightedTextSum(terms), ["a"] * 4))
    for scorer, samples in sums:
        assert scorer.score(samples, PROMPTS, records).value.tolist() == [4] * 4
    assert Ensemble({"a": one, "b": one}).score(IMAGES, PROMPTS, records).value.tolist() == [2] * 4
    for form in (list, tuple):
        assert score_named(one, IMAGES, form(PROMPTS), form(records), name="greedy").value.tolist() == [2] * 4
    assert rank(IMAGES, "p", one, metadata=records[0]).valid.all()

    def greedy(prompts, images=None, completions=(), metadata=(), n=(), **_):
        if isinstance(images, torch.Tensor):
            images.zero_()
        prompts.clear()
        for record, numbers in zip(metadata or [{}] * len(n), n, strict=True):
            record.get("include", [0]).clear()
            numbers.clear()
        return [0.0] * len(n)

    FunctionReward(greedy).score(IMAGES, PROMPTS, records)
    TextFunctionReward(greedy).score(["a"] * len(PROMPTS), PROMPTS, records)
    assert IMAGES.any() and len(PROMPTS) == 4
    assert records == [{"include": ["circle"], "n": [1], "lock": lock} for _ in PROMPTS]


def test_a_term_without_which_samples_are_scored_is_said_once():
    terms = {"a": (fixed([1.0, 2, 3, 4]), 1.0), "b": (fixed([math.nan] * 4), 1.0)}
    with pytest.warns(UserWarning, match="samples are scored without a reward. b: ") as said:
        assert total(terms, allow_missing=True).value.tolist() == [1, 2, 3, 4]
    assert len(said) == 1
