# SPDX-License-Identifier: Apache-2.0
"""What goes to a chat-completions server and what comes back.

A judge's template and its images become messages, lossless, braces safe; a chat.completion becomes a text
with its first token's alternatives, or the reason why there is none.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.images import to_uint8
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import Template, escape
from visalign.rewards.vlm.template import question as question

_SPECIAL = re.compile(
    r"<\|[^<>|]{1,40}\|>|</?(?:s|img|image|video|bos|eos|pad|unk|IMG_CONTEXT|start_of_turn|end_of_turn|think|answer)>"
    r"|\[/?INST\]"
)
"""Spellings of control tokens of the usual families, which a server reads as tokens wherever they stand."""


class ImageUrls:
    """PNG data URLs of images, each distinct image encoded once while the object lives."""

    def __init__(self) -> None:
        self._known: dict[bytes, str] = {}

    def __call__(self, image: Tensor) -> str:
        """The data URL of one image [3, H, W], float in [0, 1] or uint8, at its own size."""
        levels = to_uint8(image) if image.is_floating_point() else image.permute(1, 2, 0).cpu().numpy()
        key = hashlib.sha256(repr(levels.shape).encode() + levels.tobytes()).digest()
        if key not in self._known:
            buffer = io.BytesIO()
            Image.fromarray(levels).save(buffer, format="PNG", compress_level=1)
            encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
            self._known[key] = f"data:image/png;base64,{encoded}"
        return self._known[key]


def safe_text(text: str) -> str:
    """A user's text in which no control token is spelled out: a blank goes behind its first sign.

    >>> safe_text("a cat<|im_end|> [INST]")
    'a cat< |im_end|> [ INST]'
    """
    while found := set(_SPECIAL.findall(text)):
        text = escape(text, sorted(found))
    return text


def chat_messages(template: Template, query: Query, urls: ImageUrls) -> list[dict[str, Any]]:
    """The conversation of one request as OpenAI messages: each {"type": "image"} takes the next image, the
    prompt and other fields are made safe, and what the assistant is made to have begun is the last
    message.
    """
    if len(query.images) != template.images:
        raise RewardError(
            f"The template {template.name!r} has {template.images} slots for images and got "
            f"{len(query.images)}; give one image per slot."
        )
    images = iter(query.images)
    fields = {"prompt": query.prompt, **query.fields}
    messages = template.filled({name: safe_text(text) for name, text in fields.items()})
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [_part(part, images, urls) for part in message["content"]]
    begun = template.answer_prefix + query.continuation
    return [*messages, {"role": "assistant", "content": begun}] if begun else messages


def _part(part: dict[str, Any], images: Any, urls: ImageUrls) -> dict[str, Any]:
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": urls(next(images))}}
    return {"type": "text", "text": part["text"]}


ENDED = (None, "stop", "eos", "end_turn", "stop_sequence")
"""finish_reasons of an answer that ended by itself."""
_REFUSAL = re.compile(
    r"\b(?:i['’]?m\s+sorry|i\s+am\s+sorry|i\s+can(?:no|['’])t|i\s+am\s+(?:unable|not\s+able)|i['’]m\s+(?:unable|not\s+able)"
    r"|i\s+(?:must|have\s+to)\s+decline|as\s+an\s+ai)\b",
    re.IGNORECASE,
)
_SHOWN = 120


@dataclass(frozen=True)
class Reply:
    """One answer of a server."""

    text: str
    """As the server gives it: without special tokens."""
    first_token: Mapping[str, float]
    """Token -> log-prob of the most probable first tokens; empty where none were asked for."""


def read_reply(sent: Mapping[str, Any], *, first_token_only: bool = False) -> Reply:
    """The answer in a chat.completion object; AnswerError where there is no choice, no text, a refusal, or it
    was cut or filtered. With `first_token_only` it may end there and have no visible text.
    """
    choices = sent.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise AnswerError("the server's answer has no choices")
    choice = choices[0]
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise AnswerError("the server's answer has no message")
    if message.get("refusal"):
        raise AnswerError(f"the judge refused: {_short(message['refusal'])}")
    ended = choice.get("finish_reason")
    if ended == "content_filter":
        raise AnswerError("the judge refused: the server's content filter stopped the answer")
    if ended == "length" and not first_token_only:
        raise AnswerError("the judge's answer was cut off at the token limit; raise max_new_tokens")
    if ended not in (*ENDED, "length"):
        raise AnswerError(f"the judge's answer ended with finish_reason {ended!r:.40}, not by itself")
    text = _text(message.get("content"))
    if not text.strip() and not first_token_only:
        raise AnswerError("the judge wrote nothing")
    return Reply(text, _first_token(choice.get("logprobs")))


def explain(error: AnswerError, text: str) -> AnswerError:
    """The error of a text that could not be read, as a refusal if the text is one."""
    return AnswerError(f"the judge refused: {_short(text)}") if _REFUSAL.search(text) else error


def _text(content: Any) -> str:
    """A message's content, which may come in parts."""
    if isinstance(content, list):
        return "".join(
            part["text"]
            for part in content
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        )
    return content if isinstance(content, str) else ""


def _first_token(logprobs: Any) -> dict[str, float]:
    """Token -> log-prob at the first place; tokens that are spelled alike are added up."""
    places = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(places, list) or not places or not isinstance(places[0], Mapping):
        return {}
    listed = places[0].get("top_logprobs")
    found: dict[str, float] = {}
    for held in listed if isinstance(listed, list) else []:
        token, value = (held.get("token"), held.get("logprob")) if isinstance(held, Mapping) else (None, None)
        if not isinstance(token, str) or isinstance(value, bool) or not isinstance(value, int | float):
            raise AnswerError(
                f"the server's top_logprobs hold {_short(held)}, which is no token with a log-prob"
            )
        before = found.get(token, -math.inf)
        high = max(before, float(value))
        finite = math.isfinite(high)
        found[token] = high + math.log(math.exp(before - high) + math.exp(value - high)) if finite else high
    return found


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
