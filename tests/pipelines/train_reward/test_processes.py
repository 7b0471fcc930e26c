# SPDX-License-Identifier: Apache-2.0
"""`visalign train-reward` in two processes: the run of one process, written down once."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forks import in_fork
from tests.support.models.vision_language import save_tiny_seeing_model
from tests.support.training.metric_families import without_times
from tests.support.training.processes import in_forks
from visalign.config import load_config
from visalign.pipelines.cli.app import app
from visalign.pipelines.train_reward.job import TrainRewardConfig, run
from visalign.training.loop.metrics import read_metrics
from visalign.training.reward.heldout import HeldoutPairs, concatenate_pairs, pair_measures

YES_NO: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "{prompt}"}]}],
    "yes": ["y"],
    "no": ["n"],
}


def _settings(model: Path) -> dict[str, Any]:
    """Seven held-out pairs in batches of two: neither divides by two processes."""
    return {
        "model": {"kind": "yes_no", "path": str(model), "train": "lora", "lora": {"rank": 2, "alpha": 4.0}},
        "data": {"size": 12, "heldout_size": 7, "batch": 5, "micro_batch": 2},
        "objective": {"task": "yes_no"},
        "optimizer": {"lr": 1e-3, "updates_per_iteration": 2, "decay_updates": 8},
        "evaluation": {"every": 1, "batch": 2},
        "run": {"checkpoint_every": 1, "threads": 1},
    }


def _overrides(settings: dict[str, Any], iterations: int) -> list[str]:
    overrides = [f"{s}.{key}={json.dumps(value)}" for s, keys in settings.items() for key, value in keys.items()]
    return [*overrides, f"run.iterations={iterations}"]


def _command(arguments: list[str]) -> None:
    app(arguments, standalone_mode=False)
    sys.stdout.flush()  # a fork ends without it


def in_two(config: Path, overrides: list[str], output: Path) -> None:
    """The command in two processes."""
    arguments = ["train-reward", str(config), *overrides, "--output", str(output)]
    if not in_forks(output.parent / "forks", 2, partial(_command, arguments)):
        sys.exit("a process ended badly")


def assert_close(actual: Any, expected: Any) -> None:
    """Equal names, and numbers up to the order in which they were added."""
    assert actual.keys() == expected.keys()
    for name in actual:
        assert actual[name] == pytest.approx(expected[name], rel=2e-3, abs=1e-5, nan_ok=True), name


def test_two_processes_are_one_run_and_go_on_as_one(tmp_path):
    """test_sharding.py asks the same of processes that divide the model."""
    save_tiny_seeing_model(tmp_path / "vlm")
    (tmp_path / "vlm" / "judge.json").write_text(json.dumps({"templates": {"yes_no": YES_NO}}))
    settings = _settings(tmp_path / "vlm")
    config = tmp_path / "job.yaml"
    config.write_text("pipeline: train_reward\n")
    summary = run(load_config(TrainRewardConfig, config, _overrides(settings, 3)), tmp_path / "one")
    output = in_fork(in_two, config, _overrides(settings, 2), tmp_path / "two")
    assert output.count("iteration 1/2") == output.count("iteration 2/2") == 1
    assert output.count("Measuring on 7 held-out examples") == output.count("Done") == 1
    folder = tmp_path / "two"
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step_000001", "step_000002"]
    assert not (folder / "checkpoints" / "step_000002" / "sharded").exists()
    assert json.loads((folder / "summary.json").read_text())["examples"] == 20
    assert (folder / "judge" / "README.md").read_text().count("4 updates of 5 examples") == 1
    single, together = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert len(together) == 2
    for one, two in zip(single, together, strict=False):
        assert_close(without_times(two), without_times(one))
    assert_close(json.loads((folder / "before.json").read_text()), summary["before"])

    three = run(load_config(TrainRewardConfig, config, _overrides(settings, 3)), folder, resume=True)
    assert_close(three["after"], summary["after"])
    assert len(read_metrics(folder / "metrics.jsonl")) == 3
    name = "checkpoints/step_000003/trainable.safetensors"
    one, two = (load_file(tmp_path / run_folder / name) for run_folder in ("one", "two"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-3, atol=2e-5)


def test_pairs_measured_in_parts_are_the_pairs():
    generator = torch.Generator().manual_seed(0)
    columns = {name: torch.rand(30, generator=generator).double() for name in ("difference", "prob", "std", "mass")}
    truth = (torch.rand(30, generator=generator) < 0.5).double()
    labels = {"truth": truth, "share": truth, "weight": torch.ones(30).double()}
    clear = torch.rand(30, generator=generator) < 0.8
    pairs = HeldoutPairs(**columns, **labels, clear=clear, example=torch.arange(30) // 3)
    parts = [
        HeldoutPairs(**{name: getattr(pairs, name)[part] for name in HeldoutPairs.__dataclass_fields__})
        for part in (slice(0, 11), slice(11, 30))
    ]
    assert pair_measures(concatenate_pairs(parts)) == pair_measures(pairs)
    bare = [HeldoutPairs(**{**vars(part), "prob": None, "std": None, "mass": None}) for part in parts]
    assert concatenate_pairs(bare).prob is None and concatenate_pairs(bare).std is None
