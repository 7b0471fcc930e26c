# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids: plain text, or conversations through the tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from visalign.errors import UserError, suggestion
from visalign.text import Prompt

# Slots of a template ({{ … }}, {% … %}) tell its text from a name.
_JINJA = re.compile(r"\{[{%]")


def image_parts(prompt: Prompt) -> list[Mapping[str, Any]]:
    """The parts {"type": "image", …} of a conversation, in order; none of a text."""
    messages = () if isinstance(prompt, str) else prompt
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


class PromptEncoder:
    """Turns prompts into token ids, and says which prompt cannot be turned and why.

    Args:
        tokenizer: of the model, or its processor.
        chat_template: the Jinja text of a template, or the name of one of the tokenizer's; None is the
            processor's or the tokenizer's own.
        template_options: more variables of the template, e.g. {"enable_thinking": False}.
        plain_as_chat: wrap a plain text as the message of a user; False tokenizes it as it stands.
        system: put this message before conversations that have none of the role "system".

    Raises:
        UserError: a chat is asked for and there is no template, or none of that name.
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
        tokenizer_alone: Any = loaded.tokenizer if isinstance(loaded, ProcessorMixin) else loaded
        self.tokenizer: PreTrainedTokenizerBase = tokenizer_alone
        self.plain_as_chat = plain_as_chat
        self.system = system
        self._options = dict(template_options or {})
        self._template = _find_template(loaded.chat_template or tokenizer_alone.chat_template, chat_template)
        if self._template is None and (plain_as_chat or system is not None):
            raise UserError(
                "plain_as_chat and system need a chat template, and this tokenizer has none (a base model). "
                "Give chat_template the Jinja text of one, or use plain text prompts without them."
            )

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of each prompt, ready for the model to continue.

        A conversation that ends with a message of the assistant is continued; after any other the header of
        the assistant's turn is added. The template writes special tokens itself, so none is added to it.

        Returns:
            P lists, none empty.

        Raises:
            UserError: naming the prompt and what is wrong with it.
        """
        return [self._encode(prompt, index) for index, prompt in enumerate(prompts)]

    def _encode(self, prompt: Prompt, index: int) -> list[int]:
        if isinstance(prompt, str) and not self.plain_as_chat:
            ids = self.tokenizer(prompt)["input_ids"]
        else:
            text = self.render(prompt, index)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise UserError(
                f"Prompt {index} ({prompt!r}) has no tokens, and a model needs at least one to start from. "
                "Give a text that is not empty."
            )
        return list(ids)

    def render(self, prompt: Prompt, index: int = 0) -> str:
        """The text that the chat template makes of a conversation, or of a text that becomes the message of a
        user; `place` of the prompt among those given is for messages.
        """
        messages = _messages(prompt, index)
        if self._template is None:
            raise UserError(
                f"Prompt {index} is a conversation, and this tokenizer has no chat template (a base model). "
                "Give chat_template the Jinja text of one, or plain text prompts."
            )
        if self.system is not None and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        continued = messages[-1]["role"] == "assistant"
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=not continued,
                continue_final_message=continued,
                **self._options,
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(
                f"The chat template refuses prompt {index} (roles: {roles}): {error}. Change the prompt to "
                "roles in an order that the template knows, or give another chat_template."
            ) from error
        return str(rendered)


def _find_template(templates: Any, requested: str | None) -> str | None:
    """The Jinja text that is meant; None where there is none and none was asked for."""
    by_name: dict[str, str] = (
        dict(templates) if isinstance(templates, dict) else {"default": templates} if templates else {}
    )
    if requested is None:
        if by_name and "default" not in by_name:
            raise UserError(
                f"The tokenizer has the chat templates {', '.join(sorted(by_name))} and none is its default. "
                "Name one of them as chat_template."
            )
        return by_name.get("default")
    if requested in by_name:
        return by_name[requested]
    if _JINJA.search(requested):
        return requested
    available = f"has the chat templates {', '.join(sorted(by_name))}" if by_name else "has no chat template"
    raise UserError(
        f"chat_template {requested!r} is neither a template of this tokenizer, which {available}, nor Jinja "
        f"text. {suggestion(requested, by_name)}Give one of these names or a "
        "template's text (with {{ … }})."
    )


def _messages(prompt: Prompt, index: int) -> list[dict[str, Any]]:
    """The messages of a conversation, checked."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = [dict(m) if isinstance(m, Mapping) else m for m in prompt]
    bad = [m for m in messages if not isinstance(m, dict) or not {"role", "content"} <= set(m)]
    if bad or not messages:
        example = repr(bad[0]) if bad else "no message"
        raise UserError(
            f"Prompt {index} holds {example}; a conversation is a list of at least one message of the form "
            '{"role": "user", "content": "…"}. A plain prompt is a string.'
        )
    return messages
