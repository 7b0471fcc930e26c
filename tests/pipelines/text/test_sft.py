# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning end to end at tiny size: files, learning, resume, plan, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.training.metric_families import without_times
from tests.support.training.text_jobs import text_inputs
from visalign.config import load_config
from visalign.errors import UserError
from visalign.evaluation import load_heldout
from visalign.pipelines.text.supervised import TextSFTConfig, plan, run
from visalign.training.loop.metrics import read_metrics

BASE = (
    "data={batch: 8}",
    "generation={max_new_tokens: 4}",
    "optimizer={lr: 1e-2, updates_per_iteration: 8, micro_batch: 3, ema_decay: 0.0}",
    "evaluation={seeds: [0, 1], every: 2, prompts_on_the_way: 4, rewards: {exact_answer: {}}}",
    "evaluation.correctness=exact_answer",
    "run={iterations: 4, checkpoint_every: 2, device: cpu}",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return text_inputs(tmp_path_factory.mktemp("inputs"))


def _config(inputs: Path, *overrides: str) -> TextSFTConfig:
    files = (
        f"model.path={inputs}/model",
        f"data.train={inputs}/demonstrations.jsonl",
        f"data.heldout={inputs}/prompts.jsonl",
    )
    return load_config(TextSFTConfig, None, [*BASE, *files, *overrides])


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    output = tmp_path_factory.mktemp("runs") / "finished"
    return output, run(_config(inputs), output)


def test_a_cold_start_raises_the_accuracy_of_a_random_model(finished):
    output, summary = finished
    assert summary["before"]["accuracy"] < 0.2 and summary["after"]["accuracy"] > 0.9
    assert summary["gain"]["low"] > 0.5
    greedy = load_heldout(output / "after.npz").scores["greedy"]
    assert greedy.mean() > 0.9
    rows = read_metrics(output / "metrics.jsonl")
    assert rows[-1]["loss"] < 0.1 * rows[0]["loss"] and rows[-1]["perplexity"] < 1.2
    assert [row["iteration"] for row in rows if "heldout/accuracy" in row] == [2, 4]


def test_a_run_leaves_everything(finished, inputs):
    output, summary = finished
    names = {path.name for path in output.iterdir()}
    assert names == {
        *("metrics.jsonl", "checkpoints", "model", "summary.json", "config.yaml", "inputs.json"),
        *("before.npz", "after.npz", "report.html"),
    }
    assert summary == json.loads((output / "summary.json").read_text())
    assert summary["demonstrations"] == 8 and summary["demonstrations_left_out"] == 0
    assert summary["heldout_prompts_trained_on"] == 8
    assert summary["updates"] == 32 and summary["epochs"] == 32 and summary["samples"] == 256
    assert load_config(TextSFTConfig, output / "config.yaml") == _config(inputs)
    saved = AutoModelForCausalLM.from_pretrained(output / "model")
    before = AutoModelForCausalLM.from_pretrained(inputs / "model")
    assert not torch.equal(saved.lm_head.weight, before.lm_head.weight)


def test_a_run_out_of_time_resumes_to_the_result_of_one_that_was_not(finished, inputs, tmp_path):
    output = tmp_path / "run"
    first = run(_config(inputs, "run.max_seconds=1e-3"), output)
    assert first["stopped"] == "max_seconds" and first["iterations"] == 1
    again = run(_config(inputs, "run.max_seconds=null"), output, resume=True)
    assert again["stopped"] == "finished" and again["after"] == finished[1]["after"]
    mine, theirs = (load_file(path / "model" / "model.safetensors") for path in (output, finished[0]))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    rows = [[without_times(row) for row in read_metrics(p / "metrics.jsonl")] for p in (output, finished[0])]
    assert rows[0] == rows[1]


def test_the_packaged_tasks_are_learnt_from_their_solutions(inputs):
    overrides = ["data={size: 38, heldout_per_task: 1, batch: 19}", "run.iterations=4", "evaluation.every=2"]
    planned = plan(load_config(TextSFTConfig, None, overrides))
    expected: dict[str, Any] = {"ends_by": "run.iterations = 4", "demonstrations": 38, "prompts": 38}
    expected |= {"updates": 4, "iterations": 4, "heldout_prompts_trained_on": 0}
    expected |= {"demonstrations_per_update": 19, "epochs": 2.0}
    assert planned["batch"] == expected
    assert planned["evaluation"] == {"heldout_prompts": 19, "evaluations_on_the_way": 2, "completions": 266}
    with pytest.raises(UserError, match=r"data\.train: record 0 has no text in the field 'problem'"):
        plan(load_config(TextSFTConfig, None, ["data={size: 1, field: problem}"]))


def _file(folder: Path, *records: Any) -> str:
    (folder / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return f"data.train={folder / 'a.jsonl'}"


LONG = {"prompt": "a", "completion": "b" * 60}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"prompt": "a"}], "data.train: .* line 1 has no text in the field 'completion'"),
        ([{"prompt": "a", "completion": "b"}, LONG], "data.train: 1 of 2 records have more tokens than the 48"),
    ],
)
def test_demonstrations_that_cannot_be_used_are_refused_before_anything_is_written(records, message, inputs, tmp_path):
    with pytest.raises(UserError, match=message):
        run(_config(inputs, _file(tmp_path, *records)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_records_that_are_too_long_can_be_left_out(inputs, tmp_path):
    data = _file(tmp_path, {"prompt": "a", "completion": "b"}, LONG)
    few = ("data.too_long=drop", "run.iterations=1", "evaluation.every=0")
    summary = run(_config(inputs, data, *few), tmp_path / "out")
    assert summary["demonstrations"] == 1 and summary["demonstrations_left_out"] == 1


def test_other_inputs_are_refused(inputs, tmp_path):
    output = tmp_path / "out"
    with pytest.raises(UserError, match=r"data.train: there is no 'tasks:trian'; the packaged records are"):
        run(_config(inputs, "data.train=tasks:trian"), output)
    assert not output.exists()
    images = ("data.question=How is it?", "data.heldout=shapes:quality", "data.heldout_size=2")
    images += ("evaluation={rewards: {rating: {}}, correctness: null}",)
    with pytest.raises(UserError, match=r"no file of demonstrations 'tasks:train'; give a .jsonl"):
        run(_config(inputs, *images, "data.train=tasks:train"), output)
