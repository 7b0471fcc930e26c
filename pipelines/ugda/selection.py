# SPDX-License-Identifier: Apache-2.0
"""Which pairs of samples are labelled: where the ensemble is unsure, and where its word moves the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.core.advantages.group import group_advantages
from visalign.flow.noise import initial_noise
from visalign.flow.rollout import asked_of, rollout, velocity_of
from visalign.interfaces import DiffusionPolicy
from visalign.pipelines.collect.tasks import Task
from visalign.pipelines.sample.job import SampleSettings, load_sampler
from visalign.rewards.combine.ensemble import Ensemble
from visalign.seeds import sample_seed
from visalign.training.policy.influence import gradient_influence, gradient_sketches

LEVELS = 4
"""Noise levels at which a sample's gradient is taken, in equal parts of [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A pair that may be labelled."""

    task: Task
    margin: float | None = None
    """What the ensemble says: mean of the left image minus that of the right one."""
    deviation: float | None = None
    """Standard deviation of that margin between the members."""
    influence: float | None = None
    """Of both images on the policy, the sum of their sizes."""

    def row(self) -> dict[str, Any]:
        """As the queue has it."""
        left, right = self.task.images
        said = {"margin": self.margin, "deviation": self.deviation, "influence": self.influence}
        found = {"prompt": self.task.prompt, "image_left": left, "image_right": right}
        return found | {name: value for name, value in said.items() if value is not None}


def candidates(
    tasks: Sequence[Task],
    ensemble: Ensemble | None = None,
    sampling: SampleSettings | None = None,
    *,
    seed: int = 0,
) -> list[Candidate]:
    """Pairs with margin, deviation and influence; with none of them where there is no ensemble.

    A pair with an image that a member could not judge is left out.

    Args:
        tasks: pairs of images that `sample_images` made, PROMPT_SEED.png.
        ensemble: of the reward.
        sampling: how they were made, by the policy whose influence is asked for.
        seed: of the noise at which gradients are taken, and of the sketches.
    """
    if ensemble is None or sampling is None:
        return [Candidate(task=task) for task in tasks]
    images = list(dict.fromkeys(image for task in tasks for image in task.images))
    row = {image: number for number, image in enumerate(images)}
    prompts = {image: task.prompt for task in tasks for image in task.images}
    said = [prompts[image] for image in images]
    members = member_scores(ensemble, images, said)
    advantage = group_advantages(members.mean(0), said, ddof=0)
    moved = image_influence(sampling, images, said, advantage, seed=seed).abs()
    found = []
    for task in tasks:
        left, right = (row[image] for image in task.images)
        gap = members[:, left] - members[:, right]
        if bool(gap.isfinite().all()):
            found.append(
                Candidate(
                    task=task,
                    margin=float(gap.mean()),
                    deviation=float(gap.std()),
                    influence=float(moved[left] + moved[right]),
                )
            )
    return found


def member_scores(ensemble: Ensemble, images: Sequence[str], prompts: Sequence[str]) -> Tensor:
    """[M, N] scores of each member, float64; NaN where one could not judge."""
    parts: list[list[Tensor]] = [[] for _ in ensemble.members]
    for start in range(0, len(images), 64):
        some, asked = list(images[start : start + 64]), list(prompts[start : start + 64])
        for number, member in enumerate(ensemble.members.values()):
            scores = member.score(some, asked, [None] * len(some))
            parts[number].append(torch.where(scores.valid, scores.value.double(), torch.nan).cpu())
    return torch.stack([torch.cat(part) for part in parts])


def image_influence(
    sampling: SampleSettings,
    images: Sequence[str],
    prompts: Sequence[str],
    advantage: Tensor,
    *,
    seed: int = 0,
) -> Tensor:
    """[N] influence of each sample's reward on the policy that made it.

    The gain of a sample is minus its matching error, mean over `LEVELS` levels of |v_θ − (ε − x0)|²,
    which stands in for its log-prob as in the policy's own regressions; x0 is drawn again by prompt and seed.
    """
    policy = load_sampler(sampling)
    latents = _redrawn(policy, sampling, images, prompts)
    parameters = [parameter for _, parameter in policy.trainable_parameters()]

    def gain(number: int) -> Tensor:
        return -_matching_error(
            policy, prompts[number], latents[number], sample_seed(seed, "influence", number)
        )

    return gradient_influence(gradient_sketches(gain, len(images), parameters, seed=seed), advantage)


def log_ratios(
    made: SampleSettings, now: SampleSettings, images: Sequence[str], prompts: Sequence[str], *, seed: int = 0
) -> Tensor:
    """[N] ln π_now/π_made of samples, −D/2 times the difference of their matching errors; D a latent's size.

    Errors are means over the same `LEVELS` levels and noises, |v_θ − (ε − x0)|² per number: the flow's
    evidence bound with each level's weight 1, in place of log-probs, which sampling without noise has not.

    Args:
        made: how the samples were made, by the policy that made them.
        now: the policy of today.
        images: of the samples, PROMPT_SEED.png.
        prompts: [N].
        seed: of the noise.
    """
    policy = load_sampler(made)
    latents = _redrawn(policy, made, images, prompts)

    def errors(policy: DiffusionPolicy) -> Tensor:
        with torch.no_grad():
            found = [
                _matching_error(policy, prompt, latent, sample_seed(seed, "off_policy", number))
                for number, (prompt, latent) in enumerate(zip(prompts, latents, strict=True))
            ]
        return torch.stack(found).double().cpu()

    before = errors(policy)
    return -latents[0].numel() / 2 * (errors(load_sampler(now)) - before)


def _redrawn(
    policy: DiffusionPolicy, sampling: SampleSettings, images: Sequence[str], prompts: Sequence[str]
) -> Tensor:
    """[N, C, H, W] latents of samples that the policy made, drawn again by prompt and seed."""
    sigmas = policy.sigmas(sampling.steps, timestep_schedule=sampling.timestep_schedule)
    draws = [int(Path(image).stem.rpartition("_")[2]) for image in images]
    seeds = [sample_seed("sample", prompt, draw, 0) for prompt, draw in zip(prompts, draws, strict=True)]
    with torch.no_grad():
        condition = policy.encode(asked_of(policy, [{"prompt": prompt} for prompt in prompts]))
        return rollout(
            policy,
            condition,
            sigmas=sigmas,
            seeds=seeds,
            batch_size=sampling.batch_size,
            solver=sampling.solver,
        ).latents


def _matching_error(policy: DiffusionPolicy, prompt: str, latent: Tensor, seed: int) -> Tensor:
    x0 = latent.float().expand(LEVELS, *latent.shape)
    seeds = [sample_seed(seed, "noise", level) for level in range(LEVELS)]
    noise = initial_noise(seeds, policy.latent_shape).to(x0)
    sigma = ((torch.arange(LEVELS) + 0.5) / LEVELS).to(x0)
    wide = sigma.reshape(-1, *[1] * (x0.ndim - 1))
    condition = policy.encode(asked_of(policy, [{"prompt": prompt}] * LEVELS))
    x = ((1 - wide) * x0 + wide * noise).to(latent.dtype)
    v = velocity_of(policy, x, sigma, condition, policy.times(sigma))
    return (v - (noise - x0)).square().mean()


def selected(
    found: Sequence[Candidate], count: int, *, uncertain: float, influential: float
) -> list[Candidate]:
    """The most uncertain share, of these the most influential share, of these the first `count`.

    Sun et al., UGDA, ICLR 2025: half by the variance of the ensemble, then half by the gradient influence.
    """
    unsure = sorted(found, key=lambda c: -(c.deviation or 0.0))[: math.ceil(uncertain * len(found))]
    moving = sorted(unsure, key=lambda c: -(c.influence or 0.0))[: math.ceil(influential * len(unsure))]
    return moving[:count]


def most_uncertain(found: Sequence[Candidate], count: int) -> list[Candidate]:
    """Those on whose margin the ensemble differs most."""
    return sorted(found, key=lambda c: -(c.deviation or 0.0))[:count]


def by_lot(found: Sequence[Candidate], count: int, *, seed: int) -> list[Candidate]:
    """So many, each as likely."""
    draw = torch.Generator().manual_seed(seed % 2**63)
    return [found[place] for place in torch.randperm(len(found), generator=draw)[:count].tolist()]
