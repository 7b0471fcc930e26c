# SPDX-License-Identifier: Apache-2.0
"""The loss of flat (image, step) pairs, accumulated in micro-batches whose gradients equal those of one big
batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from visalign.core.surrogates.aggregation import Counts, aggregate
from visalign.core.surrogates.kl import gaussian_kl
from visalign.core.surrogates.ppo import ppo_clip
from visalign.core.surrogates.ratios import guard_log_ratio, guard_step_weight, log_ratio
from visalign.errors import UserError
from visalign.flow.replay import replay
from visalign.flow.trajectory import Pairs
from visalign.flow.transitions import Kernel
from visalign.interfaces import Condition, DiffusionPolicy
from visalign.seeds import sample_seed
from visalign.training.loop.optimizer import OptimizerSettings

from .collect import Experience, Team
from .settings import ObjectiveSettings, RolloutSettings


class ReplayModule(nn.Module):
    """`visalign.flow.replay` as a module, so that DDP wraps it and synchronises the policy's gradients."""

    def __init__(self, policy: DiffusionPolicy) -> None:
        super().__init__()
        self.network = policy.module
        self._policy = policy

    def forward(self, condition: Condition, pairs: Pairs, kernel: Kernel) -> tuple[Tensor, Tensor]:
        """(log_prob [N], mean [N, C, H, W]) of the pairs under the current weights."""
        stats = replay(
            self._policy, condition, pairs.x, pairs.x_next, pairs.sigma, pairs.sigma_next, kernel=kernel
        )
        return stats.log_prob, stats.mean


def step_weights(objective: ObjectiveSettings, rollout: RolloutSettings, sigmas: Tensor) -> Tensor:
    """[T] float32 weight of each denoising step in the loss.

    "inverse_dt" is GRPO-Guard's 1/|dt| divided by its mean over the trained steps, so that the choice does
    not change the scale of the loss; GRPO-Guard itself leaves it undivided.

    Raises:
        UserError: `objective.step_weights` has not one weight per step.
    """
    if objective.step_weights is not None:
        if len(objective.step_weights) != rollout.steps:
            raise UserError(
                f"objective.step_weights has {len(objective.step_weights)} weights for {rollout.steps} "
                "steps; give one for each step, 0 for those that are not trained."
            )
        return torch.tensor(objective.step_weights, dtype=torch.float32)
    if objective.step_weight == "uniform":
        return torch.ones(rollout.steps)
    weight = guard_step_weight(sigmas.diff().float().cpu())
    return weight / weight[rollout.trained].mean()


@dataclass(frozen=True, kw_only=True)
class PairTerms:
    """Loss and statistics of N pairs; `loss` alone carries gradient."""

    loss: Tensor
    """[N]."""
    log_ratio: Tensor
    """[N]."""
    kl: Tensor
    """[N]; zeros without a reference."""


def pair_terms(
    module: nn.Module,
    team: Team,
    condition: Condition,
    pairs: Pairs,
    kernel: Kernel,
    advantage: Tensor,
    weight: Tensor,
    objective: ObjectiveSettings,
) -> PairTerms:
    """Loss of N flat pairs: step weight × clipped surrogate + β × KL.

    Args:
        module: a `ReplayModule`, possibly wrapped.
        team: policy (for the reference) and accelerator.
        condition: of the N pairs.
        pairs: the stored steps.
        kernel: the rollout's.
        advantage: [N].
        weight: [N] step weights.
        objective: which ratio, clip bounds, β.
    """
    mean_ref = None
    if objective.beta > 0:  # before the policy's own forward: a reference may swap weights in place
        with torch.no_grad(), team.accelerator.autocast(), team.policy.reference():
            reference = replay(
                team.policy, condition, pairs.x, pairs.x_next, pairs.sigma, pairs.sigma_next, kernel=kernel
            )
        mean_ref = reference.mean
    log_prob, mean = module(condition, pairs, kernel)
    if objective.ratio == "guard":
        noise = (pairs.x_next.to(pairs.mean) - pairs.mean) / pairs.std.reshape(-1, 1, 1, 1)
        log_r = guard_log_ratio(noise, mean, pairs.mean)
    else:
        log_r = log_ratio(log_prob, pairs.log_prob)
    loss = weight * ppo_clip(log_r, advantage, eps_low=objective.eps_low, eps_high=objective.eps_high)
    kl = torch.zeros_like(log_r)
    if mean_ref is not None:
        kl = gaussian_kl(mean, mean_ref, pairs.std, log_prob_reduction=kernel.log_prob_reduction)  # type: ignore[arg-type]
        loss = loss + objective.beta * kl
    return PairTerms(loss=loss, log_ratio=log_r.detach(), kl=kl.detach())


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The part of the samples that one optimizer update sees."""

    samples: Tensor
    """[n] int64, this process's samples, as positions in its experience; may be empty."""
    live_total: int
    """Samples of all processes in this update."""


def chunks(experience: Experience, updates: int, seed: int, iteration: int) -> list[Chunk]:
    """Split the live samples of all processes at random into one part per update; independent of the world
    size."""
    live = np.flatnonzero(experience.live.numpy())
    order = np.random.default_rng(sample_seed(seed, "updates", iteration)).permutation(live)
    size = len(experience.trajectory)
    found = []
    for part in np.array_split(order, updates):
        own = np.sort(part[(part >= experience.first) & (part < experience.first + size)]) - experience.first
        if len(part):
            found.append(Chunk(samples=torch.from_numpy(own), live_total=len(part)))
    return found


def accumulate(
    module: nn.Module,
    team: Team,
    experience: Experience,
    chunk: Chunk,
    weight: Tensor,
    objective: ObjectiveSettings,
    settings: OptimizerSettings,
) -> Tensor:
    """Backward through one chunk in micro-batches; the gradients equal those of one big batch.

    The denominator is the number of judged (sample, step) pairs of all processes, divided by the updates of
    the iteration. Samples without signal count in it, so leaving them out changes nothing but the time.

    Args:
        module: a `ReplayModule`, possibly wrapped.
        team: accelerator and policy.
        experience: of this process.
        chunk: which samples.
        weight: [T] step weights.
        objective: the loss.
        settings: micro-batch size, updates per iteration.

    Returns:
        [8] float64 on the device: sums over this process's pairs of (1, r − 1, (r − 1)², clipped low, clipped
        high, KL), its share of the loss, and the largest |log r|.
    """
    trajectory, device = experience.trajectory, experience.advantage.device
    accelerator = team.accelerator
    steps = len(experience.trained_steps)
    pairs_total = experience.valid_total * steps / settings.updates_per_iteration
    tokens = torch.tensor(pairs_total, dtype=torch.float64, device=device)
    counts = Counts(
        tokens=tokens, sequences=tokens, length=torch.ones_like(tokens), groups=torch.zeros_like(tokens)
    )
    step_weight = weight[list(trajectory.sde_steps)].to(device)
    sums = torch.zeros(8, dtype=torch.float64, device=device)
    for sample, step, present, last in _micro_batches(experience, chunk, settings.micro_batch):
        pairs = trajectory.pairs(sample, step)
        advantage = experience.advantage[sample.to(device)]
        with nullcontext() if last else accelerator.no_sync(module):
            terms = pair_terms(
                module,
                team,
                experience.condition.select(sample),
                pairs,
                trajectory.kernel,
                advantage,
                step_weight[step.to(device)],
                objective,
            )
            mask = torch.full_like(terms.loss, float(present))
            share = aggregate(terms.loss, mask, "token_mean", counts)
            accelerator.backward(share * accelerator.num_processes)  # DDP averages over processes
        if present:
            _add(sums, terms, advantage, share.detach(), objective)
    return sums


def _micro_batches(
    experience: Experience, chunk: Chunk, size: int
) -> Iterator[tuple[Tensor, Tensor, bool, bool]]:
    """(sample, step, present, last): flat pairs; a process without any gets one absent pair, as DDP must
    meet."""
    steps = torch.tensor(experience.trained_steps)
    if len(chunk.samples) == 0:
        yield torch.zeros(1, dtype=torch.int64), steps[:1], False, True
        return
    sample = chunk.samples.repeat_interleave(len(steps))
    step = steps.repeat(len(chunk.samples))
    for start in range(0, len(sample), size):
        rows = slice(start, start + size)
        yield sample[rows], step[rows], True, start + size >= len(sample)


def _add(
    sums: Tensor, terms: PairTerms, advantage: Tensor, share: Tensor, objective: ObjectiveSettings
) -> None:
    shift = torch.expm1(terms.log_ratio).double()
    low = (advantage < 0) & (shift < -objective.eps_low)
    high = (advantage > 0) & (shift > objective.eps_high)
    columns = torch.stack([torch.ones_like(shift), shift, shift.square(), low, high, terms.kl.double()])
    sums[:6] += columns.sum(1)
    sums[6] += share.double()
    sums[7] = torch.maximum(sums[7], terms.log_ratio.abs().max().double())
