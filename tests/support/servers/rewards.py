# SPDX-License-Identifier: Apache-2.0
"""Judges with bad habits, and a reward server on loopback, in this process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from visalign.interfaces import Preferences, Scores
from visalign.rewards.base.contract import make_scores, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.serve.wire import JudgeRequest
from visalign.rewards.serve.worker import answer_request, judge_card

HABITS = f"{__file__}:Habits"
"""Name of `Habits` for a worker."""
LEVELS = torch.randint(0, 256, (9, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


class Habits:
    """Mean level plus ten times the prompt's number; some prompts make it refuse, die, dawdle or raise."""

    name, unit, range, higher_is_better = "habits", "levels", (-1e4, 1e4), True

    def __init__(self, version: int = 1) -> None:
        self.identity = Identity(judge="habits", model="none", options={"version": version})
        self.sizes: list[int] = []

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        self.sizes.append(len(request))
        reasons, means = list(request.images.reasons), []
        for row, prompt in enumerate(request.prompts):
            if prompt == "die":
                os._exit(3)
            if prompt == "raise":
                raise ValueError("a prompt that I cannot stand")
            if prompt == "sleep":
                time.sleep(30)
            if prompt == "refuse":
                reasons[row] = "I do not judge this"
            image = request.images.images[row]
            means.append(float("nan") if image is None else float(image.mean()) * 255)
        own = torch.tensor([float(p) if p.isdigit() else 0.0 for p in request.prompts])
        means = torch.tensor(means)
        return make_scores(means + 10 * own, reasons, self.unit, parts={"mean": means}, text=list(prompts))


class Pairs:
    name = "pairs"

    def compare(self, left: Any, right: Any, prompts: Any, metadata: Any = None) -> Preferences:
        sides = [read_request(self.name, side, prompts, None).images for side in (left, right)]
        gap = torch.tensor(
            [float(a.mean() - b.mean()) for a, b in zip(*(s.images for s in sides), strict=True)]  # type: ignore[union-attr]
        )
        valid = torch.tensor([prompt != "refuse" for prompt in prompts])
        return Preferences(
            prob=torch.where(valid, gap.sigmoid(), torch.nan),
            valid=valid,
            log_odds=torch.where(valid, gap, torch.nan),
            reason=[None if ok else "I do not compare these" for ok in valid.tolist()],
        )


class Inline:
    """Answers in this process what `JudgeWorker` answers in another."""

    def __init__(self, judge: Any) -> None:
        self.judge = judge
        self.restarts = 0

    def ask(self, request: Any, timeout: float | None = None) -> Any:
        return answer_request(self.judge, request)


def judge_request(*prompts: str, **changes: Any) -> JudgeRequest:
    """A request of as many images of `LEVELS` as there are prompts."""
    fields: dict[str, Any] = {
        "images": LEVELS[: len(prompts)],
        "prompts": list(prompts),
        "metadata": [None] * len(prompts),
    }
    return JudgeRequest(**(fields | changes))


def app_of(judge: Any, **options: Any) -> Any:
    """Server of a judge in this process."""
    from visalign.rewards.serve.server import judge_server

    return judge_server(Inline(judge), judge_card(judge), **options)


@contextmanager
def serving(app: Any, port: int | None = None, **config: Any) -> Iterator[str]:
    """The server's address, with uvicorn's settings; it is stopped at the end."""
    import uvicorn

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own: int = port or probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=own, log_level="critical", **config))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        if time.monotonic() > deadline:
            raise TimeoutError("the server did not start")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{own}"
    finally:
        server.should_exit = True
        thread.join(10)
