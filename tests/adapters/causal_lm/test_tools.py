# SPDX-License-Identifier: Apache-2.0
"""Completions with a tool: calls, answers, their replay; tools that hang, raise, flood."""

from __future__ import annotations

import re
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch

from tests.support.models.language import tiny_model, tiny_tokenizer
from tests.support.servers.completions import serving
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.adapters.server.generator import ServerGenerator
from visalign.errors import UserError
from visalign.interfaces import policy_text
from visalign.rewards.catalogue import load_text_reward
from visalign.text import Sampling, StoppingCriteria, TextRollout
from visalign.text.calculator import calculator
from visalign.text.steps import StepReading, step_index
from visalign.text.tool_calls import ToolUse, ask_all
from visalign.text.tools import ToolPolicy

PROMPTS = ["a", "hello there you", "1+2="]
STOPPING = StoppingCriteria(max_new_tokens=30, eos_ids=())
TOPPED = Sampling(temperature=1.2, top_k=30)


@pytest.fixture(scope="module")
def policy() -> CausalLMPolicy:
    return CausalLMPolicy(tiny_model(), tiny_tokenizer(), generate_batch=7)


def use(tool: Any = lambda text: f"<{text.count('q')}>", **options: Any) -> ToolUse:
    return ToolUse(**{"tool": tool, "close": "5", "max_calls": 2, **options})


def drawn(policy, use: ToolUse | None = None, **options) -> TextRollout:
    source = policy if use is None else ToolPolicy(policy, tiny_tokenizer(), use)
    return source.generate(
        PROMPTS, **{"seeds": 6, "num_generations": 8, "sampling": Sampling(), "stopping": STOPPING, **options}
    )


@pytest.mark.parametrize("sampling", [Sampling(), TOPPED, Sampling(temperature=0)])
def test_an_answer_stands_behind_its_call_and_was_not_drawn(policy, sampling) -> None:
    rollout, plain = drawn(policy, use(), sampling=sampling), drawn(policy, sampling=sampling)
    assert rollout.tools is not None and max(trace.calls for trace in rollout.tools) == 2 - 2 * sampling.greedy
    for row, (text, without) in enumerate(zip(rollout.text, plain.text, strict=True)):
        calls = rollout.tools[row].calls
        assert text.split("5")[0] == without.split("5")[0], "until it calls, it is what it was"
        answers = [int(n) for n in re.findall(r"5<(\d+)>", text)]
        assert len(answers) in (calls, calls - 1), "the last may be cut by the length"
        assert answers == [text[: m.start()].count("q") for m in re.finditer(r"5<\d+>", text)]
        answered = rollout.loss_mask[row] == 0
        assert calls or not answered[: int(rollout.loss_mask[row].sum())].any()
        assert (rollout.log_prob[row][answered] == 0).all() and rollout.loss_mask.shape[1] <= 30
    if not sampling.greedy:
        again = policy.log_probs(rollout)
        torch.testing.assert_close(again.log_prob, rollout.log_prob, rtol=0, atol=1e-4)
        torch.testing.assert_close(again.entropy, rollout.entropy, rtol=0, atol=1e-4)


def test_a_sample_does_not_depend_on_its_batch(policy) -> None:
    large = drawn(policy, use())
    small = drawn(CausalLMPolicy(tiny_model(), tiny_tokenizer(), generate_batch=2), use())
    assert large.text == small.text and large.tools == small.tools
    one = ToolPolicy(policy, tiny_tokenizer(), use()).generate(PROMPTS[1:2], seeds=[large.seed[9]], stopping=STOPPING)
    assert one.text == [large.text[9]]


def test_tools_that_fail_leave_a_completion_that_is_not_judged(policy) -> None:
    def raising(text: str) -> str:
        raise RuntimeError("gone")

    for tool, why in (
        (raising, r"tool raised RuntimeError: gone"),
        (lambda text: Event().wait(), r"tool gave no answer in 0\.01 s"),
        (lambda text: 3, r"tool answered a int, needed is a text or None"),
    ):
        rollout = drawn(policy, use(tool, seconds=0.01 if "0.01" in why.replace("\\", "") else 100))
        assert rollout.tools is not None
        failed = [trace.failed is not None for trace in rollout.tools]
        assert any(failed) and not all(failed) and rollout.generated.tolist() == [not failure for failure in failed]
        assert all(re.fullmatch(why, trace.failed) for trace in rollout.tools if trace.failed)
        valid = rollout.trajectories(torch.zeros(24)).valid
        assert valid is not None and valid.tolist() == rollout.generated.tolist()


def test_answers_are_cut_and_their_special_tokens_are_text(policy) -> None:
    rollout = drawn(policy, use(lambda text: "x" * 100_000, max_answer_tokens=5, max_calls=2))
    assert rollout.tools is not None and {trace.cut == trace.calls for trace in rollout.tools} == {True}
    assert "5xxxxx" in "".join(rollout.text) and "xxxxxxxxxx" not in "".join(rollout.text)
    end = tiny_tokenizer().eos_token
    rollout = drawn(policy, use(lambda text: f"{end}!"))
    called = [n for n, trace in enumerate(rollout.tools or ()) if trace.calls]
    own = tiny_tokenizer().eos_token_id
    answers = rollout.completion_ids[called][rollout.loss_mask[called] == 0]
    padding = rollout.completion_ids[0, -1]
    assert called and not ((answers == own) & (answers != padding)).any()
    none = drawn(policy, use(lambda text: None))
    assert none.text == drawn(policy).text and none.tools is not None and none.tools[0].calls == 0


def test_what_a_tool_wrote_is_told_apart(policy) -> None:
    rollout = drawn(policy, use(lambda text: "x" * 9))
    judge = load_text_reward("exact_answer", extract="pattern", pattern="(x{9})")
    assert "x" * 9 in "".join(rollout.text)
    assert judge.score(rollout.text, rollout.prompt, [{"answer": "x" * 9}] * len(rollout)).value.sum() == 0
    assert list(map(policy_text, rollout.text)) == [text.replace("x" * 9, "") for text in rollout.text]


def test_a_call_stands_between_open_and_close(policy) -> None:
    calls: list[str] = []
    rollout = drawn(policy, use(lambda text: calls.append(text) or "", open="a", max_calls=8), num_generations=24)
    assert calls and not any("a" in text or "5" in text for text in calls)
    assert any(re.search("a[^a]*5[^a]*5", text) for text in rollout.text), "a second close without an open"


@pytest.mark.parametrize("end", ["5!", "5"])
def test_what_is_no_call_hides_no_stop_string(policy, end) -> None:
    stopping = replace(STOPPING, strings=(end,))
    rollout, plain = drawn(policy, use(lambda text: None), stopping=stopping), drawn(policy, stopping=stopping)
    assert rollout.text == plain.text and rollout.stop_reason == plain.stop_reason
    assert any(text.endswith(end) and text.count("5") for text in rollout.text)


def test_a_completion_ends_where_the_context_ends_behind_an_answer() -> None:
    model = tiny_model()
    model.config.max_position_embeddings = 20
    rollout = drawn(CausalLMPolicy(model, tiny_tokenizer()), use(lambda text: "x" * 9))
    assert rollout.tools is not None and any(trace.calls for trace in rollout.tools)
    positions = torch.arange(1, rollout.loss_mask.shape[1] + 1)
    drawn_to = (positions * (rollout.loss_mask != 0)).amax(1) + rollout.prompt_mask.sum(1)
    assert int(drawn_to.max()) == 20


def test_steps_are_told_where_an_answer_is_the_end(policy) -> None:
    rollout = drawn(policy, use(lambda text: "xxxxxxxxx\nx"))
    assert rollout.tools is not None and any(text.endswith("5xxxxx") for text in rollout.text)
    step = step_index(rollout, tiny_tokenizer(), StepReading())
    assert ((step >= 0) == (rollout.loss_mask != 0)).all()
    for row, text in enumerate(rollout.text):
        assert int(step[row].max()) + 1 <= len(StepReading().spans(text))
    with pytest.raises(UserError, match=r"tokenizer reads the tokens of completion 0, .* otherwise"):
        step_index(replace(rollout, text=["?"] * 24), tiny_tokenizer(), StepReading())


def test_half_a_character_in_an_answer_is_a_question_mark(policy) -> None:
    assert "5?" in "".join(drawn(policy, use(lambda text: "\ud800")).text)


def test_a_server_goes_on_from_the_answers_too(policy) -> None:
    with serving(CausalLMPolicy(tiny_model(), tiny_tokenizer())) as server:
        engine = ServerGenerator(policy, server.url, "tiny", logprobs_mode="processed_logprobs")
        server.mode = "processed_logprobs"
        rollout = drawn(engine, use())
        assert rollout.tools is not None and max(trace.calls for trace in rollout.tools) == 2
        seeds = [body["seed"] for body in server.completions]
        assert len(set(seeds)) == len(seeds) > 24, "turns are drawn by numbers of their own"
        torch.testing.assert_close(policy.log_probs(rollout).log_prob, rollout.log_prob, rtol=0, atol=1e-4)
        assert all(re.search(r"5<\d+>", text) for text, t in zip(rollout.text, rollout.tools, strict=True) if t.calls)


def test_equal_calls_are_asked_once() -> None:
    calls: list[str] = []
    answers = ask_all(use(lambda text: calls.append(text) or text.upper()), ["a", "b", "a", *map(str, range(99))])
    assert len(calls) == 101 and answers["a"] == "A" and answers["98"] == "98"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("First 12 * 3 = 36, then 36 + 5", "41"),
        ("What is (38 + 32) * 5", "350"),
        ("1 / 3", "0.333333"),
        ("17 % 5", "2"),
        ("-3 - 4", "-7"),
        ("(2 + 3", "5"),
        ("1 / 0", "error"),
        ("is 12", None),
        ("", None),
        ("2 ** 999999999", None),
        ("1,000 + 5", None),
        ("3 × 4 + 5", None),
        ("9" * 10_000 + " + 1", str(int("9" * 196) + 1)),
        ("(" * 150 + "1", None),
    ],
)
def test_the_calculator(text, value) -> None:
    assert calculator(text) == value


def test_wrong_settings() -> None:
    with pytest.raises(UserError, match=r"answer is 'result'; it must be a text with \{answer\}"):
        use(answer="result")
