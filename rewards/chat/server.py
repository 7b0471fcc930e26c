# SPDX-License-Identifier: Apache-2.0
"""Judges behind an OpenAI-compatible chat-completions server (vLLM, SGLang, OpenAI): questions and answers.

A request that fails, for whatever reason, is a failure with a reason and costs its own row alone: a server
that hangs or hangs up, 429 and 5xx after the retries, what is no JSON, no choices, an answer cut at the token
limit, a refusal. What no row can get past (401, 403, 404), and failures above `max_failure_rate`, end the
call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from visalign.remote import ServerConnection, ServerError
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import FailureAlarm
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.generation import JudgeAnswers, check_drawing
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import Template

from .messages import ImageUrls, Reply, chat_messages, explain, read_reply

T = TypeVar("T")

Dialect = Literal["vllm", "sglang", "openai"]
"""What a server takes beside OpenAI's own fields."""

_OWN_DEFAULTS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""vLLM and SGLang take these from the model's generation config when they are left out."""
_HOPELESS = (401, 403, 404)


class ChatServer:
    """Asks a served vision-language model; its answers serve where a `VisionLanguageEngine` gives its own.

    Equal requests are sent once. An answer depends on its request, its number and the seed alone, as far as
    the server keeps to the seed.

    Args:
        base_url: as OpenAI clients take it, "http://host:8000/v1".
        model: the name under which the server serves the model.
        api_key_env: name of the environment variable that holds the key; the key itself is in no config.
        dialect: fields that the server takes beside OpenAI's.
        parallel: requests under way at once.
        timeout: seconds that the server may be silent.
        deadline: seconds that one attempt may take in all.
        retries: attempts after the first, for connection errors, 429 and 5xx.
        backoff: seconds before the second attempt, doubled from one to the next.
        jitter: share of a pause that is drawn at random.
        retry_seed: of that draw.
        max_failure_rate: share of failures among the last 200 answers above which `RewardError` is raised.
        token_field: "max_tokens", or "max_completion_tokens" for servers that want that.
        extra: further fields of the request; None as a value leaves one of ours out.

    Raises:
        RewardError: an argument that cannot be used; the environment variable is not set.
        UserError: an address that is none, or a number out of range.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        dialect: Dialect = "vllm",
        parallel: int = 16,
        timeout: float = 120.0,
        deadline: float = 600.0,
        retries: int = 3,
        backoff: float = 1.0,
        jitter: float = 0.5,
        retry_seed: int = 0,
        max_failure_rate: float = 0.5,
        token_field: str = "max_tokens",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if dialect not in ("vllm", "sglang", "openai"):
            raise RewardError(f"dialect is {dialect!r}; allowed are 'vllm', 'sglang' and 'openai'.")
        if not isinstance(model, str) or not model or parallel < 1:
            raise RewardError(
                f"model is {model!r} and parallel {parallel}; needed are the served model's name and a whole "
                "number from 1."
            )
        self.connection = ServerConnection(
            base_url,
            api_key=_key(api_key_env),
            timeout=timeout,
            deadline=deadline,
            retries=retries,
            backoff=backoff,
            jitter=jitter,
            seed=retry_seed,
        )
        self.name, self.model, self.dialect, self.parallel = model, model, dialect, parallel
        self.token_field, self.extra = token_field, dict(extra or {})
        self.alarm = FailureAlarm(f"{model} at {base_url}", max_failure_rate)

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
        """K answers to each of B requests, read; a failure stands in the place of its answer. A server that
        no request can pass, and too many failures, end the call.

        `read` takes from an answer what the judge wants, or raises AnswerError. The first answer has the seed
        and the next ones the next; `top_logprobs` alternatives of the first token are asked for, and an
        answer may then end at the limit.
        """
        check_drawing(answers, temperature, max_new_tokens)
        urls = ImageUrls()
        bodies: dict[str, dict[str, Any]] = {}
        keys: list[list[str]] = []
        for one in queries:
            messages = chat_messages(template, one, urls)
            keys.append([])
            for number in range(answers):
                body = self._body(template, messages, top_logprobs) | {"temperature": temperature}
                body |= {"seed": seed + number, self.token_field: max_new_tokens, **self.extra}
                body = {name: value for name, value in body.items() if value is not None}
                key = json.dumps(body, sort_keys=True)
                bodies[key] = body
                keys[-1].append(key)

        def take(sent: Mapping[str, Any] | ServerError) -> T | AnswerError:
            return _read(sent, read, first_token_only=top_logprobs > 0)

        def watch(sent: Mapping[str, Any] | ServerError) -> None:
            if isinstance(sent, ServerError) and sent.status in _HOPELESS:
                raise RewardError(f"{self.name}: {sent}") from sent
            found = take(sent)
            self.alarm.note(str(found) if isinstance(found, AnswerError) else None)

        sent = self.connection.post_each(
            "chat/completions", list(bodies.values()), parallel=self.parallel, on_done=watch
        )
        found = dict(zip(bodies, map(take, sent), strict=True))
        return [[found[key] for key in row] for row in keys]

    def generate(self, template: Template, queries: Sequence[Query], **drawing: Any) -> JudgeAnswers:
        """Texts, as `VisionLanguageEngine.generate` gives them, with its options and defaults.

        An answer that failed is an unfinished empty text; a request of which all failed has the first reason.
        """
        drawing = {"temperature": 1.0, "max_new_tokens": 256, **drawing}
        found = self.ask(template, queries, read=lambda reply: reply.text, **drawing)
        texts, finished, reasons = [], [], []
        for row in found:
            failed = [said for said in row if isinstance(said, AnswerError)]
            lost = len(failed) == len(row)
            texts.append([] if lost else ["" if isinstance(said, AnswerError) else said for said in row])
            finished.append([] if lost else [not isinstance(said, AnswerError) for said in row])
            reasons.append(str(failed[0]) if lost else None)
        return JudgeAnswers(texts, finished, reasons)

    def template(self, kind: str, default: Template) -> Template:
        """The given template: a server has no settings of a folder."""
        return default

    def identity_fields(self, template: Template, **options: Any) -> dict[str, Any]:
        """Arguments of `Identity` but `judge`; the address is none of them, the served model's name is."""
        return {
            "model": self.model,
            "template": template.text,
            "preprocessing": {"sent_as": "PNG, 8 bits, own size"},
            "dtype": "server",
            "options": {"dialect": self.dialect, "extra": self.extra, **options},
        }

    def _body(self, template: Template, messages: list[dict[str, Any]], top_logprobs: int) -> dict[str, Any]:
        """What all answers to a question have in common."""
        body: dict[str, Any] = {"model": self.model, "messages": messages}
        body |= {"n": 1, "stream": False, "top_p": 1.0}
        if top_logprobs:
            body |= {"logprobs": True, "top_logprobs": top_logprobs}
        if self.dialect != "openai":
            body |= _OWN_DEFAULTS
            if template.chat:
                body["chat_template_kwargs"] = dict(template.chat)
        if messages[-1]["role"] == "assistant":
            if self.dialect == "openai":
                raise RewardError(
                    f"The template {template.name!r} begins the answer itself, which OpenAI's API cannot "
                    "continue. Use vLLM or SGLang, or a template without answer_prefix."
                )
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return body


def _read(
    sent: Mapping[str, Any] | ServerError, read: Callable[[Reply], T], *, first_token_only: bool
) -> T | AnswerError:
    """What a judge wants of an answer, or why it cannot have it."""
    if isinstance(sent, ServerError):
        return AnswerError(str(sent))
    try:
        reply = read_reply(sent, first_token_only=first_token_only)
    except AnswerError as error:
        return error
    try:
        return read(reply)
    except AnswerError as error:
        return explain(error, reply.text)


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise RewardError(
            f"api_key_env is {name!r}, and the environment has no such variable. Set it to the server's key; "
            "api_key_env takes the name, never the key."
        )
    return key
