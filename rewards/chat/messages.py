# SPDX-License-Identifier: Apache-2.0
"""Chat-completions messages: a template and its images as a request, a chat.completion as a reply."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor

from visalign.rewards.base.images import to_uint8
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import Template, escape

T = TypeVar("T")

_CONTROL_TOKEN = re.compile(
    r"<\|[^<>|]{1,40}\|>|</?(?:s|img|image|video|bos|eos|pad|unk|IMG_CONTEXT|start_of_turn|end_of_turn|think|answer)>"
    r"|\[/?INST\]"
)
"""Control tokens of the usual families; a server reads these spellings as tokens anywhere in a text."""


class ImageUrls:
    """PNG data URLs of images; each distinct image is encoded once during the object's life."""

    def __init__(self) -> None:
        self._urls: dict[bytes, str] = {}

    def __call__(self, image: Tensor) -> str:
        """Return the data URL of an image [3, H, W], float in [0, 1] or uint8, at its own size."""
        levels = to_uint8(image) if image.is_floating_point() else image.permute(1, 2, 0).cpu().numpy()
        key = hashlib.sha256(repr(levels.shape).encode() + levels.tobytes()).digest()
        if key not in self._urls:
            buffer = io.BytesIO()
            Image.fromarray(levels).save(buffer, format="PNG", compress_level=1)
            encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
            self._urls[key] = f"data:image/png;base64,{encoded}"
        return self._urls[key]


def safe_text(text: str) -> str:
    """Break up the control tokens in a user's text by a blank behind their first character.

    >>> safe_text("a cat<|im_end|> [INST]")
    'a cat< |im_end|> [ INST]'
    """
    while tokens := set(_CONTROL_TOKEN.findall(text)):
        text = escape(text, sorted(tokens))
    return text


def chat_messages(template: Template, query: Query, urls: ImageUrls) -> list[dict[str, Any]]:
    """Return one request as OpenAI messages; the beginning of an answer, if any, is the last message."""
    images = iter(query.images)
    fields = {"prompt": query.prompt, **query.fields}
    messages = template.filled({name: safe_text(text) for name, text in fields.items()})
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [
                {"type": "image_url", "image_url": {"url": urls(next(images))}}
                if part["type"] == "image"
                else {"type": "text", "text": part["text"]}
                for part in message["content"]
            ]
    prefix = template.answer_prefix + query.continuation
    return [*messages, {"role": "assistant", "content": prefix}] if prefix else messages


FINISHED = (None, "stop", "eos", "end_turn", "stop_sequence")  # finish_reasons of an answer that ended by itself
CUT_OFF = "the judge's answer was cut off at the token limit; raise max_new_tokens"
EMPTY = "the judge wrote nothing"
_REFUSAL = re.compile(
    r"\b(?:i['’]?m\s+sorry|i\s+am\s+sorry|i\s+can(?:no|['’])t|i\s+am\s+(?:unable|not\s+able)|i['’]m\s+(?:unable|not\s+able)"
    r"|i\s+(?:must|have\s+to)\s+decline|as\s+an\s+ai)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Reply:
    text: str  # Without special tokens, as the server gives it
    first_token: Mapping[str, float]
    """Token -> log-prob of the most probable first tokens; empty where none were requested."""


def read_reply(completion: Mapping[str, Any], *, first_token_only: bool = False) -> Reply:
    """Read a chat.completion object; AnswerError where it is no complete answer.

    With `first_token_only` the answer may end at the token limit and have no visible text.
    """
    try:
        choice = completion["choices"][0]
        message, finish_reason = dict(choice["message"]), choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise AnswerError("the server's answer has no choices with a message") from None
    if message.get("refusal"):
        raise AnswerError(f"the judge refused: {shorten(str(message['refusal']), 120, placeholder='…')}")
    if finish_reason == "content_filter":
        raise AnswerError("the judge refused: the server's content filter stopped the answer")
    if finish_reason == "length" and not first_token_only:
        raise AnswerError(CUT_OFF)
    if finish_reason not in (*FINISHED, "length"):
        raise AnswerError(f"the judge's answer ended with finish_reason {finish_reason!r:.40}, not by itself")
    text = message.get("content")
    if isinstance(text, list):  # of parts
        text = "".join(str(part.get("text") or "") for part in text if isinstance(part, Mapping))
    if not isinstance(text, str) or not text.strip():
        if not first_token_only:
            raise AnswerError(EMPTY)
        text = ""
    try:
        top = choice["logprobs"]["content"][0]["top_logprobs"]
        first_token = merge_spellings((entry["token"], entry["logprob"]) for entry in top)
    except (KeyError, IndexError, TypeError):
        first_token = {}  # not requested, or not given
    return Reply(text, first_token)


def merge_spellings(tokens: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return token -> log-prob; ln(e^a + e^b) for tokens of equal spelling."""
    merged: dict[str, float] = {}
    for token, log_prob in tokens:
        merged[token] = float(np.logaddexp(merged.get(token, -math.inf), log_prob))
    return merged


def read_or_explain(reply: Reply | AnswerError, read: Callable[[Reply], T]) -> T | AnswerError:
    """Return what `read` takes from a reply, or the failure; an unreadable refusal is named as one."""
    if isinstance(reply, AnswerError):
        return reply
    try:
        return read(reply)
    except AnswerError as error:
        refused = _REFUSAL.search(reply.text)
        return AnswerError(f"the judge refused: {shorten(reply.text, 120, placeholder='…')}") if refused else error
