# SPDX-License-Identifier: Apache-2.0
"""Several servers of one judge: the scores of one, the work of all, and what happens when some are gone."""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.servers.rewards import Habits, Inline, serving
from visalign.interfaces import Scores
from visalign.pipelines.shared.reward_options import parse_options
from visalign.rewards import load_reward
from visalign.rewards.base.contract import RewardError
from visalign.rewards.serve.client import RemoteReward
from visalign.rewards.serve.limits import QueueFull, RequestLimits
from visalign.rewards.serve.server import judge_server
from visalign.rewards.serve.worker import judge_card

pytest.importorskip("starlette")
LEVELS = torch.randint(0, 256, (9, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
PROMPTS = [*"12345678", "refuse"]


def app_of(judge: Any, **options: Any) -> Any:
    return judge_server(Inline(judge), judge_card(judge), max_batch=2, max_wait=0.0, **options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def three() -> Iterator[tuple[list[str], list[Habits]]]:
    judges = [Habits() for _ in range(3)]
    with ExitStack() as running:
        yield [running.enter_context(serving(app_of(judge))) for judge in judges], judges


def assert_equal(found: Scores, expected: Scores) -> None:
    torch.testing.assert_close(found.value, expected.value, rtol=0, atol=0, equal_nan=True)
    assert found.reason == expected.reason and found.text == expected.text


def test_three_servers_give_the_scores_of_one(three: Any):
    urls, judges = three
    expected = RemoteReward(urls[0]).score(LEVELS, PROMPTS)
    begun = threading.Barrier(3)  # every server has a request under way at once, or this never ends
    for judge in judges:
        plain, judge.sizes = judge.score, []

        def first_together(*given: Any, judge: Habits = judge, plain: Any = plain) -> Scores:
            if not judge.sizes:
                begun.wait(20)
            return plain(*given)

        judge.score = first_together  # type: ignore[method-assign]
    remote = RemoteReward(urls)
    assert_equal(remote.score(LEVELS, PROMPTS), expected)
    assert sum(map(len, (judge.sizes for judge in judges))) == 5 and all(judge.sizes for judge in judges)
    assert remote.identity == RemoteReward(urls[1]).identity, "a cache knows no addresses"


def test_lists_are_options_like_any_other(three: Any):
    urls, _ = three
    expected = RemoteReward(urls[0]).score(LEVELS, PROMPTS)
    for said in (f"url=[{urls[0]}, {urls[1]}/]", f"url={urls[0]},{urls[1]}"):
        reward = load_reward("remote", **parse_options([said]))
        assert isinstance(reward, RemoteReward) and reward.url == f"{urls[0]}, {urls[1]}"
        assert_equal(reward.score(LEVELS, PROMPTS), expected)
    for empty in ("", " , ", []):
        with pytest.raises(ValueError, match="give the address of a server, or a list of them"):
            RemoteReward(empty)


def test_half_of_the_servers_dead_is_a_warning_with_their_names(three: Any):
    urls, _ = three
    dead = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    expected = RemoteReward(urls[0]).score(LEVELS, PROMPTS)
    with pytest.warns(UserWarning, match="2 of 4 reward servers do not answer") as told:
        remote = RemoteReward([dead[0], urls[0], dead[1], urls[1]])
    assert all(f"No reward server at {url}" in str(told[0].message) for url in dead)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert_equal(remote.score(LEVELS, PROMPTS), expected)
    with pytest.raises(RewardError, match=rf"at {dead[0]} .*at {dead[1]} .*visalign serve-reward"):
        RemoteReward(dead)


def test_a_server_of_another_judge_is_refused_by_name(three: Any):
    urls, _ = three
    with serving(app_of(Habits(version=2))) as other:
        with pytest.raises(RewardError, match=r"serves 'habits' \(identity \w+\), and another") as found:
            RemoteReward([urls[0], other])
    assert other in str(found.value) and "Leave it out" in str(found.value)


def test_a_server_that_goes_meanwhile_loses_nothing(three: Any):
    urls, judges = three
    expected = RemoteReward(urls[0]).score(LEVELS, PROMPTS)
    with ExitStack() as leaving:
        gone = leaving.enter_context(serving(app_of(Habits())))
        remote = RemoteReward([gone, urls[0]], pause=0.01)
        leaving.close()
        with pytest.warns(UserWarning, match=rf"{gone}: the reward server did not answer .* Other servers"):
            assert_equal(remote.score(LEVELS, PROMPTS), expected)
    assert judges[0].sizes


def test_a_server_that_comes_late_is_met_before_it_is_asked(three: Any):
    urls, _ = three
    port = free_port()
    with pytest.warns(UserWarning, match="1 of 2 reward servers do not answer"):
        remote = RemoteReward([f"http://127.0.0.1:{port}", urls[0]], pause=0.01)
    late = Habits()
    with serving(app_of(late, limits=RequestLimits(max_rows=1)), port=port):
        while not late.sizes:
            assert remote.score(LEVELS, PROMPTS).valid.sum() == 8
        assert remote._sizes["max_rows"] == 1
    with pytest.warns(UserWarning, match="1 of 2 reward servers do not answer"):
        remote = RemoteReward([f"http://127.0.0.1:{port}", urls[0]], pause=0.01)
    other = Habits(version=2)
    with serving(app_of(other), port=port):
        with pytest.warns(UserWarning, match=f"127.0.0.1:{port} serves 'habits' .* Other servers take its"):
            while not remote._servers[0].is_other:
                assert remote.score(LEVELS, PROMPTS).valid.sum() == 8
    assert not other.sizes


def test_a_server_that_changes_its_judge_is_left_out_while_another_is_there(three: Any):
    urls, _ = three
    expected = RemoteReward(urls[0]).score(LEVELS, PROMPTS)
    port = free_port()
    with serving(app_of(Habits()), port=port):
        remote = RemoteReward([f"http://127.0.0.1:{port}", urls[0]], pause=0.01)
    other = Habits(version=2)
    with serving(app_of(other), port=port), pytest.warns(UserWarning, match="serves another judge"):
        while not other.sizes:
            assert_equal(remote.score(LEVELS, PROMPTS), expected)
    with serving(app_of(Habits(version=2)), port=port):
        alone = RemoteReward(urls[0])
        alone.identity = replace(alone.identity, weights="of before")
        with pytest.raises(RewardError, match="serves another judge"):
            alone.score(LEVELS, PROMPTS)


def test_a_busy_server_is_no_failure_and_others_are_asked(three: Any):
    urls, judges = three
    full = app_of(Habits())

    async def submit(asked: Any) -> Any:
        raise QueueFull("all is full")

    full.state.batcher.submit = submit
    with serving(full) as busy, warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = RemoteReward([busy, urls[0]], attempts=1).score(LEVELS, PROMPTS)
        assert scores.valid.sum() == 8 and sum(judges[0].sizes) == 9
        alone = RemoteReward(busy, attempts=1, patience=0.0).score(LEVELS[:1], ["1"])
    assert alone.reason == ["the reward server failed (503): Busy: all is full. Try again.; 1 attempts"]
