# SPDX-License-Identifier: Apache-2.0
"""Settings of a judge's training that the chosen task would not read: refused, each by each task."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from visalign.config import load_config
from visalign.core.preference.ict import ict_labels
from visalign.errors import UserError
from visalign.pipelines.train_reward.config import JUDGE_KINDS, TrainRewardConfig
from visalign.training.reward.batch import RewardBatch
from visalign.training.reward.settings import OBJECTIVES, RewardObjectiveSettings
from visalign.training.reward.tasks import TASKS

CHANGED: dict[str, Any] = {
    "margin": 0.4,
    "centre": 0.1,
    "displacement": 1.2,
    "sign": 0.4,
    "l2": 0.2,
    "ties": "davidson",
    "tie_strength": 3.0,
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
    "cosine": torch.linspace(0.1, 0.6, 9),
    "odds": ROWS[:, :2],
    "log_prob": ROWS.log_softmax(1),
    "map_loss": torch.linspace(0.2, 0.4, 9),
}
PAIRS: dict[str, Any] = {
    "left": torch.arange(3),
    "right": torch.arange(3, 6),
    "label": torch.tensor([1.0, 0.0, 0.7]),
    "rank": torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]),
    "row": torch.tensor([[0, 3], [1, 4], [2, 5]]),
    "weight": torch.ones(3),
    "votes": torch.tensor([[7.0, 2.0, 0.0], [1.0, 3.0, 2.0], [float("nan")] * 3]),
}
TRIPLES = {"ict": ict_labels(torch.tensor([0.2, 0.5, 0.1]), torch.tensor([0.6, 0.9, 0.3]), torch.ones(3), theta=0.7)}
BATCHES = {
    "pairs": PAIRS,
    "triples": TRIPLES,
    "rows": {"target": torch.linspace(1, 5, 9)},
    "checks": {"target": (ROWS[:, 2:4] > 0).float()},
    "faults": {"target": torch.linspace(0, 1, 9)},
    "answers": {"target": torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, float("nan")])},
}


def _loss(task: str, **forced: Any) -> float:
    """With settings that bypass their checks."""
    settings = RewardObjectiveSettings(task=task)
    for name, value in forced.items():
        object.__setattr__(settings, name, value)
    labels: dict[str, Any] = BATCHES[TASKS[task].labels]
    if task == "rating_distribution":
        labels = {"target": ROWS.flip(1).softmax(1)}
    batch = RewardBatch(inputs=None, size=3, **labels)
    total, weight = TASKS[task].loss(OUTPUTS, batch, settings, torch.Generator().manual_seed(1))
    return float(total / weight)


def readers(name: str) -> list[str]:
    return [task for task, kind in OBJECTIVES.items() if name in kind.__dataclass_fields__]


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("task", TASKS)
def test_a_setting_is_refused_by_the_tasks_whose_loss_does_not_change_with_it(task, name):
    beside = {"ties": "davidson"} if name == "tie_strength" else {}
    changes = _loss(task, **beside, **{name: CHANGED[name]}) != pytest.approx(_loss(task, **beside), rel=1e-6)
    assert changes == (task in readers(name))
    if not changes:
        with pytest.raises(UserError, match=rf"objective has no setting '{name}'\..*Allowed: task"):
            RewardObjectiveSettings(task=task, **{name: CHANGED[name]})


def test_a_key_of_another_task_is_refused_with_the_tasks_that_read_it():
    with pytest.raises(UserError, match=r"Unknown key 'objective\.penalty' .*read where objective\.task is"):
        _config("bradley_terry", "objective.penalty=0.5")


def _config(task: str, *more: str) -> TrainRewardConfig:
    kind = next(name for name, kind in JUDGE_KINDS.items() if task in kind.tasks)
    sources = {"rows": "shapes:quality", "answers": "written.jsonl"}
    source = sources.get(TASKS[task].labels, "shapes:pairs")
    train = "full" if kind == "ict" else {"hp": "head"}.get(kind, "lora")
    overrides = [f"model.kind={kind}", f"model.train={train}", f"objective.task={task}"]
    return load_config(TrainRewardConfig, None, [*overrides, f"data.train={source}", f"data.heldout={source}", *more])


@pytest.mark.parametrize(
    ("task", "name", "value"), [("uncertainty", "theta", 0.5), ("rating", "kinds", '["quality"]')]
)
def test_data_settings_without_a_reader_are_refused(task, name, value):
    assert _config(task).objective.task == task
    with pytest.raises(UserError, match=rf"data\.{name} is .*, and it is used by"):
        _config(task, f"data.{name}={value}")


def test_a_judge_of_pairs_learns_shares_of_votes_alone():
    overrides = ["model.kind=pair", "objective.task=yes_no"]
    with pytest.raises(UserError, match=r"objective\.smoothing is .*a judge of kind pair with model.train"):
        load_config(TrainRewardConfig, None, [*overrides, "objective.smoothing=2.0"])


def test_generated_sets_of_the_other_sort_are_refused():
    with pytest.raises(UserError, match=r"data.train is shapes:quality, and a judge of kind yes_no learns from pairs"):
        _config("yes_no", "data.train=shapes:quality")
    with pytest.raises(UserError, match=r"data.heldout is shapes:pairs, and a judge of kind rating learns fro"):
        _config("rating", "data.heldout=shapes:pairs")
