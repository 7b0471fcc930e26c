# SPDX-License-Identifier: Apache-2.0
"""What each denoising step earns: TP-GRPO's completions, the one-step prediction, their cost and resume."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.support.training.images import Brightness, ToyPolicy, check_resume, toy_trainer
from visalign.flow.rollout import complete, predict_clean, rollout
from visalign.training import RolloutSettings, forward_equivalents_per_image

CHANGES = {"kl": 0.0, "surrogate_options": {"eps_low": 0.1, "eps_high": 0.1}}


def _objective(credit: str) -> dict[str, Any]:
    return {"algorithm": "flow_grpo", "credit": credit, "changes": CHANGES}


@pytest.mark.parametrize("schedule", ["flow", "cps"])
def test_the_prediction_is_read_off_the_mean(schedule):
    policy: Any = ToyPolicy(torch.float64)
    condition = policy.encode(["bright", "dark", "light"])
    sigmas = policy.sigmas(4)
    trajectory: Any = rollout(
        policy, condition, sigmas=sigmas, sde_steps=[0, 2], schedule=schedule, noise_level=0.5, seeds=[1, 2, 3]
    )
    for k in range(2):
        x, sigma = trajectory.x[:, k], trajectory.sigma[k].expand(3)
        expected = x - trajectory.sigma[k] * policy.velocity(x, sigma, condition)
        torch.testing.assert_close(predict_clean(trajectory, k), expected, rtol=1e-5, atol=1e-6)
    rest: Any = complete(policy, condition, trajectory.x_next[:, 1], sigmas=sigmas, step=3, batch_size=2)
    assert torch.equal(rest, trajectory.latents)
    assert torch.equal(complete(policy, condition, rest, sigmas=sigmas, step=4), rest)


def _levels(trainer: Any, credit: str) -> tuple[Any, torch.Tensor]:
    """(the experience, R_0 … R_{n−1} and R, by an independent loop)."""
    algorithm, policy = trainer.algorithm, trainer.algorithm.policy
    experience = algorithm.collect(trainer.context).experience
    t, grid = experience.trajectory, algorithm.sigmas
    prompts = [["bright", "dark", "light"][i] for i in experience.condition.index]
    rewards = []
    with torch.no_grad():
        for k, step in enumerate(t.sde_steps):
            x = t.x[:, k]
            for s in range(step, 4):
                sigma = grid[s]
                v = policy.velocity(x, sigma.expand(len(x)), experience.condition)
                x = x + ((0.0 if credit == "one_step" else grid[s + 1]) - sigma) * v
                if credit == "one_step":
                    break
            rewards.append(Brightness().score(policy.decode(x), prompts).value)
    rewards.append(Brightness().score(policy.decode(t.latents), prompts).value)
    return experience, torch.stack(rewards, 1).double()


@pytest.mark.parametrize("credit", ["turning_points", "one_step"])
def test_steps_earn_what_their_noise_changed(credit, tmp_path):
    trainer = toy_trainer(tmp_path, objective=_objective(credit), rollout={"sde_steps": [0, 1, 3]})
    experience, level = _levels(trainer, credit)
    earned = experience.trajectories.process_reward.double()
    increment = level.diff(dim=1)
    if credit == "one_step":
        torch.testing.assert_close(earned, increment, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(earned.sum(1), level[:, -1] - level[:, 0], rtol=1e-3, atol=1e-6)
        return
    bonus = level[:, -1:] - level[:, :-1]  # R − R_{k−1}
    plain = (earned - increment).abs() < 1e-5
    turned = (earned - bonus).abs() < 1e-5
    assert (plain | turned).all() and plain[:, 1:].any() and (turned & ~plain).any()
    steps = trainer.algorithm.prepare(experience, trainer.context)
    first = steps[0]
    column = earned[experience.trajectories.group == experience.trajectories.group[first.sample[0]]]
    z = (column - column.mean(0)) / (column.std(0, correction=0) + 1e-4)
    same = (experience.trajectories.group == experience.trajectories.group[first.sample[0]]).nonzero()[:, 0]
    position = int((same == first.sample[0]).nonzero())
    torch.testing.assert_close(first.prepared.advantage[0].double(), z[position], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("credit", "rollout_", "free"),
    [("one_step", {}, 4), ("turning_points", {"sde_steps": [1, 2], "train_steps": [2]}, 4 + 3 + 2)],
)
def test_the_cost_is_the_planned_one(credit, rollout_, free, tmp_path):
    trainer = toy_trainer(tmp_path, objective=_objective(credit), rollout=rollout_)
    record = trainer.iterate()
    settings = trainer.algorithm.rollout
    assert free == 4 + (settings.completed_per_image if credit == "turning_points" else 0)
    trained = settings.trained_per_image
    share = record["trained_share"]
    planned = forward_equivalents_per_image(
        steps=free, trained=trained, guided=False, reference=0, trained_share=share
    )
    assert record["forward_equivalents_per_image"] == pytest.approx(planned)


def test_it_learns_and_a_resume_is_exact(tmp_path):
    objective = {**_objective("turning_points"), "ratio_bound": 1e-4}
    outcome, trainer = check_resume(partial(toy_trainer, objective=objective), tmp_path, 2, 6)
    assert trainer.counters.updates == 12 and not trainer.counters.skipped
    assert outcome[2][-1]["reward_mean"] > outcome[2][0]["reward_mean"] + 0.05


def test_a_window_on_average_completes_its_share():
    assert RolloutSettings(steps=4, sde_window=1).completed_per_image == (4 + 3 + 2) / 3
