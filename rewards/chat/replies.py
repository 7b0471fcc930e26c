# SPDX-License-Identifier: Apache-2.0
"""What a chat-completions server answered: a text and its first token's alternatives, or why none."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from visalign.rewards.reading.numbers import AnswerError

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
    """The answer in a chat.completion object.

    Args:
        sent: the JSON object that the server sent.
        first_token_only: one token was asked for, so that the answer may end there and have no visible text.

    Raises:
        AnswerError: no choice, no text, a refusal, or an answer that was cut or filtered.
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
