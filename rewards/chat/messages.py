# SPDX-License-Identifier: Apache-2.0
"""Chat-completions messages: a template and its images as a request, a chat.completion as a reply.

Images are sent without loss, and no user's text can spell a control token.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from PIL import Image
from torch import Tensor

from visalign.rewards.base.contract import RewardError
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
    """Return one request as OpenAI messages.

    Each {"type": "image"} takes the next image, and the beginning of the answer, where the template or the
    query has one, is the last message.
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
            message["content"] = [_content_part(part, images, urls) for part in message["content"]]
    prefix = template.answer_prefix + query.continuation
    return [*messages, {"role": "assistant", "content": prefix}] if prefix else messages


def _content_part(part: dict[str, Any], images: Iterator[Tensor], urls: ImageUrls) -> dict[str, Any]:
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": urls(next(images))}}
    return {"type": "text", "text": part["text"]}


FINISHED = (None, "stop", "eos", "end_turn", "stop_sequence")
"""finish_reasons of an answer that ended by itself."""
CUT_OFF = "the judge's answer was cut off at the token limit; raise max_new_tokens"
EMPTY = "the judge wrote nothing"
_REFUSAL = re.compile(
    r"\b(?:i['’]?m\s+sorry|i\s+am\s+sorry|i\s+can(?:no|['’])t|i\s+am\s+(?:unable|not\s+able)|i['’]m\s+(?:unable|not\s+able)"
    r"|i\s+(?:must|have\s+to)\s+decline|as\s+an\s+ai)\b",
    re.IGNORECASE,
)
_MAX_QUOTED = 120


@dataclass(frozen=True)
class Reply:
    """Answer of a chat model."""

    text: str
    """Without special tokens, as the server gives it."""
    first_token: Mapping[str, float]
    """Token -> log-prob of the most probable first tokens; empty where none were requested."""


def read_reply(completion: Mapping[str, Any], *, first_token_only: bool = False) -> Reply:
    """Read a chat.completion object.

    With `first_token_only` the answer may end at the token limit and have no visible text.

    Raises:
        AnswerError: no choice, no text, a refusal, or an answer that was cut or filtered.
    """
    choices = completion.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise AnswerError("the server's answer has no choices")
    choice = choices[0]
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise AnswerError("the server's answer has no message")
    if message.get("refusal"):
        raise AnswerError(f"the judge refused: {_quote(message['refusal'])}")
    finish_reason = choice.get("finish_reason")
    if finish_reason == "content_filter":
        raise AnswerError("the judge refused: the server's content filter stopped the answer")
    if finish_reason == "length" and not first_token_only:
        raise AnswerError(CUT_OFF)
    if finish_reason not in (*FINISHED, "length"):
        raise AnswerError(f"the judge's answer ended with finish_reason {finish_reason!r:.40}, not by itself")
    text = _message_text(message.get("content"))
    if not text.strip() and not first_token_only:
        raise AnswerError(EMPTY)
    return Reply(text, _first_token(choice.get("logprobs")))


def read_or_explain(reply: Reply | AnswerError, read: Callable[[Reply], T]) -> T | AnswerError:
    """Return what `read` takes from a reply, or the failure; an unreadable refusal is named as one."""
    if isinstance(reply, AnswerError):
        return reply
    try:
        return read(reply)
    except AnswerError as error:
        refused = _REFUSAL.search(reply.text)
        return AnswerError(f"the judge refused: {_quote(reply.text)}") if refused else error


def _message_text(content: Any) -> str:
    """Return a message's content, which may come in parts."""
    if isinstance(content, list):
        return "".join(
            part["text"]
            for part in content
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        )
    return content if isinstance(content, str) else ""


def _first_token(logprobs: Any) -> dict[str, float]:
    """Return token -> log-prob at the first position; probabilities of equal spellings are added."""
    positions = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(positions, list) or not positions or not isinstance(positions[0], Mapping):
        return {}
    alternatives = positions[0].get("top_logprobs")
    log_probs: dict[str, float] = {}
    for entry in alternatives if isinstance(alternatives, list) else []:
        token, value = (entry.get("token"), entry.get("logprob")) if isinstance(entry, Mapping) else (0, 0)
        if not isinstance(token, str) or isinstance(value, bool) or not isinstance(value, int | float):
            raise AnswerError(
                f"the server's top_logprobs hold {_quote(entry)}, which is no token with a log-prob"
            )
        before = log_probs.get(token, -math.inf)
        high = max(before, float(value))
        # ln(e^before + e^value), shifted by the larger one
        log_probs[token] = (
            high + math.log(math.exp(before - high) + math.exp(value - high)) if math.isfinite(high) else high
        )
    return log_probs


def _quote(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 1] + "…"
