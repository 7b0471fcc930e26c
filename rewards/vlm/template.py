# SPDX-License-Identifier: Apache-2.0
"""Templates of the questions to a vision-language judge, and the settings in a model's folder.

A folder may hold `judge.json`:

    {"templates": {"yes_no": TEMPLATE, "rating": TEMPLATE, "pair": TEMPLATE, "hpsv3": TEMPLATE},
     "positions": "mrope", ...}

A TEMPLATE is an object with

- "messages": the conversation as chat templates take it, [{"role": "user", "content": [{"type": "image"},
  {"type": "text", "text": "Does it show {prompt}?"}]}]; each {"type": "image"} is a slot for one image, in
  order; a content may also be one string;
- "answer_prefix" (""): start of the assistant's answer;
- "chat" ({}): further arguments of the tokenizer's chat template;
- any other key: words that the judge looks for, as a list of strings ("yes": ["yes", "Yes"]).

Names in braces are replaced in one pass: `{prompt}` by the prompt, others by the judge's text of that name.
Other braces are kept, also in the replacements.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visalign.model_files import read_object
from visalign.rewards.base.contract import RewardError

SETTINGS = "judge.json"
POSITIONS = ("mrope", "1d")  # Token positions: on three axes, or counted as in text

_NAME = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, kw_only=True)
class Template:
    """Question to a vision-language model."""

    messages: Sequence[Mapping[str, Any]]  # Conversation with slots for images
    name: str = "template"
    answer_prefix: str = ""
    chat: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)  # name -> words that are looked for in the answer

    @classmethod
    def from_dict(cls, name: str, data: Any) -> Template:
        fields = {**data} if isinstance(data, Mapping) else {}
        messages, prefix = fields.pop("messages", None), fields.pop("answer_prefix", "")
        chat = fields.pop("chat", {})
        is_chat = isinstance(messages, list) and all(map(_is_message, messages))
        if not (is_chat and isinstance(prefix, str) and isinstance(chat, Mapping)):
            raise RewardError(
                f"template {name!r} is {data!r:.80}; it needs 'messages', a text answer_prefix and an object chat."
            )
        for key, words in fields.items():
            if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
                raise RewardError(f"template {name!r}: {key!r} is {words!r:.80}; it takes a list of words.")
        words_of = {key: tuple(words) for key, words in fields.items()}
        return cls(name=name, messages=messages, answer_prefix=prefix, chat=chat, words=words_of)

    def to_dict(self) -> dict[str, Any]:
        fixed = {"messages": list(self.messages), "answer_prefix": self.answer_prefix, "chat": dict(self.chat)}
        return {**fixed, **{key: list(words) for key, words in self.words.items()}}

    @property
    def text(self) -> str:
        """The whole template as JSON, for an identity."""
        return json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=False)

    @property
    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of `text`."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @property
    def images(self) -> int:
        return sum(part.get("type") == "image" for message in self.messages for part in _parts(message))

    @property
    def fields(self) -> frozenset[str]:
        parts = [part for message in self.messages for part in _parts(message) if "text" in part]
        return frozenset(name for part in parts for name in _NAME.findall(part["text"]))

    def filled(self, fields: Mapping[str, str]) -> list[dict[str, Any]]:
        """Replace `{name}` in the conversation by fields[name]; other braces are kept."""

        def fill(text: str) -> str:
            return _NAME.sub(lambda match: fields.get(match[1], match[0]), text)

        def fill_content(content: Any) -> Any:
            if isinstance(content, str):
                return fill(content)
            return [{**part, "text": fill(part["text"])} if "text" in part else {**part} for part in content]

        return [{**message, "content": fill_content(message["content"])} for message in self.messages]


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Contents of a model folder's `judge.json`."""

    templates: Mapping[str, Template] = field(default_factory=dict)
    positions: str | None = None  # One of `POSITIONS`, or None if not set
    rest: Mapping[str, Any] = field(default_factory=dict)  # The other keys of the file

    @classmethod
    def read(cls, folder: str | Path) -> JudgeSettings:
        """Read the `judge.json` of a folder; empty settings where it has none."""
        file = Path(folder) / SETTINGS
        if not file.is_file():
            return cls()
        data = read_object(file)
        if not isinstance(data.get("templates", {}), Mapping):
            raise RewardError(f"{file.name} needs an object with an object 'templates'.")
        templates = {name: Template.from_dict(name, item) for name, item in data.get("templates", {}).items()}
        rest = {key: data[key] for key in data if key not in ("templates", "positions")}
        return cls(templates=templates, positions=data.get("positions"), rest=rest)

    def write(self, folder: str | Path) -> None:
        templates = {name: template.to_dict() for name, template in self.templates.items()}
        positions = {} if self.positions is None else {"positions": self.positions}
        text = json.dumps({"templates": templates, **positions, **self.rest}, indent=2, ensure_ascii=False)
        (Path(folder) / SETTINGS).write_text(text + "\n", encoding="utf-8")


def escape(text: str, specials: Iterable[str]) -> str:
    """Break up special tokens in a user's text by a blank after their first character.

    A special token of a single character becomes a blank.

    >>> escape("a cat<|im_end|>", ["<|im_end|>"])
    'a cat< |im_end|>'
    """
    specials = list(specials)
    while present := [special for special in specials if special in text]:  # a blank may create another one
        for special in present:
            text = text.replace(special, f"{special[0]} {special[1:]}" if special[1:] else " ")
    return text


def _is_message(message: Any) -> bool:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content)))


def _is_part(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind == "image" or (kind == "text" and isinstance(part.get("text"), str))


def question(name: str, text: str, *, images: Sequence[str] = ("",), **fields: Any) -> Template:
    """Create a template of one user message: images, each after its label ("" for none), then the text."""
    content: list[dict[str, str]] = []
    for label in images:
        content += [{"type": "text", "text": label}] * bool(label)
        content.append({"type": "image"})
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
    return Template(name=name, messages=messages, **fields)


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
