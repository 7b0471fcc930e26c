# SPDX-License-Identifier: Apache-2.0
"""The Flow-GRPO job end to end on a tiny random SD3 pipeline: files, resume, cost, plan, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.sd3 import tiny_sd3_pipeline
from tests.support.training.metric_families import without_times
from visalign.config import load_config
from visalign.errors import UserError
from visalign.pipelines.cli.show import result_files
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, plan, run, sample_command
from visalign.pipelines.flow_grpo.plan import planned_cost
from visalign.pipelines.shared.job import TrainingInterrupted
from visalign.pipelines.shared.parts import evenly_spaced
from visalign.pipelines.text.supervised import TextSFTConfig
from visalign.training.loop.checkpoint import step_folder
from visalign.training.loop.metrics import read_metrics
from visalign.training.loop.trainer import Trainer

BASE = (
    "model.lora.rank=4",
    "model.guidance=2.0",
    "data.balance=true",
    "rewards.terms={jpeg_size: {weight: 1.0}, sharpness: {weight: 0.0}}",
    "rollout={prompts_per_iteration: 3, group_size: 4, steps: 3, batch_size: 12}",
    "objective.changes={surrogate_options: {eps_low: 0.01, eps_high: 0.01}, kl: 0.01}",
    "optimizer={lr: 1e-3, updates_per_iteration: 2, micro_batch: 7, ema_every: 1}",
    "evaluation={seeds: [0, 1], every: 1, prompts_on_the_way: 2, rewards: {shapes_verifier: {}}}",
    "monitor={features: shapes-clip, window: 1, warn: {feature_drift: 0}}",
    "run={iterations: 2, checkpoint_every: 1, device: cpu}",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with a model and two prompt files."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_sd3_pipeline().save_pretrained(folder / "model")
    records = [
        {"prompt": "a red circle", "tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}]},
        {"prompt": "two circles", "tag": "counting", "include": [{"class": "circle", "count": 2}]},
        {"prompt": "three circles", "tag": "counting", "include": [{"class": "circle", "count": 3}]},
    ]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(r) for r in records))
    (folder / "heldout.jsonl").write_text("\n".join(json.dumps(r) for r in records[:2]))
    return folder


def _config(inputs: Path, *overrides: str) -> FlowGRPOConfig:
    files = (f"model.path={inputs}/model", f"data.train={inputs}/train.jsonl", f"data.heldout={inputs}/heldout.jsonl")
    return load_config(FlowGRPOConfig, None, [*BASE, *files, *overrides])


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    output = tmp_path_factory.mktemp("runs") / "finished"
    return output, run(_config(inputs), output)


def test_a_run_leaves_everything(finished, inputs):
    output, summary = finished
    names = {path.name for path in output.iterdir()}
    assert {"metrics.jsonl", "checkpoints", "lora", "summary.json", "report.html", "config.yaml"} <= names
    assert summary == json.loads((output / "summary.json").read_text())
    assert {"accuracy", "by_category", "rewards"} <= summary["before"].keys() & summary["after"].keys()
    assert summary["before"]["by_category"].keys() == {"colors", "counting"}
    assert {"jpeg_size", "shapes_verifier", "sharpness"} <= summary["after"]["rewards"].keys()
    assert summary["seconds"] > 0 and summary["peak_memory_bytes"] > 50e6
    assert summary["config"]["optimizer"]["lr"] == 1e-3 and "torch" in summary["versions"]
    assert load_config(FlowGRPOConfig, output / "config.yaml") == _config(inputs)


def test_the_report_is_true_and_can_be_copied(finished):
    """Both held-out prompts are among the training prompts here."""
    output, summary = finished
    page = (output / "report.html").read_text()
    assert summary["heldout_prompts_trained_on"] == 2
    assert "2 prompts, all of which the model was also trained on" in page
    assert f"load_lora_weights(&#34;{output}/lora&#34;)" in page
    assert f"visalign train {output}/config.yaml --output {output} --resume" in page


def test_the_monitor_is_in_log_report_and_summary(finished):
    output, summary = finished
    rows, page = read_metrics(output / "metrics.jsonl"), (output / "report.html").read_text()
    keys = "agreement/sharpness diversity image/contrast heldout/feature_distance heldout/change/sharpness"
    for key in keys.split():
        assert all(key in row for row in rows), key
    drift = rows[0]["heldout/feature_drift"]
    assert drift > 0 and "recorded_change/sharpness" in rows[1]
    (warning,) = summary["warnings"]
    limit = "monitor.warn.feature_drift (0)"
    assert warning == f"Iteration 1: feature_drift is {drift:.3g}, above {limit}." and limit in page
    for title in ("Agreement with sharpness", "Diversity within groups", "Drift of held-out images"):
        assert f"<h4>{title}</h4>" in page, title


def test_the_next_command_samples_as_the_run_evaluates(tmp_path):
    config = _config(tmp_path, "model.path=my/sd3", "model.guidance=null")
    images = f"--output {tmp_path}/images"
    lora = f"--lora {tmp_path}/lora --steps 3 --dtype float32 --option guidance=null"
    command = shlex.join(sample_command(config, tmp_path))
    assert command == f"visalign sample 'a red circle' --model my/sd3 {lora} {images}"
    options = "{path: m, image_size: [16, 8], use_t5: false, options: {call: {a: false}, lora_path: x}, lora: null}"
    full = _config(tmp_path, f"model={options}", "data.heldout=my prompts.jsonl")
    as_trained = (
        "--steps 3 --dtype float32 --option 'image_size=[16, 8]' --option 'call={\"a\": false}' --option use_t5=false "
        "--option guidance=null"
    )
    for edits, prompts in ((True, "'my prompts.jsonl' --seeds 0"), (False, "'a red circle'")):
        command = shlex.join(sample_command(full, tmp_path, edits=edits))
        assert command == f"visalign sample {prompts} --model {tmp_path}/model {as_trained} {images}"


def test_answers_about_images_are_learnt_by_what_gave_them(tmp_path):
    from visalign.pipelines.text.sample import TextSampleConfig, _sft_keys

    for source, heldout in (("shapes:quality", "shapes:quality"), ("rated.jsonl", "HELDOUT")):
        overrides = ["model.path=shapes-vlm", f"data.train={source}", "data.question='Rate: 1'"]
        overrides += ["rewards.terms={rating: {options: {rule: regression}}}"]
        keys = _sft_keys(load_config(TextSampleConfig, None, overrides), tmp_path)
        assert keys[0] == "model.path=shapes-vlm"
        config = load_config(TextSFTConfig, None, keys)
        assert config.data.train == f"{tmp_path}/dataset.jsonl"
        assert (config.data.heldout, config.data.question) == (heldout, "Rate: 1")
        assert config.evaluation.rewards["rating"].options == {"rule": "regression"}


def test_counted_cost_is_the_planned_one(finished, inputs):
    output, summary = finished
    planned = plan(_config(inputs), measure=False)
    cost = planned["cost"]["forward_equivalents_per_image"]
    assert cost == 3 * 2 + 2 * (4 + 2)
    for row in read_metrics(output / "metrics.jsonl"):
        assert row["forward_equivalents_per_image"] == pytest.approx(cost, rel=1e-12)
    assert summary["forward_equivalents_per_image"] == pytest.approx(cost, rel=1e-12)
    assert planned_cost(_config(inputs, "objective.changes.kl=0"), 0.5) == 3 * 2 + 0.5 * 2 * 4
    more = _config(inputs, "objective.changes.kl_in_reward=0.1", "objective.epochs=2")
    assert planned_cost(more) == 3 * 2 + 2 * 2 + 2 * 2 * (4 + 2)
    assert plan(more, measure=False)["batch"]["updates"] == 2 * planned["batch"]["updates"]
    refilled = plan(_config(inputs, "dynamic={enabled: true, max_rounds: 4}"), measure=False)
    assert refilled["batch"]["rounds_per_iteration_at_most"] == 4
    assert refilled["batch"]["images"] == 4 * planned["batch"]["images"]
    assert refilled["cost"]["forward_equivalents_per_image"] == 3 * 2 + 2 * (4 + 2) / 4
    par = plan(_config(inputs, "objective={algorithm: par, changes: {kl: 0}}"), measure=False)
    references = par["batch"]["reference_images"]
    assert references == min(par["batch"]["training_prompts"], 2 * 3)
    assert par["cost"]["forward_equivalents_per_image"] == 3 * 2 * (1 + references / par["batch"]["images"]) + 2 * 4
    keys = ("objective={algorithm: diffusion_nft, ratio_bound: null}", "self_imitation={batch: 3}")
    replayed, plain = (plan(_config(inputs, *k), measure=False)["cost"] for k in (keys, keys[:1]))
    extra = replayed["forward_equivalents_per_image"] - plain["forward_equivalents_per_image"]
    assert extra == pytest.approx(3 / 12 * 2 * 4)


def test_plan_measures_and_counts(inputs):
    planned = plan(_config(inputs))
    batch = planned["batch"]
    assert (batch["images_per_iteration"], batch["pairs_per_iteration"], batch["pairs_per_update"]) == (12, 24, 12)
    assert batch["micro_batches_per_update"] == 2 and batch["updates"] == 4
    assert planned["evaluation"]["images"] == 2 * 2 * 2 + 2 * 2
    time = planned["time"]
    assert all(value > 0 for name, value in time.items() if name.startswith("seconds"))
    assert "passes of" in time["basis"] and "rewards are not timed" in time["basis"]
    assert time["ends_by"] == "run.iterations = 2"
    cut = plan(_config(inputs, "run.max_seconds=1e-9", "run.iterations=50"))["time"]["ends_by"]
    assert cut == "run.max_seconds = 1e-09, after about 1 of 50 iterations"


def test_interrupted_and_resumed_equals_uninterrupted(finished, inputs, tmp_path, monkeypatch):
    def stop_once(_self, _interrupt):
        monkeypatch.undo()
        return "interrupted"

    monkeypatch.setattr(Trainer, "_why_stop", stop_once)
    with pytest.raises(TrainingInterrupted):
        run(_config(inputs), tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    resumed = run(_config(inputs), tmp_path / "run", resume=True)
    output, summary = finished
    for name in ("trainable", "ema", "optimizer"):
        one, two = (step_folder(f / "checkpoints", 2) / f"{name}.safetensors" for f in (output, tmp_path / "run"))
        assert one.read_bytes() == two.read_bytes(), name
    rows = [[without_times(r) for r in read_metrics(f / "metrics.jsonl")] for f in (output, tmp_path / "run")]
    assert rows[0] == rows[1]
    assert resumed["before"] == summary["before"] and resumed["after"] == summary["after"]


def test_full_fine_tuning_saves_a_pipeline(inputs, tmp_path):
    run(_config(inputs, "model.lora=null", "run.iterations=1", "evaluation.every=0"), tmp_path / "run")
    assert (tmp_path / "run" / "model" / "model_index.json").is_file()
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"from_pretrained(&#34;{tmp_path}/run/model&#34;" in page and "load_lora_weights" not in page
    assert result_files(tmp_path / "run")[1].endswith("model  (for from_pretrained, by the code in report.html)")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.group_size=1", r"group_size is 1; a group is compared with itself.*2 or more"),
        ("evaluation.correctness=clip", r"evaluation.correctness is 'clip', which is no label"),
        ("data={cycle: [colors], balance: false}", r"set data\.balance=true"),
        ("rollout.image_sizes=[16, 32]", r"window is 1 and .* has 2: .* to a multiple of 2"),
    ],
)
def test_configurations_that_cannot_work_are_refused_at_once(inputs, override, message):
    with pytest.raises(UserError, match=message):
        _config(inputs, override)


def test_the_plan_refuses_more_processes_than_images(inputs, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "800")
    with pytest.raises(UserError, match=r"800 processes were started for \d+ samples"):
        plan(_config(inputs), measure=False)


def test_evenly():
    records = [{"prompt": str(i)} for i in range(10)]
    assert [r["prompt"] for r in evenly_spaced(records, 4)] == ["0", "2", "5", "7"]
    assert evenly_spaced(records, None) is records and evenly_spaced(records, 10) is records
