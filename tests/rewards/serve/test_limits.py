# SPDX-License-Identifier: Apache-2.0
"""What a reward server accepts and refuses: bytes under way, JSON, pixels, connections, descriptors."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.servers.rewards import LEVELS, Habits, Inline, app_of, judge_request, serving
from visalign.errors import UserError
from visalign.pipelines.serve_reward import serve_reward
from visalign.rewards.serve.client import RemoteReward
from visalign.rewards.serve.limits import ByteBudget, QueueFull, RequestLimits, limits_for
from visalign.rewards.serve.server import Batcher
from visalign.rewards.serve.wire import MEDIA_TYPE, pack_request

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")
connections = pytest.importorskip("visalign.rewards.serve.connections")
SMALL: dict[str, Any] = {"max_bytes": 40_000, "max_header": 20_000, "max_total_bytes": 1_500_000}


@contextmanager
def line_to(url: str, sent: bytes = b"") -> Iterator[socket.socket]:
    """A connection that sends this and no more."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as line:
        line.sendall(sent)
        yield line


def bounded(max_connections: int, *, idle: float) -> Any:
    return partial(connections.BoundedProtocol, max_connections=max_connections, idle=idle)


def unfinished(length: int) -> bytes:
    head = f"POST /v1/score HTTP/1.1\r\nHost: a\r\nContent-Type: {MEDIA_TYPE}\r\nContent-Length: {length}\r\n"
    return head.encode() + b"\r\n\x10"


def bytes_under_way(url: str) -> int:
    return httpx.get(f"{url}/health").json()["counts"]["bytes"]


def assert_under_way(url: str, size: int) -> None:
    end = time.monotonic() + 10
    while bytes_under_way(url) != size:
        assert time.monotonic() < end, f"{bytes_under_way(url)} bytes are in progress, not {size}"
        time.sleep(0.01)


def assert_closed(line: socket.socket) -> None:
    with suppress(ConnectionResetError):
        while line.recv(4096):  # a line that stays open runs into its timeout
            pass


def test_bytes_under_way_are_bounded_and_the_client_waits_for_room():
    total = 40_000 + 40 * 20_000
    with serving(app_of(Habits(), limits=RequestLimits(**SMALL))) as url, ThreadPoolExecutor(1) as pool:
        prompt = "7" + "x" * 19_500  # each of its characters counts as 41 bytes
        with line_to(url, unfinished(40_000)):
            assert_under_way(url, total)
            sent = pack_request(judge_request(prompt))
            reply = httpx.post(f"{url}/v1/score", content=sent, headers={"Content-Type": MEDIA_TYPE})
            assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
            assert f"Busy: {total} bytes are in progress; at most 1500000 may be" in reply.json()["error"]
            given_up = RemoteReward(url, attempts=1, patience=0.0).score(LEVELS[:1], [prompt])
            assert not given_up.valid.any() and "(503)" in str(given_up.reason)
            waiting = pool.submit(RemoteReward(url, attempts=1).score, LEVELS[:1], [prompt])
            time.sleep(0.3)
            assert not waiting.done() and bytes_under_way(url) == total
        assert waiting.result().valid.all()
        assert_under_way(url, 0)


def test_json_is_charged_for_what_it_becomes_and_bounded():
    budget = ByteBudget(RequestLimits(max_total_bytes=48 << 20))
    with budget.reserve(2 << 20):
        assert budget.used == 42 << 20
        with pytest.raises(QueueFull, match="44040192 bytes are in progress"), budget.reserve(1 << 20):
            pass
    assert budget.used == 0
    with serving(app_of(Habits(), limits=RequestLimits(**SMALL))) as url:
        sent = pack_request(judge_request("1", metadata=[{"a": "x" * 21_000}]))
        reply = httpx.post(f"{url}/v1/score", content=sent, headers={"Content-Type": MEDIA_TYPE})
        assert reply.status_code == 413 and "(prompts, records); at most 20000" in reply.json()["error"]
        prompts = ["1" + "ü" * 900] * 4  # more JSON than one request may have, known before it is sent
        scores = RemoteReward(url).score(LEVELS[:4], prompts)
        assert scores.valid.all() and bytes_under_way(url) == 0


def test_what_is_judged_together_has_a_bounded_number_of_pixels():
    async def run() -> list[int]:
        judge = Habits()
        batcher = Batcher(Inline(judge), max_wait=0.05, max_pixels=130)
        await asyncio.gather(*(batcher.submit(judge_request("1")) for _ in range(5)))  # 64 pixels each
        await batcher.close()
        return judge.sizes

    assert asyncio.run(run()) == [2, 2, 1]


def test_limits_follow_from_the_memory():
    assert limits_for(64, connections=0) == RequestLimits()
    assert limits_for(64, connections=0, timeout=7.0).timeout == 7.0
    tight = limits_for(0.5, connections=0)
    assert tight.max_pixels == 1 << 21 and tight.max_total_bytes == 1 << 28 and tight.max_bytes == 1 << 27
    with pytest.raises(UserError, match=r"pixels\. Give 0\.25 GiB"):
        limits_for(0.2, connections=0)
    assert limits_for(1, connections=100).max_total_bytes == (1 << 29) - 100 * (320 << 10)
    assert limits_for(0.2, connections=0, max_pixels=5000).max_pixels == 5000


def test_silent_connections_make_room_for_those_who_ask():
    with serving(app_of(Habits()), http=bounded(8, idle=30.0)) as url, ExitStack() as open_lines:
        remote = RemoteReward(url)
        lines = [open_lines.enter_context(line_to(url, b"POST /v1")) for _ in range(30)]
        assert remote.score(LEVELS[:4], ["1", "2", "3", "4"]).valid.all()
        assert RemoteReward(url).score(LEVELS[:1], ["1"]).valid.all()
        assert_closed(lines[0])


def test_a_connection_whose_answers_are_not_read_is_closed():
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    app = Starlette(routes=[Route("/", lambda request: Response(bytes(16 << 20)))])
    with serving(app, http=bounded(1, idle=0.5)) as url, line_to(url, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"):
        assert httpx.get(f"{url}/").status_code == 503
        time.sleep(1.0)
        assert httpx.get(f"{url}/").status_code == 200


def test_a_connection_that_asks_nothing_is_closed():
    with serving(app_of(Habits()), http=bounded(8, idle=0.3)) as url:
        with line_to(url) as silent, line_to(url, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n") as active:
            assert active.recv(8) == b"HTTP/1.1"
            for line in (silent, active):
                assert_closed(line)


def test_one_too_many_is_told_to_come_again():
    with serving(app_of(Habits()), http=bounded(2, idle=30.0)) as url, ExitStack() as busy:
        for _ in range(2):
            busy.enter_context(line_to(url, unfinished(1000)))
        reply = httpx.get(f"{url}/health")
        assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
        assert reply.json() == {"error": "Busy: too many connections. Try again.", "busy": True}


def test_connections_leave_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch):
    resource = pytest.importorskip("resource")
    for limit, allowed in ((256, 64), (1 << 20, 256), (resource.RLIM_INFINITY, 256), (100, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert connections.connections_allowed(256) == allowed


@pytest.mark.parametrize("token", ["two\nlines", "sésame", "a b", "sesame\n"])
def test_a_token_that_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch, token: str):
    monkeypatch.setenv("TOKEN", token)
    with pytest.raises(UserError, match="names TOKEN, whose value holds characters that no HTTP header may"):
        serve_reward("no-such-judge", token_env="TOKEN")
    with pytest.raises(ValueError, match="token holds characters that no HTTP header may hold"):
        RemoteReward("http://127.0.0.1:9", token_env="TOKEN")
