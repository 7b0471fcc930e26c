# SPDX-License-Identifier: Apache-2.0
"""Settings of a judge's training that the chosen task would not read: refused, each by each task."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from visalign.config import load_config
from visalign.core.preference.ict import ict_labels
from visalign.errors import UserError
from visalign.pipelines.train_reward.config import JUDGE_KINDS, TrainRewardConfig
from visalign.training.loop.metrics import METRICS
from visalign.training.loop.progress import SUPERVISED_COLUMNS, TrainingProgress
from visalign.training.reward.batch import RewardBatch
from visalign.training.reward.settings import OBJECTIVES, RewardObjectiveSettings
from visalign.training.reward.tasks import TASKS


def test_each_task_has_its_own_class_by_the_name_of_all() -> None:
    assert set(OBJECTIVES) == set(TASKS)
    for task, kind in OBJECTIVES.items():
        made = RewardObjectiveSettings(task=task)
        assert type(made) is kind and made.task == task
    assert type(RewardObjectiveSettings()) is OBJECTIVES["uncertainty"]


CHANGED: dict[str, Any] = {
    "margin": 0.3,
    "centre": 0.1,
    "displacement": 1.2,
    "smoothing": 2.0,
    "pair_weight": "votes",
    "negatives": 0.1,
    "likelihood": 0.7,
    "mass": 0.25,
    "samples": 3,
    "penalty": 0.5,
}
GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(9, 5, generator=GENERATOR)
OUTPUTS = {
    "value": torch.tensor([0.3, -1.0, 2.0, 0.5, 0.1, 1.5, 0.0, 1.0, 2.0]),
    "log_std": torch.linspace(-1.0, 0.5, 9),
    "log_mass": torch.linspace(-1.0, -0.1, 9),
    "image": ROWS,
    "easy": ROWS[:3] + 1,
    "refined": ROWS[3:6] - 1,
    "weights": torch.tensor([1.0, 2.0]),
}
PAIRS: dict[str, Any] = {
    "left": torch.arange(3),
    "right": torch.arange(3, 6),
    "label": torch.tensor([1.0, 0.0, 0.7]),
    "votes": torch.tensor([[7.0, 2.0, 0.0], [1.0, 3.0, 2.0], [float("nan")] * 3]),
}
TRIPLES = {
    "ict": ict_labels(torch.tensor([0.2, 0.5, 0.1]), torch.tensor([0.6, 0.9, 0.3]), torch.ones(3), theta=0.7)
}
BATCHES = {
    "pairs": PAIRS,
    "triples": TRIPLES,
    "rows": {"target": torch.linspace(1, 5, 9)},
    "answers": {"target": torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, float("nan")])},
}


def _loss(task: str, **forced: Any) -> float:
    """With settings put in past their checks."""
    settings = RewardObjectiveSettings(task=task)
    for name, value in forced.items():
        object.__setattr__(settings, name, value)
    batch = RewardBatch(inputs=None, size=3, **BATCHES[TASKS[task].labels])
    total, weight = TASKS[task].loss(OUTPUTS, batch, settings, torch.Generator().manual_seed(1))
    return float(total / weight)


def readers(name: str) -> list[str]:
    return [task for task, kind in OBJECTIVES.items() if name in kind.__dataclass_fields__]


def test_every_setting_is_tried():
    assert set(CHANGED) == {name for kind in OBJECTIVES.values() for name in kind.__dataclass_fields__} - {
        "task"
    }


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("task", TASKS)
def test_a_setting_is_refused_by_the_tasks_whose_loss_does_not_change_with_it(task, name):
    changes = _loss(task, **{name: CHANGED[name]}) != pytest.approx(_loss(task), rel=1e-6)
    assert changes == (task in readers(name))
    if changes:
        settings = RewardObjectiveSettings(task=task, **{name: CHANGED[name]})
        assert getattr(settings, name) == CHANGED[name]
        return
    with pytest.raises(UserError, match=rf"objective has no setting '{name}'\..*Allowed: task"):
        RewardObjectiveSettings(task=task, **{name: CHANGED[name]})
    with pytest.raises(UserError, match=rf"Unknown key 'objective\.{name}' .*read where objective\.task is"):
        _config(task, f"objective.{name}={CHANGED[name]}")


def _config(task: str, *more: str) -> TrainRewardConfig:
    kind = next(name for name, kind in JUDGE_KINDS.items() if task in kind.tasks)
    sources = {"rows": "shapes:quality", "answers": "written.jsonl"}
    source = sources.get(TASKS[task].labels, "shapes:pairs")
    train = "full" if kind == "ict" else {"hp": "head"}.get(kind, "lora")
    given = [f"model.kind={kind}", f"model.train={train}", f"objective.task={task}"]
    return load_config(
        TrainRewardConfig, None, [*given, f"data.train={source}", f"data.heldout={source}", *more]
    )


@pytest.mark.parametrize(
    ("task", "name", "value"),
    [("uncertainty", "theta", 0.5), ("ict", "labels", "truth"), ("rating", "kinds", '["quality"]')],
)
def test_data_settings_without_a_reader_are_refused(task, name, value):
    assert _config(task).objective.task == task
    with pytest.raises(
        UserError, match=rf"data\.{name} is .*, and the task {task} on data\.train shapes:.*is used"
    ):
        _config(task, f"data.{name}={value}")


def test_a_judge_of_pairs_learns_shares_of_votes_alone():
    given = ["model.kind=pair", "objective.task=yes_no"]
    for name in ("smoothing", "pair_weight", "likelihood"):
        with pytest.raises(
            UserError, match=rf"objective\.{name} is .*a judge of kind pair with model.train lora"
        ):
            load_config(TrainRewardConfig, None, [*given, f"objective.{name}={CHANGED[name]}"])


@pytest.mark.parametrize("name", ["data.train", "data.heldout"])
def test_generated_sets_of_the_other_sort_are_refused(name):
    with pytest.raises(UserError, match=rf"{name} is shapes:quality, which holds single rated images"):
        _config("yes_no", f"{name}=shapes:quality")
    with pytest.raises(UserError, match=rf"{name} is shapes:pairs, and a judge of kind rating learns from"):
        _config("rating", f"{name}=shapes:pairs")


RECORD = {"iteration": 1, "loss": 0.51234, "grad_norm": 0.2, "lr": 1e-3}
RECORD |= {"samples_per_second": 30.0, "seconds": 2.0}


def test_the_progress_of_a_judge_shows_what_it_has_and_nothing_of_ratios():
    console = Console(file=io.StringIO(), width=160)
    progress = TrainingProgress(4, console=console, columns=SUPERVISED_COLUMNS)
    progress.update(RECORD)
    progress.update({**RECORD, "iteration": 2, "heldout/accuracy": 0.875, "heldout/ece": 0.0312})
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for wanted in ("0.5123", "0.875", "0.031", "1.0e-03", "30.0", "0:04 left"):
        assert wanted in text
    assert not any(word in text for word in ("clipped", "spread", "SRCC", "reward"))
    keys = {key if "/" not in key else key.split("/")[0] + "/*" for _, key, _ in SUPERVISED_COLUMNS}
    assert keys <= set(METRICS)
