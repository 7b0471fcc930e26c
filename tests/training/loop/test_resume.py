# SPDX-License-Identifier: Apache-2.0
"""A run that was killed, interrupted or split over processes is the run that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.training.images import ToyPolicy, outcome, toy_trainer
from visalign.training.loop import checkpoint
from visalign.training.loop.checkpoint import CheckpointError
from visalign.training.loop.metrics import read_metrics

ROOT = Path(__file__).parents[3]


class Runs:
    """Runs in processes of their own, which are forks of one that has imported."""

    def __init__(self) -> None:
        self.parent = subprocess.Popen(
            [sys.executable, "-m", "tests.support.training.images_run"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, what: object) -> int:
        assert self.parent.stdin is not None and self.parent.stdout is not None
        print(json.dumps(what), file=self.parent.stdin, flush=True)
        return int(self.parent.stdout.readline())

    def start(self, folder: Path, iterations: int, pause: float = 0.0) -> int:
        """The id of the process."""
        return self._ask([str(folder), iterations, pause])

    def finish(self, process: int) -> int:
        """Its exit status, that of a signal negative."""
        return self._ask(process)


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    found = Runs()
    with found.parent:
        yield found


def _wait_for_line(folder: Path, line: int) -> None:
    deadline = time.monotonic() + 200
    while len(read_metrics(folder / "metrics.jsonl")) < line:
        assert time.monotonic() < deadline, "the run wrote no metrics"
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(runs, tmp_path):
    whole = runs.start(tmp_path / "whole", 7)
    killed = runs.start(tmp_path / "killed", 7, 0.4)
    _wait_for_line(tmp_path / "killed", 5)  # checkpoints at 2 and 4: the fifth iteration is done again
    os.kill(killed, signal.SIGKILL)
    assert runs.finish(killed) == -signal.SIGKILL
    assert read_metrics(tmp_path / "killed" / "metrics.jsonl")[-1]["iteration"] < 7
    again = runs.start(tmp_path / "killed", 7)
    status, said = runs.finish(again), (tmp_path / "killed.txt").read_text()
    assert status == 0 and said.split() == ["begun", "resumed", "finished"], said
    assert runs.finish(whole) == 0, (tmp_path / "whole.txt").read_text()
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "killed")
    assert len(read_metrics(tmp_path / "whole" / "metrics.jsonl")) == 7


@pytest.mark.slow
def test_ctrl_c_saves_the_iteration_and_exits_130(runs, tmp_path):
    process = runs.start(tmp_path / "run", 50, 0.3)
    _wait_for_line(tmp_path / "run", 1)
    os.kill(process, signal.SIGINT)
    status, said = runs.finish(process), (tmp_path / "run.txt").read_text()
    assert status == 130 and "interrupted" in said, said
    done = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["iteration"]
    folder, _ = checkpoint.newest_intact(tmp_path / "run" / "checkpoints")
    assert folder is not None and folder.name == f"step_{done:06d}" and done < 50


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
    said = []
    trainer = toy_trainer(tmp_path, run={"iterations": 6})
    monkeypatch.setattr(trainer.progress, "note", said.append)
    assert trainer.resume() and trainer.counters.iteration == 2
    assert "step_000004 is damaged: ema.safetensors has 100 bytes instead of" in said[0]
    assert "Resumed from" in said[1] and "after iteration 2" in said[1]
    older = checkpoint.step_folder(tmp_path / "checkpoints", 2) / "state.json"
    older.unlink()
    with pytest.raises(
        CheckpointError, match=r"none of the 2 checkpoints .* is whole.*new run in another output"
    ):
        toy_trainer(tmp_path).resume()


def test_no_checkpoint_yet_starts_at_the_beginning(tmp_path):
    trainer = toy_trainer(tmp_path)
    assert trainer.resume() is False and trainer.counters.iteration == 0


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


def test_a_finished_run_resumes_to_nothing(tmp_path):
    _trained(tmp_path, 2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    _trained(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
