# SPDX-License-Identifier: Apache-2.0
"""The embedded language model's build: tokenizer, corpus, packing, a tiny training, resume, save and load."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from visalign.data.assets import resolve_model
from visalign.data.text_tasks.tasks import TASKS, check_answer, heldout_tasks, task_record
from visalign.pipelines.packaged import language as assets_language
from visalign.pipelines.packaged import language_data as assets_language_data
from visalign.pipelines.packaged.language import (
    accuracy,
    complete,
    language_card,
    new_language,
    save_language,
    solution_loss,
)
from visalign.pipelines.packaged.language_data import (
    MISREAD_SHARE,
    corpus_record,
    encode,
    misread,
    new_tokenizer,
    pack,
)
from visalign.pipelines.packaged.stage import Plan, size_of
from visalign.pipelines.packaged.stage import train as train_stage

TOKENIZER: Any = new_tokenizer()


def train(work: Path, **given: Any) -> Any:
    resume, save_every = given.pop("resume", False), given.pop("save_every", 1)
    settings = {"language_steps": 4, "language_batch": 8, "seed": 1, "language_per_task": 0}
    return assets_language.train_language(work, Plan(**(settings | given)), resume, save_every)


def test_the_tokenizer_has_one_token_for_each_digit_sign_and_word() -> None:
    text = "Put 58, 7 in order. 4 + 38 = 42, 9 < 10. \\boxed{58, -7}"
    tokens = TOKENIZER.convert_ids_to_tokens(TOKENIZER(text, add_special_tokens=False).input_ids)
    assert [token.replace("Ġ", " ") for token in tokens] == [
        *("Put", " ", "5", "8", ", ", "7", " in", " order", ".", " ", "4", " + ", "3", "8", " = ", "4", "2"),
        *(", ", "9", " < ", "1", "0", ".", " \\boxed{", "5", "8", ", ", "-", "7", "}"),
    ]
    assert len(TOKENIZER) < 400
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (0, 1, 2)
    fallback = {TOKENIZER.convert_tokens_to_ids(c) for c in "abcdefghijklmnopqrstuvwxyz"}
    for record in heldout_tasks(15):
        ids = TOKENIZER(record["prompt"] + "\n" + record["solution"], add_special_tokens=False).input_ids
        assert not fallback & set(ids)


@settings(deadline=None, max_examples=30)
@given(text=st.text(max_size=30))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    assert TOKENIZER.decode(ids) == text


def test_a_chat_of_one_turn_is_the_prompt_and_a_line_break() -> None:
    record = task_record(0, seed=0)
    chat = [{"role": "user", "content": record["prompt"]}]
    ids = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == TOKENIZER(record["prompt"] + "\n").input_ids
    chat.append({"role": "assistant", "content": record["solution"]})
    assert TOKENIZER.apply_chat_template(chat, return_dict=False) == encode(TOKENIZER, [record])[0][0]
    padded = TOKENIZER(["Sort 1.", "Sort 1, 2, 3."], padding=True, return_tensors="pt")
    assert padded.input_ids[0, 0] == 0 and padded.attention_mask[0, 0] == 0


def test_labels_are_the_next_tokens_of_the_solution_alone() -> None:
    packed = pack([([1, 11, 12, 21, 2], 3), ([1, 13, 22, 23, 24, 2], 2)], row=12, pad=0)
    assert packed.ids.tolist() == [[1, 13, 22, 23, 24, 2, 1, 11, 12, 21, 2, 0]]
    assert packed.labels.tolist() == [[-100, 22, 23, 24, 2, -100, -100, -100, 21, 2, -100, -100]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0]]
    assert pack([([1, 3, 2], 1)] * 3, row=7, pad=0).ids.shape == (2, 7)
    with pytest.raises(ValueError, match="an example of 3 tokens does not fit into rows of 2"):
        pack([([1, 3, 2], 1)], row=2, pad=0)


def test_a_packed_example_sees_itself_alone() -> None:
    torch.manual_seed(0)
    model: Any = new_language(TOKENIZER).eval()
    examples = encode(TOKENIZER, [task_record(n, seed=0) for n in range(6)])
    with torch.no_grad():
        alone, tokens = 0.0, 0
        for ids, prompt in examples:
            logits = model(input_ids=torch.tensor([ids])).logits[0, prompt - 1 : -1]
            alone += float(F.cross_entropy(logits, torch.tensor(ids[prompt:]), reduction="sum"))
            tokens += len(ids) - prompt
        packed = pack(examples, row=256, pad=0)
        assert packed.ids.shape[0] == 1
        torch.testing.assert_close(float(solution_loss(model, packed)), alone / tokens, rtol=1e-6, atol=0.0)


def test_a_share_of_the_corpus_misreads_one_number() -> None:
    rng = np.random.default_rng(0)
    for number in range(10 * len(TASKS)):
        record = task_record(number, seed=2)
        changed = misread(record, rng)
        assert changed | {"solution": ""} == record | {"solution": ""}
        assert changed["solution"].count("\\boxed{") == 1
    corpus = [corpus_record(n, seed=4) for n in range(1900)]
    assert corpus[7] == corpus_record(7, seed=4)
    sums = [record for record in corpus if record["task"] in ("add", "sort", "sum", "two_addends")]
    wrong = np.mean([not check_answer(record["solution"], record)[0] for record in sums])
    assert abs(wrong - MISREAD_SHARE) < 4 * (0.25 / len(sums)) ** 0.5


def test_a_resumed_training_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path / "a")

    def interrupted(number: int, *, seed: int) -> Any:
        if number >= 16:
            raise KeyboardInterrupt
        return corpus_record(number, seed=seed)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(assets_language, "corpus_record", interrupted)
        train(tmp_path / "b")
    resumed = train(tmp_path / "b", resume=True)
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not whole.training


def test_training_lowers_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    packed = pack(encode(TOKENIZER, [corpus_record(n, seed=1) for n in range(8)]), row=256, pad=0)
    with torch.no_grad():
        before = float(solution_loss(new_language(TOKENIZER).eval(), packed))
        assert abs(before - np.log(len(TOKENIZER))) < 0.3
        # the same eight records in every step
        monkeypatch.setattr(assets_language, "corpus_record", lambda n, seed: corpus_record(n % 8, seed=seed))
        monkeypatch.setattr(assets_language, "train", partial(train_stage, warmup=1))
    trained = train(tmp_path, language_steps=12, save_every=12)
    with torch.no_grad():
        assert float(solution_loss(trained, packed)) < before - 1.0


def test_transformers_loads_the_saved_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = new_language(TOKENIZER).eval()
    folder = tmp_path / assets_language.NAME
    save_language(model, folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert loaded.dtype == torch.float32 and loaded.config.model_type == "qwen3"
    assert 1e6 < sum(p.numel() for p in loaded.parameters()) < 2e6
    assert size_of(folder) < 4.0
    assert "_name_or_path" not in (folder / "config.json").read_text(encoding="utf-8")
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.top_k) == (2, 0)
    record = task_record(0, seed=0)
    chat = [{"role": "user", "content": record["prompt"]}]
    given = {"add_generation_prompt": True, "return_dict": False}
    assert tokenizer.apply_chat_template(chat, **given) == TOKENIZER.apply_chat_template(chat, **given)
    assert tokenizer.padding_side == "left" and tokenizer.decode([5, 2], skip_special_tokens=True) != ""
    for ours, theirs in zip(model.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_completions_are_a_function_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets_language, "ANSWER_TOKENS", 6)
    torch.manual_seed(0)
    model, prompts = new_language(TOKENIZER).eval(), ["Sort 3, 1.", "What is 1 + 1?"]
    state = torch.get_rng_state()
    first = complete(model, TOKENIZER, prompts, seed=1)
    assert first == complete(model, TOKENIZER, prompts, seed=1) != complete(model, TOKENIZER, prompts, seed=2)
    greedy = complete(model, TOKENIZER, prompts, temperature=0.0, seed=1)
    assert greedy == complete(model, TOKENIZER, prompts, temperature=0.0, seed=2)
    assert torch.equal(state, torch.get_rng_state())


def scripted(model: Any, tokenizer: Any, prompts: Sequence[str], **given: Any) -> list[str]:
    """Right when greedy; the first sample right on every second prompt, the second on none."""
    solutions = {record["prompt"]: record["solution"] for record in heldout_tasks(4)}
    right = [
        given.get("temperature") == 0.0 or (given["seed"] == 0 and i % 2 == 0) for i in range(len(prompts))
    ]
    return [solutions[prompt] if ok else "" for prompt, ok in zip(prompts, right, strict=True)]


def test_accuracy_and_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets_language, "complete", scripted)
    records = heldout_tasks(4)[: 2 * len(TASKS)]
    found = accuracy(None, None, records, samples=2)
    assert (found.greedy, found.sampled, found.mixed) == (1.0, 0.25, 0.5)
    assert found.by_task["add"] == (1.0, 0.25, 0.5) and list(found.by_task) == list(TASKS)
    folder = tmp_path / assets_language.NAME
    save_language(new_language(TOKENIZER), folder)
    card = language_card(
        folder, 90.0, Plan(language_steps=3, language_batch=8, language_per_task=4), samples=2
    )
    assert f"# {assets_language.NAME}\n" in card and "3 steps of 8 fresh records" in card
    assert "| all | 1.000 | 0.250 | 0.500 |" in card and card.count("\n| ") == len(TASKS) + 2
    assert f"{MISREAD_SHARE:.0%} of the solutions" in card
    assert assets_language_data.MAX_TOKENS == TOKENIZER.model_max_length


def test_the_packaged_model_is_as_good_as_its_card_says() -> None:
    """Measured again on fewer samples; the base that reinforcement learning starts from is half right."""
    folder = resolve_model("tasks-qwen3")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    found = accuracy(model.eval(), AutoTokenizer.from_pretrained(folder), heldout_tasks(8), samples=2, seed=7)
    card = (Path(folder) / "README.md").read_text(encoding="utf-8")
    row = re.search(r"\| all \| ([0-9.]+) \| ([0-9.]+) \|", card)
    assert row is not None
    greedy, sampled = (float(value) for value in row.groups())
    assert 0.3 <= sampled <= 0.6
    assert found.greedy == pytest.approx(greedy, abs=0.08)
    assert found.sampled == pytest.approx(sampled, abs=0.08)


def test_the_averaged_weights_keep_what_is_tied_and_are_those_of_the_state(tmp_path: Path) -> None:
    trained = train(tmp_path)
    assert trained.lm_head.weight is trained.model.embed_tokens.weight
    state = torch.load(tmp_path / "language.pt", weights_only=True)
    for name, value in trained.state_dict().items():
        assert torch.equal(value, state["average"][f"module.{name}"]), name
    assert not torch.equal(trained.lm_head.weight, state["module"]["lm_head.weight"])
