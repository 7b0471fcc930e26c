# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling of images: groups without signal are refilled; the update is that of the groups that are kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training.images import Brightness, check_resume, toy_trainer
from visalign.errors import UserError
from visalign.interfaces import Scores
from visalign.training import DynamicSettings
from visalign.training.loop.metrics import check_keys


class Flat(Brightness):
    """`Brightness` for the named prompts, one constant for all others."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
        scores = super().score(images, prompts, metadata)
        value = [v if p in self.words else 0.0 for v, p in zip(scores.value.tolist(), prompts, strict=True)]
        return replace(scores, value=torch.tensor(value))


SIZE = {"prompts_per_iteration": 3, "group_size": 4}
CORRECTED = {"changes": {"importance_sampling": {"level": "token", "mode": "truncate", "high": 2.0}}}
REGRESSION = {"algorithm": "diffusion_nft", "changes": {"levels": 2}}


def _trainer(folder: Path, reward: Any, **changes: Any) -> Any:
    dynamic = DynamicSettings(**{"enabled": True, "max_rounds": 3, **changes.pop("dynamic", {})})
    changes = {"rollout": SIZE, "objective": None, "run": {"iterations": 3}, **changes}
    return toy_trainer(folder, reward=reward, dynamic=dynamic, **changes)


@pytest.mark.parametrize("objective", [None, REGRESSION], ids=["log_probs", "regression"])
def test_rounds_go_on_until_enough_groups_carry_signal(objective: Any, tmp_path: Path) -> None:
    """One of three prompts carries signal: three rounds give the three groups of an update."""
    trainer = _trainer(tmp_path, Flat("bright"), objective=objective)
    record = trainer.iterate()
    check_keys(record)
    counts = {name: record[f"groups/{name}"] for name in ("rounds", "generated", "kept", "dropped_flat", "surplus")}
    assert counts == {"rounds": 3, "generated": 9, "kept": 3, "dropped_flat": 6, "surplus": 0}
    assert record["samples"] == 36 and record["frac_reward_zero_std"] == 0 and record["updates"] == 2
    assert trainer.counters.own["rounds"] == 3


def test_the_images_are_those_of_their_rounds_in_order(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, Flat("bright", "light"))
    algorithm, run = trainer.algorithm, trainer.context
    experience = algorithm.collect(run).experience
    rounds = [algorithm.scored(algorithm.sample(number, run.clock, (0, 1, 2), 0), run.clock) for number in (0, 1)]
    names = [record["prompt"] for images in rounds for record in images.records]
    rows = torch.tensor([i for i, name in enumerate(names) if name != "dark"][:12])
    for column, parts in (
        (experience.trajectories.reward, [images.value for images in rounds]),
        (experience.trajectories.group, [images.group for images in rounds]),
        (experience.trajectory.x, [images.trajectory.x for images in rounds]),
        (experience.trajectories.old_log_prob, [images.trajectory.log_prob for images in rounds]),
    ):
        assert torch.equal(
            column, torch.cat(parts)[rows][:, : column.shape[1]] if column.ndim > 1 else torch.cat(parts)[rows]
        )
    torch.testing.assert_close(algorithm._log_probs(experience, 64), experience.trajectories.old_log_prob)


def test_without_a_group_of_dead_signal_it_is_the_plain_run(tmp_path: Path) -> None:
    ends = []
    for name, dynamic in (("plain", {"enabled": False}), ("dynamic", {})):
        trainer = _trainer(tmp_path / name, Brightness(), dynamic=dynamic)
        trainer.iterate()
        ends.append(torch.cat([p.detach().flatten() for _, p in trainer.weights.named]))
    assert torch.equal(*ends)


def test_a_part_of_the_reward_that_only_some_rounds_have_is_their_mean(tmp_path: Path) -> None:
    class Sometimes(Flat):
        calls = 0

        def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
            scores = super().score(images, prompts, metadata)
            self.calls += 1
            return replace(scores, parts={"late": torch.ones(len(prompts))} if self.calls == 1 else {})

    record = _trainer(tmp_path, Sometimes("bright")).iterate()
    assert record["reward_part/late"] == 1 and record["groups/rounds"] == 3


def test_an_iteration_without_signal_learns_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, Flat(), dynamic={"max_rounds": 2})
    record = trainer.iterate()
    assert record["updates"] == 0 and record["samples"] == 24 and record["groups/kept"] == 0


@pytest.mark.parametrize("objective", [None, REGRESSION], ids=["log_probs", "regression"])
def test_a_resumed_run_samples_on_where_it_was(objective: Any, tmp_path: Path) -> None:
    make = partial(_trainer, reward=Flat("bright"), objective=objective)
    check_resume(make, tmp_path, 1, 3, checkpoint_every=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": {"algorithm": "draft"}}, r"algorithm=draft compares no rewards.*dynamic.enabled=false"),
        ({"rollout": {**SIZE, "staleness": 1}, "objective": CORRECTED}, r"rollout.staleness=1 samples before"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        _trainer(tmp_path, Brightness(), **changes)
