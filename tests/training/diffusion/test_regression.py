# SPDX-License-Identifier: Apache-2.0
"""Regressions of velocities on the toy: rows learn, micro-batches add up, costs and resumes are exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.models.clip import save_tiny_clip
from tests.support.training.images import (
    Brightness,
    ToyPolicy,
    check_resume,
    gradients_of,
    none_owned,
    policy_weights,
    toy_trainer,
)
from visalign.core.regression.rows import REGRESSIONS
from visalign.errors import UserError
from visalign.interfaces import with_capabilities
from visalign.rewards import load_reward
from visalign.training import DiffusionObjectiveSettings, RolloutSettings, forward_equivalents_per_image, read_metrics
from visalign.training.diffusion.cost import planned_passes
from visalign.training.diffusion.rollout_settings import check_processes


class GuidedToy(ToyPolicy):
    """A toy whose guidance scale can be set; 1 is none."""

    def __init__(self, dtype: torch.dtype = torch.float32, guidance: float = 1.0) -> None:
        super().__init__(dtype)
        self.guidance = guidance

    def velocity(self, x: Any, sigma: Any, condition: Any, time: Any = None) -> Any:
        self.guided = self.guidance != 1
        return super().velocity(x, sigma, condition, time)


REWARDED = [name for name, row in REGRESSIONS.items() if row.anchor != "expert" and row.compares]
"""Rows that learn from a reward; see test_experts.py for the other."""
PAIRS = {"prompts_per_iteration": 24, "group_size": 2, "shared_noise": True}
"""Branches of one path, as FDFO needs them."""


def test_reward_rises(tmp_path):
    """With a β for rewards that differ by hundredths."""
    objective = {"algorithm": "diffusion_nft", "changes": {"loss_options": {"beta": 0.02}}}
    trainer = toy_trainer(tmp_path, objective=objective, run={"iterations": 12})
    trainer.train()
    rewards = [r["reward_mean"] for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert trainer.counters.updates == 24 and trainer.counters.skipped == 0
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.015


class _Partly(Brightness):
    """Groups of "dark" carry no signal, and every seventh image cannot be judged."""

    def score(self, images, prompts, metadata=None):
        scores = super().score(images, prompts, metadata)
        dark = torch.tensor([p == "dark" for p in prompts])
        valid = torch.arange(len(prompts)) % 7 != 3
        value = torch.where(valid, torch.where(dark, 0.3, scores.value), float("nan"))
        return replace(scores, value=value, valid=valid)


def _gradient(tmp_path, micro_batch: int, objective: dict[str, Any]) -> torch.Tensor:
    """The sum of the gradients of two updates, in float64; the policy differs from the old one and the reference."""
    policy = ToyPolicy(torch.float64)
    trainer = toy_trainer(
        tmp_path,
        policy=policy,
        reward=_Partly(),
        objective=objective,
        optimizer={"micro_batch": micro_batch},
        rollout=PAIRS if objective["algorithm"] == "fdfo" else {},
    )
    algorithm = trainer.algorithm
    with torch.no_grad():
        policy.net.shift.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.01)
    experience = algorithm.collect(trainer.context).experience
    with torch.no_grad():
        policy.net.shift.add_(0.01)
    steps = [replace(s, on_policy=False) for s in algorithm.prepare(experience, trainer.context)]
    for step in steps:
        algorithm.backward(experience, step, trainer.context)
    assert len(steps) == 2
    return gradients_of(policy)


@pytest.mark.parametrize("name", REWARDED)
def test_accumulation_equals_one_big_batch(name, tmp_path):
    """The rows of groups take two passes where a group does not fit."""
    clip = {"loss_options": {"eps_low": 1e-3, "eps_high": 1e-3}} if name == "dgpo" else {}
    objective = {"algorithm": name, "changes": {"kl": 0.1, **clip}}
    expected = _gradient(tmp_path, 10_000, objective)
    assert expected.norm() > 1e-7
    torch.testing.assert_close(_gradient(tmp_path, 3, objective), expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", ["diffusion_nft", "crd"])
def test_a_process_without_a_sample_moves_nothing(name, tmp_path):
    policy = ToyPolicy()
    trainer = toy_trainer(tmp_path, policy=policy, objective={"algorithm": name})
    algorithm = trainer.algorithm
    experience = algorithm.collect(trainer.context).experience
    steps = algorithm.prepare(experience, trainer.context)
    elsewhere = replace(experience, images=replace(experience.images, shares=none_owned(experience.images.shares)))
    for step in steps:
        before = policy.count.forward_backward
        sums = algorithm.backward(elsewhere, step, trainer.context)
        assert policy.count.forward_backward - before == 1 and not any(sums.values())
    assert not gradients_of(policy).any()


def test_fewer_groups_than_updates_get_new_noise_in_each_epoch(tmp_path):
    rollout = {"prompts_per_iteration": 2}
    objective, pace = {"algorithm": "crd", "epochs": 3}, {"updates_per_iteration": 5}
    trainer = toy_trainer(tmp_path, rollout=rollout, objective=objective, optimizer=pace)
    experience = trainer.algorithm.collect(trainer.context).experience
    assert [step.epoch for step in trainer.algorithm.prepare(experience, trainer.context)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [("diffusion_nft_closed", {}), ("group_covariance", {}), ("dgpo", {}), ("dgpo", {"kl": 0.1})],
)
def test_samples_that_say_nothing_have_no_gradient_and_stay_in_the_denominator(algorithm, changes, tmp_path):
    """A sample of the mean reward has one where the loss is the group's direction, and each has the KL term's."""
    policy = ToyPolicy(torch.float64)
    trainer = toy_trainer(
        tmp_path,
        policy=policy,
        reward=_Partly(),
        objective={"algorithm": algorithm, "changes": changes},
        optimizer={"updates_per_iteration": 1},
    )
    with torch.no_grad():
        policy.net.shift.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.01)
    experience = trainer.algorithm.collect(trainer.context).experience
    experience.signal[experience.signal.nonzero()[0]] = 0.0
    (step,) = trainer.algorithm.prepare(experience, trainer.context)
    group, present = experience.images.group, experience.present
    every = list(present.nonzero()[:, 0].split(1))
    if trainer.algorithm.row.of_groups:
        every = [(present & (group == label)).nonzero()[:, 0] for label in group.unique()]
    assert step.on_policy and step.count == len(every) and (len(step.units) < len(every)) == (not changes)
    trained = sum(map(len, step.units))
    assert int(present.sum()) == 41 and experience.metrics["trained_share"] == trained / 48
    trainer.algorithm.backward(experience, step, trainer.context)
    sparse = gradients_of(policy).clone()
    policy.net.zero_grad()
    trainer.algorithm.backward(experience, replace(step, units=every), trainer.context)
    torch.testing.assert_close(gradients_of(policy), sparse, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "changes", "updates", "guidance", "sampling"),
    [
        ("diffusion_nft_closed", {"levels": 2, "kl": 0.1}, 2, 2.0, {}),
        ("diffusion_nft", {"old_decay": [0, 0.5, 0.5]}, 2, 1.0, {"guidance": 2.0}),
        ("awm", {"levels": 3}, 1, 1.0, {}),
        ("awm", {"levels": 2, "kl": 0.1, "average_kl": 1.0}, 1, 2.0, {}),
        ("ram", {"levels": 2, "reference_guidance": 3.0}, 2, 2.0, {"guidance": 2.0}),
        ("crd", {"levels": 2}, 2, 1.0, {}),
    ],
)
def test_counted_cost_is_the_planned_one(tmp_path, name, changes, updates, guidance, sampling):
    policy = GuidedToy(guidance=guidance)
    trainer = toy_trainer(
        tmp_path,
        policy=policy,
        objective={"algorithm": name, "changes": changes},
        optimizer={"updates_per_iteration": updates},
        rollout=sampling,
        run={"iterations": 3},
    )
    trainer.train()
    row = trainer.algorithm.row
    rows = read_metrics(tmp_path / "metrics.jsonl")
    counted = sum(r["forward_equivalents_per_image"] for r in rows) / 3
    own = 1 + (guidance > 1)
    planned = forward_equivalents_per_image(
        steps=4,
        trained=row.level_count(4),
        guided=guidance > 1,
        reference=planned_passes(
            row, updates, passes=own, reference=2 if row.reference_guidance else own, iterations=3
        ),
        guided_rollout=None if not sampling else True,
    )
    assert counted == pytest.approx(planned, rel=1e-12)
    assert all(r["trained_share"] == 1 for r in rows) and policy.guidance == guidance


def test_the_old_policy_samples_and_moves_as_its_row_says(tmp_path):
    """θ_old ← d θ_old + (1 − d) θ with d = 0, then 1/2; the images are the old policy's."""
    policy = ToyPolicy()
    trainer = toy_trainer(
        tmp_path, policy=policy, objective={"algorithm": "diffusion_nft", "changes": {"old_decay": [0, 0.5, 0.5]}}
    )
    trainer.iterate()
    first = policy_weights(policy)
    trainer.iterate()
    old = torch.cat([v.flatten() for v in trainer.context.tensors["old"].values()])
    torch.testing.assert_close(old, (first + policy_weights(policy)) / 2)
    latents = trainer.algorithm.collect(trainer.context).experience.images.trajectory.latents
    with trainer.algorithm._with_old():
        again = trainer.algorithm.sample(2, trainer.clock).trajectory.latents
    fresh = trainer.algorithm.sample(2, trainer.clock).trajectory.latents
    assert torch.equal(latents, again) and not torch.equal(latents, fresh)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    objective = {"algorithm": "diffusion_nft", "changes": {"old_decay": [0, 0.2, 0.9], "average_kl": 0.1}}
    outcome, _ = check_resume(partial(toy_trainer, objective=objective), tmp_path, 2, 5)
    assert {"old.safetensors", "average.safetensors"} <= {*outcome[1]}


def test_the_pull_to_the_average_is_its_distance(tmp_path):
    """ē ← d ē + (1 − d) θ after each iteration; the loss adds k · mean |v − v_avg|², apart from the reference's."""
    changes = {"average_kl": 2.0, "average_decay": [0, 0.1, 0.1], "levels": 1}
    policy = ToyPolicy(torch.float64)
    trainer = toy_trainer(
        tmp_path,
        policy=policy,
        objective={"algorithm": "awm", "changes": changes},
        optimizer={"updates_per_iteration": 1},
    )
    start = policy_weights(policy)
    assert trainer.iterate()["loss/average"] == 0
    average = torch.cat([v.flatten() for v in trainer.context.tensors["average"].values()])
    torch.testing.assert_close(average.double(), 0.1 * start + 0.9 * policy_weights(policy), rtol=1e-5, atol=1e-8)
    record = trainer.iterate()
    assert record["loss/average"] > 0 and "loss/kl" not in record and trainer.algorithm.divergence is None
    assert record["loss"] == pytest.approx(record["loss/policy"] + record["loss/average"], rel=1e-9)


@pytest.mark.parametrize(("name", "size"), [("diffusion_dpo", 2), ("diffusion_kto", 4)])
def test_positive_and_negative_sets_of_an_iteration_are_contrasted(name, size, tmp_path):
    """DRAGON: each pair of a prompt has an image in either set, the better set is the positive one; resumes."""
    reward = load_reward("vendi_gain", model=save_tiny_clip(tmp_path / "clip"), over="sets")
    rollout = {"prompts_per_iteration": 6, "group_size": size}
    make = partial(toy_trainer, reward=reward, rollout=rollout, objective={"algorithm": name})
    trainer = make(tmp_path / "once")
    experience = trainer.algorithm.collect(trainer.context).experience
    value, parts = experience.images.value, experience.images.parts
    assert (value[::2] == -value[1::2]).all() and parts["positive"][0] > parts["negative"][0]
    units = [unit for step in trainer.algorithm.prepare(experience, trainer.context) for unit in step.units]
    assert sorted(len(unit) for unit in units) == [size] * 6
    assert size > 2 or all(value[unit].tolist() == [1, -1] for unit in units)
    check_resume(make, tmp_path, 1, 2, checkpoint_every=1)


@pytest.mark.parametrize("name", ["gdro", "diffusion_dpo"])
def test_equal_rewards_are_ordered_anew_in_each_update(name, tmp_path):
    """By the run's seed: the first of equals changes with the iteration, and not with a resume."""

    class Half(Brightness):
        def score(self, images, prompts, metadata=None):
            scores = super().score(images, prompts, metadata)
            return replace(scores, value=(torch.arange(len(prompts)) % 8 < 4).to(scores.value))

    trainer = toy_trainer(tmp_path, reward=Half(), objective={"algorithm": name})
    experience = trainer.algorithm.collect(trainer.context).experience

    def units(iteration: int) -> list[list[int]]:
        trainer.counters.iteration = iteration
        return [
            unit.tolist() for step in trainer.algorithm.prepare(experience, trainer.context) for unit in step.units
        ]

    first, second = units(1), units(2)
    assert first == units(1) and sorted(map(sorted, first)) != sorted(second)
    assert all(unit != sorted(unit) for unit in first if len(unit) > 2)
    for unit in first:
        value = experience.images.value[unit]
        assert len(unit) > 2 or value[0] > value[1]


def test_levels_are_stratified_and_shared_in_a_group(tmp_path):
    changes = {"levels": 2, "noise": "group", "continuous": True}
    trainer = toy_trainer(tmp_path, objective={"algorithm": "awm", "changes": changes})
    algorithm = trainer.algorithm
    experience = algorithm.collect(trainer.context).experience
    images = experience.images
    first, second = torch.arange(8), torch.arange(8, 16)  # two groups
    for number, (low, high) in enumerate([(0.5, 1.0), (0.0, 0.5)]):
        level = torch.full((8,), number)
        _, target, sigma, time = algorithm._noised(experience, first, level, 0)
        assert len(sigma.unique()) == 1 and low <= sigma[0] <= high
        assert torch.equal(time, 1000 * sigma)
        noise = target + images.trajectory.latents[first]
        torch.testing.assert_close(noise, noise[:1].expand_as(noise))
        assert sigma[0] != algorithm._noised(experience, second, level, 0)[2][0]
        assert sigma[0] != algorithm._noised(experience, first, level, 1)[2][0]


def test_fdfo_learns_from_branches_of_one_path(tmp_path):
    trainer = toy_trainer(tmp_path, objective={"algorithm": "fdfo"}, rollout=PAIRS)
    experience = trainer.algorithm.collect(trainer.context).experience
    images, ends = experience.images, experience.images.trajectory.latents
    assert torch.equal(images.trajectory.x[::2, 0], images.trajectory.x[1::2, 0]) and experience.levels == 3
    torch.testing.assert_close(experience.signal[::2], (images.value[::2] - images.value[1::2]) / 2)
    delta = ends[::2] - ends[1::2]
    expected = -delta / delta.square().flatten(1).mean(1)[:, None, None, None]
    torch.testing.assert_close(experience.guidance[::2], expected)
    torch.testing.assert_close(experience.guidance[1::2], -expected)
    check_resume(partial(toy_trainer, objective={"algorithm": "fdfo"}, rollout=PAIRS), tmp_path / "r", 1, 2)
    with pytest.raises(
        UserError, match=r"rollout.group_size is 8 .*two branches of one path\. Set rollout.group_size=2"
    ):
        toy_trainer(tmp_path, objective={"algorithm": "fdfo"})


def test_start_noise_is_the_noise_that_the_image_was_made_from(tmp_path):
    trainer = toy_trainer(tmp_path, objective={"algorithm": "awm", "changes": {"noise": "start", "levels": 1}})
    algorithm = trainer.algorithm
    with torch.no_grad():  # the ODE of v = x is x0 = x1 Π (1 − Δσ)
        algorithm.policy.net.base.weight.zero_()
    experience = algorithm.collect(trainer.context).experience
    images = experience.images
    sample = torch.arange(48)
    _, target, _, _ = algorithm._noised(experience, sample, torch.zeros(48, dtype=torch.int64), 0)
    noise = target + images.trajectory.latents
    torch.testing.assert_close(noise * 0.75**4, images.trajectory.latents, rtol=1e-4, atol=1e-5)


NFT = {"algorithm": "diffusion_nft"}


def test_a_group_over_two_processes_is_refused_where_it_is_compared():
    odd, reward = RolloutSettings(prompts_per_iteration=5, group_size=4), with_capabilities(Brightness())
    with pytest.raises(UserError, match=r"some group would be spread over two.*Use a multiple of 2"):
        check_processes(DiffusionObjectiveSettings(algorithm="crd"), odd, reward, 2)
    check_processes(DiffusionObjectiveSettings(algorithm="awm"), odd, reward, 2)


def test_guidance_is_refused_where_it_cannot_be_set_or_breaks_the_ratio(tmp_path):
    with pytest.raises(UserError, match="ToyPolicy has no attribute guidance"):
        toy_trainer(tmp_path, objective=NFT, rollout={"guidance": 2.0})
    with pytest.raises(UserError, match=r"rollout.guidance and .*log-probs or gradient .*take a regression"):
        toy_trainer(tmp_path, rollout={"guidance": 2.0})
