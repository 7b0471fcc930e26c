# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids: plain text, or conversations through the tokenizer's chat template."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError, meta

from visalign.errors import CaughtError, UserError, suggestion
from visalign.interfaces import Prompt

from .messages import prompt_text, template_messages, text_messages

_PROBE = "QQTEXTQQ"  # Content of messages whose surroundings in a rendered text are those of the template

_OWN_VARIABLES = {"messages", "add_generation_prompt", "raise_exception", "bos_token", "eos_token", "tools"}
"""Variables of templates that are no options."""


def image_parts(prompt: Prompt) -> list[Mapping[str, Any]]:
    """Return the parts {"type": "image", …} of a conversation, in order; none of a text."""
    messages = () if isinstance(prompt, str) else prompt
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


class Surroundings(NamedTuple):
    """Text of a chat template around the content of messages; "" without a template."""

    before: str  # Before the first message, a user's
    behind: str  # Behind a user's message
    header: str  # Behind that, before the assistant's answer
    closing: str  # Behind the answer, where it is the last message
    between: str  # Between an answer and the next message of a user

    @property
    def role(self) -> str:
        """The header without the thinking that some templates open."""
        return self.header.partition("<think>")[0].strip()


class PromptEncoder:
    """Turns prompts into token ids, and says which prompt cannot be turned and why.

    `chat_template` is Jinja text or the name of one of the tokenizer's (or processor's) templates, None its own;
    `template_options` are more variables of it, e.g. {"enable_thinking": False}. With `plain_as_chat` a plain text is
    the message of a user, or the turns of an HH-RLHF transcript, unless the template was applied to it before.
    `system` is put before conversations that have no system message.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        plain_as_chat: bool = False,
        system: str | None = None,
    ) -> None:
        self.tokenizer: Any = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's
        self.plain_as_chat, self.system = plain_as_chat, system
        self._options = dict(template_options or {})
        self._warned = False
        self._template = _find_template(tokenizer.chat_template or self.tokenizer.chat_template, chat_template)
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

    def use_tools(self, tools: Sequence[Callable[..., Any]]) -> None:
        """Describe tools in every conversation: functions with type hints, and a docstring with their "Args:"."""
        if self._template is None:
            raise UserError("This tokenizer has no chat template (a base model), so nothing can answer its turns.")
        if not tools:
            return
        if not re.search(r"\btools\b", self._template):
            raise UserError(
                "The chat template of this model describes no tools. Take a model that was trained with them."
            )
        self._options["tools"] = list(tools)
        with CaughtError() as caught:
            self._apply([{"role": "user", "content": _PROBE}])
        if caught.error is not None:  # transformers reads a tool's signature and docstring
            raise UserError(f"The tools cannot be described to the model: {caught.error}")

    @property
    def role(self) -> str:
        return self._surroundings.role

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt, ready for the model to continue.

        A last message of the assistant is continued; after another the header of its turn is added. A plain text has
        at most one start token.
        """
        encoded = []
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str) and not self.plain_as_chat:
                ids = self._text_tokens(prompt)
            else:  # the template writes special tokens itself
                ids = self._token_ids(self.render(prompt, index))
            if not ids:
                raise UserError(f"Prompt {index} ({prompt!r}) has no tokens. Give a text that is not empty.")
            encoded.append(ids)
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
                "Set the tokenizer's chat_template to the Jinja text of one, or give plain text prompts."
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

    def render_answered(self, prompt: Prompt, answer: str) -> str:
        """Return the text of a prompt with the assistant's answer behind it, which ends its turn."""
        if isinstance(prompt, str) and self._is_rendered(prompt):
            return self._rendered(prompt) + answer + self._surroundings.closing
        messages = text_messages(prompt) if isinstance(prompt, str) else prompt
        if isinstance(prompt, str) and messages[0]["content"] != prompt:  # a transcript, which may go on in the answer
            *before, last = text_messages(prompt + answer)
            messages, answer = (before, last["content"]) if last["role"] == "assistant" else (messages, answer.strip())
        elif messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):  # a begun answer
            messages, answer = messages[:-1], prompt_text(messages[-1:]) + answer
        return self.render([*messages, {"role": "assistant", "content": answer}], closed=True)

    def turn_end(self, ends: Sequence[int | None] = ()) -> int | None:
        """Return the token that the chat template writes behind a message of the assistant: the first special one
        there, or one of `ends`, which may begin the next turn (GLM's do); None without such.
        """
        closing, between = (self._token_ids(text) for text in self._surroundings[-2:])
        marks = [token for token in closing if token in self._special or token in ends]
        return next(iter([*marks, *(token for token in between if token in ends)]), None)

    def end_token(self, prompt: Prompt, ends: Sequence[int]) -> int:
        """Return the token behind a completion: `turn_end`, after plain text the tokenizer's, else `ends[0]`."""
        chat = not isinstance(prompt, str) or self.plain_as_chat or self._is_rendered(prompt)
        end: Any = self.turn_end(ends) if chat else None
        end = self.tokenizer.eos_token_id if end is None else end
        return ends[0] if end is None else end

    def _token_ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _apply(self, messages: Sequence[Mapping[str, Any]], **turn: bool) -> str:
        options = {"chat_template": self._template, "tokenize": False, **turn, **self._options}
        return str(self.tokenizer.apply_chat_template(list(messages), **options))

    def _apply_to_probe(self, *contents: Any, header: bool = False) -> str:
        """Render messages of user and assistant in turn; "" where the template refuses them."""
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
        try:
            return self._apply(messages, add_generation_prompt=header)
        except (TemplateError, ValueError, TypeError):
            return ""

    @cached_property
    def _surroundings(self) -> Surroundings:
        before, _, behind = self._apply_to_probe(_PROBE).partition(_PROBE)
        _, _, opened = self._apply_to_probe(_PROBE, header=True).partition(_PROBE)
        if not opened.startswith(behind):  # Phi's write the end of the text behind the last message
            behind = behind.removesuffix(str(self.tokenizer.eos_token or ""))
        closing = self._apply_to_probe(_PROBE, _PROBE).split(_PROBE)[2:]
        between = self._apply_to_probe(*[_PROBE] * 3).split(_PROBE)[2:3]
        header = opened.removeprefix(behind) if opened.startswith(behind) else ""
        return Surroundings(before, behind, header, "".join(closing), "".join(between))

    @cached_property
    def _reading(self) -> dict[str, bool]:
        """Forms of content and of tool calls that the template reads; see `template_messages`."""
        parts = self._apply_to_probe([{"type": "text", "text": _PROBE}]) == self._apply_to_probe(_PROBE)
        # DeepSeek's templates join the arguments of a call to a text
        call = {"id": "call00000", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
        call_messages = {"role": "user", "content": _PROBE}, {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            self._apply([*call_messages, {"role": "tool", "tool_call_id": "call00000", "content": _PROBE}])
            text_arguments = False
        except (TemplateError, ValueError, TypeError) as error:
            text_arguments = isinstance(error, TypeError)
        return {"reads_parts": parts, "text_arguments": text_arguments}

    @cached_property
    def _opening(self) -> tuple[str, str]:
        """Return what a rendered text begins with (holds, where that is a special token); and the start token."""
        start = str(self.tokenizer.bos_token or "")
        before = self._surroundings.before.removeprefix(start).lstrip()
        tokens = (token for token in self._special.values() if before.startswith(token))
        return max(tokens, key=len, default=before.strip()), start

    @cached_property
    def _special(self) -> dict[int, str]:
        return {number: token.content for number, token in self.tokenizer.added_tokens_decoder.items()}

    def _is_rendered(self, text: str) -> bool:
        """Check for a text to which the chat template was applied before."""
        opening, start = self._opening
        around, text = self._surroundings, text.strip()
        begins, text = bool(start) and text.startswith(start), text.removeprefix(start).lstrip()
        if not opening or opening not in text:
            return False
        behind, marks = around.behind.strip(), tuple(self._special.values())
        if around.role and text.endswith((around.role, around.header.strip())):
            return True
        if opening in marks:  # other roles than the user's may come first
            return begins or text.startswith(marks)
        if behind and text.endswith(behind):
            return True
        answer = (around.behind + around.header).strip()
        return bool(answer) and answer in text and (bool(behind) or text.startswith(opening))

    def _rendered(self, text: str) -> str:
        """Return a rendered text with the start token and the header of an answer that the template writes."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Prompts such as {text[:60]!r} hold the marks of the chat template already and are taken as they "
                "stand: no template, no system message. Give the bare text, or conversations.",
                stacklevel=2,
            )
        start = self._opening[1]
        before, behind, header, _, between = self._surroundings
        if start and before.startswith(start) and not text.startswith(start):
            text = start + text
        bare, role = text.rstrip(), self._surroundings.role
        for end in filter(None, (header.strip(), role)):  # files of prompts lose the line end of the header
            if bare.endswith(end):
                rest = header.lstrip().removeprefix(end)
                return bare + rest[: len(rest) - len(rest.lstrip())]
        shared = (between[n:].strip() for n in range(len(between)) if before.endswith(between[n:]))
        user = next(shared, "") or before.strip()
        if not role or text.rfind(role) > text.rfind(user):  # a started answer is continued
            return text
        return bare.removesuffix(behind.strip()).rstrip() + behind + header

    def _text_tokens(self, text: str) -> list[int]:
        """Tokenize a plain text with the special tokens that the tokenizer puts before texts, and none behind."""
        full, bare = list(self.tokenizer(text)["input_ids"]), self._token_ids(text)
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
