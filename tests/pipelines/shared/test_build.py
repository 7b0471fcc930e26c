# SPDX-License-Identifier: Apache-2.0
"""The accelerator of a run: its precision, its trackers, its patience; a term's use of its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate.state import AcceleratorState

from visalign.errors import UserError
from visalign.interfaces import Scores
from visalign.pipelines.flow_grpo.config import FlowGRPOConfig
from visalign.pipelines.shared import parts as build
from visalign.pipelines.shared.job import TrainingInterrupted, run_job
from visalign.pipelines.shared.parts import weighted_sum
from visalign.pipelines.shared.sections import PolicyRunConfig, RewardsConfig, RewardTerm, RunConfig
from visalign.pipelines.watch import run_state
from visalign.rewards import WeightedSum


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_environment_chooses_no_precision_and_processes_wait(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerator = build.build_accelerator(SimpleNamespace(run=RunConfig(device="cpu")), tmp_path)
    handler = accelerator.init_handler
    assert accelerator.mixed_precision == "no" and handler is not None and handler.timeout == build.PATIENCE
    assert build.PATIENCE.total_seconds() > 3600, "for the one that evaluates"


def test_a_tracker_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [])
    with pytest.raises(UserError, match=r"run\.trackers names wandb, which is not installed.*pip install wandb"):
        build.build_accelerator(SimpleNamespace(run=RunConfig(device="cpu", trackers=["wandb"])), tmp_path)
    with pytest.raises(UserError, match=r"run\.trackers is \['nope'\]"):
        build.build_accelerator(SimpleNamespace(run=RunConfig(device="cpu", trackers=["nope"])), tmp_path)


def test_trackers_are_closed_after_an_interruption(tmp_path: Path) -> None:
    calls: list[str] = []
    accelerator = SimpleNamespace(
        num_processes=1,
        is_main_process=True,
        device=torch.device("cpu"),
        wait_for_everyone=lambda: None,
        init_trackers=lambda *_, **__: calls.append("begin"),
        end_training=lambda: calls.append("end"),
    )

    def stop() -> None:
        raise TrainingInterrupted

    progress = SimpleNamespace(note=lambda _: None)
    trainer = SimpleNamespace(accelerator=accelerator, algorithm=_Doubtful(), progress=progress)
    job = SimpleNamespace(trainer=trainer, fingerprints={}, batches={}, before=stop)
    config = FlowGRPOConfig(run=PolicyRunConfig(trackers=["tensorboard"]))
    with pytest.raises(TrainingInterrupted):
        run_job(config, tmp_path / "run", build=lambda *_: cast(Any, job))
    assert calls == ["begin", "end"]
    assert run_state(tmp_path / "run").state == "interrupted"


class _Doubtful:
    """Gives the first image 2 with σ = 0.5, the second 4 with σ = 2."""

    name, unit, range, higher_is_better = "doubtful", "level", (0.0, 5.0), True

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
        value, std = torch.tensor([2.0, 4.0]), torch.tensor([0.5, 2.0])
        return Scores(value=value, std=std, valid=torch.ones(2, dtype=torch.bool), unit="level")


OVERLAP = math.sqrt(2 / 4.25) * math.exp(-4 / (4 * 4.25))
"""Of N(2, 0.25) and N(4, 4): √(2 σ τ/(σ² + τ²)) exp(−(μ − ν)²/(4 (σ² + τ²)))."""


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        ({}, [2.0, 4.0]),
        ({"uncertainty": "lower_bound", "strength": 2.0}, [1.0, 0.0]),
        ({"uncertainty": "weight", "reference": 1.0}, [1 + math.exp(-0.5), 1 + 3 * math.exp(-2)]),
        ({"uncertainty": "bhattacharyya", "strength": 3.0}, [2 - 3 * OVERLAP, 4 - 3 * OVERLAP]),
    ],
)
def test_a_term_uses_its_judges_standard_deviation(term: dict[str, Any], expected: list[float]):
    config = RewardsConfig(terms={"a": RewardTerm(**term)})
    total = weighted_sum(config, {"a": _Doubtful()}, WeightedSum)
    scores = total.score(torch.zeros(2, 3, 8, 8), ["x", "y"])
    assert scores.value.tolist() == pytest.approx(expected)


def test_advantages_of_images_are_not_weighed():
    config = RewardsConfig(terms={"a": RewardTerm(uncertainty="advantage")})
    with pytest.raises(UserError, match=r"rewards.terms.a.uncertainty is advantage, .* texts only"):
        weighted_sum(config, {"a": _Doubtful()}, WeightedSum)
