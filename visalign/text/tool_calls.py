# SPDX-License-Identifier: Apache-2.0
"""A tool and its calls: how a text calls it, asking for answers side by side, what a failed call leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any

import torch

from visalign.errors import CaughtError, UserError
from visalign.interfaces import Scores

from .rollout import TextRollout

Tool = Callable[[str], str | None]
"""The text of a call -> its answer, which may say that the call was wrong; None: it is no call."""
AT_ONCE = 32
"""Calls under way at a time."""


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """A tool, and how it is called in a text."""

    tool: Tool
    name: str = "tool"
    """For messages."""
    close: str
    """A completion that has just written this has called."""
    open: str | None = None
    """A call begins behind the last of these, and each begins one call; None: at the beginning of the
    completion."""
    answer: str = "{answer}"
    """What is put into the completion; {answer} is the tool's."""
    max_calls: int = 8
    """Answers in a completion; after them `close` is a text as any other."""
    max_answer_tokens: int = 64
    """A longer answer is cut."""
    seconds: float = 10.0
    """A call that takes longer has failed."""

    def __post_init__(self) -> None:
        if not self.close or self.open == "":
            raise UserError(f"tool: open is {self.open!r} and close {self.close!r}; neither may be empty.")
        if "{answer}" not in self.answer:
            raise UserError(f"tool: answer is {self.answer!r}; it holds {{answer}}, the tool's, once.")
        for name in ("max_calls", "max_answer_tokens", "seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"tool: {name} is {getattr(self, name)}; it must be above 0 and finite.")


def without_failed(scores: Scores, rollout: TextRollout) -> Scores:
    """The scores, invalid where a tool failed, which is then the reason."""
    failed = [trace.failed for trace in rollout.tools or ()]
    if not any(failed):
        return scores
    reasons = scores.reason or [None] * len(scores)
    return replace(
        scores,
        valid=scores.valid.cpu() & torch.tensor([why is None for why in failed]),
        reason=[why or reason for why, reason in zip(failed, reasons, strict=True)],
    )


@dataclass(frozen=True)
class ToolFailure:
    """A call without an answer."""

    why: str


def ask_all(use: ToolUse, calls: Sequence[str]) -> dict[str, str | ToolFailure | None]:
    """The answers to some calls, each different one asked once, `AT_ONCE` side by side.

    A call that raises, takes longer than `use.seconds`, or answers something else than a text has failed. A
    thread cannot be stopped: what hangs is left behind, and holds the process up no longer than that.
    """
    found: dict[str, str | ToolFailure | None] = {}
    different = list(dict.fromkeys(calls))
    for start in range(0, len(different), AT_ONCE):
        part, done = different[start : start + AT_ONCE], SimpleQueue[tuple[str, Any]]()
        for call in part:
            Thread(target=_ask, args=(use, call, done), daemon=True).start()
        deadline = monotonic() + use.seconds
        for _ in part:
            try:
                call, answer = done.get(timeout=max(0.0, deadline - monotonic()))
            except Empty:
                break
            found[call] = answer
        for call in part:
            found.setdefault(call, ToolFailure(f"{use.name} gave no answer in {use.seconds:g} s"))
    return found


def _ask(use: ToolUse, call: str, done: SimpleQueue[tuple[str, Any]]) -> None:
    with CaughtError() as caught:
        answer: Any = use.tool(call)
        if answer is not None and not isinstance(answer, str):
            answer = ToolFailure(f"{use.name} answered a {type(answer).__name__}, needed is a text or None")
    if caught.error is not None:
        answer = ToolFailure(f"{use.name} raised {type(caught.error).__name__}: {caught.error}")
    if isinstance(answer, str):  # half a surrogate pair is no text to a tokenizer
        answer = answer.encode(errors="replace").decode()
    done.put((call, answer))
