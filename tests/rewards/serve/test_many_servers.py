# SPDX-License-Identifier: Apache-2.0
"""Several servers of one judge: the scores of one, the work of all, and what happens when some are gone."""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.support.servers.rewards import LEVELS, Habits, serving
from tests.support.servers.rewards import app_of as served
from visalign.interfaces import Scores
from visalign.pipelines.shared.reward_options import parse_options
from visalign.rewards import load_reward
from visalign.rewards.base.contract import RewardError
from visalign.rewards.serve.client import RemoteReward
from visalign.rewards.serve.limits import QueueFull, RequestLimits

pytest.importorskip("starlette")
PROMPTS = [*"12345678", "refuse"]


def app_of(judge: Any, **options: Any) -> Any:
    return served(judge, max_batch=2, max_wait=0.0, **options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def three() -> Iterator[tuple[list[str], list[Habits]]]:
    judges = [Habits() for _ in range(3)]
    with ExitStack() as running:
        yield [running.enter_context(serving(app_of(judge))) for judge in judges], judges


def assert_equal(scores: Scores, expected: Scores) -> None:
    torch.testing.assert_close(scores.value, expected.value, rtol=0, atol=0, equal_nan=True)
    assert scores.reason == expected.reason and scores.text == expected.text


def test_three_servers_give_the_scores_of_one(three: Any):
    urls, judges = three
    expected = RemoteReward(urls[0]).score(LEVELS, PROMPTS)
    begun = threading.Barrier(3)  # every server has a request under way at once, or this never ends
    for judge in judges:
        plain, judge.sizes = judge.score, []

        def first_together(*arguments: Any, judge: Habits = judge, plain: Any = plain) -> Scores:
            if not judge.sizes:
                begun.wait(20)
            return plain(*arguments)

        judge.score = first_together  # type: ignore[method-assign]
    remote = RemoteReward(urls)
    assert_equal(remote.score(LEVELS, PROMPTS), expected)
    assert sum(map(len, (judge.sizes for judge in judges))) == 5 and all(judge.sizes for judge in judges)
    assert remote.identity == RemoteReward(urls[1]).identity, "a cache knows no addresses"


def test_lists_are_options_like_any_other(three: Any):
    urls, _ = three
    expected = RemoteReward(urls[0]).score(LEVELS, PROMPTS)
    for option in (f"url=[{urls[0]}, {urls[1]}/]", f"url={urls[0]},{urls[1]}"):
        reward = load_reward("remote", **parse_options([option]))
        assert isinstance(reward, RemoteReward) and reward.url == f"{urls[0]}, {urls[1]}"
        assert_equal(reward.score(LEVELS, PROMPTS), expected)
    for empty in ("", " , ", []):
        with pytest.raises(ValueError, match="give the address of a server, or a list of them"):
            RemoteReward(empty)
    with pytest.raises(ValueError, match=r"timeout is 0 and pause 0\.25; allowed are seconds above 0"):
        RemoteReward(urls, timeout=0)


def test_every_server_answers_with_the_same_judge_or_is_refused_by_name(three: Any):
    urls, _ = three
    dead = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RewardError, match=rf"No reward server at {dead} .*visalign serve-reward"):
        RemoteReward([urls[0], dead], pause=0.01)
    with serving(app_of(Habits(version=2))) as other:
        with pytest.raises(RewardError, match=rf"{other} serves 'habits' \(identity \w+\), .* Leave one of them out"):
            RemoteReward([urls[0], other])


def test_a_server_that_goes_meanwhile_loses_nothing(three: Any):
    urls, judges = three
    expected = RemoteReward(urls[0]).score(LEVELS, PROMPTS)
    with ExitStack() as leaving:
        stopped = leaving.enter_context(serving(app_of(Habits())))
        remote = RemoteReward([stopped, urls[0]], pause=0.01)
        leaving.close()
        with pytest.warns(UserWarning, match=rf"{stopped}: the reward server did not answer .* Other servers"):
            assert_equal(remote.score(LEVELS, PROMPTS), expected)
    assert judges[0].sizes


def test_requests_fit_the_smallest_limits(three: Any):
    urls, _ = three
    with serving(served(Habits(), max_batch=8, max_wait=0.0, limits=RequestLimits(max_rows=1))) as small:
        remote = RemoteReward([urls[0], small])
        assert remote._max_rows == 1 and remote.score(LEVELS, PROMPTS).valid.sum() == 8


def test_a_server_that_changes_its_judge_ends_the_call(three: Any):
    urls, _ = three
    port = free_port()
    with serving(app_of(Habits()), port=port):
        remote = RemoteReward([f"http://127.0.0.1:{port}", urls[0]], pause=0.01)
    with serving(app_of(Habits(version=2)), port=port):
        with pytest.raises(RewardError, match="serves another judge, or version"):
            remote.score(LEVELS, PROMPTS)


def test_a_busy_server_is_no_failure_and_others_are_asked(three: Any):
    urls, judges = three
    full = app_of(Habits())

    async def submit(request: Any) -> Any:
        raise QueueFull("all is full")

    full.state.batcher.submit = submit
    with serving(full) as busy, warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = RemoteReward([busy, urls[0]], attempts=1).score(LEVELS, PROMPTS)
        assert scores.valid.sum() == 8 and sum(judges[0].sizes) == 9
        single = RemoteReward(busy, attempts=1, patience=0.0).score(LEVELS[:1], ["1"])
    assert single.reason == ["the reward server failed (503): Busy: all is full. Try again.; 1 attempts"]
