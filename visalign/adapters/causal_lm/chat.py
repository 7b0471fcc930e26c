# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids: plain text, or conversations through the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from visalign.errors import UserError, suggestion
from visalign.text import Prompt


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
        plain_as_chat: wrap a plain text as the message of a user; False tokenizes it as it stands.
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
        self._template = _find_template(loaded.chat_template or text_tokenizer.chat_template, chat_template)
        if self._template is None and (plain_as_chat or system is not None):
            raise UserError(
                "plain_as_chat and system need a chat template, and this tokenizer has none (a base model). "
                "Give chat_template the Jinja text of one, or use plain text prompts without them."
            )

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt, ready for the model to continue.

        A conversation that ends with a message of the assistant is continued; after any other the header of
        the assistant's turn is added.
        """
        encoded = []
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str) and not self.plain_as_chat:
                ids = self.tokenizer(prompt)["input_ids"]
            else:  # the template writes special tokens itself
                ids = self.tokenizer(self.render(prompt, index), add_special_tokens=False)["input_ids"]
            if not ids:
                raise UserError(f"Prompt {index} ({prompt!r}) has no tokens. Give a text that is not empty.")
            encoded.append(list(ids))
        return encoded

    def render(self, prompt: Prompt, index: int = 0) -> str:
        """Return the text that the chat template makes of a conversation, or of a text as the message of a
        user; `index` is for messages.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        bad = [m for m in messages if not isinstance(m, Mapping) or not {"role", "content"} <= set(m)]
        if bad or not messages:
            raise UserError(
                f"Prompt {index} holds {bad[0] if bad else 'no message'!r}; a conversation is a list of messages "
                'of the form {"role": "user", "content": "…"}. A plain prompt is a string.'
            )
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
                [dict(message) for message in messages],
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
