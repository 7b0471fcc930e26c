# SPDX-License-Identifier: Apache-2.0
"""Judges of images that two processes divide by `run.sharding` are those of two processes that do not."""

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
from tests.support.training.metric_families import without_times
from tests.support.training.processes import in_forks
from visalign.errors import UserError
from visalign.pipelines.train_reward import judges
from visalign.pipelines.train_reward.job import build_judge, run
from visalign.training.loop.metrics import read_metrics

from .test_processes import assert_close
from .test_train_reward import _config, _examples, models

__all__ = ["models"]

JUDGE = ("checklist", "lora", "checklist")
"""Adapters; a head and all weights differ in what is gathered alone."""


def _train(models: Path, root: Path, sharding: bool) -> None:
    """Five examples to an update: one process makes two micro-batches, the other one. An undivided judge reads
    each in several passes."""
    judges._TOKENS = 100
    optimizer = {"eps": 1e-3}  # or the rounding of small gradients is blown up
    run_settings = {"threads": 1, "sharding": sharding}
    run(_config(models, *JUDGE, data={"batch": 5}, optimizer=optimizer, run=run_settings), root)


def in_two(models: Path, folder: Path) -> None:
    """`_train` in two processes that divide the model."""
    if not in_forks(folder, 2, partial(_train, models, folder / "run", True)):
        sys.exit(f"a process in {folder} ended badly")


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Without times, and without what is null in so small a set."""
    return {name: value for name, value in without_times(record).items() if value is not None}


@pytest.mark.slow
def test_a_divided_judge_is_the_judge(models, tmp_path, monkeypatch):
    """Of one process (test_processes.py has two): unequal parts, an image that was seen before, dropout."""
    monkeypatch.setattr(judges, "_TOKENS", judges._TOKENS)  # `_train` sets it
    ddp, fsdp = tmp_path / "one", tmp_path / "fsdp" / "run"
    in_fork(in_two, models, fsdp.parent)
    _train(models, ddp, False)
    assert (fsdp / "checkpoints" / "step_000002" / "sharded").is_dir()
    records = [[_numbers(r) for r in read_metrics(folder / "metrics.jsonl")] for folder in (ddp, fsdp)]
    assert len(records[0]) == len(records[1]) == 2
    for undivided, divided in zip(*records, strict=True):
        for measured in (undivided, divided):
            measured.pop("adam_resolution")  # a median of roundings
        assert_close(divided, undivided)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (ddp, fsdp)]
    for key in ("before", "after"):
        assert_close(_numbers(summaries[1][key]), _numbers(summaries[0][key]))
    assert summaries[1]["trainable_parameters"] == summaries[0]["trainable_parameters"] > 0
    files = sorted((ddp / "judge").glob("*.safetensors"))
    assert files
    for file in files:
        weights, expected = load_file(fsdp / "judge" / file.name), load_file(file)
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert weights[name].dtype == value.dtype
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5)
    cards = [(folder / "judge" / "README.md").read_text().partition("## Weights")[0] for folder in (ddp, fsdp)]
    assert all("How good it is" in card for card in cards)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": "head"}, "model.train head of a checklist trains the weights of the answers alone. Set"),
        ({"diversity": {"others": ["a"]}}, r"run\.sharding goes without model\.diversity\. Leave one of the"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_message(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        _config(tmp_path, "checklist", "lora", model=change, run={"sharding": True})


@pytest.mark.parametrize(("kind", "train", "cached"), [("rating", "full", False), ("yes_no", "lora", True)])
def test_what_a_moving_tower_said_is_forgotten_before_each_measurement(models, kind, train, cached):
    """Gathered weights may lie where those before them lay, so that the change is not seen."""
    judge: Any = build_judge(_config(models, kind, train), torch.device("cpu"))
    images = judge.encode(_examples(_config(models, kind, train))).inputs[0][0].images
    with torch.no_grad():
        judge.engine.network.features(images)
    judge.train(False)
    assert (judge.engine.network.cache.get(images[0].digest) is not None) == cached
    tower = judge.divide()
    assert bool(tower) == cached and judge.engine.network.in_one_pass
