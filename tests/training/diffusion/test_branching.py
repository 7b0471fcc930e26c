# SPDX-License-Identifier: Apache-2.0
"""Tree rollouts in training: what a step earns, that it is trained once, what it costs, resume, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.training.images import Brightness, ToyPolicy, check_resume, gradients_of, toy_trainer
from visalign.training import BranchSettings, forward_equivalents_per_image

GRID = {"group_size": 8, "sde_steps": [0, 1, 2]}
TREE = {**GRID, "branch": BranchSettings(at=[0, 2], children=2)}
"""Two trees of four in a group: 2, 4, 4 and 8 paths before the four steps."""
BRANCHES: dict[str, Any] = {"credit": "branches"}


def _collected(trainer: Any) -> tuple[Any, list[Any]]:
    experience = trainer.algorithm.collect(trainer.context).experience
    return experience, trainer.algorithm.prepare(experience, trainer.context)


def _gradient(trainer: Any) -> torch.Tensor:
    """Gradient of an iteration's updates, the policy moved before them."""
    algorithm, policy = trainer.algorithm, trainer.algorithm.policy
    experience, steps = _collected(trainer)
    with torch.no_grad():
        policy.net.shift.add_(0.003)  # so that ratios differ from 1
    for step in steps:
        algorithm.backward(experience, step, trainer.context)
    return gradients_of(policy)


def _trainer(folder: Any, *, micro_batch: int = 64, updates: int = 2, **more: Any) -> Any:
    pace = {"micro_batch": micro_batch, "updates_per_iteration": updates}
    options: dict[str, Any] = {"rollout": TREE, "objective": BRANCHES, **more}
    return toy_trainer(folder, policy=ToyPolicy(torch.float64), optimizer=pace, **options)


def test_a_step_earns_the_mean_of_its_images_standardised_at_its_depth(tmp_path):
    trainer = _trainer(tmp_path)
    experience, steps = _collected(trainer)
    reward = experience.trajectories.reward.view(6, 2, 2, 2).double()  # prompt, tree, first way, second way
    levels = [reward.mean(3, keepdim=True), reward.mean(3, keepdim=True), reward]
    sample = torch.cat([step.sample for step in steps])
    advantage = torch.cat([step.prepared.advantage for step in steps])[sample.argsort()].view(6, 8, 3)
    for step, level in enumerate(levels):
        value = level.expand_as(reward).reshape(6, 8)
        nodes = level.reshape(6, -1)  # each path once: 4, 4 and 8
        assert nodes.shape[1] == (4, 4, 8)[step]
        expected = (value - nodes.mean(1, keepdim=True)) / (nodes.std(1, keepdim=True) + 1e-8)
        torch.testing.assert_close(advantage[:, :, step].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_failed_image_leaves_the_mean_and_its_step_is_still_trained(tmp_path):
    class Failing(Brightness):
        def score(self, images, prompts, metadata=None):
            scores = super().score(images, prompts, metadata)
            return replace(scores, valid=torch.arange(len(prompts)) % 8 != 0, parts={})

    trainer = _trainer(tmp_path, reward=Failing())
    experience, steps = _collected(trainer)
    t = experience.trajectories
    assert not t.valid[0] and t.valid[1:8].all()
    reward = t.reward.double()
    nodes = torch.stack([reward[1], *reward[2:8].view(3, 2).mean(1)])  # image 0 leaves the mean of the first
    expected = (nodes - nodes.mean()) / (nodes.std() + 1e-8)
    torch.testing.assert_close(t.advantage[1:8:2, 0].double(), expected, rtol=1e-4, atol=1e-5)
    step = next(step for step in steps if 1 in step.sample)
    row, decision, times = trainer.algorithm._pairs(experience, step, step.local_rows(torch.arange(48)))
    rows = step.sample[row]
    assert 0 not in rows and len(rows) == len(step.sample) // 8 * (4 + 4 + 7)
    assert times[(rows == 1) & (decision == 0)] == 1 and times[(rows == 2) & (decision == 0)] == 2


@pytest.mark.parametrize("objective", [{}, {"algorithm": "grpo_guard", "changes": {"kl": 0.1}}])
def test_what_is_trained_once_counts_as_for_each_image(tmp_path, objective):
    """The gradient is that of all images' steps, for 15 passes a group in place of 24."""
    objective = {**BRANCHES, **objective}
    once = [_trainer(tmp_path, micro_batch=size, objective=objective) for size in (500, 1, 7)]
    expected, *parts = map(_gradient, once)
    assert expected.norm() > 1e-5
    for gradient in parts:
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    every = _trainer(tmp_path, objective=objective)
    algorithm = every.algorithm
    collect = algorithm.collect

    def each_alone(run: Any) -> Any:
        collected = collect(run)
        collected.experience.node = torch.arange(48)[:, None].expand(48, 3)
        return collected

    algorithm.collect = each_alone
    torch.testing.assert_close(_gradient(every), expected, rtol=1e-9, atol=1e-12)
    counted = [t.algorithm.policy.count.forward_backward for t in (every, once[0])]
    assert counted == [6 * 8 * 3, 6 * (4 + 4 + 8)]


@pytest.mark.parametrize(
    ("rollout_", "sampled", "pairs"),
    [
        (TREE, (2 + 4 + 4 + 8) / 8, (4 + 4 + 8) / 8),
        ({**TREE, "sde_steps": [1, 2], "branch": BranchSettings(at=[1], children=8)}, 18 / 8, 2.0),
    ],
)
def test_the_cost_is_the_planned_one(rollout_, sampled, pairs, tmp_path):
    trainer = toy_trainer(tmp_path, rollout=rollout_, objective={**BRANCHES, "changes": {"kl": 0.1}})
    settings = trainer.algorithm.rollout
    assert settings.sampled_per_image == sampled and settings.pairs_per_image == pairs
    record = trainer.iterate()
    planned = forward_equivalents_per_image(steps=sampled, trained=pairs, guided=False, reference=1)
    assert record["forward_equivalents_per_image"] == pytest.approx(planned, rel=1e-12)
    assert record["trained_share"] == 1 and record["ratio_floor"] < 1e-5


def test_it_learns_and_a_resume_is_exact(tmp_path):
    make = partial(toy_trainer, rollout={**TREE, "overlap": 3}, objective=BRANCHES)
    outcome, trainer = check_resume(make, tmp_path, 3, 10)
    assert trainer.counters.updates == 20 and not trainer.counters.skipped
    rewards = [row["reward_mean"] for row in outcome[2]]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05


def test_a_step_in_common_is_asked_again_once(tmp_path):
    correction = {"importance_sampling": {"level": "token", "mode": "truncate", "high": 2.0}}
    trainer = toy_trainer(tmp_path, rollout=TREE, objective={**BRANCHES, "changes": correction})
    experience, _ = _collected(trainer)
    t = experience.trajectories
    assert trainer.algorithm.policy.count.forward == 6 * (2 + 4 + 4 + 8) + 6 * (4 + 4 + 8)
    torch.testing.assert_close(t.old_log_prob, t.rollout_log_prob, rtol=1e-4, atol=1e-5)
    assert torch.equal(t.old_log_prob.gather(0, experience.node), t.old_log_prob)
