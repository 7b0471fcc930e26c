# SPDX-License-Identifier: Apache-2.0
"""Training through the reward's gradient: the gradient that is stated, at the cost that is planned."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.training.images import Brightness, ToyPolicy, check_resume, none_owned, toy_trainer
from visalign.core import ASCENTS, Ascent, named_ascent
from visalign.errors import UserError
from visalign.flow.noise import initial_noise
from visalign.rewards import WeightedSum
from visalign.training import TextObjectiveSettings, read_metrics
from visalign.training.diffusion.cost import forward_equivalents_per_image
from visalign.training.diffusion.reward_gradient import image_gradient
from visalign.training.loop.metrics import METRICS

IMAGE = math.prod((3, 8, 8))


def _one_update(folder, name="draft", policy=None, micro_batch=64, **changes):
    """(trainer, its experience, the step, backward's sums)."""
    trainer = toy_trainer(
        folder,
        policy=policy or ToyPolicy(torch.float64),
        objective={"algorithm": name, "changes": changes},
        optimizer={"updates_per_iteration": 1, "micro_batch": micro_batch},
    )
    experience = trainer.algorithm.collect(trainer.context).experience
    (step,) = trainer.algorithm.prepare(experience, trainer.context)
    return trainer, experience, step, trainer.algorithm.backward(experience, step, trainer.context)


def _gradient(trainer):
    return torch.cat([p.grad.flatten() for _, p in trainer.weights.named])


def _mean_reward(policy, algorithm, experience, stop, to_end):
    """The reward that the row raises, written out: Euler steps, the first `stop` without gradient."""
    grid, seeds = algorithm.sigmas.double(), algorithm.sample_seeds(experience.batch.sample_id)
    x = initial_noise(seeds, policy.latent_shape).double()
    steps = len(grid) - 1
    for k in range(steps if to_end else stop + 1):
        sigma = grid[k].expand(len(x))
        with torch.set_grad_enabled(k >= stop):
            v = policy.velocity(x, sigma, experience.condition)
        x = x + (grid[k + 1] - grid[k] if to_end or k < stop else -grid[k]) * v
    images = policy.decode(x)
    return Brightness().score_with_gradient(images, experience.prompts).double().mean()


@pytest.mark.parametrize(("name", "changes"), [("draft", {"last": 1}), ("draft", {"last": 3}), ("refl", {})])
def test_the_gradient_is_that_of_the_mean_reward(name, changes, tmp_path):
    trainer, experience, step, sums = _one_update(tmp_path, name, **changes)
    gradient = _gradient(trainer).clone()
    policy = trainer.algorithm.policy
    policy.net.zero_grad()
    mean = _mean_reward(policy, trainer.algorithm, experience, step.stop, name != "refl")
    (-mean).backward()
    torch.testing.assert_close(gradient, _gradient(trainer), rtol=1e-5, atol=1e-9)
    assert gradient.norm() > 1e-4 and sums["loss/policy"] == pytest.approx(-float(mean.detach()), rel=1e-5)


def test_noising_again_takes_the_mean_of_all_predictions(tmp_path):
    """x0 = x − σ v at the last level of n noises more; from x_σ = (1 − σ) x0 + σ ε."""
    trainer, experience, step, _ = _one_update(tmp_path, "draft_lv", renoised=2)
    algorithm, policy = trainer.algorithm, trainer.algorithm.policy
    gradient = _gradient(trainer).clone()
    policy.net.zero_grad()
    everyone = torch.arange(len(experience.prompts))
    x0, _ = algorithm._clean(experience, step, everyone)
    ends = [x0, *(algorithm._renoised(experience, step, everyone, x0.detach(), n)[0] for n in range(2))]
    assert not torch.equal(ends[1], ends[2])
    means = [Brightness().score_with_gradient(policy.decode(end), experience.prompts).mean() for end in ends]
    (-torch.stack(means).mean()).backward()
    torch.testing.assert_close(gradient, _gradient(trainer), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ASCENTS)
def test_reward_rises_at_the_planned_cost(name, tmp_path):
    policy = ToyPolicy()
    trainer = toy_trainer(
        tmp_path, policy=policy, objective={"algorithm": name, "changes": {"kl": 0.01}}, run={"iterations": 8}
    )
    trainer.train()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[-1]["reward_mean"] > rows[0]["reward_mean"] + 0.05
    assert {key.split("/")[0] + "/*" if "/" in key else key for key in rows[-1]} <= set(METRICS)
    free, carried = trainer.algorithm.row.counted(4)
    planned = forward_equivalents_per_image(steps=free, trained=carried, guided=False, reference=1)
    assert rows[-1]["forward_equivalents_per_image"] == pytest.approx(planned)


@pytest.mark.parametrize("name", ASCENTS)
def test_accumulation_equals_one_big_batch(name, tmp_path):
    expected = _gradient(_one_update(tmp_path, name, kl=0.1)[0])
    parts = _gradient(_one_update(tmp_path, name, micro_batch=5, kl=0.1)[0])
    torch.testing.assert_close(parts, expected, rtol=1e-6, atol=1e-10)  # images are float32


def test_a_process_without_a_sample_moves_nothing(tmp_path):
    trainer, experience, step, _ = _one_update(tmp_path)
    trainer.algorithm.policy.net.zero_grad()
    trainer.algorithm._update_sums = lambda *_: {}  # the other process's samples cannot be counted here
    trainer.algorithm.shares = none_owned(trainer.algorithm.shares)
    before = trainer.algorithm.policy.count.forward_backward
    trainer.algorithm.backward(experience, step, trainer.context)
    assert trainer.algorithm.policy.count.forward_backward == before + 1
    assert not _gradient(trainer).any()


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    objective = {"algorithm": "draft_lv", "changes": {"kl": 0.01}}
    check_resume(partial(toy_trainer, objective=objective), tmp_path, 2, 4)


class _Two:
    """Two terms, one a thousand times the other."""

    name, unit, higher_is_better = "two", "level", True

    def gradient_terms(self):
        yield "small", Brightness(), 1.0, 0.0
        yield "large", _Darkness(), -1.0, 0.0


class _Darkness(Brightness):
    higher_is_better = False

    def score_with_gradient(self, images, prompts):
        return 1000 * images.square().mean((1, 2, 3))


def test_each_term_has_unit_norm_where_normalised():
    images = torch.rand(5, 3, 8, 8)
    prompts = ["bright", "dark", "bright", "dark", "bright"]
    value, slope = image_gradient(_Two(), images, prompts, Ascent(normalise=True))
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]).reshape(-1, 1, 1, 1)
    first = sign.expand_as(images) / IMAGE**0.5
    second = images / images.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
    torch.testing.assert_close(slope, first - second)
    plain, raw = image_gradient(_Two(), images, prompts, Ascent())
    torch.testing.assert_close(raw, sign / IMAGE - 2000 * images / IMAGE)
    torch.testing.assert_close(value, plain)


def test_an_image_above_the_hinge_or_without_a_score_moves_nothing():
    class Holes(Brightness):
        def score_with_gradient(self, images, prompts):
            return images.mean((1, 2, 3)) * torch.tensor([1.0, 1.0, torch.nan])

    images = torch.stack([torch.full((3, 8, 8), level) for level in (0.2, 0.8, 0.5)])
    value, slope = image_gradient(Holes(), images, ["bright"] * 3, Ascent(hinge=0.5))
    assert value[:2].tolist() == pytest.approx([0.2, 0.8]) and value[2].isnan()
    assert slope[0].any() and not slope[1:].any()


def test_the_values_are_those_of_the_sum_and_of_its_score():
    """The logged reward and the hinge are in the sum's own scale, means and all."""
    terms = {"light": (Brightness(), 2.0), "dark": (_Darkness(), 1.0)}
    total = WeightedSum(terms, normalise={"light": (0.5, 0.1), "dark": (300.0, 50.0)})
    images, prompts = torch.rand(3, 3, 8, 8), ["bright", "light", "bright"]
    value, _ = image_gradient(total, images, prompts, Ascent())
    light, dark = images.mean((1, 2, 3)), 1000 * images.square().mean((1, 2, 3))
    expected = 2.0 * (light - 0.5) / 0.1 - (dark - 300.0) / 50.0
    torch.testing.assert_close(value, expected.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("broken", ["shape", "gradient"])
def test_a_rewards_gradient_that_is_none_is_said(broken):
    class Broken(Brightness):
        def score_with_gradient(self, images, prompts):
            brightness = images.mean((1, 2, 3))
            return brightness.mean() if broken == "shape" else brightness + (images - images).sum((1, 2, 3)).sqrt()

    images, prompts = torch.rand(3, 3, 8, 8), ["bright"] * 3
    if broken == "shape":
        with pytest.raises(UserError, match=r"'brightness' returned \[\] for 3 images"):
            image_gradient(Broken(), images, prompts, Ascent())
        return
    for row in (Ascent(), Ascent(normalise=True)):  # √0 has no slope
        value, slope = image_gradient(Broken(), images, prompts, row)
        assert value.isnan().all() and not slope.any()


def test_sampling_stops_where_the_row_says():
    refl = ASCENTS["refl"]
    assert list(refl.stops(40)) == list(range(30, 40)) and list(refl.stops(1)) == [0]
    assert list(named_ascent("draft", last=3).stops(10)) == [7]
    assert named_ascent("draft", last=3).counted(10) == (7, 3)
    assert ASCENTS["draft_lv"].counted(10) == (9, 3) and refl.counted(40) == (34.5, 1)


class _NoGradient(Brightness):
    score_with_gradient: Any = None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": _NoGradient()}, "'brightness' .* has no gradient in the pixels"),
        ({"objective": {"algorithm": "draft", "changes": {"last": 5}}}, "last is 5, and rollout.steps is 4"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message, tmp_path):
    with pytest.raises(UserError, match=message):
        toy_trainer(tmp_path, **{"objective": {"algorithm": "draft"}, **arguments})


def test_text_refuses_an_ascent_by_name():
    with pytest.raises(UserError, match="trains on velocities or pixels of images"):
        TextObjectiveSettings(algorithm="refl")
