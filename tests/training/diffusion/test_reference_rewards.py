# SPDX-License-Identifier: Apache-2.0
"""PAR, FlowRL, RiskPO and Entrocraft on images: by hand, resumed bit for bit, refused by message."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training.images import Brightness, ToyPolicy, check_resume, toy_trainer
from visalign.errors import UserError
from visalign.interfaces import RewardCapabilities, Scores
from visalign.training import RewardFailure

SIZE = {"prompts_per_iteration": 2, "group_size": 4}
ROWS: dict[str, dict[str, Any]] = {
    "par": {"algorithm": "par", "changes": {"advantage_options": {"references": 2}}},
    "flowrl": {"algorithm": "flowrl", "changes": {"surrogate_options": {"beta": 0.1}}},
    "riskpo": {"algorithm": "riskpo", "changes": {"advantage_options": {"bundle": 2}}},
    "entrocraft": {"algorithm": "entrocraft"},
}


def _levels(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(2).mean(2) - 0.5


def _trainer(folder: Path, name: str, **changes: Any) -> Any:
    run = {"iterations": 2, "checkpoint_every": 1}
    return toy_trainer(
        folder, **{"rollout": SIZE, "objective": ROWS[name], "run": run, "features": _levels, **changes}
    )


def test_par_compares_with_images_of_the_start_that_are_sampled_once(tmp_path: Path) -> None:
    policy = ToyPolicy(torch.float64)
    with torch.no_grad():
        policy.net.shift.add_(0.5)  # the policy has moved, the reference has not
    trainer = _trainer(tmp_path, "par", policy=policy, optimizer={"updates_per_iteration": 1})
    algorithm, run = trainer.algorithm, trainer.context
    experience = algorithm.collect(run).experience
    t = experience.trajectories
    prompt = experience.prompt
    with policy.reference():
        number = 2 * int(prompt[0])  # the first of two images of the first prompt
        batch = algorithm.sampler.batch(0)
        again = algorithm.roll_out(
            policy.encode([algorithm.records[int(prompt[0])]["prompt"]]),
            type(batch)(**{n: torch.tensor([-1 - number]) for n in ("prompt_index", "group_id", "sample_id")}),
            torch.tensor([0]), experience.trajectory.sde_steps, run.clock,
        ).latents  # fmt: skip
        expected = Brightness().score(policy.decode(again), [algorithm.records[int(prompt[0])]["prompt"]]).value
    reference = t.reference_reward
    assert reference.shape == (8, 2) and torch.equal(reference[0], reference[3])
    torch.testing.assert_close(reference[0, 0].float(), expected[0])
    shaped = torch.sigmoid(t.reward[:, None] - reference).mean(1).view(2, 4)
    advantage = (shaped - shaped.mean(1, keepdim=True)) / (shaped.std(1, keepdim=True) + 1e-4)
    (step,) = algorithm.prepare(experience, run)
    torch.testing.assert_close(step.prepared.advantage[:, 0].float(), advantage.flatten().float())
    before = policy.count.forward
    algorithm.collect(run)  # the same prompts: the reference samples nothing
    assert policy.count.forward - before == 8 * 4


def test_par_forgets_the_rewards_of_a_reference_that_is_reset(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "par", objective={**ROWS["par"], "reset_reference_every": 2})
    trainer.iterate()
    assert len(trainer.context.tensors["reference_rewards"]["prompt"]) == 2
    trainer.iterate()
    assert len(trainer.context.tensors["reference_rewards"]["prompt"]) == 0


def test_log_z_descends_on_the_mean_residual(tmp_path: Path) -> None:
    """At the first update log π = log π_ref, so ∂/∂log Z(x) of mean (log Z − β R)² is 2 mean (log Z − β R)."""
    trainer = _trainer(tmp_path, "flowrl", optimizer={"updates_per_iteration": 1, "micro_batch": 8})
    algorithm, run = trainer.algorithm, trainer.context
    with torch.no_grad():
        algorithm.log_z.shared.fill_(0.25)
    experience = algorithm.collect(run).experience
    (step,) = algorithm.prepare(experience, run)
    algorithm.backward(experience, step, run)
    residual = 0.25 - 0.1 * step.prepared.advantage.mean(1)
    torch.testing.assert_close(
        algorithm.log_z.shared.grad[0], 2 * residual.mean(), rtol=1e-4, atol=1e-6, check_dtype=False
    )
    for prompt in experience.prompt.unique():
        mean = 2 * residual[experience.prompt[step.sample] == prompt].sum() / len(residual)
        torch.testing.assert_close(algorithm.log_z.prompt.grad[prompt], mean, rtol=1e-4, atol=1e-6, check_dtype=False)


def test_entrocraft_keeps_what_moves_the_variety_into_its_band(tmp_path: Path) -> None:
    for low, high, sign in ((0.0, 1e-9, 1), (4.0, 5.0, -1)):  # too much variety keeps good images, too little bad ones
        band = {"low": low, "high": high, "low_end": None, "high_end": None}
        objective = {"algorithm": "entrocraft", "changes": {"selection_options": band}}
        trainer = _trainer(tmp_path / str(sign), "entrocraft", objective=objective)
        experience = trainer.algorithm.collect(trainer.context).experience
        for step in trainer.algorithm.prepare(experience, trainer.context):
            assert bool((sign * step.prepared.advantage[step.prepared.weight != 0] >= 0).all())


@pytest.mark.parametrize("name", ROWS)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    check_resume(partial(_trainer, name=name), tmp_path, 1, 3, checkpoint_every=1)


class _OfGroups(Brightness):
    capabilities = RewardCapabilities(needs_group=True)


class _NotOfReference(Brightness):
    """Fails on every second call, the one for the reference's images."""

    calls = 0

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
        self.calls += 1
        scores = super().score(images, prompts, metadata)
        return scores if self.calls % 2 else replace(scores, valid=torch.zeros_like(scores.valid))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "par",
            {"reward": _OfGroups()},
            "algorithm=par compares .* image of the reference.*objective.algorithm=flow_grpo",
        ),
        ("par", {"reward": _NotOfReference()}, "could not score 8 of 8 samples.*the reference's image of the prompt"),
        ("entrocraft", {"features": None}, "holds the metric diversity in a band.*monitor.features.*dapo"),
    ],
)
def test_what_cannot_be_compared_is_refused(name: str, changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((UserError, RewardFailure), match=message):
        _trainer(tmp_path, name, **changes).iterate()
