# SPDX-License-Identifier: Apache-2.0
"""Tool calls: how a text calls a tool, asking for answers in parallel, scores of failed calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from visalign.errors import CaughtError, UserError
from visalign.interfaces import Scores

from .rollout import TextRollout

Tool = Callable[[str], str | None]
"""Text of a call -> its answer, which may state that the call was wrong; None: it is no call."""
PARALLEL = 32  # Calls in progress at a time


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
    name: str = "tool"  # Name in messages


def spread_scores(scores: Scores, rows: Sequence[int], count: int, reason: str) -> Scores:
    """Return the scores of `count` samples of which only `rows` were scored; the others are invalid for `reason`."""
    index = torch.full((count,), -1).index_copy(0, torch.tensor(rows), torch.arange(len(rows)))
    present, numbers = index >= 0, list[int](index.tolist())

    def spread(values: Tensor) -> Tensor:
        return torch.where(present.to(values.device), values[index.to(values.device)], torch.nan)

    texts, reasons = scores.text, scores.reason or [None] * len(scores)
    return Scores(
        value=spread(scores.value),
        valid=scores.valid[index.to(scores.valid.device)] & present.to(scores.valid.device),
        unit=scores.unit,
        std=None if scores.std is None else spread(scores.std),
        parts={name: spread(part) for name, part in scores.parts.items()},
        text=None if texts is None else ["" if i < 0 else texts[i] for i in numbers],
        reason=[reason if i < 0 else reasons[i] for i in numbers],
    )


def score_generated(rollout: TextRollout, records: Sequence[Any], score: Callable[..., Scores]) -> Scores:
    """Score completions by `score` (texts, prompts, records); those of too long prompts are invalid."""
    rows, reason = rollout.generated.nonzero()[:, 0].tolist(), "prompt too long"
    columns = ([column[row] for row in rows] for column in (rollout.text, rollout.prompt, records))
    nan = torch.full((1,), torch.nan)
    scores = score(*columns) if rows else Scores(value=nan, valid=nan > 0, unit="", reason=[reason])
    return without_failed(spread_scores(scores, rows or [0], len(rollout), reason), rollout)


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
    why: str


def ask_all(use: ToolUse, calls: Sequence[str]) -> dict[str, str | ToolFailure | None]:
    """Answer calls, each distinct one once, `PARALLEL` at a time; one fails that raises, is late, or gives no text.

    A thread cannot be stopped: a hanging one is left behind.
    """
    distinct = list(dict.fromkeys(calls))
    answers = run_all([partial(_ask, use, call) for call in distinct], use.seconds, use.name)
    return dict(zip(distinct, answers, strict=True))


def _ask(use: ToolUse, call: str) -> str | ToolFailure | None:
    answer: Any = use.tool(call)
    if answer is not None and not isinstance(answer, str):
        return ToolFailure(f"{use.name} answered a {type(answer).__name__}, needed is a text or None")
    return answer and without_surrogates(answer)


def without_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which a tokenizer refuses."""
    return text.encode(errors="replace").decode()


def run_all(jobs: Sequence[Callable[[], Any]], seconds: float, name: str) -> list[Any]:
    """Run jobs in threads, `PARALLEL` at a time; one that raises or takes longer is a `ToolFailure` of `name`."""
    results: dict[int, Any] = {}
    for start in range(0, len(jobs), PARALLEL):
        batch, done = range(start, min(start + PARALLEL, len(jobs))), SimpleQueue[tuple[int, Any]]()
        for number in batch:
            Thread(target=_run, args=(jobs[number], name, number, done), daemon=True).start()
        deadline = monotonic() + seconds
        for _ in batch:
            try:
                number, result = done.get(timeout=max(0.0, deadline - monotonic()))
            except Empty:
                break
            results[number] = result
    return [results.get(number, ToolFailure(f"{name} gave no answer in {seconds:g} s")) for number in range(len(jobs))]


def _run(job: Callable[[], Any], name: str, number: int, done: SimpleQueue[tuple[int, Any]]) -> None:
    result: Any = None
    with CaughtError() as caught:
        result = job()
    if caught.error is not None:
        result = ToolFailure(f"{name} raised {type(caught.error).__name__}: {caught.error}")
    done.put((number, result))
