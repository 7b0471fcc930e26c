# SPDX-License-Identifier: Apache-2.0
"""A first trial with a model, prompts and a reward of one's own; a user's own model class trains, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.adapters import load_policy
from visalign.adapters.model_folder import stored_dtype, stored_variant
from visalign.config import load_config
from visalign.errors import UserError
from visalign.evaluation import load_heldout
from visalign.pipelines.cli.app import app
from visalign.pipelines.cli.show import gain_lines
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, run
from visalign.pipelines.jobs import load_job
from visalign.training.loop.metrics import read_metrics

TRIAL = (
    "model.lora.rank=4",
    "rollout={prompts_per_iteration: 3, group_size: 4, steps: 3, batch_size: 12}",
    "evaluation.every=1",
    "monitor.features=null",
    "run={iterations: 2, device: cpu}",
)


def _trial(folder: Path, *overrides: str) -> FlowGRPOConfig:
    tiny_sd3_pipeline().save_pretrained(folder / "model")
    (folder / "prompts.txt").write_text("\n".join(f"a cat with {n} hats" for n in range(40)))
    (folder / "mine.py").write_text("def brightness(images, prompts):\n    return images.mean((1, 2, 3)).tolist()\n")
    own = f"rewards.terms={{mine: {{name: '{folder}/mine.py:brightness'}}}}"
    files = f"model.path={folder}/model", f"data.train={folder}/prompts.txt"
    return load_config(FlowGRPOConfig, None, [*files, own, *TRIAL, *overrides])


@pytest.fixture(scope="module")
def trial(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trial")
    return folder / "run", run(_trial(folder, "optimizer.lr=0.01"), folder / "run")


def test_a_run_below_an_interval_of_the_average_saves_what_it_learnt(trial):
    output, summary = trial
    weights = load_file(next((output / "lora").glob("*.safetensors")))
    assert sum(bool(w.any()) for name, w in weights.items() if "lora_B" in name) > 5
    assert summary["warnings"] == []


def test_the_held_out_prompts_are_some_of_ones_own(trial):
    output, summary = trial
    heldout = load_heldout(output / "before.npz")
    assert set(heldout.prompts) <= {f"a cat with {n} hats" for n in range(40)} and summary["before"]["prompts"] == 4
    assert summary["heldout_prompts_trained_on"] == 0 and list(heldout.scores) == ["mine"]


def test_the_curve_of_ones_own_reward_is_its_mean_with_its_interval(trial):
    output, summary = trial
    last = read_metrics(output / "metrics.jsonl")[-1]
    assert last["heldout/mine.low"] <= last["heldout/mine"] <= last["heldout/mine.high"]
    assert "heldout/accuracy" not in last
    page = (output / "report.html").read_text()
    assert "Held-out mine" in page and "No finite value" not in page and "Held-out accuracy" not in page
    assert gain_lines(summary)[0].startswith("Held-out mine ")


def test_a_result_that_equals_its_start_warns(tmp_path, capsys):
    summary = run(_trial(tmp_path, "optimizer.lr=1e-30", "run.iterations=1"), tmp_path / "run")
    assert summary["warnings"][0].startswith("The result equals its start: all held-out images")
    assert "The result equals its start" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"]


def test_weights_of_a_variant_alone_are_read(tmp_path):
    tiny_sd3_pipeline().to(torch.float16).save_pretrained(tmp_path / "half", variant="fp16")
    assert stored_variant(tmp_path / "half") == "fp16" and stored_dtype(tmp_path / "half" / "transformer") == "float16"
    assert load_policy(tmp_path / "half").storage_dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("text_grpo", "data.heldout=missing.jsonl", "data.heldout: no prompt set 'missing.jsonl': give an"),
        ("shapes_flow_grpo", "evaluation.rewards={pick_score: {options: {model: /none}}}", "option model is '/none'"),
    ],
)
def test_what_is_wrong_is_named_before_a_model_is_loaded(name, override, message):
    with pytest.raises(UserError, match=message):
        job = load_job(name, ["evaluation.correctness=null", override])
        job.plan(job.config)


def test_a_resume_under_another_configuration_names_the_runs_own(trial):
    output, _ = trial
    with pytest.raises(UserError, match=rf"\d+ more\. Resume it under its own: visalign train {output}/config.yaml"):
        run(load_config(FlowGRPOConfig, None, []), output, resume=True)


OWN = """
from tests.support.training.images import ToyPolicy

class Own(ToyPolicy):
    @classmethod
    def from_pretrained(cls, folder_or_id, *, dtype, device):
        return cls(dtype)

    def save(self, folder):
        folder.mkdir(parents=True)
        (folder / "shift.txt").write_text(str(self.net.shift.tolist()))
"""
CONFIG = """
pipeline: flow_grpo
model: {{path: mine, adapter: "{folder}/own.py:Own"}}
data: {{train: {folder}/prompts.jsonl, heldout: {folder}/prompts.jsonl}}
rewards: {{terms: {{brightness: {{weight: 1}}}}}}
rollout: {{prompts_per_iteration: 2, group_size: 4, steps: 3, batch_size: 8, noise_level: 0.5}}
objective: {{changes: {{kl: 0.0, surrogate_options: {{eps_low: 0.1, eps_high: 0.1}}}}}}
optimizer: {{lr: 0.05, micro_batch: 8}}
evaluation: {{rewards: {{}}, correctness: null, seeds: [0]}}
run: {{iterations: 8, device: cpu}}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in ("bright", "light")))
    (tmp_path / "own.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def test_a_users_own_model_trains_from_the_command_line(folder):
    result = CliRunner().invoke(app, ["train", f"{folder}/own.yaml", "--output", f"{folder}/run"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["ratio_floor"] < 1e-5
    summary = json.loads((folder / "run" / "summary.json").read_text())
    before, after = (summary[when]["rewards"]["brightness"]["mean"] for when in ("before", "after"))
    assert after > before + 0.02
    assert (folder / "run" / "lora" / "shift.txt").is_file()
    page = (folder / "run" / "report.html").read_text()
    assert f"adapter=&#34;{folder}/own.py:Own&#34;)" in page and "StableDiffusion3Pipeline" not in page


@pytest.mark.parametrize(
    "override, message",
    [
        ("model.guidance=2", r"The adapter Own takes no guidance\. It takes dtype, device"),
    ],
)
def test_refusals(folder, override, message):
    with pytest.raises((UserError, FileNotFoundError), match=message):
        run(load_config(FlowGRPOConfig, folder / "own.yaml", [override]), folder / "run")
    assert not (folder / "run").exists()
