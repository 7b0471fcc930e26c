# SPDX-License-Identifier: Apache-2.0
"""Feynman-Kac steering: what it draws is the model's distribution tilted by the reward."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from visalign.flow import steered_rollout
from visalign.flow.steering import _draw_parents

PARTICLES, DEVIATION = 1024, 0.5


class Gaussian:
    """The exact velocity of data N(0, s²) in one dimension; an image is the latent itself."""

    latent_shape, storage_dtype, prediction = (1, 1, 1), torch.float64, "velocity"
    device = torch.device("cpu")

    def times(self, sigmas):
        return 1000 * sigmas

    def velocity(self, x, sigma, condition, time=None):
        # E[ε − x0 | x], x = (1 − σ) x0 + σ ε
        s = sigma.double().reshape(-1, 1, 1, 1)
        variance = (1 - s) ** 2 * DEVIATION**2 + s**2
        return (s - (1 - s) * DEVIATION**2) / variance * x

    def decode(self, latents):
        return latents


class Nothing:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def select(self, index):
        return Nothing(len(index))


def _steered(strength, reward=None, particles=PARTICLES, **more):
    return steered_rollout(
        cast(Any, Gaussian()),
        Nothing(particles),
        reward or (lambda images: images.flatten()),
        sigmas=torch.linspace(1, 0, 41),
        seeds=range(particles),
        particles=particles,
        resample_after=list(range(4, 39, 3)),
        strength=strength,
        **more,
    ).flatten()


def test_the_samples_are_those_of_the_tilted_distribution():
    """p(x) exp(λ x) of a normal p is N(λ s², s²); measured from the untilted samples of the same sampler."""
    plain = _steered(1e-9)
    assert plain.mean().abs() < 0.03 and plain.std() == pytest.approx(DEVIATION, rel=0.1)
    tilted = _steered(2.0)
    assert tilted.mean() - plain.mean() == pytest.approx(2.0 * float(plain.var()), rel=0.1)
    assert tilted.std() == pytest.approx(float(plain.std()), rel=0.15)


def test_a_particle_has_as_many_children_as_its_weight_says():
    weight = torch.tensor([0.5, 0.25, 0.25, 0.0, 0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    for seed in range(50):
        parents = _draw_parents(weight.log(), 4, [seed * 2**56] * 8)
        assert parents[:4].bincount(minlength=4).tolist() == [2, 1, 1, 0]
        children = parents[4:].sub(4).bincount(minlength=4)
        assert ((children - 4 * weight[4:]).abs() < 1).all() and children.sum() == 4


def test_what_could_not_be_judged_has_no_child():
    def partly(images):
        values = images.flatten().clone()
        values[values < 0] = torch.nan
        return values

    assert (_steered(1e-9, reward=partly, particles=64) > 0).double().mean() > 0.9
    nothing = _steered(2.0, reward=lambda images: torch.full((len(images),), torch.nan), particles=64)
    assert torch.equal(nothing, _steered(1e-9, reward=lambda images: torch.zeros(len(images)), particles=64))


@pytest.mark.parametrize("schedule", ["flow", "ddim"])
def test_children_differ_and_the_last_step_leaves_no_noise(schedule):
    """The ODE's last step: all children of the last resampling are apart, by the noise of the step after."""
    settings = {"sigmas": torch.linspace(1, 0, 11), "seeds": range(64), "particles": 64, "strength": 20.0}
    policy, images = cast(Any, Gaussian()), lambda images: images.flatten()
    x = steered_rollout(
        policy, Nothing(64), images, resample_after=[6, 7], schedule=schedule, noise_level=0.7, **settings
    )
    assert len(x.unique()) == 64


def test_batches_change_nothing():
    for batch_size in (7, 10**20):
        torch.testing.assert_close(_steered(2.0, particles=64, batch_size=batch_size), _steered(2.0, particles=64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"particles": 1}, "groups of at least 2"), ({"resample_after": [38]}, "rising steps among 0 to 37")],
)
def test_what_cannot_be_is_refused(changes, message):
    settings = {
        "sigmas": torch.linspace(1, 0, 41),
        "seeds": range(4),
        "particles": 4,
        "resample_after": [5],
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        steered_rollout(cast(Any, Gaussian()), Nothing(4), lambda images: images.flatten(), **settings)
