# SPDX-License-Identifier: Apache-2.0
"""Judging beside the rollout and beside the update: same samples, same scores, no waiting."""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.training.images import ROLLOUT, Brightness, ToyPolicy, check_resume, toy_trainer
from tests.support.training.text import Letters, toy_text_trainer, weights_of
from visalign.errors import UserError
from visalign.interfaces import RewardCapabilities, Scores
from visalign.text.tool_calls import spread_scores
from visalign.training.loop.judging import RewardScorer, concatenate_scores
from visalign.training.loop.metrics import read_metrics

CORRECTED = {"changes": {"importance_sampling": {"level": "token", "mode": "truncate", "high": 2.0}}}
MAKERS = {"images": toy_trainer, "text": toy_text_trainer}
JUDGES: dict[str, Any] = {"images": Brightness, "text": Letters}


def listening(kind: str, **more: Any) -> Any:
    """A judge that keeps (thread, samples) of each call."""

    class Listening(JUDGES[kind]):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, int]] = []
            for name, value in more.items():
                setattr(self, name, value)

        def score(self, samples: Any, prompts: Any, metadata: Any = None) -> Scores:
            self.calls.append((threading.current_thread().name, len(prompts)))
            return super().score(samples, prompts, metadata)

    return Listening()


@pytest.mark.parametrize("kind", MAKERS)
def test_stretches_change_no_sample_no_score_and_no_weight(tmp_path, kind):
    at_once = MAKERS[kind](tmp_path / "a")
    at_once.train()
    judge = listening(kind)
    parts = MAKERS[kind](tmp_path / "b", reward=judge, rollout={"overlap": 3})
    parts.train()
    assert len(judge.calls) == 9 and all(name.startswith("reward") for name, _ in judge.calls)
    torch.testing.assert_close(weights_of(parts), weights_of(at_once), rtol=1e-5, atol=1e-6)
    rows = zip(read_metrics(tmp_path / "a/metrics.jsonl"), read_metrics(tmp_path / "b/metrics.jsonl"), strict=True)
    for row, other in rows:
        assert row.keys() == other.keys()
        assert other["reward_mean"] == pytest.approx(row["reward_mean"], rel=1e-5)
        assert other["reward_std"] == pytest.approx(row["reward_std"], rel=1e-5)


@pytest.mark.parametrize(
    ("capabilities", "sizes"),
    [
        (RewardCapabilities(), [10, 10, 10, 9, 9]),
        (RewardCapabilities(needs_group=True), [16, 8, 8, 8, 8]),
        (RewardCapabilities(needs_batch=True), [48]),
    ],
)
def test_a_stretch_holds_what_its_judge_compares(tmp_path, capabilities, sizes):
    judge = listening("images", capabilities=capabilities)
    toy_trainer(tmp_path, reward=judge, rollout={"overlap": 5}, run={"iterations": 1}).train()
    assert [size for _, size in judge.calls] == sizes


@pytest.mark.parametrize("kind", MAKERS)
def test_samples_made_ahead_are_of_the_weights_before_and_corrected(tmp_path, kind):
    changes = {**CORRECTED["changes"], "kl": 0.0}
    objective = {"algorithm": "grpo" if kind == "text" else "flow_grpo", "changes": changes}
    run = {"iterations": 4, "checkpoint_every": 100}
    means = []
    for staleness in (0, 1):
        folder = tmp_path / str(staleness)
        trainer = MAKERS[kind](folder, rollout={"staleness": staleness}, objective=dict(objective), run=run)
        trainer.train()
        means.append([row["reward_mean"] for row in read_metrics(folder / "metrics.jsonl")])
    fresh, stale = means
    assert stale[0] == fresh[0]
    assert stale[1] != fresh[1], "the second iteration's samples come from the first weights"
    untrained = MAKERS[kind](tmp_path / "still", objective=dict(objective), optimizer={"lr": 1e-30}, run=run)
    untrained.train()
    assert stale[1] == pytest.approx(read_metrics(tmp_path / "still/metrics.jsonl")[1]["reward_mean"], rel=1e-6)


def test_a_resumed_run_that_makes_samples_ahead_equals_one_that_went_on(tmp_path):
    make = partial(toy_trainer, rollout={"staleness": 1, "overlap": 2}, objective=CORRECTED)
    check_resume(make, tmp_path, 4, 6, checkpoint_every=2)


class Heard(ToyPolicy):
    """A policy that signals updates, and sampling beyond the first `steps` velocities."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.sampled, self.updated, self.steps = threading.Event(), threading.Event(), steps

    def velocity(self, *arguments: Any, **more: Any) -> Any:
        self.steps -= not torch.is_grad_enabled()
        if torch.is_grad_enabled():
            self.updated.set()
        elif self.steps < 0:
            self.sampled.set()
        return super().velocity(*arguments, **more)


@pytest.mark.parametrize(("how", "call"), [({"overlap": 2}, 1), ({"staleness": 1}, 2)])
def test_a_judge_is_asked_beside_the_next_samples_and_beside_the_update(tmp_path, how, call):
    """Of two stretches the first judgement ends only once the second is being sampled; of samples made ahead
    only once the update runs. If the judge blocked, both would wait for ever."""
    policy, met = Heard(ROLLOUT["steps"]), []

    class Waiting(Brightness):
        calls = 0

        def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
            self.calls += 1
            if self.calls == call:
                met.append((policy.sampled if call == 1 else policy.updated).wait(20))
            return super().score(images, prompts, metadata)

    run = {"iterations": 2, "checkpoint_every": 100}
    toy_trainer(tmp_path, policy=policy, reward=Waiting(), rollout=how, objective=CORRECTED, run=run).train()
    assert met == [True]


def test_an_evaluation_waits_for_what_is_being_judged(tmp_path):
    """Samples made ahead are judged for longer than the update takes; the evaluation asks later."""
    busy, met = threading.Event(), []

    class Slow(Brightness):
        def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
            busy.set()
            time.sleep(0.3)
            busy.clear()
            return super().score(images, prompts, metadata)

    def evaluate(_iteration: int) -> dict[str, float]:
        met.append(busy.is_set())
        return {}

    run = {"iterations": 3, "checkpoint_every": 100, "evaluate_every": 1}
    toy_trainer(
        tmp_path, reward=Slow(), rollout={"staleness": 1}, objective=CORRECTED, run=run, evaluate=evaluate
    ).train()
    assert met == [False] * 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda f: toy_trainer(f, rollout={"staleness": 1}, objective={"algorithm": "diffusion_nft"}),
            "diffusion_nft takes them for the policy's own",
        ),
        (
            lambda f: toy_text_trainer(f, rollout={"staleness": 1}, objective=CORRECTED, dynamic={}),
            "dynamic.enabled decides by scores",
        ),
    ],
)
def test_what_cannot_be_made_ahead_is_refused(tmp_path, make, message):
    with pytest.raises(UserError, match=message):
        make(tmp_path)


def test_scores_of_stretches_are_joined_with_what_one_of_them_lacks():
    one, two = torch.ones(1), torch.zeros(2)
    first = Scores(value=one, valid=one.bool(), unit="u", std=one, parts={"a": one}, reason=[None])
    second = Scores(value=two, valid=two.bool(), unit="u", parts={"b": two})
    scores = concatenate_scores([first, second])
    assert scores.value.tolist() == [1, 0, 0] and scores.valid.tolist() == [True, False, False]
    assert scores.std is not None and scores.std.isnan().tolist() == [False, True, True]
    assert {name: part.isnan().tolist() for name, part in scores.parts.items()} == {
        "a": [False, True, True],
        "b": [True, False, False],
    }
    assert scores.reason == [None, None, None] and scores.text is None
    assert RewardScorer(Brightness(), in_thread=False).chunks([0, 0, 1], 9)[2].tolist() == [2]


def test_scores_of_some_samples_are_spread_over_all() -> None:
    scores = Scores(
        value=torch.tensor([1.0, 2.0]),
        std=torch.tensor([3.0, 4.0]),
        valid=torch.tensor([True, False]),
        unit="u",
        parts={"a": torch.tensor([5.0, 6.0])},
        text=["x", "y"],
        reason=[None, "bad"],
    )
    spread = spread_scores(scores, [2, 0], 3, "too long")
    assert spread.std is not None
    columns = torch.stack([spread.value, spread.std, spread.parts["a"]])
    expected = torch.tensor([[2.0, math.nan, 1.0], [4.0, math.nan, 3.0], [6.0, math.nan, 5.0]])
    torch.testing.assert_close(columns, expected, equal_nan=True)
    assert spread.valid.tolist() == [False, False, True]
    assert (spread.text, spread.reason) == (["y", "", "x"], ["bad", "too long", None])
