# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation end to end at tiny size: judged samples, files, plan, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.text_jobs import QUESTIONS, text_inputs
from visalign.config import load_config
from visalign.errors import UserError
from visalign.pipelines.shared.parts import split_records
from visalign.pipelines.text.config import TextModelConfig
from visalign.pipelines.text.supervised import TextDPOConfig, TextSFTConfig, plan, prepare_supervised, run
from visalign.training.loop.metrics import read_metrics

BASE = (
    "data={batch: 6, pairs_heldout: 0.25}",
    "generation={max_new_tokens: 4}",
    "optimizer={lr: 1e-2, updates_per_iteration: 4, micro_batch: 4, ema_decay: 0.0}",
    "evaluation={seeds: [0], every: 1, prompts_on_the_way: 2, rewards: {exact_answer: {}}}",
    "evaluation.correctness=exact_answer",
    "run={iterations: 2, checkpoint_every: 2, device: cpu}",
)
JUDGED = [
    {"prompt": r["prompt"], "completion": text, "reward": float(text == r["answer"])}
    for r in QUESTIONS
    for text in (r["answer"], "zz", r["answer"] * 2)
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return text_inputs(tmp_path_factory.mktemp("inputs"))


def _file(folder: Path, records: list[dict[str, Any]]) -> str:
    path = folder / "answers.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return f"data.train={path}"


def _config(inputs: Path, *overrides: str) -> TextDPOConfig:
    files = (f"model.path={inputs}/model", f"data.heldout={inputs}/prompts.jsonl")
    return load_config(TextDPOConfig, None, [*BASE, *files, *overrides])


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_judged_completions_are_learnt_and_held_out_ones_measured(loss, inputs, tmp_path):
    ties = [{**JUDGED[0], "prompt": "tie?"}]
    config = _config(inputs, _file(tmp_path, JUDGED + ties), f"loss={{row: {loss}, beta: 0.5}}")
    summary = run(config, tmp_path / "run")
    pairs = loss == "sigmoid"
    assert summary["completions_left_out"] == ({"ties": 1} if pairs else {})
    assert summary["completions"] + summary["completions_heldout"] == (8 if pairs else 25)
    assert summary["completions_heldout"] == (2 if pairs else 6) and summary["samples"] == 48
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["rewards/margins"] > 1
    assert rows[-1]["heldout/rewards/accuracies"] > 0.5 and "heldout/loss" in rows[0]
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert "Held-out pairs ranked correctly" in (tmp_path / "run" / "report.html").read_text()


def test_records_of_a_prompt_stay_on_one_side():
    records = [{"prompt": prompt, "n": n} for n in range(3) for prompt in "abcdefghij"]
    learnt, measured = split_records(records, 0.2, seed=1)
    prompts = {r["prompt"] for r in measured}
    assert len(measured) == 6 and len(prompts) == 2 and not prompts & {r["prompt"] for r in learnt}
    assert split_records(records, 0.0, seed=1) == (records, [])
    assert all(map(len, split_records(records, 0.99, seed=1))), "something is left to learn from"
    assert split_records(records[:1], 0.5, seed=1) == (records[:1], [])
    assert split_records(records, 0.2, seed=3)[1] != measured


@pytest.mark.parametrize(("loss", "kind", "count"), [("sigmoid", "pairs", 36), ("kto", "votes", 72)])
def test_the_packaged_tasks_have_pairs_and_votes(loss, kind, count):
    small = ["data={size: 38, heldout_per_task: 1, pairs_heldout: 0.05}", "run.iterations=4"]
    batch = plan(load_config(TextDPOConfig, None, [*small, f"loss.row={loss}"]))["batch"]
    assert batch[kind] == count and batch[f"{kind}_heldout"] == 76 * (loss == "kto") + 38 * (loss != "kto") - count
    assert batch["updates"] == 4 and batch["epochs"] == 4 * 32 / count


@pytest.mark.parametrize(
    ("records", "overrides", "message"),
    [
        (
            [{"prompt": "a", "completion": "b", "label": n} for n in (True, False)],
            ("loss.row=kto",),
            "data.train: Record 0 of 2 has no other prompt's completion",
        ),
        ([], ("data.train=tasks:train", "data.size=1"), "all tasks have one answer, so no solution is wrong"),
    ],
)
def test_unusable_completions_are_refused_before_anything_is_written(records, overrides, message, inputs, tmp_path):
    with pytest.raises(UserError, match=message):
        run(_config(inputs, _file(tmp_path, records), *overrides), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [TextSFTConfig, TextDPOConfig])
def test_a_tenth_of_ones_own_records_is_held_out(kind, tmp_path):
    record = {"completion": "2", "chosen": "2", "rejected": "3"}
    lines = [json.dumps({"prompt": f"1 + {n // 2} = ?", **record}) for n in range(40)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    model, data = TextModelConfig(path="me/model"), str(tmp_path / "own.jsonl")
    config = kind(model=model, data={"train": data})
    inputs = prepare_supervised(config)
    assert (len(inputs.records), len(inputs.heldout), inputs.heldout_trained_on) == (36, 2, 0)
    assert config.data.heldout is None and not config.evaluation.rewards and not inputs.rewards
    assert kind(model=model).data.heldout == kind(data={"train": data}).data.heldout == "tasks:heldout"
