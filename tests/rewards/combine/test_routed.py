# SPDX-License-Identifier: Apache-2.0
"""Rewards for some records only: their rows, their place in a sum and its scales, what is refused."""

from typing import Any

import pytest
import torch

from visalign.errors import UserError
from visalign.interfaces import NOT_FOR_SAMPLE
from visalign.pipelines.shared.parts import check_routes, load_terms, weighted_sum
from visalign.pipelines.shared.sections import RewardsConfig, RewardTerm, WeightSchedule
from visalign.rewards import FunctionReward, WeightedSum
from visalign.rewards.catalogue import load_judge, load_text_reward
from visalign.rewards.combine.routed import Routed
from visalign.rewards.combine.weighted_sum import NO_REWARD
from visalign.rewards.text.callables import TextFunctionReward
from visalign.rewards.text.combine import WeightedTextSum
from visalign.training.loop.judging import reward_columns

RECORDS = [{"task": "ocr"}, {"task": "count"}, {"task": "ocr"}, {}]
length = TextFunctionReward(len, name="length")
ones = TextFunctionReward(lambda completion: 1.0, name="ones")


def routed(reward: Any = length, **where: Any) -> Routed:
    return Routed(reward, where)


def scored(rewards: dict[str, Any], texts: list[str], **options: Any) -> Any:
    return WeightedTextSum(rewards, allow_mixed_units=True, **options).score(texts, ["p"] * len(texts), RECORDS)


def test_a_term_is_added_where_its_records_are_and_fails_nowhere_else() -> None:
    scores = scored({"a": (routed(task="ocr"), 2.0), "b": (ones, 1.0)}, ["x", "xx", "xxx", "xxxx"])
    assert scores.value.tolist() == [3, 1, 7, 1] and scores.valid.all()
    assert scores.parts["a"][[0, 2]].tolist() == [1, 3] and scores.parts["a"][[1, 3]].isnan().all()
    assert scores.parts["a.weighted"].tolist() == [2, 0, 6, 0], "one column per reward has a number for each sample"
    summed = WeightedTextSum({"a": (routed(task="ocr"), 2.0), "b": (ones, 1.0)}, allow_mixed_units=True)
    assert reward_columns(summed, scores).tolist() == [[1, 1], [0, 1], [3, 1], [0, 1]]


def test_scales_of_a_batch_are_those_of_the_rows_that_a_term_has() -> None:
    scores = scored({"a": (routed(task="ocr"), 1.0), "b": (ones, 1.0)}, ["x", "x" * 90, "xxx", ""], normalise="batch")
    assert scores.value.tolist() == [-1, 0, 1, 0]


def test_a_sample_of_no_reward_and_a_failed_one_have_no_score() -> None:
    fails = TextFunctionReward(lambda completion: float("nan"), name="fails")
    scores = scored({"a": (routed(task="ocr"), 1.0), "b": (routed(fails, task="count"), 1.0)}, ["x"] * 4)
    assert scores.reason == [None, "b: fails returned NaN for it", None, NO_REWARD]


@pytest.mark.parametrize("kind", ["image", "text"])
def test_none_of_a_function_means_not_for_this_sample(kind) -> None:
    if kind == "text":
        some: Any = TextFunctionReward(lambda prompts, completions, task: [5.0 if t == "ocr" else None for t in task])
        scores = scored({"a": (some, 1.0), "b": (ones, 1.0)}, ["x"] * 4)
    else:
        some = FunctionReward(lambda images, task: [5.0 if t == "ocr" else None for t in task], name="some")
        every = FunctionReward(lambda images: [1.0] * len(images), name="every")
        scores = WeightedSum({"a": (some, 1.0), "b": (every, 1.0)}).score(torch.rand(4, 3, 8, 8), ["p"] * 4, RECORDS)
    assert scores.value.tolist() == [6, 1, 6, 1] and scores.valid.all()


def test_images_are_routed_as_texts_are() -> None:
    terms = {"bright": RewardTerm(name="brightness", where={"task": ["ocr", "sign"]})}
    scores = load_terms(terms, load_judge, None)["bright"].score(torch.ones(4, 3, 8, 8), ["p"] * 4, RECORDS)
    assert scores.valid.tolist() == [True, False, True, False] and scores.reason[1] == NOT_FOR_SAMPLE


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"task": "orc"}, r"where is \{'task': 'orc'\}, which no record .*'ocr' \(2\), 'count' \(1\)"),
        ({"tsk": "ocr"}, "None has the field 'tsk'. Did you mean 'task'"),
        ({"task": "ocr"}, r"2 of 4 records .* no reward at .*the first is \{'task': 'count'\}"),
    ],
)
def test_a_route_that_no_record_has_is_refused(where, message) -> None:
    with pytest.raises(UserError, match=message):
        check_routes({"a": RewardTerm(where=where)}, RECORDS)


def test_a_route_goes_without_what_reads_all_samples() -> None:
    terms = {"exact_answer": RewardTerm(where={"task": "ocr"}, uncertainty="advantage")}
    with pytest.raises(UserError, match="chooses records, and its bound or uncertainty=advantage"):
        weighted_sum(RewardsConfig(terms=terms), load_terms(terms, load_text_reward, None), WeightedTextSum)


def test_records_of_a_reward_whose_weight_ends_at_0_need_another() -> None:
    fading, rising = (WeightSchedule(start=a, end=1 - a, iterations=2) for a in (1.0, 0.0))
    ocr, records = {"task": "ocr"}, RECORDS[:3]
    others = RewardTerm(where={"task": "count"})
    with pytest.raises(UserError, match=r"2 of 3 records of data.train have no reward at the end of the run, as each"):
        check_routes({"a": RewardTerm(where=ocr, weight=fading), "b": others}, records)
    with pytest.raises(UserError, match=r"1 of 3 records of data.train have no reward at the end"):
        check_routes({"a": RewardTerm(weight=fading), "b": RewardTerm(where=ocr, weight=rising)}, records)
    check_routes({"a": RewardTerm(weight=fading), "b": RewardTerm(weight=rising), "c": RewardTerm(where=ocr)}, records)
