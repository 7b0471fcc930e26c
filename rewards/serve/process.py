# SPDX-License-Identifier: Apache-2.0
"""What happens in a judge's own process, and how its replies are read at the other end."""

from __future__ import annotations

import json
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from visalign.interfaces import Metadata, PairwiseReward, PointwiseReward, Preferences, Scores
from visalign.rewards.base.attempt import Attempt
from visalign.rewards.base.contract import RewardError

from .wire import JudgeRequest, Pixels, WireError, as_batch, joined, unpack_request
from .wire_answer import pack_answer, unpack_answer


class JudgeRefused(RewardError):
    """The judge found fault with the request (it raised a ValueError or TypeError)."""


class JudgeFailed(RewardError):
    """The judge broke on a request that has no fault of its own."""


def judge_card(judge: PointwiseReward | PairwiseReward) -> dict[str, Any]:
    """What a client must know of a judge: JSON values.

    Args:
        judge: a reward, or one that compares.
    """
    identity = getattr(judge, "identity", None)
    card: dict[str, Any] = {
        "name": judge.name,
        "scores": isinstance(judge, PointwiseReward),
        "compares": isinstance(judge, PairwiseReward),
        "identity": None if identity is None else identity.digest,
        "needs_group": bool(getattr(judge, "needs_group", False)),
    }
    if isinstance(judge, PointwiseReward):
        low, high = judge.range
        card |= {
            "unit": judge.unit,
            "range": [str(low), str(high)],
            "higher_is_better": judge.higher_is_better,
        }
    return card


def answer_request(judge: Any, request: JudgeRequest) -> Scores | Preferences:
    """Score or compare, as the request asks.

    Raises:
        JudgeRefused: the judge cannot do that, or finds fault with the request.
        JudgeFailed: it raised anything else.
    """
    with Attempt() as judging:
        return _answered(judge, request)
    kind = JudgeRefused if isinstance(judging.error, ValueError | TypeError | JudgeRefused) else JudgeFailed
    raise kind(f"{type(judging.error).__name__}: {judging.error}") from judging.error


def _answered(judge: Any, request: JudgeRequest) -> Scores | Preferences:
    metadata: Metadata = request.metadata
    if request.right is None:
        if not isinstance(judge, PointwiseReward):
            raise JudgeRefused(f"{judge.name!r} only compares pairs of images.")
        return judge.score(_shown(request.images), request.prompts, metadata)
    if not isinstance(judge, PairwiseReward):
        raise JudgeRefused(f"{judge.name!r} scores single images and does not compare pairs.")
    return judge.compare(_shown(request.images), _shown(request.right), request.prompts, metadata)


def _shown(images: Pixels) -> Pixels:
    """Images in a form that every judge takes and reads with the channels first."""
    batch = as_batch(images)
    if isinstance(batch, Tensor):
        return batch / 255 if batch.shape[-1] == 3 else batch  # [3, H, 3] could be read either way
    return [image / 255 if image.shape[-1] == 3 else image for image in batch]


def serve_judge(link: Connection, name: str, options: dict[str, Any], threads: int | None) -> None:
    """What the process does: load the judge, then answer until the other end hangs up.

    Args:
        link: to the other end.
        name: for `load_judge`.
        options: its options.
        threads: CPU threads; None as torch chooses.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal; the server decides
    import torch

    from visalign.rewards.catalogue import load_judge

    if threads is not None:
        torch.set_num_threads(threads)
    judge: Any = None
    reply = b""
    with Attempt() as loading:
        judge = load_judge(name, **options)
        reply = json.dumps(judge_card(judge)).encode()
    try:
        link.send_bytes(_told(reply, loading))
        while loading.error is None:
            count = int.from_bytes(link.recv_bytes(), "little")
            messages = [bytearray(link.recv_bytes()) for _ in range(count)]
            with Attempt() as judging:  # one bad request must not end the process
                request = joined([unpack_request(message) for message in messages])
                reply = pack_answer(answer_request(judge, request))
            if judging.error is not None and not isinstance(judging.error, JudgeRefused):
                traceback.print_exception(judging.error)  # clients get the message, who serves gets the lines
            link.send_bytes(_told(reply, judging))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _told(reply: bytes, attempt: Attempt) -> bytes:
    """The reply, or as text what was raised, for the other end to raise."""
    if attempt.error is None:
        return b"+" + reply
    if isinstance(attempt.error, JudgeRefused):
        return b"?" + str(attempt.error).encode(errors="replace")
    if isinstance(attempt.error, JudgeFailed):
        return b"-" + str(attempt.error).encode(errors="replace")
    return b"-" + f"{type(attempt.error).__name__}: {attempt.error}".encode(errors="replace")


def read_reply(reply: bytes, size: int) -> Scores | Preferences:
    """What the process answered.

    Args:
        reply: of `serve_judge`.
        size: rows that were asked about.

    Raises:
        JudgeRefused, JudgeFailed: what the judge raised, or an answer that is none.
    """
    kind, said = reply[:1], reply[1:]
    if kind == b"?":
        raise JudgeRefused(said.decode(errors="replace"))
    if kind == b"-":
        raise JudgeFailed(said.decode(errors="replace"))
    try:
        return unpack_answer(said, size)
    except WireError as error:
        raise JudgeFailed(f"the judge's answer is unusable: {error}") from error
