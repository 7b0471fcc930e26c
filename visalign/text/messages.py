# SPDX-License-Identifier: Apache-2.0
"""Conversations as chat templates read them: joined text parts, tool calls as objects, no empty keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from visalign.errors import UserError
from visalign.interfaces import Prompt, is_message

BETWEEN_PARTS = "\n\n"
"""Text between two joined parts, as in mistral_common."""


@dataclass(frozen=True, kw_only=True)
class TemplateReading:
    """Forms of content and of tool calls that a chat template reads."""

    parts: bool = False
    """Lists of text parts; False joins them to one text."""
    text_arguments: bool = False
    """Arguments of a tool call as JSON text; False: as an object."""


TEXT_READING = TemplateReading()


def template_messages(prompt: Prompt, where: str, reading: TemplateReading = TEXT_READING) -> list[dict[str, Any]]:
    """Return the messages of a prompt (a text is the message of a user) in the form that chat templates read.

    Keys with None are dropped; `where` names the prompt in messages.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    bad = [message for message in messages if not is_message(message)]
    if bad or not messages:
        raise UserError(
            f"{where} holds {str(bad[0])[:80] if bad else 'no message'}; a conversation is a list of messages "
            'of the form {"role": "user", "content": "…"}, or with "tool_calls". A plain prompt is a string.'
        )
    return [
        _template_message(message, f"Message {number} of {where[0].lower()}{where[1:]}", reading)
        for number, message in enumerate(messages)
    ]


def _template_message(message: Mapping[str, Any], where: str, reading: TemplateReading) -> dict[str, Any]:
    result = {key: value for key, value in message.items() if value is not None}
    if calls := result.pop("tool_calls", None):
        calls = calls if isinstance(calls, list | tuple) else [calls]
        result["tool_calls"] = [_tool_call(call, where, reading) for call in calls]
    content = result.get("content", "")
    if isinstance(content, list | tuple):
        content = [_part(part, where) for part in content]
        joins = not reading.parts or message["role"] == "system"  # Gemma 3 reads one part of it
        if joins and all(part["type"] == "text" for part in content):
            content = BETWEEN_PARTS.join(part["text"] for part in content)
    elif not isinstance(content, str | list):
        raise UserError(f"{where} has the content {str(content)[:80]}; give a text, or a list of parts.")
    return {**result, "content": content}


def _part(part: Any, where: str) -> dict[str, Any]:
    """Return a part with its type and without empty keys, which templates would take for an image."""
    filled = {"type": "text", "text": part} if isinstance(part, str) else part
    if isinstance(filled, Mapping):
        filled = {key: value for key, value in filled.items() if value is not None}
        kind = filled.setdefault("type", "text")
        if kind == "image" or (kind == "text" and isinstance(filled.get("text"), str)):
            return filled
    raise UserError(
        f"{where} has the part {str(part)[:80]} in its content; parts are "
        '{"type": "text", "text": "…"} and, for models that read images, {"type": "image"}.'
    )


def _tool_call(call: Any, where: str, reading: TemplateReading) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(
            f"{where} has the tool call {str(call)[:80]}; a call is "
            '{"function": {"name": "…", "arguments": {…}}}.'
        )
    written = function.get("arguments") or {}
    try:
        arguments = json.loads(written) if isinstance(written, str) else written
    except (ValueError, RecursionError):
        arguments = written
    if not isinstance(arguments := arguments or {}, Mapping):
        raise UserError(
            f"{where} calls {function['name'][:80]!r} with arguments that are no JSON object: {str(written)[:80]}. "
            "Give an object, or its JSON text."
        )
    if reading.text_arguments:
        arguments = written if isinstance(written, str) else json.dumps(arguments, ensure_ascii=False)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
