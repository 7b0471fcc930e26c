# SPDX-License-Identifier: Apache-2.0
"""Conversations as chat templates read them: joined text parts, tool calls as objects, no empty keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from visalign.errors import UserError
from visalign.interfaces import Prompt, is_message

BETWEEN_PARTS = "\n\n"  # Text between two joined parts, as in mistral_common


def template_messages(
    prompt: Prompt, where: str, *, reads_parts: bool = False, text_arguments: bool = False
) -> list[dict[str, Any]]:
    """Return a prompt's messages as chat templates read them; `where` names it in messages.

    Lists of text parts are joined unless the template `reads_parts`; arguments of tool calls become objects, or with
    `text_arguments` JSON texts.
    """
    messages = text_messages(prompt) if isinstance(prompt, str) else list(prompt)
    bad = [message for message in messages if not is_message(message)]
    if bad or not messages:
        raise UserError(
            f"{where} holds {str(bad[0])[:80] if bad else 'no message'}; a conversation is a list of messages "
            '{"role": "user", "content": "…"}, or with "tool_calls". A plain prompt is a string.'
        )
    return [
        _template_message(message, f"Message {number} of {where[0].lower()}{where[1:]}", reads_parts, text_arguments)
        for number, message in enumerate(messages)
    ]


def text_messages(text: str) -> list[dict[str, str]]:
    """Read a transcript of HH-RLHF as its turns, without an empty last one; another text is the message of a user.

    >>> text_messages("\\n\\nHuman: Hi\\n\\nAssistant: Yes?\\n\\nHuman: 1 + 1?\\n\\nAssistant:")[1:]
    [{'role': 'assistant', 'content': 'Yes?'}, {'role': 'user', 'content': '1 + 1?'}]
    """
    before, *turns = re.split("\n\n(Human|Assistant):", text)
    if before or turns[:1] != ["Human"]:
        return [{"role": "user", "content": text}]
    roles = ({"Human": "user", "Assistant": "assistant"}[speaker] for speaker in turns[::2])
    messages = [{"role": role, "content": turn.strip()} for role, turn in zip(roles, turns[1::2], strict=True)]
    return messages if messages[-1]["content"] or len(messages) == 1 else messages[:-1]


def prompt_text(prompt: Prompt, *, images: bool = True) -> str:
    """Return a prompt as one text: itself, or the contents of its messages, with the names of `images`.

    >>> prompt_text([{"role": "user", "content": [{"image": "a.png"}, {"text": "How good is it?"}]}])
    '[a.png] How good is it?'
    """
    if isinstance(prompt, str):
        return prompt
    contents = (message.get("content") or "" for message in prompt)
    lists = (content if isinstance(content, list | tuple) else [content] for content in contents)
    return "\n".join(" ".join(_part_text(part) for part in parts if images or not _is_image(part)) for parts in lists)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and (part.get("image") is not None or part.get("type") == "image")


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    return f"[{part['image']}]" if part.get("image") is not None else str(part.get("text", part))


def _template_message(
    message: Mapping[str, Any], where: str, reads_parts: bool, text_arguments: bool
) -> dict[str, Any]:
    result = {key: value for key, value in message.items() if value is not None}
    if calls := result.pop("tool_calls", None):
        calls = calls if isinstance(calls, list | tuple) else [calls]
        result["tool_calls"] = [_tool_call(call, where, text_arguments) for call in calls]
    content = result.get("content", "")
    if isinstance(content, list | tuple):
        content = [_part(part, where) for part in content]
        joins = not reads_parts or message["role"] == "system"  # Gemma 3 reads one part of it
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


def _tool_call(call: Any, where: str, as_text: bool) -> dict[str, Any]:
    call = _without_null(call)  # Parquet fills keys of other calls with null
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
            f"{where} calls {function['name'][:80]!r} with arguments that are no JSON object: {str(written)[:80]}."
        )
    if as_text:
        arguments = written if isinstance(written, str) else json.dumps(arguments, ensure_ascii=False)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _without_null(value: Any) -> Any:
    """Remove the keys of objects, and of objects inside, whose value is null."""
    if isinstance(value, Mapping):
        return {key: _without_null(entry) for key, entry in value.items() if entry is not None}
    return [_without_null(entry) for entry in value] if isinstance(value, list) else value
