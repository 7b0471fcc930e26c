# SPDX-License-Identifier: Apache-2.0
"""Weights of rewards that change over a run: their values, both wings, a resumed run, what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.support.training.images import Brightness, Loud, check_resume, toy_trainer
from tests.support.training.text import Letters, toy_text_trainer
from visalign.config import load_config
from visalign.errors import UserError
from visalign.pipelines.shared.parts import weighted_sum
from visalign.pipelines.shared.sections import RewardsConfig, RewardTerm, WeightSchedule
from visalign.pipelines.text.job import TextGRPOConfig
from visalign.pipelines.text.sample import TextSampleConfig
from visalign.pipelines.text.sample import plan as plan_samples
from visalign.rewards import WeightedSum
from visalign.rewards.text.combine import WeightedTextSum
from visalign.rewards.text.format import Refusal
from visalign.training.loop.judging import reward_at, reward_columns, reward_weights

FADING = {"start": 1.0, "end": 0.2, "iterations": 4}


@pytest.mark.parametrize(
    ("shape", "weights"),
    [("linear", [1, 0.8, 0.6, 0.4, 0.2, 0.2]), ("cosine", [1, 0.882843, 0.6, 0.317157, 0.2, 0.2])],
)
def test_a_weight_goes_from_its_start_to_its_end(shape: Any, weights: list[float]) -> None:
    schedule = WeightSchedule(**FADING, shape=shape)
    assert [schedule.at(i) for i in range(6)] == pytest.approx(weights, abs=1e-6)


def _sum(kind: Any, a: Any, b: Any, weight: Any) -> Any:
    terms = {"a": RewardTerm(), "b": RewardTerm(weight=WeightSchedule(**weight))}
    return weighted_sum(RewardsConfig(terms=terms, allow_mixed_units=True), {"a": a, "b": b}, kind)


def test_the_sum_and_its_columns_have_the_weights_of_their_iteration() -> None:
    reward = _sum(WeightedTextSum, Letters("a"), Letters("e"), {"start": 0.5, "end": 0.0, "iterations": 2})
    texts = ["ae", "ee"]
    for iteration, weight in enumerate([0.5, 0.25, 0.0]):
        now = reward_at(reward, iteration)
        scores = now.score(texts, ["?"] * 2)
        assert scores.value.tolist() == pytest.approx([0.5 + weight / 2, weight])
        assert reward_weights(now) == {"a": 1.0, "b": weight} and scores.parts["b.weight"].tolist() == [weight] * 2
        assert reward_columns(now, scores).tolist() == [[0.5, 0.5 * (weight > 0)], [0, 1.0 * (weight > 0)]]


@pytest.mark.parametrize("allow_missing", [False, True])
def test_a_schedule_at_its_zero_drops_no_sample(allow_missing: bool) -> None:
    """The record of "b" fails; at its weight of 0 the sum is that of "a", and where "a" fails there is none."""
    schedule = {"b": lambda iteration: 1.0 - min(iteration, 1)}
    rewards = {"a": (Refusal("a"), 1.0), "b": (Refusal("b", name="b"), 1.0)}
    reward = WeightedTextSum(rewards, schedules=schedule, allow_missing=allow_missing)
    records = [{"a": False, "b": "?"}, {"a": "?", "b": False}]
    for iteration, valid in enumerate([[allow_missing] * 2, [True, False]]):
        now = reward_at(reward, iteration)
        scores = now.score(["yes", "yes"], ["?"] * 2, records)
        assert scores.valid.tolist() == valid
    assert scores.value[0] == 1 and reward_columns(now, scores)[0].tolist() == [1, 0]


@pytest.mark.parametrize("algorithm", ["grpo", "gdpo"])
def test_a_resumed_text_run_has_the_weights_of_an_uninterrupted_one(algorithm: str, tmp_path: Any) -> None:
    reward = _sum(WeightedTextSum, Letters("a"), Letters("e"), FADING)
    more = {"dynamic": {}} if algorithm == "gdpo" else {}
    outcome, _ = check_resume(partial(toy_text_trainer, algorithm=algorithm, reward=reward, **more), tmp_path, 1, 3)
    assert [row["reward_part/b.weight"] for row in outcome[2]] == pytest.approx([1, 0.8, 0.6])


@pytest.mark.parametrize("algorithm", ["flow_grpo", "diffusion_nft", "draft"])
def test_image_trainers_read_the_same_setting(algorithm: str, tmp_path: Any) -> None:
    ends = []
    for weight in ({**FADING, "iterations": 1}, {"start": 1.0, "end": 1.0, "iterations": 1}):
        torch.manual_seed(0)
        reward = _sum(WeightedSum, Brightness(), Loud(), weight)
        trainer = toy_trainer(tmp_path, reward=reward, objective={"algorithm": algorithm})
        for _ in range(2):
            trainer.iterate()
        ends.append(torch.cat([p.detach().flatten() for _, p in trainer.weights.named]))
    assert not torch.equal(*ends)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            TextGRPOConfig,
            ["rewards.terms={task_answer: {weight: {iterations: 0}}}"],
            r"weight.iterations' in .* greater than or equal to 1",
        ),
        (
            TextGRPOConfig,
            ["rewards.terms={task_answer: {weight: {start: 0, end: 0, iterations: 3}}}"],
            "rewards.terms: a weight's start and end are 0",
        ),
        (TextGRPOConfig, ["rewards.terms={task_answer: {bound: 1, weight: {iterations: 3}}}"], "constant weight"),
        (TextGRPOConfig, ["rewards.terms={task_answer: {weight: {iterations: 3}}}"], "leave no term at their"),
        (TextSampleConfig, ["rewards.terms={task_answer: {weight: {end: 2, iterations: 3}}}"], "nothing is trained"),
    ],
)
def test_schedules_that_cannot_be_are_refused(config: Any, changes: list[str], message: str) -> None:
    from visalign.pipelines.text.parts import prepare

    with pytest.raises((UserError, ValueError), match=message):
        loaded: Any = load_config(config, None, [*changes, "data.size=20"])
        (plan_samples if config is TextSampleConfig else prepare)(loaded)


def test_marble_chooses_its_weights_itself(tmp_path: Any) -> None:
    reward = _sum(WeightedSum, Brightness(), Loud(), FADING)
    with pytest.raises(UserError, match=r"balance_every chooses .* Give numbers"):
        toy_trainer(tmp_path, reward=reward, objective={"balance_every": 1})


def test_a_round_that_is_sampled_ahead_has_the_weights_of_its_iteration(tmp_path: Any) -> None:
    ends, ahead = {"start": 0.0, "end": 1.0, "iterations": 3}, {"staleness": 1}
    text = _sum(WeightedTextSum, Letters("a"), Letters("e"), ends)
    images = _sum(WeightedSum, Brightness(), Loud(), ends)
    objective = {"changes": {"importance_sampling": {"level": "token", "mode": "truncate", "high": 2.0}}}
    trainers = [
        toy_text_trainer(tmp_path / "text", reward=text, rollout=ahead, objective=objective),
        toy_trainer(tmp_path / "images", reward=images, rollout=ahead, objective=dict(objective)),
    ]
    for trainer in trainers:
        rows = [trainer.iterate() for _ in range(4)]
        assert [row["reward_part/b.weight"] for row in rows] == pytest.approx([0, 1 / 3, 2 / 3, 1], abs=1e-6)
