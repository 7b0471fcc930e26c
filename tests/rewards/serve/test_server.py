# SPDX-License-Identifier: Apache-2.0
"""The reward server: the same scores as locally, batches across clients, deaths, limits, every refusal."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load, save

from tests.support.servers.rewards import HABITS, LEVELS, Habits, Pairs, app_of, serving
from tests.support.servers.rewards import judge_request as request
from visalign.errors import UserError
from visalign.interfaces import RewardCapabilities, Scores
from visalign.pipelines.serve_reward import serve_reward
from visalign.pipelines.shared.reward_options import parse_options
from visalign.rewards import check_reward, load_reward
from visalign.rewards.base.contract import RewardError, make_scores, read_request
from visalign.rewards.serve.client import RemoteReward
from visalign.rewards.serve.limits import RequestLimits
from visalign.rewards.serve.server import judge_server
from visalign.rewards.serve.wire import (
    FORMAT,
    MEDIA_TYPE,
    WireError,
    pack_answer,
    pack_request,
    unpack_answer,
    unpack_request,
)
from visalign.rewards.serve.worker import JudgeWorker, WorkerTimeout

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")
WIDE = torch.zeros(3, 20, 30, dtype=torch.uint8)


def headed(about: dict[str, Any]) -> bytes:
    """A safetensors file without tensors, with any JSON as its metadata."""
    header = json.dumps({"__metadata__": about}).encode()
    return len(header).to_bytes(8, "little") + header


def sent(tensors: dict[str, torch.Tensor], prompts: list[str]) -> bytes:
    """A request as another program might write it."""
    return save({name: tensor.clone() for name, tensor in tensors.items()}, headers(prompts))


def headers(prompts: list[str]) -> dict[str, str]:
    return {"format": FORMAT, "request": json.dumps({"prompts": prompts})}


@pytest.fixture(scope="module")
def habits() -> Any:
    judge = Habits()
    limits = RequestLimits(max_bytes=4000, max_rows=4, max_pixels=500, max_prompt=50)
    with serving(app_of(judge, limits=limits)) as url:
        yield url, judge


@pytest.fixture(scope="module")
def worker() -> Any:
    worker = JudgeWorker(HABITS, {"version": 7}, threads=1)
    yield worker
    worker.close()


def test_a_request_survives_the_wire():
    original = request("ä {b}", "c", metadata=[{"x": [1, None]}, None])
    back = unpack_request(pack_request(original))
    assert back.prompts == original.prompts and back.metadata == original.metadata and back.right is None
    assert all(torch.equal(a, b) for a, b in zip(back.images, original.images, strict=True))
    pair = request("a", right=[LEVELS[3]])
    back = unpack_request(pack_request(pair))
    assert back.right is not None and torch.equal(back.right[0], LEVELS[3]) and back.pixels == 128
    mixed = request("a", "b", images=[LEVELS[0], WIDE], right=list(LEVELS[:2]))
    back = unpack_request(pack_request(mixed))
    assert torch.equal(back.images[1], WIDE) and back.right is not None and torch.equal(back.right[1], LEVELS[1])
    assert back.pixels == 64 + 600 + 128


def test_the_wire_is_plain_safetensors():
    raw = bytearray(pack_request(request("a", "b")))
    assert torch.equal(load(bytes(raw))["image.1"], LEVELS[1])
    assert unpack_request(save({"image.0": LEVELS[0].clone()}, headers(["a"]))).prompts == ["a"]
    with pytest.raises(TypeError, match=r"metadata cannot travel to a server: Object of type Tensor"):
        pack_request(request("a", metadata=[{"x": LEVELS[0]}]))


@pytest.mark.parametrize("judge", [Habits(), Pairs()])
def test_an_answer_survives_the_wire(judge: Any):
    prompts = ["1", "refuse"]
    scores = isinstance(judge, Habits)
    answer = judge.score(LEVELS[:2], prompts) if scores else judge.compare(LEVELS[:2], LEVELS[2:4], prompts)
    back = unpack_answer(pack_answer(answer), 2)
    assert type(back) is type(answer) and torch.equal(back.valid, answer.valid) and back.reason == answer.reason
    main, other = (x.value if isinstance(x, Scores) else x.prob for x in (back, answer))
    torch.testing.assert_close(main, other, rtol=0, atol=0, equal_nan=True)
    assert back.parts.keys() == answer.parts.keys() and back.text == answer.text
    with pytest.raises(WireError, match="2 rows for 3 samples"):
        unpack_answer(pack_answer(answer), 3)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x80\x04pickle", "no request in the format"),
        (pack_answer(Habits().score(LEVELS[:1], ["1"])), "no request in the format"),
        (headed({"format": FORMAT, "request": '{"prompts": 1' + "0" * 5000 + "}"}), "no request in"),
        (sent({"image.0": LEVELS[0]}, ["a", "b"]), r"2 prompts need as many uint8 tensors \[3, H, W\]"),
        (sent({"left.0": LEVELS[0]}, ["a"]), "1 prompts need .* of pairs"),
        (sent({"image.0": LEVELS[0].float()}, ["a"]), "1 prompts need as many uint8"),
        (pack_request(request("a", metadata=[])), "'metadata' must be a list of 1 objects or null"),
        (pack_request(request("a", prompts=[1])), "'prompts' must be a list of strings"),
    ],
)
def test_unreadable_requests_say_why(raw: bytes, message: str):
    with pytest.raises(WireError, match=message):
        unpack_request(raw)


def test_the_client_is_a_reward_like_any_other(habits: Any):
    url, judge = habits
    remote = RemoteReward(url)
    assert (remote.name, remote.unit, remote.range) == ("habits", "levels", (-1e4, 1e4))
    assert remote.identity.weights == judge.identity.digest
    prompts = ["1", "2", "refuse", "4", "5", "6"]
    local, received = judge.score(LEVELS[:6], prompts), remote.score(LEVELS[:6], prompts)
    torch.testing.assert_close(received.value, local.value, rtol=0, atol=0, equal_nan=True)
    assert received.reason == local.reason and received.text == local.text and received.unit == local.unit
    torch.testing.assert_close(received.parts["mean"], local.parts["mean"], rtol=0, atol=0, equal_nan=True)
    check_reward(load_reward("remote", url=url), images=LEVELS[:4], prompts=["1", "2", "3", "refuse"])


def test_what_cannot_be_read_is_not_sent(habits: Any, tmp_path: Path):
    Image.new("RGB", (8, 8), "white").save(tmp_path / "white.png")
    scores = RemoteReward(habits[0]).score([tmp_path / "none.png", tmp_path / "white.png"], ["1", "1"])
    assert scores.valid.tolist() == [False, True] and float(scores.value[1]) == 265
    assert "no such image file" in str((scores.reason or [""])[0])
    nothing = RemoteReward(habits[0]).score([tmp_path / "none.png"], ["1"])
    assert not nothing.valid.any() and nothing.value.isnan().all()


def test_pairs_travel_too():
    judge = Pairs()
    with serving(app_of(judge, max_batch=2)) as url:
        remote = RemoteReward(url)
        prompts = ["a", "refuse", "b"]
        local, received = (source.compare(LEVELS[:3], LEVELS[3:6], prompts) for source in (judge, remote))
        torch.testing.assert_close(received.prob, local.prob, rtol=0, atol=0, equal_nan=True)
        assert received.log_odds is not None and received.reason == local.reason
        assert not remote.compare(["none.png"], [LEVELS[0]], ["a"]).valid.any()
        with pytest.raises(RewardError, match="only compares pairs"):
            remote.score(LEVELS[:1], ["a"])
        reply = httpx.post(f"{url}/v1/score", content=b"x", headers={"Content-Type": MEDIA_TYPE})
        assert reply.status_code == 404 and "only compares pairs: POST /v1/compare" in reply.json()["error"]


def test_requests_of_many_clients_share_batches_and_are_not_mixed():
    judge = Habits()
    with serving(app_of(judge, max_batch=16, max_wait=0.05)) as url:
        remotes = [RemoteReward(url) for _ in range(8)]
        barrier = threading.Barrier(8)

        def work(client: int) -> None:
            for turn in range(6):
                barrier.wait()
                number = 100 * client + turn
                count = 1 + (client + turn) % 3
                images = torch.full((count, 3, 4, 4), client, dtype=torch.uint8)
                scores = remotes[client].score(images, [str(number)] * count)
                assert scores.value.tolist() == pytest.approx([client + 10.0 * number] * count)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        counts = httpx.get(f"{url}/health").json()["counts"]
    assert counts["requests"] == 48 and counts["batches"] < 40 and max(judge.sizes) > 3
    assert sum(judge.sizes) == counts["images"] and max(judge.sizes) <= 16


def test_a_killed_worker_costs_no_answer(worker: JudgeWorker):
    import os
    import signal

    with serving(judge_server(worker, worker.card)) as url:
        remote = RemoteReward(url)
        for _ in range(2):
            os.kill(worker.pid or 0, signal.SIGKILL)
            assert remote.score(LEVELS[:2], ["1", "2"]).valid.all()


def test_a_slow_judge_is_ended(worker: JudgeWorker):
    with pytest.raises(WorkerTimeout, match=r"did not answer within 0\.5 seconds"):
        worker.ask(request("sleep"), timeout=0.5)
    assert isinstance(worker.ask(request("1")), Scores)
    with serving(judge_server(worker, worker.card, limits=RequestLimits(timeout=0.5))) as url:
        scores = RemoteReward(url, attempts=1).score(LEVELS[:1], ["sleep"])
    assert "(504)" in str((scores.reason or [""])[0])


def test_a_worker_says_what_it_cannot_load():
    with pytest.raises(RewardError, match=r"could not be loaded .* no reward 'nothing'"):
        JudgeWorker("nothing")


@pytest.mark.parametrize(
    ("content", "kind", "status", "message"),
    [
        (b"{}", "application/json", 415, "send application/x-safetensors"),
        (b"\x80\x04.", MEDIA_TYPE, 400, "Unreadable body"),
        (b"x" * 4001, MEDIA_TYPE, 413, "at most 4000 are allowed"),
        (pack_request(request(*"11111")), MEDIA_TYPE, 413, "5 rows; at most 4"),
        (pack_request(request("1", right=[LEVELS[1]])), MEDIA_TYPE, 400, "to /v1/compare"),
        (pack_request(request("raise")), MEDIA_TYPE, 422, "I cannot stand"),
    ],
)
def test_refusals(habits: Any, content: bytes, kind: str, status: int, message: str):
    reply = httpx.post(f"{habits[0]}/v1/score", content=content, headers={"Content-Type": kind})
    assert reply.status_code == status and message in reply.json()["error"]


def test_a_body_without_length_is_refused(habits: Any):
    reply = httpx.post(f"{habits[0]}/v1/score", content=iter([b"a", b"b"]), headers={"Content-Type": MEDIA_TYPE})
    assert reply.status_code == 411 and httpx.get(f"{habits[0]}/nothing").status_code == 404


def test_a_slow_body_is_given_up():
    import socket
    from urllib.parse import urlsplit

    with serving(app_of(Habits(), limits=RequestLimits(receive_timeout=0.2))) as url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5) as line:
            head = ("POST /v1/score HTTP/1.1", "Host: a", f"Content-Type: {MEDIA_TYPE}", "Content-Length: 100")
            line.sendall("\r\n".join((*head, "", "xx")).encode())
            assert b" 408 " in line.recv(4096).split(b"\r\n")[0]
        assert RemoteReward(url).score(LEVELS[:1], ["1"]).valid.all()


def test_the_token_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    with serving(app_of(Habits(), token="sesame")) as url:
        for token in (None, "wrong", "sésame"):
            with pytest.raises(RewardError, match=r"refused it \(401\): No or a wrong token"):
                RemoteReward(url, token=token and token.encode("ascii", "ignore").decode()).score(LEVELS[:1], ["1"])
        assert RemoteReward(url, token="sesame").score(LEVELS[:1], ["1"]).valid.all()
        monkeypatch.setenv("MY_TOKEN", "sesame")
        assert RemoteReward(url, token_env="MY_TOKEN").score(LEVELS[:1], ["1"]).valid.all()
        assert httpx.get(f"{url}/health").json()["token"] is True
        headers = {"Content-Type": MEDIA_TYPE, "Authorization": "Basic sesame"}
        reply = httpx.post(f"{url}/v1/score", content=b"", headers=headers)
        assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"


def test_a_full_queue_says_so_and_the_client_tries_again():
    judge = Habits()
    release = threading.Event()
    plain = judge.score

    def slow(*arguments: Any, **options: Any) -> Scores:
        release.wait(5)
        return plain(*arguments, **options)

    judge.score = slow  # type: ignore[method-assign]
    with serving(app_of(judge, max_batch=1, max_wait=0.0, max_waiting=1)) as url:
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(RemoteReward(url).score, LEVELS[:1], ["1"]) for _ in range(2)]
            threading.Event().wait(0.3)
            refused = RemoteReward(url, attempts=2, pause=0.01, patience=0.0).score(LEVELS[:1], ["1"])
            release.set()
            assert all(job.result().valid.all() for job in waiting)
    assert "failed (503): Busy: 1 images wait already" in str((refused.reason or [""])[0])
    assert "2 attempts" in str((refused.reason or [""])[0])


def test_no_server_and_other_servers_are_told_apart(habits: Any):
    with pytest.raises(RewardError, match=r"No reward server at http://127\.0\.0\.1:9 "):
        RemoteReward("http://127.0.0.1:9")
    from starlette.applications import Starlette

    with serving(Starlette()) as url, pytest.raises(RewardError, match="answers 404, but is no"):
        RemoteReward(url)
    with pytest.raises(ValueError, match="attempts is 0"):
        RemoteReward(habits[0], attempts=0)


def test_an_open_address_needs_a_token(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match=r"--host is 0\.0\.0\.0, which other machines can reach"):
        serve_reward("sharpness", host="0.0.0.0")
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(UserError, match="--token-env names NOT_SET, which is empty or not set"):
        serve_reward("sharpness", token_env="NOT_SET")
    for item, message in (("quality", "write NAME=VALUE"), ("a=[", "the value cannot be read")):
        with pytest.raises(UserError, match=message):
            parse_options([item])


def test_an_address_that_is_taken_is_refused_before_the_judge_is_loaded(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=rf"on 127\.0\.0\.1, port {port}: Address already in use"):
            serve_reward("no-such-judge", port=port)
    monkeypatch.setenv("TOKEN", "sesame")
    with pytest.raises(UserError, match=r"Nothing can listen on 192\.0\.2\.1"):  # an address of nobody
        serve_reward("no-such-judge", host="192.0.2.1", token_env="TOKEN")


class Groups:
    """The mean level over that of the image's group."""

    name, unit, range, higher_is_better = "groups", "levels", (-1e4, 1e4), True
    capabilities = RewardCapabilities(needs_group=True)

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        means = torch.stack([image.mean() for image in request.images.images if image is not None])
        groups = torch.tensor([record["group_id"] for record in metadata])
        of_group = (groups[:, None] == groups).float() @ means
        return make_scores(means / of_group, [None] * len(means), self.unit)


def test_a_judge_of_the_whole_batch_gets_one_request():
    judge = Groups()
    judge.capabilities = RewardCapabilities(needs_batch=True, needs_prompt=False)
    records = [{"group_id": 0}] * 9
    with serving(app_of(judge, max_batch=2)) as url:
        client = RemoteReward(url, batch_size=2)
        assert client.capabilities == judge.capabilities
        expected, scores = (reward.score(LEVELS, ["p"] * 9, records).value for reward in (judge, client))
    assert torch.allclose(scores, expected)
    with serving(app_of(judge, limits=RequestLimits(max_rows=4))) as url:
        client = RemoteReward(url)
        with pytest.raises(RewardError, match="9 do not go"):
            client.score(LEVELS, ["p"] * 9, records)


def test_groups_stay_whole_and_apart_from_those_of_other_clients():
    records = [{"group_id": n // 3} for n in range(9)]
    local = Groups().score(LEVELS, ["p"] * 9, records)
    limits = RequestLimits(max_rows=4)  # one group of three in a request
    with serving(app_of(Groups(), limits=limits, max_wait=0.2)) as url, ThreadPoolExecutor(3) as pool:
        clients = [RemoteReward(url) for _ in range(3)]
        answers = list(pool.map(lambda client: client.score(LEVELS, ["p"] * 9, records), clients))
        with pytest.raises(RewardError, match="compares images with each other, and 9 do not go"):
            clients[0].score(LEVELS, ["p"] * 9, [{"group_id": n % 3} for n in range(9)])
    assert all(torch.allclose(answer.value, local.value) for answer in answers)
    assert local.value.std() > 0.01
