# SPDX-License-Identifier: Apache-2.0
"""The job text_reward at tiny size: losses, layouts, balance, and the folder that other libraries load."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Qwen3ForSequenceClassification,
)

from tests.support.models.language import save_tiny_language_model, tiny_config, tiny_tokenizer
from visalign.config import load_config
from visalign.core.preference.bradley_terry import bradley_terry_loss, plackett_luce_loss
from visalign.data.assets import resolve_model
from visalign.data.sets.completion_files import load_rankings
from visalign.errors import ConfigError, UserError
from visalign.pipelines.jobs import load_job
from visalign.pipelines.text.parts import retokenized
from visalign.pipelines.train_reward.text import TextRewardConfig, estimate, plan, run
from visalign.pipelines.train_reward.text_network import RewardNetwork
from visalign.pipelines.train_reward.text_records import (
    RankedTexts,
    length_balanced,
    longer_share,
    read_rankings,
    tokenize,
)
from visalign.rewards import RewardError, load_text_reward
from visalign.text.messages import text_messages
from visalign.training.loop.metrics import read_metrics
from visalign.training.reward.tasks import TASKS

CPU = torch.device("cpu")
TEXTS = ("a", "ab", "bab", "bb")
"""The more letters "a" the better; lengths say nothing."""
SCORED = [{"prompt": f"q{n}", "completion": t, "reward": t.count("a") / len(t)} for n in range(12) for t in TEXTS]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny_language_model(folder / "model", max_position_embeddings=48)
    write(folder / "scored.jsonl", SCORED)
    return folder


def config(inputs: Path, *more: str) -> TextRewardConfig:
    base = [f"model.path={inputs}/model", f"data.train={inputs}/scored.jsonl", "run.device=cpu", "data.batch=4"]
    pace = ["data.epochs=8", "optimizer.lr=1e-2", "optimizer.updates_per_iteration=4", "evaluation.every=2"]
    return load_config(TextRewardConfig, None, [*base, *pace, *more])


def texts_of(*elements: tuple[list[str], Sequence[float]]) -> list[RankedTexts]:
    records = [{"prompt": "q", "completions": texts, "scores": scores} for texts, scores in elements]
    return tokenize(records, tiny_tokenizer(), limit=48, drop=False, compares=True, left_out={})


def test_rankings_become_a_model_that_transformers_and_the_reward_load(inputs: Path, tmp_path: Path) -> None:
    summary = run(config(inputs), tmp_path / "run")
    assert summary["after"]["accuracy"] == 1 and summary["after"]["nll"] < 0.1
    assert summary["after"]["accuracy_low"] < 1 and summary["examples"] == 88 and summary["pairs"] == 11 * 6
    assert "interval of the accuracy" in (tmp_path / "run/judge/README.md").read_text()
    folder = tmp_path / "run/judge"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = model.config.num_labels, model.config.problem_type, model.config.pad_token_id, tokenizer.pad_token_id
    assert settings == (1, "regression", 0, 0) and hasattr(model, "score")
    reward = load_text_reward("reward_model", model=folder)
    good, bad = reward.score(["aaa", "bbb"], ["q3", "q3"]).value.tolist()
    ids = tokenizer("<user>q3<end><assistant>aaa<end>", return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(ids).logits.item() == pytest.approx(good, abs=1e-5)
    assert good > bad


@pytest.mark.parametrize(
    ("overrides", "std"),
    [
        (["objective.task=uncertainty"], True),
        (["model.heads=3"], True),
        (["model.train=lora", "model.lora.rank=4"], False),
        (["model.train=head"], False),
        (["objective.task=plackett_luce", "model.heads=2"], True),
        (["objective.task=bce"], False),
        (["objective={task: bradley_terry, margin: 0.1, centre: 0.01, sign: 0.1, l2: 0.01}"], False),
    ],
)
def test_each_kind_is_read_as_it_was_measured(inputs: Path, tmp_path: Path, overrides: list[str], std: bool) -> None:
    built = config(inputs, "data.epochs=3", "evaluation.every=0", *overrides)
    summary = run(built, tmp_path / "run")
    assert math.isfinite(summary["after"]["accuracy"]) and summary["updates"] == 8
    assert ("srcc" in summary["after"]) == (built.objective.task == "bce")
    if built.objective.task == "bce":
        rankings = read_rankings(built)[1]
        pairs = [pair for r in rankings for pair in zip(r["completions"], r["scores"], strict=True)]
        (completions, scores), prompts = zip(*pairs, strict=True), [r["prompt"] for r in rankings for _ in r["scores"]]
        judge = load_text_reward("reward_model", model=tmp_path / "run/judge")
        error = judge.score(completions, prompts).value.sigmoid() - torch.tensor(scores)
        assert summary["after"]["mae"] == pytest.approx(float(error.abs().mean()), abs=1e-4)
    scores = load_text_reward("reward_model", model=tmp_path / "run/judge").score([*TEXTS], ["q0"] * 4)
    assert (scores.std is not None) == std
    if std:
        assert scores.std is not None and bool((scores.std > 0).all())
    if built.model.train == "lora":
        names = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/judge").state_dict()
        assert not [name for name in names if "lora" in name or "base_layer" in name]


def test_patience_ends_a_run(inputs: Path, tmp_path: Path) -> None:
    early = ["optimizer.lr=1e-12", "run.best_by=heldout/accuracy", "run.patience=2", "evaluation.every=1"]
    run(config(inputs, *early), tmp_path / "early")
    assert len(read_metrics(tmp_path / "early/metrics.jsonl")) == 3
    with pytest.raises(UserError, match=r"run.patience is 2, and run.best_by names no metric that could stop"):
        run(config(inputs, "run.patience=2"), tmp_path / "never")


def test_full_training_in_bfloat16_keeps_float32_weights_and_head(inputs: Path) -> None:
    network = RewardNetwork(config(inputs), CPU)
    batch = network.encode(texts_of((["a", "b"], [1, 0])))
    exact = network(batch.inputs)["value"]
    network.compute_dtype = torch.bfloat16  # as on a GPU
    outputs = []
    network.module.score.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    mixed = network(batch.inputs)["value"]
    mixed.sum().backward()
    assert outputs[0].dtype == torch.float32
    assert {(p.dtype, p.grad.dtype) for _, p in network.trainable_parameters() if p.grad is not None} == {
        (torch.float32, torch.float32)
    }
    assert not torch.equal(mixed, exact)
    torch.testing.assert_close(mixed, exact, rtol=0.05, atol=0.05)


def test_all_pairs_of_a_prompt_weigh_one_and_heads_learn_from_other_weights(inputs: Path) -> None:
    network = RewardNetwork(config(inputs), CPU)
    batch = network.encode(texts_of((["a", "b", "ab"], [3, 1, 2]), (["a", "b"], [1, 0])))
    assert batch.weight is not None and batch.weight.tolist() == pytest.approx([1 / 3] * 3 + [1])
    value = torch.tensor([1.0, -0.5, 0.2, 0.3, 0.4])
    loss, weight = TASKS["bradley_terry"].loss({"value": value}, batch, config(inputs).objective, torch.Generator())
    softplus = [math.log1p(math.exp(-lead)) for lead in (1.5, 0.8, 0.7)]
    assert loss.item() == pytest.approx(sum(softplus) / 3 + math.log1p(math.exp(0.1)))
    assert weight.item() == pytest.approx(2)
    several = RewardNetwork(config(inputs, "model.heads=2"), CPU)
    batch = several.encode(texts_of((["a", "b"], [1, 0]), (["b", "a"], [0, 1])))
    assert batch.left is not None and batch.weight is not None
    assert batch.left.tolist() == [0, 3, 4, 7] and len(set(batch.weight.tolist())) == 4
    assert len(several({k: v for k, v in batch.inputs.items()})["value"]) == 4, "in evaluation the mean of the heads"


def test_plackett_luce_and_the_regularisers_by_hand() -> None:
    score = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    full = plackett_luce_loss(score, torch.tensor([[1.0, 2.0, 0.0]]).double())
    e = [math.exp(s) for s in (0.5, -1.0, 2.0)]
    assert full.item() == pytest.approx(math.log(sum(e)) - 2 + math.log(e[0] + e[1]) - 0.5)
    tied = plackett_luce_loss(score, torch.tensor([[1.0, 1.0, 0.0]]).double())
    assert tied.item() == pytest.approx(math.log(sum(e)) - 2), "the cross-entropy of the best of three"
    missing = plackett_luce_loss(score, torch.tensor([[1.0, math.nan, 0.0]]).double())
    assert missing.item() == pytest.approx(math.log1p(math.exp(-1.5)))
    assert torch.autograd.gradcheck(lambda s: plackett_luce_loss(s, torch.tensor([[1.0, 1, 0]]).double()), (score,))
    left, right = torch.tensor([-0.5, 0.5]), torch.tensor([0.25, -1.0])
    plain = bradley_terry_loss(left, right)
    assert (bradley_terry_loss(left, right, sign=2.0) - plain).tolist() == pytest.approx([1.5, 0.0])
    assert (bradley_terry_loss(right, left, torch.zeros(2), sign=2.0) - plain).tolist() == pytest.approx([1.5, 0.0])
    assert (bradley_terry_loss(left, right, l2=2.0) - plain).tolist() == pytest.approx([0.625, 2.5])


HH = "\n\nHuman: hi\n\nAssistant:"
ULTRA = [{"response": "a", "overall_score": 1.0, "fine-grained_score": 2.5}, {"response": "b", "overall_score": 4.0}]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "prompt", "completions", "scores"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "q", ["a", "b"], [1, 0]),
        ({"chosen": f"{HH} I am", "rejected": f"{HH} I was"}, HH, [" I am", " I was"], [1, 0]),
        (
            {k: [*CHAT, {"role": "assistant", "content": k}] for k in ("chosen", "rejected")},
            CHAT, ["chosen", "rejected"], [1, 0],
        ),
        ({"instruction": "q", "completions": ULTRA}, "q", ["a", "b"], [2.5, 4]),
        ({"prompt": "q", "completions": ["a", "b", "a"], "scores": [1, 2, 4]}, "q", ["a", "b"], [2.5, 2]),
        ({"prompt": "q", "completions": ["a", "b"], "ranks": [2, 1]}, "q", ["a", "b"], [-2, -1]),
        ({"prompt": "q", "completion": "a", "label": True}, "q", ["a"], [1]),
    ],
)  # fmt: skip
def test_layouts(tmp_path: Path, row: dict[str, Any], prompt: Any, completions: list[str], scores: list[Any]) -> None:
    (record,) = load_rankings(write(tmp_path / "rows.jsonl", [row])).records
    assert (record["prompt"], record["completions"], record["scores"]) == (prompt, completions, scores)


def test_turns_of_a_transcript_go_through_the_chat_template_and_stay_text_without_one() -> None:
    record = {"prompt": HH, "completions": [" ja", " no"], "scores": [1.0, 0.0]}
    assert text_messages(HH + " ja") == [*CHAT, {"role": "assistant", "content": "ja"}]
    for template, text in ((True, "<user>hi<end><assistant>ja<end>"), (False, HH + " ja")):
        tokenizer = tiny_tokenizer() if template else tiny_tokenizer(template=None)
        (element,) = tokenize([record], tokenizer, limit=48, drop=False, compares=True, left_out={})
        assert element.ids[0] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_length_balanced_pairs_leave_length_without_meaning() -> None:
    longer = [(["aaaa", "b"], [1, 0])] * 30 + [(["a", "bbbb"], [1, 0])] * 10 + [(["aa", "bb"], [1, 0])] * 5
    texts = texts_of(*longer)
    assert longer_share(texts) == pytest.approx((30 + 2.5) / 45)
    balanced = length_balanced(texts, 0)
    assert longer_share(balanced) == 0.5 and len(balanced) >= 5
    with pytest.raises(UserError, match=r"finds nothing to balance 1 pairs with: the better completion"):
        length_balanced(texts_of((["aa", "b"], [1, 0])), 0)


def test_an_encoder_and_a_model_without_a_pad_token(inputs: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_labels": 1, "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    tiny_tokenizer(pad=False, template=None).save_pretrained(tmp_path / "bert")
    short = ["data.epochs=1", "evaluation.every=0"]
    run(config(inputs, f"model.path={tmp_path}/bert", *short), tmp_path / "run")
    reward: Any = load_text_reward("reward_model", model=tmp_path / "run/judge")
    assert retokenized({"other": reward}, tiny_tokenizer()) == []
    (note,) = retokenized({"other": reward}, AutoTokenizer.from_pretrained(resolve_model("tasks-qwen3")))
    assert note == "other has another tokenizer than the policy: completions are tokenized again."
    assert reward.tokenizer.pad_token == "<end>" and reward.score(["ab"], ["q"]).valid.all()


def test_ties_are_counted_before_the_split_and_shortened_prompts_once(inputs: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "completions": ["a", "b"], "scores": [1, int(n < 2)]} for n in range(12)]
    rows[11]["scores"] = [1, 0]
    file = write(tmp_path / "ties.jsonl", rows)
    trained, measured, left_out = read_rankings(config(inputs, f"data.train={file}", "data.heldout=0.2"))
    assert (len(trained) + len(measured), left_out) == (10, {"ties": 2})
    options: Any = {"limit": 5, "drop": True, "compares": True, "left_out": (counts := {})}
    record = {"prompt": "q", "completions": ["a" * 9, "b"], "scores": [1.0, 0.0]}
    with pytest.raises(UserError, match="no record is left"):
        tokenize([record], tiny_tokenizer(template=None), **options)
    assert counts == {"too_long": 1}


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    Qwen3ForSequenceClassification(tiny_config(num_labels=1, vocab_size=8)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"has tokens up to \d+, the model 8 emb"):
        load_text_reward("reward_model", model=tmp_path)


def test_what_is_refused_and_with_which_words(inputs: Path, tmp_path: Path) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    same, long = {**pair, "rejected": "a"}, {**pair, "chosen": "a" * 60}
    bce = ["objective.task=bce"]
    for rows, more, message in (
        ([pair, same], [], "1 of 2 records .* have equal completions: rows 2.*data.unusable=drop leaves them out"),
        ([pair, {"prompt": "r", "completions": [], "scores": []}], [], "has an empty cell"),
        ([{**pair, "margin": "abc"}], [], "the margin 'abc' is no number of 0 or more"),
        ([{**pair, "margin": -5}], [], "the margin -5 is no number"),
        ([{"prompt": "q", "completion": "a", "reward": float("inf")}], [], "reward is inf"),
        ([{side: "\n\nHuman: q\n\nAssistant: a" for side in ("chosen", "rejected")}], [], "have equal"),
        ([pair, long], [], r"data.train: the completion 'a+.* has 6\d tokens; the model reads at most"),
        ([{"prompt": "q", "completion": c, "reward": 1} for c in "ab"], [], "none of the 1 prompts has two"),
        ([{"prompt": "q", "completion": c, "label": 1} for c in "ab"], bce, "all 2 scores are 1, from"),
        ([{"prompt": "q", "completion": "a", "reward": 4}], bce, "1 scores, as 4, are outside 0 to 1"),
        ([{"text": "q"}], [], "prompt"),
    ):
        file = write(tmp_path / "bad.jsonl", rows)
        with pytest.raises(UserError, match=message):
            run(config(inputs, f"data.train={file}", "data.heldout=0", *more), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    both = write(tmp_path / "both.jsonl", [pair, {**pair, "prompt": "q3"}])
    with pytest.raises(UserError, match=r"1 prompts of data\.heldout are also in data.train: 'q3'"):
        run(config(inputs, f"data.heldout={both}"), tmp_path / "bad")
    dropped = config(inputs, f"data.heldout={both}", "data.unusable=drop")
    assert read_rankings(dropped)[2] == {"shared": 1} and len(read_rankings(dropped)[1]) == 2
    wide = tmp_path / "wide"
    Qwen3ForSequenceClassification(tiny_config(num_labels=3)).save_pretrained(wide)
    tiny_tokenizer().save_pretrained(wide)
    with pytest.raises(UserError, match=r"a classifier with 3 outputs \(LABEL_0, .*\), and this objective trains 1"):
        run(config(inputs, f"model.path={wide}"), tmp_path / "bad")
    with pytest.raises(RewardError, match="the model has 3 outputs"):
        load_text_reward("reward_model", model=wide)
    for more, message in (
        (["objective.smoothing=1"], "objective.smoothing is 1.0, and pairs of texts have no votes"),
        (["objective.task=mse", "model.heads=2"], "an ensemble learns by bradley_terry or plackett_luce"),
        (["objective.task=mse", "data.length_balanced=true"], "length_balanced chooses pairs, and objective.task mse"),
        (["objective.task=hp"], "objective.task"),
    ):
        with pytest.raises((UserError, ConfigError), match=message):
            config(inputs, *more)


def test_the_plan_counts_and_both_commands_find_the_job(inputs: Path) -> None:
    planned = estimate(config(inputs))
    assert planned["records"]["prompts"] == 11 and planned["length"]["updates"] == 22
    assert planned["memory_in_GB"]["in_all"] > 0 and planned["model"]["longest_text"] <= 48
    assert plan(config(inputs, "run.iterations=2"))["length"]["updates"] == 8
    assert load_job("text_reward", pipelines=("train_reward", "text_reward")).config.pipeline == "text_reward"
    with pytest.raises(ConfigError, match="not 'train_reward' or 'text_reward'"):
        load_job("text_dpo", pipelines=("train_reward", "text_reward"))
