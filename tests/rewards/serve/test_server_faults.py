# SPDX-License-Identifier: Apache-2.0
"""Faults of a reward server: lost clients, broken judges and workers, nonsense answers, its end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.support.forks import Fork, visalign
from tests.support.servers.rewards import HABITS, LEVELS, Habits, Inline, app_of, serving
from tests.support.servers.rewards import judge_request as request
from visalign.interfaces import Scores
from visalign.rewards.base.identity import Identity
from visalign.rewards.serve import worker as judge_worker
from visalign.rewards.serve.client import RemoteReward
from visalign.rewards.serve.limits import RequestLimits
from visalign.rewards.serve.server import judge_server
from visalign.rewards.serve.wire import MEDIA_TYPE, JudgeRequest, pack_answer, pack_request, unpack_request
from visalign.rewards.serve.worker import JudgeWorker, WorkerDied, WorkerUnavailable, judge_card

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")


def post(url: str, query: JudgeRequest) -> Any:
    return httpx.post(f"{url}/v1/score", content=pack_request(query), headers={"Content-Type": MEDIA_TYPE}, timeout=99)


def assert_soon(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def reason_of(scores: Scores) -> str:
    return str((scores.reason or [""])[0])


class Gate(Habits):
    """Waits at the prompt "wait" until it is let through, and notes every prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()
        self.seen: list[str] = []

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
        self.seen += prompts
        if "wait" in prompts:
            self.begun.set()
            assert self.go.wait(30)
        return super().score(images, prompts, metadata)


def begin(url: str, query: JudgeRequest) -> socket.socket:
    """A request sent whole, without waiting for its answer."""
    parts, body = urlsplit(url), pack_request(query)
    head = f"POST /v1/score HTTP/1.1\r\nHost: a\r\nContent-Type: {MEDIA_TYPE}\r\nContent-Length: {len(body)}"
    line = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)
    line.sendall(head.encode() + b"\r\n\r\n" + body)
    return line


def test_a_client_that_left_while_its_request_waited_is_not_judged():
    gate = Gate()
    app = app_of(gate, max_batch=8, max_wait=0.0)
    with serving(app) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(RemoteReward(url).score, LEVELS[:1], ["wait"])
        assert gate.begun.wait(10)
        leaving = begin(url, request("7"))
        assert_soon(lambda: app.state.batcher.waiting == 1)
        staying = pool.submit(RemoteReward(url).score, LEVELS[:2], ["8", "9"])
        assert_soon(lambda: app.state.batcher.waiting == 3)
        leaving.close()
        assert_soon(lambda: app.state.batcher.waiting == 2)
        gate.go.set()
        expected = Habits().score(LEVELS[:2], ["8", "9"]).value
        assert first.result().valid.all() and torch.equal(staying.result().value, expected)
    assert gate.seen == ["wait", "8", "9"]
    assert app.state.batcher.counts["given_up"] == 1


class Unstable(JudgeWorker):
    """A worker without a process, which dies at the prompt "die"; `next_card` is that of a restart."""

    def __init__(self) -> None:
        self.next_card: Any = judge_card(Habits())
        self.prompts: Any = ()
        super().__init__("stub")

    def _start(self) -> Any:
        self._process: Any = SimpleNamespace(exitcode=3, kill=lambda: None, join=lambda timeout=None: None)
        self._link: Any = SimpleNamespace(send=lambda count: None, send_bytes=self._read, close=lambda: None)
        self._link.poll, self._link.recv = lambda timeout: True, self._answer
        return self.next_card

    def _read(self, raw: bytes) -> None:
        self.prompts = unpack_request(raw).prompts

    def _answer(self) -> bytes:
        if "die" in self.prompts:
            raise EOFError
        return pack_answer(Habits().score(LEVELS[: len(self.prompts)], self.prompts))


def test_a_judge_that_dies_again_and_again_is_given_a_rest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judge_worker, "_RESTARTS_AT_ONCE", 1)
    worker = Unstable()
    with pytest.raises(WorkerDied, match=r"the judge's process ended \(exit code 3\)"):
        worker.ask(request("die"))
    with pytest.raises(WorkerDied, match=r"\(exit code 3\), 2 times in a row"):
        worker.ask(request("die"))
    with pytest.raises(WorkerUnavailable, match="2 times in a row") as unavailable:
        worker.ask(request("1"))
    assert 0 < unavailable.value.retry_after <= 1 and worker.restarts == 1
    worker._retry_at = 0.0
    assert worker.ask(request("1")).valid.all() and worker.down is None and worker._failures == 0
    worker.close()
    with pytest.raises(WorkerUnavailable, match="the server is ending"):
        worker.ask(request("1"))


def test_a_worker_that_dies_is_replaced_and_harms_nobody():
    worker = Unstable()
    with serving(judge_server(worker, worker.card, max_wait=0.2)) as url:
        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(RemoteReward(url).score, LEVELS[:1], [p]) for p in ("1", "die", "3")]
        scores = [job.result() for job in jobs]
    assert [bool(answer.valid[0]) for answer in scores] == [True, False, True]
    assert "the judge's process ended (exit code 3)" in reason_of(scores[1]) and worker.restarts >= 2


def test_a_worker_whose_files_changed_meanwhile_is_not_mixed_with_the_old_one():
    worker = Unstable()
    worker.next_card = {"name": "habits", "identity": "of other weights"}
    with pytest.raises(WorkerDied):
        worker.ask(request("die"))
    with pytest.raises(WorkerUnavailable, match="'habits' is another version now"):
        worker.ask(request("1"))
    assert worker.down is not None and "another version" in worker.down


_RAISED = {"RuntimeError": RuntimeError, "ValueError": ValueError}


class Odd:
    """Raises or answers what its prompt says."""

    name, unit, range, higher_is_better = "odd", "levels", (0.0, 1.0), True
    identity = Identity(judge="odd", model="none")

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Any:
        value = torch.full((len(prompts),), 0.5)
        if prompts[0] == "nan":
            value[0] = float("nan")
        if prompts[0] == "short":
            value = value[:-1]
        if prompts[0] == "none":
            return None
        if prompts[0] in _RAISED:
            raise _RAISED[prompts[0]]("my fault")
        return Scores(value=value, valid=torch.ones(len(value), dtype=torch.bool), unit=self.unit)


@pytest.fixture(scope="module")
def odd() -> Any:
    worker = JudgeWorker(f"{Path(__file__)}:Odd", threads=1)
    with serving(judge_server(worker, worker.card, max_wait=0.0)) as url:
        yield url, worker
    worker.close()


@pytest.mark.parametrize(
    ("prompt", "status", "message"),
    [
        ("ValueError", 422, "The judge refused the request: ValueError: my fault"),
        ("RuntimeError", 500, "The judge broke on the request: RuntimeError: my fault"),
        ("none", 500, "The judge broke on the request: AttributeError"),
        ("short", 500, "answer is unusable: an answer in the format visalign-judge-3 (ValueError: 1 rows for 2"),
    ],
)
def test_statuses_tell_whose_fault_it_is(odd: Any, prompt: str, status: int, message: str):
    reply = post(odd[0], request(prompt, "b"))
    assert reply.status_code == status and message in reply.json()["error"]
    masked = RemoteReward(odd[0]).score(LEVELS[:2], [prompt, "b"])
    assert not masked.valid.any() and f"({status})" in reason_of(masked)


def test_a_valid_nan_is_no_score(odd: Any):
    scores = RemoteReward(odd[0]).score(LEVELS[:2], ["nan", "b"])
    assert scores.valid.tolist() == [False, True] and float(scores.value[1]) == 0.5
    assert scores.value[0].isnan() and reason_of(scores) == "the judge's answer is nan, which is no score"


def test_what_is_too_large_for_the_server_is_invalid_and_its_neighbours_are_judged():
    limits = RequestLimits(max_pixels=500, max_prompt=50)
    images = [LEVELS[0], torch.zeros(3, 20, 30, dtype=torch.uint8), LEVELS[2], LEVELS[3]]
    prompts = ["1", "2", "x" * 51, "4"]
    with serving(app_of(Habits(), limits=limits)) as url:
        scores = RemoteReward(url, attempts=1).score(images, prompts)
    assert scores.valid.tolist() == [True, False, False, True] and scores.reason is not None
    assert "600 pixels; at most 500" in str(scores.reason[1])
    assert "51 characters in a prompt; at most 50" in str(scores.reason[2])
    own = Habits().score([images[0], images[3]], ["1", "4"])
    assert torch.equal(scores.value[[0, 3]], own.value)


def test_retry_after_is_obeyed(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    judge = Inline(Habits())

    def none(query: Any, timeout: float | None = None) -> Any:
        raise WorkerUnavailable("it is being mended", 7.2)

    judge.ask = none  # type: ignore[method-assign]
    with serving(judge_server(judge, judge_card(Habits()))) as url:
        remote = RemoteReward(url, attempts=2, pause=0.01)
        monkeypatch.setattr("visalign.rewards.serve.client.time.sleep", slept.append)
        scores = remote.score(LEVELS[:1], ["1"])
    assert (
        slept[0] == pytest.approx(8.0, abs=0.5)
        and "it is being mended" in reason_of(scores)
        and "2 attempts" in reason_of(scores)
    )


def test_an_ending_server_answers_what_it_judges_and_refuses_what_waits():
    gate = Gate()
    app = app_of(gate, max_batch=1, max_wait=0.0)
    with serving(app) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, url, request("wait"))
        assert gate.begun.wait(10)
        second = pool.submit(post, url, request("2"))
        assert_soon(lambda: app.state.batcher.waiting == 1)
        app.state.stop()
        assert second.result().status_code == 503 and "the server is ending" in second.result().json()["error"]
        assert post(url, request("3")).status_code == 503
        gate.go.set()
        assert first.result().status_code == 200
    assert gate.seen == ["wait"]


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is a signal to a group of processes")
def test_ctrl_c_twice_at_the_command_line():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Fork(visalign, "serve-reward", HABITS, "--threads", "1", "--max-batch", "1", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    try:
        assert_soon(lambda: _answers(url), 120)
        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(RemoteReward(url, attempts=1).score, LEVELS[:1], ["sleep"])
            assert_soon(lambda: httpx.get(f"{url}/health").json()["counts"]["batches"] == 1)
            waiting = pool.submit(RemoteReward(url, attempts=1).score, LEVELS[:1], ["2"])
            assert_soon(lambda: httpx.get(f"{url}/health").json()["counts"]["waiting"] == 1)
            begun = time.monotonic()
            os.killpg(server.pid, signal.SIGINT)
            assert "failed (503)" in reason_of(waiting.result()), "the first refuses what waits"
            assert not running.done()
            os.killpg(server.pid, signal.SIGINT)
            assert not running.result().valid[0], "the second ends the judge"
            code, output = server.wait(20)
        assert code is not None and "Traceback" not in output and time.monotonic() - begun < 20
        assert f"Computing: {HABITS} on cpu." in output
    finally:
        server.process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
