# SPDX-License-Identifier: Apache-2.0
"""A judge's template and its pictures as messages of a chat-completions request: lossless, braces safe."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.images import to_uint8
from visalign.rewards.vlm.requests import Ask
from visalign.rewards.vlm.template import Template, escape

_SPECIAL = re.compile(
    r"<\|[^<>|]{1,40}\|>|</?(?:s|img|image|video|bos|eos|pad|unk|IMG_CONTEXT|start_of_turn|end_of_turn|think|answer)>"
    r"|\[/?INST\]"
)
"""Spellings of control tokens of the usual families, which a server reads as tokens wherever they stand."""


class PictureUrls:
    """PNG data URLs of pictures, each distinct picture encoded once while the object lives."""

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


def chat_messages(template: Template, ask: Ask, urls: PictureUrls) -> list[dict[str, Any]]:
    """The conversation of one request.

    Args:
        template: what is asked; each {"type": "image"} takes the next picture.
        ask: pictures, prompt and other fields; they are made safe.
        urls: encodes the pictures.

    Returns:
        OpenAI messages. What the assistant is made to have begun is the last one.

    Raises:
        RewardError: another number of pictures than slots.
    """
    if len(ask.images) != template.images:
        raise RewardError(
            f"The template {template.name!r} has {template.images} slots for pictures and got "
            f"{len(ask.images)}; give one picture per slot."
        )
    pictures = iter(ask.images)
    fields = {"prompt": ask.prompt, **ask.fields}
    messages = template.filled({name: safe_text(text) for name, text in fields.items()})
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [_part(part, pictures, urls) for part in message["content"]]
    begun = template.answer_prefix + ask.continuation
    return [*messages, {"role": "assistant", "content": begun}] if begun else messages


def question(
    name: str, text: str, *, pictures: Sequence[str] = ("",), words: Mapping[str, Sequence[str]] | None = None
) -> Template:
    """A template of one user message: pictures, each behind its label, then the text.

    Args:
        name: of the template.
        text: with `{prompt}` and other names in braces.
        pictures: a label per picture; "" for none.
        words: that the judge looks for.
    """
    content: list[dict[str, str]] = []
    for label in pictures:
        content += [{"type": "text", "text": label}] * bool(label)
        content.append({"type": "image"})
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
    return Template(name=name, messages=messages, words=words or {})


def _part(part: dict[str, Any], pictures: Any, urls: PictureUrls) -> dict[str, Any]:
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": urls(next(pictures))}}
    return {"type": "text", "text": part["text"]}
