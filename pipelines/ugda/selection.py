# SPDX-License-Identifier: Apache-2.0
"""Selection of pairs to label: where the ensemble is uncertain, and where labels move the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visalign.core.advantages.group import group_advantages
from visalign.flow.noise import initial_noise
from visalign.flow.rollout import encoder_inputs, velocity_of
from visalign.interfaces import DiffusionPolicy
from visalign.pipelines.collect.tasks import Task
from visalign.pipelines.flow_grpo.stored_pairs import stored_latents
from visalign.pipelines.sample.job import SampleSettings, load_sampler
from visalign.rewards.combine.ensemble import Ensemble
from visalign.seeds import sample_seed
from visalign.training.loop import checkpoint
from visalign.training.loop.adamw_8bit import read_moment
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.policy.influence import AdamState, adam_influence

LEVELS = 4  # Noise levels at which a sample's gradient is taken, in equal parts of [0, 1]
SHARE = 0.5  # Share of the pairs that UGDA keeps by variance, and of these by influence


class Candidate(NamedTuple):
    """A pair that may be labelled; in the first round without measures."""

    task: Task
    margin: float | None = None  # Ensemble mean of the left image's score minus that of the right one
    deviation: float | None = None  # Standard deviation of that margin between the members
    influence: float | None = None  # Sum of both images' influence on the policy

    def row(self) -> dict[str, Any]:
        left, right = self.task.images
        row = {"prompt": self.task.prompt, "image_left": left, "image_right": right}
        if self.margin is None:
            return row
        return row | {"margin": self.margin, "deviation": self.deviation, "influence": self.influence}


def score_candidates(
    tasks: Sequence[Task], ensemble: Ensemble, sampling: SampleSettings, *, seed: int = 0
) -> list[Candidate]:
    """Compute margin, deviation and influence of pairs; pairs that a member cannot judge are left out."""
    prompt_of = {image: task.prompt for task in tasks for image in task.images}
    images, prompts = list(prompt_of), list(prompt_of.values())
    row = {image: number for number, image in enumerate(images)}
    members = member_scores(ensemble, images, prompts)
    advantage = group_advantages(members.mean(0), prompts, ddof=0)
    influence = image_influence(sampling, images, prompts, advantage, seed=seed)
    candidates = []
    for task in tasks:
        left, right = (row[image] for image in task.images)
        margins = members[:, left] - members[:, right]
        if bool(margins.isfinite().all()):
            both = float(influence[left] + influence[right])
            candidates.append(Candidate(task, float(margins.mean()), float(margins.std()), both))
    return candidates


def member_scores(ensemble: Ensemble, images: Sequence[str], prompts: Sequence[str]) -> Tensor:
    """Score images with each member: [M, N] float64, NaN where it could not judge."""
    batches = []
    for start in range(0, len(images), 64):
        batch, texts = list(images[start : start + 64]), list(prompts[start : start + 64])
        scores = [member.score(batch, texts, [None] * len(batch)) for member in ensemble.members.values()]
        batches.append(torch.stack([torch.where(s.valid, s.value.double(), torch.nan).cpu() for s in scores]))
    return torch.cat(batches, 1)


def image_influence(
    sampling: SampleSettings, images: Sequence[str], prompts: Sequence[str], advantage: Tensor, *, seed: int = 0
) -> Tensor:
    """Compute the influence [N] of samples, summed over the checkpoints of the run that left `sampling.lora`.

    The loss of a sample is A times its matching error, the mean over `LEVELS` levels of |v_θ − (ε − x0)|², which
    stands in for −log π as in the policy's own regressions; x0 is the autoencoder's latent of the image.
    """
    [lora] = sampling.lora
    policy, advantage = load_sampler(sampling), torch.nan_to_num(advantage)
    records = [{"image": image, "where": image} for image in images]
    latents = stored_latents(policy)(records)
    named = list(policy.trainable_parameters())
    parameters = [parameter for _, parameter in named]

    def loss(number: int) -> Tensor:
        noise = sample_seed(seed, "influence", number)
        return float(advantage[number]) * _matching_error(policy, prompts[number], latents[number], noise)

    total = torch.zeros(len(images), dtype=torch.float64)
    for folder in checkpoint.folders(Path(lora).parent / "checkpoints"):
        config = checkpoint.verify(folder)["config"]
        loaded, optimizer = checkpoint.load(folder, config), OptimizerSettings(**config["optimizer"])
        with torch.no_grad():
            for name, parameter in named:
                parameter.copy_(loaded.tensors["trainable"][name])
        state = _adam_state(loaded, named, optimizer)
        rate = optimizer.lr_at(max(0, loaded.state["updates"] - 1))
        total += rate * adam_influence(loss, len(images), parameters, state).cpu()
    return total


def _adam_state(loaded: checkpoint.Checkpoint, parameters: Any, optimizer: OptimizerSettings) -> AdamState:
    """Read Adam's moments from a checkpoint; 0 for a parameter that had no step."""
    moments = loaded.tensors["optimizer"]

    def read(key: str, power: int) -> Tensor:
        return read_moment(moments, key, power) if optimizer.name == "adamw_8bit" else moments[key]

    first, second = (
        [
            (read(f"{name}.{key}", power) if f"{name}.step" in moments else torch.zeros_like(p)).to(p.device)
            for name, p in parameters
        ]
        for power, key in enumerate(("exp_avg", "exp_avg_sq"), start=1)
    )
    steps = max((int(moments[key]) for key in moments if key.endswith(".step")), default=0)
    betas = (optimizer.betas[0], optimizer.betas[1])
    return AdamState(exp_avg=first, exp_avg_sq=second, steps=steps, betas=betas, eps=optimizer.eps)


@torch.no_grad()
def log_ratios(
    source: SampleSettings, now: SampleSettings, images: Sequence[str], prompts: Sequence[str], *, seed: int = 0
) -> Tensor:
    """Estimate ln π_now/π_source [N] of samples of `source`: −D/2 · (error_now − error_source), D a latent's size.

    Errors are means over the same `LEVELS` levels and noises, |v_θ − (ε − x0)|² per number: the flow's
    evidence bound with each level's weight 1, in place of log-probs, which sampling without noise has not.
    """
    policy = load_sampler(source)
    records = [{"image": image, "where": image} for image in images]
    latents = stored_latents(policy)(records)

    def errors(policy: DiffusionPolicy) -> Tensor:
        values = [
            _matching_error(policy, prompt, latent, sample_seed(seed, "off_policy", number))
            for number, (prompt, latent) in enumerate(zip(prompts, latents, strict=True))
        ]
        return torch.stack(values).double().cpu()

    before = errors(policy)
    return -latents[0].numel() / 2 * (errors(load_sampler(now)) - before)


def _matching_error(policy: DiffusionPolicy, prompt: str, latent: Tensor, seed: int) -> Tensor:
    """Compute the mean over `LEVELS` noise levels of |v_θ − (ε − x0)|²."""
    x0 = latent.float().expand(LEVELS, *latent.shape)
    seeds = [sample_seed(seed, "noise", level) for level in range(LEVELS)]
    noise = initial_noise(seeds, policy.latent_shape).to(x0)
    sigma = ((torch.arange(LEVELS) + 0.5) / LEVELS).to(x0)
    wide = sigma.reshape(-1, *[1] * (x0.ndim - 1))
    condition = policy.encode(encoder_inputs(policy, [{"prompt": prompt}] * LEVELS))
    x = ((1 - wide) * x0 + wide * noise).to(latent.dtype)
    v = velocity_of(policy, x, sigma, condition, policy.times(sigma))
    return (v - (noise - x0)).square().mean()


def select_candidates(pool: Sequence[Candidate], count: int, rule: str, *, seed: int) -> list[Candidate]:
    """Choose the pairs to label.

    Rules: random; uncertainty, the pairs on whose margin the members differ most; ugda, of the most uncertain half the
    more influential half, of these the first `count`.
    """
    if rule == "random":
        draw = torch.Generator().manual_seed(seed % 2**63)
        return [pool[i] for i in torch.randperm(len(pool), generator=draw)[:count].tolist()]
    unsure = sorted(pool, key=attrgetter("deviation"), reverse=True)
    if rule == "uncertainty":
        return unsure[:count]
    unsure = unsure[: math.ceil(SHARE * len(pool))]
    influential = sorted(unsure, key=attrgetter("influence"), reverse=True)
    return influential[: math.ceil(SHARE * len(unsure))][:count]
