# SPDX-License-Identifier: Apache-2.0
"""Conversations with tools and environments: their form, what was drawn, rewards, and what fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.adapters.causal_lm.test_chat_families import FAMILIES, GLM
from tests.support.models.language import tiny_model, tiny_tokenizer
from visalign.adapters.causal_lm.demonstrations import demonstration_rollout
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.errors import UserError
from visalign.interfaces import ToolCompletion, policy_text
from visalign.rewards.catalogue import load_text_reward
from visalign.rewards.text.callables import TextFunctionReward
from visalign.rewards.text.classifier import spelled_out
from visalign.rewards.text.combine import WeightedTextSum
from visalign.text import Sampling, StoppingCriteria, StopReason
from visalign.text.chat import PromptEncoder
from visalign.text.messages import template_messages
from visalign.text.rollout import TextRollout
from visalign.text.steps import StepReading, step_index
from visalign.text.tools import ToolPolicy
from visalign.text.turns import ChatTurns, EnvironmentUse

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = [{"role": "user", "content": "1 + 2 = ?"}]
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def mean(values: list[float], digits: int = None) -> float:  # type: ignore[assignment]  # noqa: RUF013
    """Average numbers.

    Args:
        values: the numbers.
        digits: the digits of the answer.
    """
    return round(sum(values) / len(values), digits or 9)


class Room:
    """An environment with a tool."""

    def reset(self, start: int = 0, **record: Any) -> str:
        self.total = start
        return " Begin."

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
        """
        self.total += a + b
        return f"Total {self.total}"

    def get_reward(self) -> float:
        return self.total / 10


class Game:
    """An environment with steps that rejects a wrong answer, which costs 1."""

    def reset(self) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool]:
        return "No <|im_end|>", 5.0 if "3" in text else -1.0, "3" in text


class Broken(Game):
    def step(self, text: str) -> Any:
        raise RuntimeError("the server is gone")


class Scripted:
    """An engine whose samples draw these turns, one after the other."""

    def __init__(self, encoder: PromptEncoder, *turns: str) -> None:
        self.encoder, self.turns, self.prompts = encoder, list(turns), list[Any]()

    def generate(self, prompts: Any, *, after: Any, group: Any, **options: Any) -> TextRollout:
        self.prompts.append(self.encoder.render(prompts[0]))
        ids = [self.encoder.tokenizer(self.turns.pop(0), add_special_tokens=False)["input_ids"]] * len(prompts)
        tokens = torch.tensor([[*old, *new] for old, new in zip(after, ids, strict=True)])
        reasons: list[StopReason] = ["eos"] * len(prompts)
        drawn = torch.tensor([[0.0] * len(old) + [1.0] * len(new) for old, new in zip(after, ids, strict=True)])
        return TextRollout(
            prompt_ids=torch.ones(len(prompts), 1, dtype=torch.int64), prompt_mask=torch.ones(len(prompts), 1),
            completion_ids=tokens, loss_mask=drawn, log_prob=-drawn, full_log_prob=-drawn, entropy=drawn,
            text=[""] * len(prompts), stop_reason=reasons, group=group, prompt=prompts,
            seed=[0] * len(prompts), sampling=Sampling(),
        )  # fmt: skip


def played(*turns: str, records: Any = (), template: str = TEMPLATE, **use: Any) -> tuple[TextRollout, Scripted]:
    tokenizer = FAMILIES["Qwen3"].tokenizer()
    tokenizer.chat_template = template
    encoder = PromptEncoder(tokenizer, plain_as_chat=True)
    engine = Scripted(encoder, *(f"{turn}<|im_end|>" for turn in turns))
    conversations = ChatTurns(encoder, EnvironmentUse(name="mine", **use), records)
    return ToolPolicy(engine, tokenizer, conversations).generate([PROMPT], seeds=0), engine


def called(call: Any) -> str:
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def test_a_conversation_has_the_form_of_the_template_and_only_the_policys_tokens_are_trained() -> None:
    rollout, engine = played(called(CALL), "It is 3", tools=[add])
    call, tool = {"tool_calls": [{"function": CALL}]}, {"role": "tool", "content": "3"}
    messages = [
        *PROMPT,
        {"role": "assistant", "content": "", **call},
        tool,
        {"role": "assistant", "content": "It is 3"},
    ]
    rendered = engine.encoder.render(messages, closed=True)
    assert '"name": "add"' in engine.prompts[0] and rendered == engine.prompts[0] + rollout.text[0] + "<|im_end|>\n"
    tokens, drawn = rollout.completion_ids[0], rollout.loss_mask[0] != 0
    assert engine.encoder.tokenizer.decode(tokens[drawn]) == f"{called(CALL)}<|im_end|>It is 3<|im_end|>"
    assert (rollout.log_prob[0][~drawn] == 0).all() and rollout.tools is not None and rollout.tools[0].calls == 1
    texts: list[str] = []
    TextFunctionReward(lambda completion: texts.append(completion) or 1.0).score(rollout.text, rollout.prompt)
    assert texts == [f"{called(CALL)}\nIt is 3"], "what tool and template wrote earns nothing"
    assert spelled_out(engine.encoder.tokenizer, texts[0]) is None
    learnt = rollout.text[0][: rollout.tools[0].answers[0][0]]
    assert learnt == f"{called(CALL)}<|im_end|>", "demonstrations keep the end of a turn"
    spans = [trace.answers for trace in rollout.tools]
    again = demonstration_rollout(FAMILIES["Qwen3"].policy(), ["1"], list(rollout.text), answers=spans)
    assert again.completion_ids[0].tolist() == tokens.tolist() and torch.equal(again.loss_mask, rollout.loss_mask)


@pytest.mark.parametrize(
    ("turn", "answer", "valid"),
    [
        (called({"name": "mul", "arguments": {}}), "error: no tool 'mul'; the tools are add, mean", 0),
        (called({"name": "add", "arguments": {"c": 1}}), "error: missing a required argument: 'a'", 0),
        (called({"name": "add", "arguments": {"a": "2"}}), "error: argument 'a' is '2'; needed is int", 0),
        (called({"name": "add", "arguments": {"a": True}}), "error: argument 'a' is True; needed is int", 0),
        (called({"name": "mean", "arguments": {"values": 3}}), "is 3; needed is list[float]", 0),
        (called({"name": "mean", "arguments": {"values": [3], "digits": None}}), "<|im_start|>tool\n3.0<|im_end|>", 1),
        ('<tool_call>{"name": "add", </tool_call>', "error: no call", 0),
        (called({"name": "add", "arguments": '{"a": 4}'}), "<|im_start|>tool\n4<|im_end|>", 1),
        (called(CALL) + " {so} " + called(CALL), "<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n3<|im_end|>", 2),
    ],
)
def test_wrong_calls_are_answered_and_several_too(turn, answer, valid) -> None:
    rollout = played(turn, "So.", tools=[add, mean])[0]
    assert answer in rollout.text[0]
    terms: Any = {"tool_calls": (load_text_reward("tool_calls", most=2), 1.0)}
    assert WeightedTextSum(terms).score(rollout.text, rollout.prompt).value.tolist() == [valid / 2]


@pytest.mark.parametrize(("answer", "seen"), [("No blank", "2 3"), ("None", "23")])
def test_end_tokens_reach_no_reward_where_a_template_writes_no_blanks(answer, seen) -> None:
    game = type("Game", (Game,), {"step": lambda self, text: (answer, 1.0, "3" in text)})
    rollout, engine = played("2", "3", factory=game, template=TEMPLATE.replace("\n", ""))
    assert policy_text(rollout.text[0]) == seen and "<|im_end|>" in rollout.text[0]
    assert spelled_out(engine.encoder.tokenizer, seen) is None


def test_answers_that_are_no_texts_keep_their_letters() -> None:
    def cities() -> list[str]:
        """Name cities."""
        return ["Zürich", "圆"]

    assert '["Zürich", "圆"]' in played(called({"name": "cities"}), "So.", tools=[cities])[0].text[0]


def test_methods_of_an_environment_are_tools_and_its_reward_is_read() -> None:
    rollout, engine = played(called(CALL), "Done", factory=Room, records=[{"prompt": PROMPT, "start": 4}])
    assert "1 + 2 = ? Begin.<|im_end|>" in engine.prompts[0] and "Total 7" in rollout.text[0]
    scores = load_text_reward("environment").score(rollout.text, rollout.prompt)
    assert scores.value.tolist() == pytest.approx([0.7])


def test_steps_end_the_conversation_and_add_up() -> None:
    rollout, _ = played("2", "3", factory=Game)
    assert isinstance(text := rollout.text[0], ToolCompletion) and text.outcome == 4
    assert text.startswith("2<|im_end|>\n<|im_start|>user\nNo <|im_end|><|im_end|>") and text.endswith("\n3")
    end: Any = rollout.completion_ids[0] == FAMILIES["Qwen3"].tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert int(end.sum()) == 3, "an environment's text holds no special token"
    assert played("1", "2", "3", factory=Game, max_turns=2)[0].text[0].outcome == -2  # type: ignore[attr-defined]
    assert played(called(CALL), factory=Room, max_turns=1)[0].text[0] == called(CALL), (
        "behind the last turn is nothing"
    )


def test_the_mark_that_ends_a_turn_and_begins_the_next_stands_once() -> None:
    encoder = PromptEncoder(GLM.tokenizer())
    engine = Scripted(encoder, "2<|user|>", "3<|user|>")
    turns = ChatTurns(encoder, EnvironmentUse(name="mine", factory=Game))
    text = ToolPolicy(engine, encoder.tokenizer, turns).generate([PROMPT], seeds=0).text[0]
    answered = [{"role": "assistant", "content": "2"}, {"role": "user", "content": "No <|im_end|>"}]
    assert encoder.render(PROMPT) + text == encoder.render([*PROMPT, *answered]) + "3"


def test_steps_of_a_conversation_are_those_of_its_turns() -> None:
    rollout, engine = played("a\nb", "3\n4", factory=Game)
    tokenizer, drawn = engine.encoder.tokenizer, rollout.loss_mask[0] != 0
    steps = step_index(rollout, tokenizer, StepReading())[0]
    texts = [tokenizer.decode(rollout.completion_ids[0][drawn & (steps == number)]) for number in range(4)]
    assert texts == ["a\n", "b<|im_end|>", "3\n", "4<|im_end|>"] and (steps[~drawn] == -1).all()


def test_a_conversation_whose_first_turn_was_cut_earned_nothing() -> None:
    turns = ChatTurns(PromptEncoder(FAMILIES["Qwen3"].tokenizer()), EnvironmentUse(name="mine", factory=Game))
    conversations, _ = turns.begin([PROMPT])
    assert turns.finish(conversations) == [0.0]


def test_an_environment_that_raises_leaves_a_sample_that_is_not_scored() -> None:
    rollout, _ = played("2", factory=Broken)
    assert rollout.tools is not None and rollout.tools[0].failed == "mine raised RuntimeError: the server is gone"
    assert rollout.generated.tolist() == [False] and rollout.stop_reason == ["tool failed"]


@pytest.mark.parametrize(
    ("template", "use", "message"),
    [
        (None, {"factory": Game}, "no chat template"),
        ("{{ messages[0].content }}", {"tools": [add]}, "describes no tools"),
        (TEMPLATE, {"tools": [lambda a: a]}, "cannot be described to the model"),
        (TEMPLATE.replace("| tojson }}</tool_call>", ".name }}</tool_call>"), {"tools": [add]}, "which is no JSON"),
        ("{{ messages[0].content }}", {"factory": Game}, "no place for messages of the role 'user'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_drawn(template, use, message) -> None:
    tokenizer = FAMILIES["Qwen3"].tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message):
        ChatTurns(PromptEncoder(tokenizer), EnvironmentUse(name="mine", **use))


def test_log_probs_of_a_conversation_are_those_that_were_drawn() -> None:
    policy = CausalLMPolicy(tiny_model(), tiny_tokenizer())
    turns = ChatTurns(policy.prompts, EnvironmentUse(name="mine", factory=Game))
    options: dict[str, Any] = {"seeds": 3, "num_generations": 8, "stopping": StoppingCriteria(max_new_tokens=40)}
    rollout = ToolPolicy(policy, policy.tokenizer, turns).generate([[{"role": "user", "content": "a"}]], **options)
    assert rollout.tools is not None and max(trace.calls for trace in rollout.tools) > 1
    torch.testing.assert_close(policy.log_probs(rollout).log_prob, rollout.log_prob, rtol=0, atol=1e-4)


def test_keys_that_a_table_fills_with_null_are_no_arguments() -> None:
    call = {
        "type": "function",
        "id": None,
        "function": {"name": "add", "arguments": {"a": 1, "q": None, "of": [{"b": None}]}},
    }
    filled = [*PROMPT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    *_, message = template_messages(filled, "Prompt 0")
    bare = {"name": "add", "arguments": {"a": 1, "of": [{}]}}
    assert message["tool_calls"] == [{"type": "function", "function": bare}]


def test_turns_of_a_transcript_are_messages_of_a_chat_model() -> None:
    encoder = PromptEncoder(tiny_tokenizer(template=TEMPLATE), plain_as_chat=True)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}, *PROMPT]
    transcript = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: 1 + 2 = ?\n\nAssistant:"
    assert encoder.render(transcript) == encoder.render(turns)
    assert encoder.render_answered(transcript, " 3") == encoder.render_answered(turns, "3")
    more = [*turns, {"role": "assistant", "content": "3"}, {"role": "user", "content": "sure?"}]
    answer = " 3\n\nHuman: sure?\n\nAssistant: Yes."
    assert encoder.render_answered(transcript, answer) == encoder.render_answered(more, "Yes.")
    assert encoder.render("\n\nHuman:")
