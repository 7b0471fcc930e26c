# SPDX-License-Identifier: Apache-2.0
"""Client of an OpenAI-compatible chat-completions server (vLLM, SGLang, OpenAI) for judges.

A request that fails (429 and 5xx after the retries, no JSON, an answer cut off, a refusal) costs only its own row.
Errors that every row would meet (401, 403, 404), and failures above `max_failure_rate`, end the call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from visalign.remote import ServerConnection, ServerError
from visalign.rewards.base.contract import RewardError, check_choices, check_counts, check_rules
from visalign.rewards.base.failure import FailureAlarm
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.generation import check_drawing
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import Template

from .messages import ImageUrls, Reply, chat_messages, read_or_explain, read_reply

T = TypeVar("T")

Dialect = Literal["vllm", "sglang", "openai"]  # Kind of server, which decides its fields in addition to OpenAI's

_NEUTRAL_SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""vLLM and SGLang take these from the model's generation config when they are left out."""
_FATAL_STATUS = (401, 403, 404)


class ChatServer:
    """Asks a served vision-language model; equal requests are sent once.

    Args:
        base_url: as OpenAI clients take it, "http://host:8000/v1".
        model: the name under which the server serves the model.
        api_key_env: name of the environment variable that holds the key; no config holds the key itself.
        dialect: which fields the server takes in addition to OpenAI's.
        parallel: largest number of concurrent requests.
        timeout: seconds that the server may be silent.
        deadline: seconds that one attempt may take in all.
        retries: attempts after the first, for connection errors, 429 and 5xx.
        backoff: seconds before the second attempt, doubled for each further one.
        max_failure_rate: share of failures among the last 200 answers above which `RewardError` is raised.
        token_field: "max_tokens", or "max_completion_tokens" for servers that want that.
        extra: further fields of the request; None as a value leaves one of ours out.
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
        max_failure_rate: float = 0.5,
        token_field: str = "max_tokens",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        check_choices("ChatServer", dialect=(dialect, get_args(Dialect)))
        check_counts("ChatServer", parallel=parallel)
        seconds = f"timeout is {timeout} and deadline {deadline}; allowed are seconds above 0"
        check_rules("ChatServer", {seconds: timeout > 0 and deadline > 0})
        key = None if api_key_env is None else os.environ.get(api_key_env)
        if api_key_env is not None and not key:
            raise RewardError(f"api_key_env is {api_key_env!r}, and there is no such variable. Set it to the key.")
        limits: dict[str, Any] = {"timeout": timeout, "deadline": deadline, "retries": retries, "backoff": backoff}
        self.connection = ServerConnection(base_url, api_key=key, **limits)
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
        """Return K answers to each of B requests, as `read` takes them from replies, or AnswerErrors.

        The k-th answer has the seed `seed` + k. Where `top_logprobs` of the first token are requested it may be cut
        off.
        """
        check_drawing(answers, temperature, max_new_tokens)
        urls = ImageUrls()
        bodies: dict[str, dict[str, Any]] = {}
        keys: list[list[str]] = []
        for query in queries:
            messages = chat_messages(template, query, urls)
            keys.append([])
            for number in range(answers):
                body = self._common_body(template, messages, top_logprobs) | {"temperature": temperature}
                body |= {"seed": seed + number, self.token_field: max_new_tokens, **self.extra}
                body = {name: value for name, value in body.items() if value is not None}
                key = json.dumps(body, sort_keys=True)
                bodies[key] = body
                keys[-1].append(key)

        def parse(response: Mapping[str, Any] | ServerError) -> T | AnswerError:
            if isinstance(response, ServerError):
                return AnswerError(str(response))
            try:
                reply = read_reply(response, first_token_only=top_logprobs > 0)
            except AnswerError as error:
                return error
            return read_or_explain(reply, read)

        def watch(response: Mapping[str, Any] | ServerError) -> None:
            if isinstance(response, ServerError) and response.status in _FATAL_STATUS:
                raise RewardError(f"{self.name}: {response}") from response
            result = parse(response)
            self.alarm.note(str(result) if isinstance(result, AnswerError) else None)

        posting: dict[str, Any] = {"parallel": self.parallel, "on_done": watch}
        responses = self.connection.post_each("chat/completions", list(bodies.values()), **posting)
        results = dict(zip(bodies, map(parse, responses), strict=True))
        return [[results[key] for key in query_keys] for query_keys in keys]

    def identity_fields(self, template: Template, **options: Any) -> dict[str, Any]:
        """Return the arguments of `Identity` except `judge`: the served model's name, not the address."""
        return {
            "model": self.model,
            "template": template.text,
            "preprocessing": {"sent_as": "PNG, 8 bits, own size"},
            "dtype": "server",
            "options": {"dialect": self.dialect, "extra": self.extra, **options},
        }

    def _common_body(self, template: Template, messages: list[dict[str, Any]], top_logprobs: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": messages, "n": 1, "stream": False, "top_p": 1.0}
        if top_logprobs:
            body |= {"logprobs": True, "top_logprobs": top_logprobs}
        if self.dialect != "openai":
            body |= _NEUTRAL_SAMPLING
            if template.chat:
                body["chat_template_kwargs"] = dict(template.chat)
        if messages[-1]["role"] == "assistant":
            if self.dialect == "openai":
                raise RewardError(f"The template {template.name!r} has an answer_prefix, which OpenAI's API lacks.")
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return body
