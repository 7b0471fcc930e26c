# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation on the toy: each prompt learns from its expert, whatever the reward says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training.images import RECORDS, ToyPolicy, check_resume, toy_trainer
from tests.support.training.metric_families import REGRESSION_ONLY
from visalign.errors import UserError
from visalign.training.diffusion.experts import Experts


class Kept(ToyPolicy):
    """A toy whose saved weights load."""

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        torch.save(dict(self.trainable_parameters()), folder / "toy.pt")

    def load(self, folder: Path) -> None:
        with torch.no_grad():
            for name, weight in torch.load(folder / "toy.pt").items():
                self.net.get_parameter(name).copy_(weight)


@pytest.fixture
def experts(tmp_path) -> dict[str, str]:
    """For "up" an expert that pulls by +1, for the rest by −1."""
    folders = {}
    for tag, pull in (("up", 1.0), ("*", -1.0)):
        expert = Kept()
        with torch.no_grad():
            expert.net.shift.fill_(pull)
        folders[tag] = str(tmp_path / f"expert {pull}")
        expert.save(Path(folders[tag]))
    return folders


def _trainer(folder: Path, experts: dict[str, str], iterations: int = 40, **more: Any):
    objective = {"algorithm": "opd", "experts": experts}
    more = {"objective": objective, "optimizer": {"ema_decay": 0.0}, **more}
    return toy_trainer(folder, **{"policy": Kept(), "run": {"iterations": iterations}, **more})


def test_each_prompt_learns_from_its_expert(tmp_path, experts):
    policy = Kept()
    trainer = _trainer(tmp_path / "run", experts, policy=policy)
    before = [p.detach().clone() for _, p in policy.trainable_parameters()]
    assert not any(p.any() for p in before)  # reading the experts left the policy as it was
    lines = [trainer.iterate() for _ in range(40)]
    assert lines[-1]["anchor_distance"] < 0.02 * lines[0]["anchor_distance"]
    bright, dark, light = policy.net.shift.detach().mean(1)  # of tags up, down, up
    assert bright > 0.8 and light > 0.8 and dark < -0.8
    assert REGRESSION_ONLY[0] not in lines[0]  # there is no end point to match
    # 4 steps, and 3 of them with a backward and a pass of an expert
    assert lines[0]["forward_equivalents_per_image"] == 4 + 3 * (3 + 1)


def test_a_resumed_run_and_micro_batches_change_nothing(tmp_path, experts):
    check_resume(lambda f, run: _trainer(f, experts, **run, rollout={"sde_window": 2}), tmp_path, 2, 4)
    gradients = []
    for size in (1, 7, 1000):
        policy = Kept(torch.float64)
        trainer = _trainer(tmp_path / f"{size}", experts, policy=policy, optimizer={"micro_batch": size})
        batch = trainer.algorithm.collect(trainer.context).experience
        trainer.algorithm.backward(batch, trainer.algorithm.prepare(batch, trainer.context)[0], trainer.context)
        assert policy.net.shift.grad is not None
        gradients.append(policy.net.shift.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-9, atol=1e-12)


def test_experts_are_checked(tmp_path, experts):
    for folders, message in (
        ({}, r"objective.experts names \[\], and the tags of the training prompts are \['down', 'up'\]"),
        ({"up": experts["up"]}, r"Give each tag the folder of a trained policy"),
        ({**experts, "sideways": experts["up"]}, r"names \['\*', 'sideways', 'up'\]"),
        ({"*": str(tmp_path / "none")}, r"objective\.experts\.\* is .*none, which is no folder. Name a run"),
        ({"*": str(tmp_path)}, r"objective\.experts: .* is no expert of this policy"),
    ):
        with pytest.raises(UserError, match=message):
            Experts(Kept(), folders, RECORDS)
    with pytest.raises(UserError, match="algorithm=opd learns from experts, and there are none"):
        _trainer(tmp_path, {})
    with pytest.raises(UserError, match=r"objective.algorithm=awm has none. Set objective.algorithm=opd"):
        toy_trainer(tmp_path, objective={"algorithm": "awm", "experts": experts})
