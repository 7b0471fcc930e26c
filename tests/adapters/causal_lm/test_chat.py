# SPDX-License-Identifier: Apache-2.0
"""Prompts to tokens: plain text, chat templates, and messages about prompts that cannot be used."""

from typing import Any

import pytest
from tokenizers import processors

from tests.support.models.language import TEMPLATE, tiny_tokenizer
from visalign.errors import UserError
from visalign.text.chat import PromptEncoder

USER = {"role": "user", "content": "hi"}


def encoder(template: Any = TEMPLATE, **options) -> PromptEncoder:
    return PromptEncoder(tiny_tokenizer(template=template), **options)


def test_plain_text_stays_as_it_is() -> None:
    prompt_encoder = encoder()
    assert prompt_encoder.tokenizer.decode(prompt_encoder.encode(["a b", "hi"])[0]) == "a b"
    assert encoder(None).encode(["hi"]) == prompt_encoder.encode(["hi"])


def test_conversations_go_through_the_template_with_its_special_tokens() -> None:
    prompt_encoder = encoder()
    ids = prompt_encoder.encode([[USER]])[0]
    assert prompt_encoder.tokenizer.convert_ids_to_tokens(ids) == ["<user>", "h", "i", "<end>", "<assistant>"]
    assert prompt_encoder.render([USER, {"role": "assistant", "content": "so"}]) == "<user>hi<end><assistant>so"
    assert encoder(plain_as_chat=True).encode(["hi"]) == [ids]


def test_a_start_token_is_not_doubled() -> None:
    prompt_encoder = encoder()
    backend: Any = prompt_encoder.tokenizer
    backend.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<system> $A", special_tokens=[("<system>", 4)]
    )
    assert prompt_encoder.tokenizer.convert_ids_to_tokens(prompt_encoder.encode(["hi"])[0]) == ["<system>", "h", "i"]
    assert prompt_encoder.tokenizer.convert_ids_to_tokens(prompt_encoder.encode([[USER]])[0])[0] == "<user>"


def test_a_system_message_is_put_before_those_that_have_none() -> None:
    prompt_encoder = encoder(system="be", plain_as_chat=True)
    assert prompt_encoder.render("hi") == "<system>be<end><user>hi<end><assistant>"
    own = [{"role": "system", "content": "mine"}, USER]
    assert prompt_encoder.render(own) == "<system>mine<end><user>hi<end><assistant>"


def test_templates_by_name_by_text_and_with_options() -> None:
    templates = {"default": "{{ messages[0].content }}", "loud": "{{ messages[0].content }}{{ mark }}"}
    assert encoder(templates).render([USER]) == "hi"
    assert encoder(templates, chat_template="loud", template_options={"mark": "!"}).render([USER]) == "hi!"
    assert encoder(None, chat_template="{{ messages[0].role }}").render([USER]) == "user"


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (None, {"plain_as_chat": True}, "need a chat template, and this tokenizer has none"),
        (None, {"chat_template": "chatml"}, r"has no chat template 'chatml'.*\(it has none\)"),
        ({"default": "a", "rag": "b"}, {"chat_template": "rga"}, r"Did you mean 'rag'.*\(default, rag\)"),
    ],
)
def test_unknown_templates_are_refused(template, options, message) -> None:
    with pytest.raises(UserError, match=message):
        encoder(template, **options)


@pytest.mark.parametrize(
    ("template", "prompts", "message"),
    [
        (None, ["a", [USER]], "Prompt 1 is a conversation, and this tokenizer has no chat template"),
        (TEMPLATE, [""], r"Prompt 0 \(''\) has no tokens"),
        (TEMPLATE, [[{"role": "user"}]], "Prompt 0 holds {'role': 'user'}; a conversation is"),
        (TEMPLATE, [[USER, {"role": "judge", "content": "x"}]], "chat template refuses prompt 0: role judge"),
    ],
)
def test_bad_prompts_are_named(template, prompts, message) -> None:
    with pytest.raises(UserError, match=message):
        encoder(template).encode(prompts)
