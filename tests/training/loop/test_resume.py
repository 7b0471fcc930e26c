# SPDX-License-Identifier: Apache-2.0
"""A run that was killed, interrupted or split over processes is the run that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.training.images import ToyPolicy, outcome, toy_trainer
from visalign.training.loop import checkpoint
from visalign.training.loop.checkpoint import CheckpointError
from visalign.training.loop.metrics import read_metrics


def _trained(folder: Path, iterations: int, **keeping: object) -> ToyPolicy:
    policy = ToyPolicy()
    keeping = {"iterations": iterations, "checkpoint_every": 2, **keeping}
    trainer = toy_trainer(folder, policy=policy, run=keeping)
    trainer.resume()
    trainer.train()
    return policy


def test_resumed_in_the_same_process_equals_uninterrupted(tmp_path):
    for name in ("whole", "split"):
        (tmp_path / name).mkdir()
    _trained(tmp_path / "whole", 5)
    _trained(tmp_path / "split", 3)
    _trained(tmp_path / "split", 5)
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "split")
    assert len(read_metrics(tmp_path / "whole" / "metrics.jsonl")) == 5


def test_a_damaged_checkpoint_is_passed_over_aloud(tmp_path, monkeypatch):
    _trained(tmp_path, 4)
    newest = checkpoint.step_folder(tmp_path / "checkpoints", 4) / "ema.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    notes = []
    trainer = toy_trainer(tmp_path, run={"iterations": 6})
    monkeypatch.setattr(trainer.progress, "note", notes.append)
    assert trainer.resume() and trainer.counters.iteration == 2
    assert "step_000004 is damaged: ema.safetensors has 100 bytes instead of" in notes[0]
    assert "Resumed from" in notes[1] and "after iteration 2" in notes[1]
    older = checkpoint.step_folder(tmp_path / "checkpoints", 2) / "state.json"
    older.unlink()
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* is whole.*new run in another output"):
        toy_trainer(tmp_path).resume()


def test_another_model_is_refused(tmp_path):
    _trained(tmp_path, 2)
    policy = ToyPolicy()
    policy.net.shift = torch.nn.Parameter(torch.zeros(5, 4))
    with pytest.raises(CheckpointError, match=r"other trained parameters than the model.*'shift'"):
        toy_trainer(tmp_path, policy=policy).resume()


def test_a_run_over_its_budget_resumes_to_nothing(tmp_path):
    for _ in range(2):
        trainer = toy_trainer(tmp_path, run={"iterations": 50, "max_seconds": 1e-6})
        trainer.resume()
        result = trainer.train()
        assert result.stopped == "max_seconds" and result.counters.iteration == 1
    assert [row["iteration"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert [f.name for f in checkpoint.folders(tmp_path / "checkpoints")] == ["step_000001"]
    more = toy_trainer(tmp_path, run={"iterations": 3, "max_seconds": 1e6})
    more.resume()
    assert more.train().counters.iteration == 3
