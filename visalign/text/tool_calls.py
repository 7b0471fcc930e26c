# SPDX-License-Identifier: Apache-2.0
"""Tool calls: how a text calls a tool, asking for answers in parallel, scores of failed calls."""

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
"""Text of a call -> its answer, which may state that the call was wrong; None: it is no call."""
PARALLEL = 32
"""Calls in progress at a time."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Format of a tool's calls in a text, and limits."""

    open: str | None = None
    """Text before a call, for example <call>; each begins one call. null: the beginning of the completion."""
    close: str = " = "
    """Text that ends a call, for example </call>."""
    answer: str = "{answer}"
    """Text put into the completion: {answer} is the tool's."""
    max_calls: int = 8
    """Answers in a completion; after them `close` is ordinary text."""
    max_answer_tokens: int = 64
    """Tokens of an answer; a longer one is cut."""
    seconds: float = 10.0
    """Time limit of one call; a slower one has failed."""

    def __post_init__(self) -> None:
        rules = {
            "open": (self.open != "", "null, or not empty"),
            "close": (bool(self.close), "not empty"),
            "answer": ("{answer}" in self.answer, "a text with {answer} in it"),
            "max_calls": (self.max_calls > 0, "above 0"),
            "max_answer_tokens": (self.max_answer_tokens > 0, "above 0"),
            "seconds": (0 < self.seconds < math.inf, "above 0 and finite"),
        }
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise UserError(f"tool: {name} is {getattr(self, name)!r}; it must be {allowed}.")


@dataclass(frozen=True, kw_only=True)
class ToolUse(ToolFormat):
    """A tool, and how it is called in a text."""

    tool: Tool
    name: str = "tool"
    """Name in messages."""


def without_failed(scores: Scores, rollout: TextRollout) -> Scores:
    """Mark scores invalid where a tool failed, with its reason."""
    failures = [trace.failed for trace in rollout.tools or ()]
    if not any(failures):
        return scores
    reasons = scores.reason or [None] * len(scores)
    return replace(
        scores,
        valid=scores.valid.cpu() & torch.tensor([failure is None for failure in failures]),
        reason=[failure or reason for failure, reason in zip(failures, reasons, strict=True)],
    )


@dataclass(frozen=True)
class ToolFailure:
    """A call without an answer."""

    why: str


def ask_all(use: ToolUse, calls: Sequence[str]) -> dict[str, str | ToolFailure | None]:
    """Answer calls, each distinct one once, `PARALLEL` at a time.

    A call fails if it raises, takes longer than `use.seconds`, or answers anything but text. A thread cannot
    be stopped: a hanging one is left behind.
    """
    answers: dict[str, str | ToolFailure | None] = {}
    distinct = list(dict.fromkeys(calls))
    for start in range(0, len(distinct), PARALLEL):
        batch, done = distinct[start : start + PARALLEL], SimpleQueue[tuple[str, Any]]()
        for call in batch:
            Thread(target=_ask, args=(use, call, done), daemon=True).start()
        deadline = monotonic() + use.seconds
        for _ in batch:
            try:
                call, answer = done.get(timeout=max(0.0, deadline - monotonic()))
            except Empty:
                break
            answers[call] = answer
        for call in batch:
            answers.setdefault(call, ToolFailure(f"{use.name} gave no answer in {use.seconds:g} s"))
    return answers


def _ask(use: ToolUse, call: str, done: SimpleQueue[tuple[str, Any]]) -> None:
    with CaughtError() as caught:
        answer: Any = use.tool(call)
        if answer is not None and not isinstance(answer, str):
            answer = ToolFailure(f"{use.name} answered a {type(answer).__name__}, needed is a text or None")
    if caught.error is not None:
        answer = ToolFailure(f"{use.name} raised {type(caught.error).__name__}: {caught.error}")
    if isinstance(answer, str):  # a tokenizer refuses half a surrogate pair
        answer = answer.encode(errors="replace").decode()
    done.put((call, answer))
