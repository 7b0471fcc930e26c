# SPDX-License-Identifier: Apache-2.0
"""Search over start noise and over paths, on a flow to a Gaussian whose best image is known."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.support.flow_policies import GaussianPolicy, Shift
from visalign.flow import PathSearch, ZeroOrderSearch, rollout, timestep_sigmas

SIGMAS, BEST = timestep_sigmas(10), 0.9


class Toy(GaussianPolicy):
    """Data N(0.5 + condition, 0.3²); an image is its latent."""

    def decode(self, latents):
        return latents


def near_best(images):
    return -(images.flatten(1) - BEST).square().mean(1)


def searched(search, count=8, reward=near_best, seeds=None, condition=None, **more):
    policy = Toy()
    condition = Shift(torch.zeros(count)) if condition is None else condition
    seeds = range(count) if seeds is None else seeds
    latents = search(policy, condition, reward, sigmas=SIGMAS, seeds=seeds, **more)
    return latents, policy.count.equivalents


def plain(count=8):
    return rollout(Toy(), Shift(torch.zeros(count)), sigmas=SIGMAS, seeds=range(count)).latents


def test_more_rounds_of_zero_order_search_are_never_worse_and_reach_the_best_image():
    values = [near_best(plain())]
    for rounds in (1, 2, 4, 8, 32):
        latents, _ = searched(ZeroOrderSearch(rounds=rounds, candidates=2, radius=0.3))
        values.append(near_best(latents))
    assert all((later >= earlier).all() for earlier, later in pairwise(values))
    assert values[0].mean() < -0.1 and values[-1].mean() > -0.005


def test_more_branches_of_paths_are_better_and_reach_the_best_image():
    means = [float(near_best(plain(256)).mean())]
    for branches in (2, 4, 8, 32):
        latents, _ = searched(PathSearch(branches=branches, start=2, back=2, forward=4), 256)
        means.append(float(near_best(latents).mean()))
    assert all(later > earlier for earlier, later in pairwise(means)), means
    assert means[0] < -0.1 and means[-1] > -0.005


def test_of_paths_the_best_goes_on_and_stands_first():
    latents, _ = searched(PathSearch(branches=3, start=5), 24, paths=4)
    values = near_best(latents).view(6, 4)
    assert (values[:, :-1] >= values[:, 1:]).all()
    single, _ = searched(PathSearch(branches=3, start=5), 24)
    assert values[:, 0].mean() > near_best(single).mean(), "groups choose among 12 where paths alone have 3"


def test_what_is_judged_of_paths_is_the_image_that_the_last_step_predicted():
    class Recording(Toy):
        def velocity(self, x, sigma, condition, time=None):
            v = super().velocity(x, sigma, condition, time)
            self.clean = list((x - sigma.double().view(-1, 1, 1, 1) * v).split(4))
            return v

    policy, batches = Recording(), []

    def reward(images):
        batches.append(images)
        torch.testing.assert_close(images.double(), policy.clean[len(batches) % 3 - 1], rtol=0, atol=1e-6)
        return near_best(images)

    search = PathSearch(branches=3, start=3, back=1, forward=3)
    search(policy, Shift(torch.zeros(4)), reward, sigmas=SIGMAS, seeds=range(4))
    assert len(batches) == 3 * len(search.rounds(10)) == 12


@pytest.mark.parametrize("search", [ZeroOrderSearch(rounds=2, candidates=3), PathSearch(branches=3)])
def test_a_sample_is_the_same_in_any_batch_and_again(search):
    shifts, seeds = torch.tensor([0.0, 0.2, -0.1]), [5, 9, 2**62]
    together, _ = searched(search, 3, seeds=seeds, condition=Shift(shifts))
    for i in range(3):
        single, _ = searched(search, 1, seeds=seeds[i : i + 1], condition=Shift(shifts[i : i + 1]))
        torch.testing.assert_close(single, together[i : i + 1], rtol=0, atol=1e-12)
    for batch_size in (2, 10**20):
        chunks, _ = searched(search, 3, seeds=seeds, condition=Shift(shifts), batch_size=batch_size)
        torch.testing.assert_close(chunks, together, rtol=0, atol=1e-12)
    other, _ = searched(search, 3, seeds=[6, 10, 3], condition=Shift(shifts))
    assert not (other == together).any()


@pytest.mark.parametrize(
    ("search", "velocities"),
    [
        (ZeroOrderSearch(rounds=2, candidates=4), 90),
        (PathSearch(branches=4, start=4, back=1, forward=3), 4 + 4 * (3 + 3 + 3)),
        (PathSearch(branches=3, start=5, back=2, forward=5), 5 + 3 * (5 + 4)),
    ],
)
def test_the_cost_is_what_the_formula_says(search, velocities):
    assert search.velocities(10) == velocities
    latents, spent = searched(search, 6)
    assert spent == 6 * velocities and latents.shape == (6, 1, 1, 1)


@pytest.mark.parametrize(
    "search", [ZeroOrderSearch(rounds=6, candidates=2, radius=1.0), PathSearch(branches=8, start=2)]
)
def test_what_could_not_be_judged_is_never_chosen(search):
    def partly(images):
        values = images.flatten().clone()
        values[values > 0.7] = torch.nan  # the best would be these
        return values

    latents, _ = searched(search, 64, reward=partly)
    assert (plain(64) > 0.7).any() and (latents <= 0.7).all()
    nothing, _ = searched(search, 64, reward=lambda images: torch.full((len(images),), torch.nan))
    assert nothing.isfinite().all()
    if isinstance(search, ZeroOrderSearch):
        torch.testing.assert_close(nothing, plain(64))


def test_the_noise_of_neighbours_and_paths_leaves_the_distribution_as_it_is():
    """Where the reward says nothing, what comes out is the model's own: N(0.5, 0.3²)."""
    count = 2048
    own = plain(count)
    rewards = iter(range(9))  # each candidate of later rounds beats all before

    def blind(images):
        return torch.full((len(images),), float(next(rewards)))

    neighbours, _ = searched(ZeroOrderSearch(rounds=4, candidates=2), count, reward=blind)
    paths, _ = searched(
        PathSearch(branches=1, start=6, back=4, forward=5),
        count,
        reward=lambda images: torch.zeros(len(images)),
        paths=2,
    )
    for latents in (neighbours, paths):
        assert latents.mean() == pytest.approx(float(own.mean()), abs=0.02)
        assert latents.std() == pytest.approx(float(own.std()), rel=0.04)
        assert torch.corrcoef(torch.stack([latents.flatten(), own.flatten()]))[0, 1] < 0.9, "it moved"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ZeroOrderSearch(rounds=0), r"rounds must be a whole number in \[1, inf\); got 0"),
        (lambda: ZeroOrderSearch(radius=0), r"radius must be a number in \(0, 1\]; got 0"),
        (lambda: PathSearch(start=2, back=3, forward=5), "back is 3; it must be at most start, 2 steps"),
        (lambda: PathSearch(back=3, forward=3), "no round would get any further"),
        (lambda: searched(PathSearch(start=10)), "start is 10; with 10 steps it must be from 1 to 9"),
        (lambda: searched(PathSearch(), 8, paths=3), "8 samples, groups of 3 paths"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
