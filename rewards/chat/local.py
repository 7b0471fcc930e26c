# SPDX-License-Identifier: Apache-2.0
"""A vision-language model in this process where a chat server's judge expects its server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from visalign.rewards.base.failure import FailureAlarm
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.engine import VisionLanguageEngine, engine_of
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import Template

from .messages import Reply, explain

T = TypeVar("T")


class LocalModel:
    """Asks a model as `ChatServer` asks a server, with the same replies and failures.

    Args:
        model: folder, hub id or packaged name of a model that `rewards.vlm` knows; or a loaded
            `VisionLanguageEngine`.
        max_failure_rate: as of `ChatServer`.
        **loading: of `engine_of`: device, precision, attention, device_map, quantization, ...
    """

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
        """K answers to each of B requests, as `ChatServer.ask` gives them.

        With `top_logprobs` the likeliest first tokens alone are read, at the temperature 1 of the model, and
        nothing is written.
        """
        if top_logprobs:
            replies = self._first_tokens(template, queries, top_logprobs)
            found = [[self._read(reply, read)] * answers for reply in replies]
        else:
            drawing = {"seed": seed, "temperature": temperature, "max_new_tokens": max_new_tokens}
            made = self.engine.generate(template, queries, answers=answers, **drawing)
            found = []
            for texts, ended, reason in zip(made.texts, made.finished, made.reasons, strict=True):
                said = [_reply(text, whole) for text, whole in zip(texts, ended, strict=True)]
                lost = [AnswerError(reason)] * answers if reason is not None else said
                found.append([self._read(one, read) for one in lost])
        for row in found:
            for one in row:
                self.alarm.note(str(one) if isinstance(one, AnswerError) else None)
        return found

    def identity_fields(self, template: Template, **options: Any) -> dict[str, Any]:
        """Arguments of `Identity` but `judge`."""
        return self.engine.identity_fields(template, **options)

    def _read(self, reply: Reply | AnswerError, read: Callable[[Reply], T]) -> T | AnswerError:
        if isinstance(reply, AnswerError):
            return reply
        try:
            return read(reply)
        except AnswerError as error:
            return explain(error, reply.text)

    @torch.no_grad()
    def _first_tokens(
        self, template: Template, queries: Sequence[Query], count: int
    ) -> list[Reply | AnswerError]:
        """The likeliest first tokens of each request, as text -> log-prob, alike spellings added up."""
        rows, reasons = self.engine.encode(template, queries)
        real = [row for row in rows if row is not None]
        if not real:
            return [AnswerError(str(reason)) for reason in reasons]
        log_prob, ids = self.engine.network.likeliest(self.engine.states(real), count)
        told = iter(zip(log_prob.tolist(), ids.tolist(), strict=True))
        replies: list[Reply | AnswerError] = []
        for reason in reasons:
            if reason is not None:
                replies.append(AnswerError(reason))
                continue
            listed: dict[str, torch.Tensor] = {}
            for value, token in zip(*next(told), strict=True):
                spelled = self.engine.processor.tokenizer.decode([token])
                before = listed.get(spelled, torch.tensor(-torch.inf))
                listed[spelled] = torch.logaddexp(before, torch.tensor(value))
            replies.append(Reply("", {spelled: float(value) for spelled, value in listed.items()}))
        return replies


def _reply(text: str, ended: bool) -> Reply | AnswerError:
    if not ended:
        return AnswerError("the judge's answer was cut off at the token limit; raise max_new_tokens")
    return Reply(text, {}) if text.strip() else AnswerError("the judge wrote nothing")
