# SPDX-License-Identifier: Apache-2.0
"""Chat models of public families: prompts, the end of a turn that is learnt, tags that stay, tool calls."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from tokenizers import processors

from tests.support.models.chat_families import FAMILIES, FIRST_SYSTEM, ChatFamily, by_role
from visalign.adapters.causal_lm.demonstrations import demonstration_rollout
from visalign.adapters.causal_lm.loading import end_tokens
from visalign.errors import UserError
from visalign.text import StoppingCriteria
from visalign.text.chat import PromptEncoder
from visalign.text.decoding import completion_text
from visalign.text.steps import StepReading, step_index

ENDS = {
    "Qwen3-Instruct-2507": "<|im_end|>", "Llama 3": "<|eot_id|>", "Gemma 3": "<end_of_turn>", "Phi-3": "<|end|>",
    "Phi-4-mini-instruct (without tools)": "<|end|>", "Mistral-7B-Instruct v0.3 (v3)": "</s>",
}  # fmt: skip
USER = {"role": "user", "content": "2+2="}
SYSTEM = {"role": "system", "content": "Be kind."}
ANSWER = "<answer>4</answer>"


@pytest.mark.parametrize(("name", "end"), ENDS.items())
def test_the_end_of_a_turn_is_learnt_and_tags_stay(name, end) -> None:
    policy = FAMILIES[name].policy("<answer>", "</answer>")
    tokenizer: Any = policy.tokenizer
    rollout = demonstration_rollout(policy, [[USER], "2+2="], [ANSWER, ANSWER])
    ids = rollout.completion_ids[0].tolist()
    assert [tokenizer.decode(row[-1]) for row in rollout.completion_ids] == [end, FAMILIES[name].eos]
    assert completion_text(tokenizer, ids, ended=True) == ANSWER and len(ids) == 4
    assert step_index(rollout, tokenizer, StepReading()).tolist() == [[0] * 4] * 2
    assert ids[-1] in end_tokens(policy.model, policy.prompts, StoppingCriteria())
    optimizer = torch.optim.SGD((p for _, p in policy.trainable_parameters()), lr=0.1)
    log_probs = []
    for _ in range(3):
        log_prob = policy.log_probs(rollout, slice(0, 1)).log_prob
        log_probs.append(log_prob[0, -1].item())
        optimizer.zero_grad()
        (-log_prob.sum()).backward()
        optimizer.step()
    assert log_probs == sorted(log_probs) and log_probs[2] > log_probs[0] + 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rendered_prompt_is_taken_as_it_stands(name) -> None:
    tokenizer: Any = FAMILIES[name].tokenizer()
    options: dict[str, Any] = {"template_options": {"date_string": "26 Nov 2026"}}
    encoder, plain = (PromptEncoder(tokenizer, plain_as_chat=chat, **options) for chat in (True, False))
    conversations = [[USER], [USER, {"role": "assistant", "content": "4"}, USER], [SYSTEM, USER]]
    for conversation in conversations[: 2 if name == "Gemma 1 and 2" else 3]:
        text = encoder.render(conversation)
        texts = [
            text,
            text.removeprefix(tokenizer.bos_token or ""),
        ]  # the tokenizer adds a start token that is left out
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = encoder.encode([conversation, *texts])
        assert all(row == ids[0] for row in ids) and plain.encode(texts) == ids[1:]
    encoder = PromptEncoder(tokenizer, plain_as_chat=True, **options)
    with pytest.warns(UserWarning, match="hold the marks of the chat template already") as caught:
        encoder.encode([text, text])
    assert len(caught) == 1
    for text in ("2+2=", "<|im_end|> <|eot_id|> <end_of_turn> <|end|> </s>", "What is [INST]?"):
        assert encoder.render(text) == encoder.render([{"role": "user", "content": text}])


DEEPSEEK = ChatFamily(
    FIRST_SYSTEM + "{{ bos_token + system }}{% for m in messages %}{{ '<|User|>' + m.content if m.role == 'user' else "
    "'<|Assistant|>' + m.content + eos_token }}{% endfor %}{{ '<|Assistant|><think>\n' if add_generation_prompt }}",
    ("<|User|>", "<|Assistant|>", "<s>", "</s>"), "</s>", "<s>",
)  # fmt: skip
GLM = ChatFamily(by_role("<|", "|>\n", "").replace("{{ bos_token }}", "[gMASK]"), ("<|user|>", "[gMASK]"), "<|user|>")
BY_HAND = ChatFamily(FAMILIES["Qwen3-Instruct-2507"].template, ("<eos>",), "<eos>")


@pytest.mark.parametrize("family", [*FAMILIES.values(), DEEPSEEK, GLM, BY_HAND])
def test_a_rendered_prompt_gets_the_header_that_files_and_people_leave_out(family) -> None:
    tokenizer: Any = family.tokenizer()
    encoder = PromptEncoder(tokenizer, plain_as_chat=True, template_options={"date_string": "26 Nov 2026"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for messages in ([USER], [USER, {"role": "assistant", "content": "4"}, USER], [SYSTEM, USER]):
            if messages[0] is SYSTEM and "no system message" in family.template:
                continue
            text = encoder.render(messages)
            closed = encoder.render(messages, closed=True).removesuffix("<|endoftext|>")
            assert {encoder.render(form) for form in (text, text.strip(), closed, closed.strip())} == {text}
            answered = encoder.render([*messages, {"role": "assistant", "content": "It is 4."}])
            assert encoder.render(answered) == answered  # an answer that was begun is continued


@pytest.mark.parametrize("name", ["Qwen3-Instruct-2507", "Llama 3", "Gemma 3", "Phi-3"])
def test_an_answer_behind_a_rendered_prompt_closes_its_turn(name) -> None:
    encoder = PromptEncoder(FAMILIES[name].tokenizer(), plain_as_chat=True)
    expected = encoder.render([USER, {"role": "assistant", "content": ANSWER}], closed=True)
    with pytest.warns(UserWarning, match="marks of the chat template"):
        assert encoder.render_answered(encoder.render([USER]), ANSWER) == expected
    assert encoder.render_answered("2+2=", ANSWER) == encoder.render_answered([USER], ANSWER) == expected
    begun = [USER, {"role": "assistant", "content": ANSWER[:8]}]
    assert encoder.render_answered(begun, ANSWER[8:]) == expected


def test_the_next_turn_may_end_an_answer() -> None:
    policy = GLM.policy()
    assert policy.prompts.turn_end() is None
    assert policy.tokenizer.decode(policy.prompts.end_token([USER], [1, policy.tokenizer.eos_token_id])) == "<|user|>"


def test_no_end_token_stands_behind_a_prompt() -> None:
    tokenizer = FAMILIES["Mistral-7B-Instruct v0.3 (v3)"].tokenizer()
    pairs = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    around = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=pairs)
    tokenizer.backend_tokenizer.post_processor = around  # type: ignore[assignment]
    ids = PromptEncoder(tokenizer).encode(["2+2=", "", "<s>2+2=", "a</s>"])
    assert tokenizer.batch_decode(ids) == ["<s>2+2=", "<s>", "<s>2+2=", "<s>a</s>"]


@pytest.mark.parametrize("name", ["Qwen3", "Llama 3", "Phi-3"])
def test_text_parts_are_joined(name) -> None:
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}]
    encoder = PromptEncoder(FAMILIES[name].tokenizer())
    assert encoder.render([{"role": "user", "content": parts}]) == encoder.render([{**USER, "content": "a\n\nb"}])
    reads_parts = "{% for m in messages %}{% for p in m.content %}{{ p.text or p }}{% endfor %}{% endfor %}"
    encoder = PromptEncoder(FAMILIES[name].tokenizer(), chat_template=reads_parts)
    assert encoder.render([{"role": "user", "content": parts}]) == "ab"


CALLS = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}ARGUMENTS{% endfor %};{% endfor %}"
)


@pytest.mark.parametrize("arguments", [{"a": "é"}, '{"a": "é"}', None, ""])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}, {"content": ""}])
@pytest.mark.parametrize("written", ["{{ c.function.arguments | tojson }}", "{{ ' ' + c.function.arguments }}"])
def test_tool_calls(arguments, content, written) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        USER,
        {"role": "assistant", **content, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_calls": []},
    ]
    tokenizer = FAMILIES["Qwen3"].tokenizer()
    template = CALLS.replace("ARGUMENTS", written)
    text = PromptEncoder(tokenizer, chat_template=template).render(messages)
    rendered = text.removeprefix("user:2+2=;assistant:add").removesuffix(";tool:4;")
    assert json.loads(rendered or "{}") == ({"a": "é"} if arguments else {})


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": function}]}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (call(name="add", arguments="{a: 2}"), "Message 1 of prompt 0 calls 'add' with arguments that are no JSON"),
        (call(name="add", arguments="[1]"), "with arguments that are no JSON object"),
        (call(arguments={}), "has the tool call {'function': {'arguments': {}}}; a call is"),
        ({"role": "user", "content": 4}, "Message 1 of prompt 0 has the content 4; give a text, or a list of parts"),
        ({"role": "user", "content": [{"type": "audio"}]}, "has the part {'type': 'audio'} in its content; parts are"),
        ({"role": "assistant", "content": None}, "Prompt 0 holds {'role': 'assistant', 'content': None}"),
        (call(name="add"), "Prompt 0 ends with a tool call. Add the tool's message"),
    ],
)
def test_messages_name_what_is_wrong(message, text) -> None:
    with pytest.raises(UserError) as caught:
        PromptEncoder(FAMILIES["Qwen3"].tokenizer()).render([USER, message])
    assert text in str(caught.value) and "roles" not in str(caught.value)
