# SPDX-License-Identifier: Apache-2.0
"""Base of the judges that ask a chat model: its connection, and the score of an image from K answers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from visalign.data.assets import resolve_model
from visalign.interfaces import RewardCapabilities, Scores
from visalign.rewards.base.contract import Request, RewardError, check_rules, make_scores
from visalign.rewards.base.identity import Identity
from visalign.rewards.catalogue import check_options
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.requests import requests
from visalign.rewards.vlm.template import Template, question
from visalign.rewards.weights.hub import is_hub_id

from .local import LocalModel
from .messages import Reply
from .server import ChatServer

URL, MODEL, KEY = "VISALIGN_JUDGE_URL", "VISALIGN_JUDGE_MODEL", "VISALIGN_JUDGE_KEY"
"""Environment variables for judges that are named without options, as on the command line."""

Answer = tuple[Mapping[str, float], str]  # Numbers read from one answer ("value" and parts), and its text


class ChatJudge:
    """Judge that asks a vision-language model; nothing is sent before the first image.

    Args:
        base_url: address of an OpenAI-compatible server; VISALIGN_JUDGE_URL in the environment if None.
        model: the name under which it serves the judge; VISALIGN_JUDGE_MODEL if None. Without an address, a folder,
            hub id or packaged name of a model that is loaded in this process.
        server: a `ChatServer` or `LocalModel` instead of the two, which several judges may share.
        device: where a model in this process runs.
        template: replaces the judge's own: a `Template`, or only its text with the same names in braces, behind the
            images.
        answers: K to each question.
        seed: of the first answer; the next answers use the next seeds.
        temperature: 0 always takes the likeliest token, so allows one answer.
        max_new_tokens: of an answer; a longer one is a failure.
        **server_options: of `ChatServer`, or of `LocalModel`: precision, attention, device_map, ...
    """

    name: str
    higher_is_better = True
    capabilities = RewardCapabilities()
    default_template: Template
    required_fields: Sequence[str] = ("prompt",)  # Names in braces that a template must contain
    default_temperature = 0.0
    default_max_new_tokens = 1024
    load_local: Callable[..., LocalModel] = LocalModel  # Loads a model in this process

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        server: ChatServer | LocalModel | None = None,
        device: Any = "cpu",
        template: Template | str | None = None,
        answers: int = 1,
        seed: int = 0,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        **server_options: Any,
    ) -> None:
        loading = {"device": device, "load_local": self.load_local}
        self.server = connect(self.name, server, base_url, model, server_options, **loading)
        default = self.default_template
        if isinstance(template, str):
            template = question(default.name, template, images=[""] * default.images, words=default.words)
        self.template = template = template or default
        missing = next((f"{{{field}}}" for field in self.required_fields if field not in template.fields), None)
        images = f"the template has {template.images} slots for images; it needs {default.images}"
        absent = f"the template has no {missing}; write it where that text belongs"
        check_rules(self.name, {absent: missing is None, images: template.images == default.images})
        self.answers = answers
        self.sampling = {
            "answers": answers,
            "seed": seed,
            "temperature": self.default_temperature if temperature is None else temperature,
            "max_new_tokens": self.default_max_new_tokens if max_new_tokens is None else max_new_tokens,
        }
        self.min_readable = min(2, answers)  # one of several answers has no spread

    def make_identity(self, **options: Any) -> Identity:
        """Return what the scores depend on; `options` are the judge's own."""
        return Identity(judge=self.name, **self.server.identity_fields(self.template, **options))

    def score_answers(
        self,
        request: Request,
        read: Callable[[Reply], Mapping[str, float]],
        unit: str,
        *,
        top_logprobs: int = 0,
        fields: Mapping[str, str] | None = None,
        source: bool = False,
    ) -> Scores:
        """Ask about B images and average the readable answers to each (`average_answers`).

        `read` returns "value" and parts of one answer, or raises AnswerError. `fields` are further names that the
        template fills; `source` shows the image under "source" in a record first.
        """
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.template, reasons, fields, source=source)
        options = {"top_logprobs": top_logprobs, **self.sampling}
        answers = self.server.ask(self.template, queries, read=lambda reply: (read(reply), reply.text), **options)
        return self.average_answers(request, rows, answers, reasons, unit)

    def average_answers(
        self,
        request: Request,
        rows: Sequence[int],
        answers: Sequence[Sequence[Answer | AnswerError]],
        reasons: list[str | None],
        unit: str,
        *,
        min_readable: int | None = None,
    ) -> Scores:
        """Average K answers to each of `rows`; a row with too few readable answers gets its reason.

        With K > 1, `std` is the standard error s/√n, and there are the parts "spread", the deviation s (ddof 1), and
        "readable", the share of readable answers. `text` is the first of these.
        """
        size = len(request)
        columns = {name: torch.full((size,), torch.nan) for name in ("value", "std")}
        texts = [""] * size
        for row, row_answers in zip(rows, answers, strict=True):
            readable = [answer for answer in row_answers if not isinstance(answer, AnswerError)]
            if len(readable) < (self.min_readable if min_readable is None else min_readable):
                reasons[row] = failure_reason(row_answers)
                continue
            texts[row] = readable[0][1]
            count = len(readable)
            means = {key: math.fsum(parts[key] for parts, _ in readable) / count for key in readable[0][0]}
            if self.answers > 1:
                values = torch.tensor([parts["value"] for parts, _ in readable], dtype=torch.float64)
                spread = float(values.std()) if count > 1 else math.nan
                means |= {"readable": count / len(row_answers), "spread": spread}
                means["std"] = spread / math.sqrt(count)
            for key, mean in means.items():
                columns.setdefault(key, torch.full((size,), torch.nan))[row] = mean
        value, std = columns.pop("value"), columns.pop("std")
        std = std if self.answers > 1 else None
        return make_scores(value, reasons, unit, std=std, parts=columns, text=texts)


def connect(
    name: str,
    server: ChatServer | LocalModel | None,
    base_url: str | None,
    model: str | None,
    options: dict[str, Any],
    *,
    device: Any = "cpu",
    load_local: Callable[..., LocalModel] = LocalModel,
) -> ChatServer | LocalModel:
    """Return the given server, or connect to `base_url` and `model`, else to those of the environment."""
    if server is not None:
        if base_url is not None or model is not None or options:
            raise RewardError(f"{name}: give a server, or base_url, model and options of one, not both.")
        return server
    if base_url is None and URL in os.environ:
        base_url = os.environ[URL]
        options = {"api_key_env": KEY if KEY in os.environ else None, **options}
    model = model if model is not None else os.environ.get(MODEL)
    if base_url is None and model and (isinstance(resolve_model(model), Path) or is_hub_id(model)):
        return load_local(model, device=device, **options)
    if base_url is None or not model:
        raise RewardError(
            f"{name}: base_url is {base_url!r} and model {model!r}; give the address of an OpenAI-compatible "
            'server, e.g. "http://localhost:8000/v1", and the name under which it serves the model, or set '
            f"{URL} and {MODEL} in the environment. To load a model here, give a folder or hub id as model."
        )
    arguments = {"base_url": base_url, "model": model, **options}
    check_options(name, ChatServer, arguments)
    return ChatServer(**arguments)


def failure_reason(answers: Sequence[Any]) -> str:
    """Describe why too few of an image's answers are readable."""
    failures = [answer for answer in answers if isinstance(answer, AnswerError)]
    if len(answers) == 1:
        return str(failures[0])
    return f"{len(failures)} of {len(answers)} answers failed, the first so: {failures[0]}"
