# SPDX-License-Identifier: Apache-2.0
"""Model in this process that stands in for a chat server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from visalign.rewards.base.failure import FailureAlarm
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.engine import VisionLanguageEngine, engine_of
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import Template

from .messages import CUT_OFF, EMPTY, Reply, merge_spellings, read_or_explain

T = TypeVar("T")


class LocalModel:
    """Model (folder, hub id, packaged name or engine) asked as a `ChatServer`; `loading` is for `engine_of`."""

    def __init__(
        self, model: str | Path | VisionLanguageEngine, *, max_failure_rate: float = 0.5, **loading: Any
    ) -> None:
        self.engine: VisionLanguageEngine = engine_of(model, "LocalModel", **loading)
        self.name = self.model = self.engine.name
        self.alarm = FailureAlarm(self.name, max_failure_rate)

    def ask(
        self,
        template: Template,
        queries: Sequence[Query],
        *,
        read: Callable[[Reply], T],
        answers: int = 1,
        seed: int = 0,
        temperature: float = 0.0,
        max_new_tokens: int = 1024,
        top_logprobs: int = 0,
    ) -> list[list[T | AnswerError]]:
        """Return K answers to each request, as `ChatServer.ask`; `top_logprobs` reads first tokens only."""
        replies: list[list[Reply | AnswerError]]
        if top_logprobs:
            rows, reasons = self.engine.likeliest(template, queries, top_logprobs)
            replies = [
                [Reply("", merge_spellings(row)) if reason is None else AnswerError(reason)] * answers
                for row, reason in zip(rows, reasons, strict=True)
            ]
        else:
            sampling = {"seed": seed, "temperature": temperature, "max_new_tokens": max_new_tokens}
            generated = self.engine.generate(template, queries, answers=answers, **sampling)
            answered = zip(generated.texts, generated.finished, generated.reasons, strict=True)
            replies = [
                [_reply(text, ended) for text, ended in zip(texts, finished, strict=True)]
                if reason is None
                else [AnswerError(reason)] * answers
                for texts, finished, reason in answered
            ]
        results = [[read_or_explain(reply, read) for reply in row] for row in replies]
        for result in (result for row in results for result in row):
            self.alarm.note(str(result) if isinstance(result, AnswerError) else None)
        return results

    def identity_fields(self, template: Template, **options: Any) -> dict[str, Any]:
        return self.engine.identity_fields(template, **options)


def _reply(text: str, ended: bool) -> Reply | AnswerError:
    if not ended:
        return AnswerError(CUT_OFF)
    return Reply(text, {}) if text.strip() else AnswerError(EMPTY)
