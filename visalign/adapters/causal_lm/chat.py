# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids: plain text, or conversations through the tokenizer's chat template."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from visalign.errors import UserError, suggestion
from visalign.text import Prompt
from visalign.text.messages import template_messages

_PROBE = "QQTEXTQQ"
"""Content of messages whose surroundings in a rendered text are those of the template."""

_OWN_VARIABLES = {"messages", "add_generation_prompt", "raise_exception", "bos_token", "eos_token", "tools"}
"""Variables of templates that are no options."""


def image_parts(prompt: Prompt) -> list[Mapping[str, Any]]:
    """Return the parts {"type": "image", …} of a conversation, in order; none of a text."""
    messages = () if isinstance(prompt, str) else prompt
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


class PromptEncoder:
    """Turns prompts into token ids, and says which prompt cannot be turned and why.

    Args:
        tokenizer: tokenizer or processor of the model.
        chat_template: the Jinja text of a template, or the name of one of the tokenizer's; None is the
            processor's or the tokenizer's own.
        template_options: more variables of the template, e.g. {"enable_thinking": False}.
        plain_as_chat: wrap a plain text as the message of a user, unless the template was applied to it before;
            False tokenizes it as it stands.
        system: put this message before conversations that have none of the role "system".
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
        *,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        plain_as_chat: bool = False,
        system: str | None = None,
    ) -> None:
        loaded: Any = tokenizer
        text_tokenizer: Any = loaded.tokenizer if isinstance(loaded, ProcessorMixin) else loaded
        self.tokenizer: PreTrainedTokenizerBase = text_tokenizer
        self.plain_as_chat, self.system = plain_as_chat, system
        self._options = dict(template_options or {})
        self._warned = False
        self._template = _find_template(loaded.chat_template or text_tokenizer.chat_template, chat_template)
        if self._template is None and (plain_as_chat or system is not None):
            raise UserError(
                "plain_as_chat and system need a chat template, and this tokenizer has none (a base model). "
                "Give chat_template the Jinja text of one, or use plain text prompts without them."
            )

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse variables that the template does not read, or that the encoder sets itself."""
        if not options:
            return
        # transformers' own block, which a plain environment cannot parse
        jinja = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", self._template or "")
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        read = meta.find_undeclared_variables(environment.parse(jinja)) - _OWN_VARIABLES
        for name in options:
            if name not in read:
                reason = "which the prompt sets" if name in _OWN_VARIABLES else "which the chat template never reads"
                problem = f"it sets {name!r}, {reason}" if self._template else "the tokenizer has no chat template"
                names = ", ".join(sorted(read)) or "none"
                raise UserError(f"{problem}. {suggestion(name, read)}Variables of this template: {names}.")

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt, ready for the model to continue.

        A conversation that ends with a message of the assistant is continued; after any other the header of
        the assistant's turn is added. A plain text has at most one start token, and no end token behind it.
        """
        encoded = []
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str) and not self.plain_as_chat:
                ids = self._text_tokens(prompt)
            else:  # the template writes special tokens itself
                ids = self.tokenizer(self.render(prompt, index), add_special_tokens=False)["input_ids"]
            if not ids:
                raise UserError(f"Prompt {index} ({prompt!r}) has no tokens. Give a text that is not empty.")
            encoded.append(list(ids))
        return encoded

    def render(self, prompt: Prompt, index: int = 0, *, closed: bool = False) -> str:
        """Return the text that the chat template makes of a conversation, or of a text as the message of a
        user; `index` is for messages. With `closed` nothing follows it: the last turn ends.
        """
        if isinstance(prompt, str) and self._is_rendered(prompt):
            return self._rendered(prompt)
        messages = template_messages(prompt, f"Prompt {index}", **self._reading)
        if self._template is None:
            raise UserError(
                f"Prompt {index} is a conversation, and this tokenizer has no chat template (a base model). "
                "Give chat_template the Jinja text of one, or plain text prompts."
            )
        if self.system is not None and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        continued = messages[-1]["role"] == "assistant" and not closed
        if continued and messages[-1].get("tool_calls"):
            raise UserError(f"Prompt {index} ends with a tool call. Add the tool's message, or leave the call out.")
        if continued and not messages[-1]["content"]:  # nothing to continue: the header alone
            continued, messages = False, messages[:-1]
        try:
            return self._apply(
                messages, add_generation_prompt=not (continued or closed), continue_final_message=continued
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise UserError(
                f"The chat template refuses prompt {index}: {error}. Its messages are of "
                f"{', '.join(message['role'] for message in messages)}. Change them to what the template reads, "
                "or give another chat_template."
            ) from error

    def turn_end(self, ends: Sequence[int | None] = ()) -> int | None:
        """Return the token that the chat template writes behind a message of the assistant: the first special
        one there, or one of `ends`; None without such.
        """
        ids = self.tokenizer(self._surroundings[2], add_special_tokens=False)["input_ids"]
        return next((token for token in ids if token in self._special or token in ends), None)

    def end_token(self, prompt: Prompt, ends: Sequence[int]) -> int:
        """Return the token that ends a completion of a prompt: `turn_end`, or the tokenizer's after plain text;
        the first of `ends` where there is none.
        """
        chat = not isinstance(prompt, str) or self.plain_as_chat or self._is_rendered(prompt)
        end: Any = self.turn_end(ends) if chat else None
        end = self.tokenizer.eos_token_id if end is None else end
        return ends[0] if end is None else end

    def _apply(self, messages: Sequence[Mapping[str, Any]], **turn: bool) -> str:
        options = {"chat_template": self._template, "tokenize": False, **turn, **self._options}
        return str(self.tokenizer.apply_chat_template(list(messages), **options))  # type: ignore[arg-type]

    def _apply_to_probe(self, content: Any = _PROBE, *answers: str) -> str:
        """Render a message of a user and, closed, the answers of the assistant; "" where the template refuses."""
        messages = [{"role": "user", "content": content}, *({"role": "assistant", "content": a} for a in answers)]
        try:
            return self._apply(messages, add_generation_prompt=not answers)
        except (TemplateError, ValueError, TypeError):
            return ""

    @cached_property
    def _surroundings(self) -> tuple[str, str, str]:
        """Text of the template before and behind a user's message, and behind an assistant's; "" without template."""
        before, _, behind = self._apply_to_probe().partition(_PROBE)
        return before, behind, self._apply_to_probe(_PROBE, _PROBE).rpartition(_PROBE)[2]

    @cached_property
    def _reading(self) -> dict[str, bool]:
        """Forms of content and of tool calls that the template reads; see `template_messages`."""
        parts = self._apply_to_probe([{"type": "text", "text": _PROBE}]) == self._apply_to_probe()
        # DeepSeek's templates join the arguments of a call to a text
        call = {"id": "call00000", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
        asked = {"role": "user", "content": _PROBE}, {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            self._apply([*asked, {"role": "tool", "tool_call_id": "call00000", "content": _PROBE}])
            text_arguments = False
        except (TemplateError, ValueError, TypeError) as error:
            text_arguments = isinstance(error, TypeError)
        return {"reads_parts": parts, "text_arguments": text_arguments}

    @cached_property
    def _opening(self) -> tuple[str, str]:
        """Return what a rendered text begins with (holds, where that is a special token); and the start token."""
        start = str(self.tokenizer.bos_token or "")
        before = self._surroundings[0].removeprefix(start).lstrip()
        tokens = (token for token in self._special.values() if before.startswith(token))
        return max(tokens, key=len, default=before.strip()), start

    @cached_property
    def _special(self) -> dict[int, str]:
        return {number: token.content for number, token in self.tokenizer.added_tokens_decoder.items()}

    def _is_rendered(self, text: str) -> bool:
        """Check for a text to which the chat template was applied before."""
        opening, start = self._opening
        text = text.lstrip().removeprefix(start).lstrip()
        if opening in (marks := tuple(self._special.values())):  # other roles than the user's may come first
            return opening in text and text.startswith(marks)
        answer = self._surroundings[1].strip()
        return bool(opening and answer) and text.startswith(opening) and answer in text

    def _rendered(self, text: str) -> str:
        """Return a rendered text with the start token that the template writes."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Prompts such as {text[:60]!r} hold the marks of the chat template already and are taken as they "
                "stand: no template, no system message. Give the bare text, or conversations.",
                stacklevel=2,
            )
        start = self._opening[1]
        missing = start and self._surroundings[0].startswith(start) and not text.startswith(start)
        return start + text if missing else text

    def _text_tokens(self, text: str) -> list[int]:
        """Tokenize a plain text with the special tokens that the tokenizer puts before texts, and none behind."""
        full = list(self.tokenizer(text)["input_ids"])
        bare = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not bare:
            return [token for token in full if token == self.tokenizer.bos_token_id]
        begins = next((n for n in range(len(full)) if full[n : n + len(bare)] == bare), 0)
        before = full[:begins]
        return bare if before == bare[: len(before)] else before + bare  # a rendered text holds them itself


def _find_template(templates: Any, requested: str | None) -> str | None:
    """Return the Jinja text of the template; None where there is none and none was requested."""
    by_name = dict(templates) if isinstance(templates, dict) else {"default": templates} if templates else {}
    if requested is None or "{" in requested:  # Jinja text
        return requested or by_name.get("default")
    if requested not in by_name:  # transformers would take the name for Jinja text
        raise UserError(
            f"The tokenizer has no chat template {requested!r}. {suggestion(requested, by_name)}Give chat_template "
            f"one of its names ({', '.join(sorted(by_name)) or 'it has none'}) or Jinja text with {{{{ … }}}}."
        )
    return by_name[requested]
