# SPDX-License-Identifier: Apache-2.0
"""What judges behind a chat server share: the server, and the way from K answers to an image's score."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from visalign.data.assets import resolve_model
from visalign.interfaces import RewardCapabilities, Scores
from visalign.rewards.base.contract import Request, RewardError, make_scores
from visalign.rewards.base.identity import Identity
from visalign.rewards.catalogue import check_options
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.requests import requests
from visalign.rewards.vlm.template import Template
from visalign.rewards.weights.hub import is_hub_id

from .local import LocalModel
from .messages import Reply, question
from .server import ChatServer

URL, MODEL, KEY = "VISALIGN_JUDGE_URL", "VISALIGN_JUDGE_MODEL", "VISALIGN_JUDGE_KEY"
"""Environment variables for judges that are named without options, as on the command line."""


class ServedJudge:
    """A judge that asks a vision-language model: a served one, to which nothing is sent before the first
    image, or one that is loaded here.

    Args:
        base_url: address of an OpenAI-compatible server; VISALIGN_JUDGE_URL in the environment if None.
        model: the name under which it serves the judge; VISALIGN_JUDGE_MODEL if None. Without an address a
            folder, hub id or packaged name of a model that is loaded in this process.
        server: a `ChatServer` or `LocalModel` instead of the two, which several judges may share.
        device: where a model in this process runs; a server knows of none.
        template: instead of ours: a `Template`, or the text alone, with the names in braces that ours has,
            before which the images are put without labels, as the published texts want them.
        default: ours.
        needed: names that the template must hold.
        answers: K to each question.
        seed: of the first answer; the next have the next ones.
        temperature: of the answers; 0 takes the likeliest token always, which gives one answer.
        max_new_tokens: of an answer; a longer one is a failure.
        **server_options: of `ChatServer`, or of `LocalModel`: precision, attention, device_map, ...

    Raises:
        RewardError: options that cannot be used.
    """

    name: str
    capabilities = RewardCapabilities()

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        default: Template,
        needed: Sequence[str] = ("prompt",),
        server: ChatServer | LocalModel | None = None,
        device: Any = "cpu",
        template: Template | str | None = None,
        answers: int = 1,
        seed: int = 0,
        temperature: float = 0.0,
        max_new_tokens: int = 1024,
        **server_options: Any,
    ) -> None:
        self.server = connect(self.name, server, base_url, model, server_options, device=device)
        self.template = as_template(self.name, template, default, needed=needed)
        self.answers = answers
        self.drawing = {"answers": answers, "seed": seed, "temperature": temperature}
        self.drawing["max_new_tokens"] = max_new_tokens
        self.least = min(2, answers)
        """Answers that must be readable: two, where more than one is drawn."""

    def identified(self, **options: Any) -> Identity:
        """What the scores depend on; `options` are the judge's own."""
        return Identity(judge=self.name, **self.server.identity_fields(self.template, **options))

    def rate(
        self,
        request: Request,
        read: Callable[[Reply], Mapping[str, float]],
        unit: str,
        *,
        top_logprobs: int = 0,
        fields: Mapping[str, str] | None = None,
        source: bool = False,
    ) -> Scores:
        """Scores of B images, each the mean of its n readable answers.

        Where more than one is drawn there are also their standard deviation s (ddof 1) as the part "spread",
        the standard error of the mean, s/√n, as `std`, and the part "readable", their share. `text` is the
        first of them.

        Args:
            request: images and prompts.
            read: gives "value" and parts of one answer, or raises AnswerError.
            unit: of the value.
            top_logprobs: alternatives of the first token to ask for.
            fields: further names that the template fills.
            source: show the image under "source" in a record first.
        """
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.template, reasons, fields, source=source)

        def reader(reply: Reply) -> tuple[Mapping[str, float], str]:
            return read(reply), reply.text

        found = self.server.ask(
            self.template, queries, read=reader, top_logprobs=top_logprobs, **self.drawing
        )
        return self.summed(request, rows, found, reasons, unit)

    def summed(
        self,
        request: Request,
        rows: Sequence[int],
        found: Sequence[Sequence[tuple[Mapping[str, float], str] | AnswerError]],
        reasons: list[str | None],
        unit: str,
    ) -> Scores:
        """Scores as of `rate` from K answers to each of its rows: "value", parts and text, or the failure."""
        size = len(request)
        columns: dict[str, torch.Tensor] = {}
        text = [""] * size
        for row, answers in zip(rows, found, strict=True):
            known = [answer for answer in answers if not isinstance(answer, AnswerError)]
            if len(known) < self.least:
                reasons[row] = failed(answers)
                continue
            text[row] = known[0][1]
            told = {key: math.fsum(parts[key] for parts, _ in known) / len(known) for key in known[0][0]}
            if self.answers > 1:
                values = torch.tensor([parts["value"] for parts, _ in known], dtype=torch.float64)
                told |= {"readable": len(known) / len(answers), "spread": float(values.std())}
                told["std"] = told["spread"] / math.sqrt(len(known))
            for key, value in told.items():
                columns.setdefault(key, torch.full((size,), torch.nan))[row] = value
        unknown = torch.full((size,), torch.nan)
        value, std = columns.pop("value", unknown), columns.pop("std", unknown)
        std = std if self.answers > 1 else None
        return make_scores(value, reasons, unit, std=std, parts=columns, text=text)


def connect(
    name: str,
    server: ChatServer | LocalModel | None,
    base_url: str | None,
    model: str | None,
    options: dict[str, Any],
    *,
    device: Any = "cpu",
) -> ChatServer | LocalModel:
    """The server that a judge was given (several may share one), or that at an address: `base_url` and
    `model`, else what `URL` and `MODEL` say in the environment with the key in `KEY`; `options` are those
    of `ChatServer`. Without an address a model that can be found is loaded here, with those of `LocalModel`.
    """
    if server is not None:
        if base_url is not None or model is not None or options:
            raise RewardError(f"{name}: give a server, or base_url, model and options of one, not both.")
        return server
    if base_url is None and URL in os.environ:
        base_url = os.environ[URL]
        options = {"api_key_env": KEY if KEY in os.environ else None, **options}
    model = model if model is not None else os.environ.get(MODEL)
    if (
        base_url is None
        and model is not None
        and (isinstance(resolve_model(model), Path) or is_hub_id(model))
    ):
        return LocalModel(model, device=device, **options)
    if base_url is None or model is None:
        raise RewardError(
            f"{name}: base_url is {base_url!r} and model {model!r}; give the address of an OpenAI-compatible "
            'server, e.g. "http://localhost:8000/v1", and the name under which it serves the model, or set '
            f"{URL} and {MODEL} in the environment; or a folder or hub id as model alone, to load it here."
        )
    arguments = {"base_url": base_url, "model": model, **options}
    check_options(name, ChatServer, arguments)
    return ChatServer(**arguments)


def as_template(
    name: str, given: Template | str | None, default: Template, *, needed: Sequence[str] = ("prompt",)
) -> Template:
    """The template that a judge was given, or its own; a text with names in braces comes behind as many
    images, and nothing between them. It must hold the names that are `needed`.
    """
    template = given if isinstance(given, Template) else default
    if isinstance(given, str):
        template = question(default.name, given, images=[""] * default.images, words=default.words)
    if missing := [field for field in needed if field not in template.fields]:
        raise RewardError(
            f"{name}: the template has no {{{missing[0]}}}; write it where the text is to stand. A template "
            f"needs {', '.join(f'{{{field}}}' for field in needed)}."
        )
    if template.images != default.images:
        raise RewardError(
            f"{name}: the template has {template.images} slots for images, needed are {default.images}."
        )
    return template


def failed(answers: Sequence[Any]) -> str:
    """Why too few of an image's answers can be used."""
    first = next(str(answer) for answer in answers if isinstance(answer, AnswerError))
    if len(answers) == 1:
        return first
    count = sum(isinstance(answer, AnswerError) for answer in answers)
    return f"{count} of {len(answers)} answers failed, the first so: {first}"
