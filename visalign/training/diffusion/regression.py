# SPDX-License-Identifier: Apache-2.0
"""Train a diffusion policy by regression of its velocity at noised end points: DiffusionNFT, AWM, RAM, ...

The algorithms are `visalign.core.REGRESSIONS`. They need no log-probs and no ratio: they sample along the ODE
on any timesteps and learn from clean latents alone, except "opd", which learns at the states that it visits.

Deliberate differences from the published code:
* the old policy is not evaluated while it is the current one, and the reference only where the loss uses it;
* samples without signal are left out where they have no gradient, but stay in the denominator;
* samples of equal reward are ranked, or paired, in an order drawn anew for each update;
* levels and noise are functions of (seed, sample or group, pass): a resumed run equals an uninterrupted one;
* noise levels are stratified over the sampler's timesteps: S levels of a sample lie in S equal parts of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visalign.core.groups.group_statistics import group_extremes
from visalign.core.groups.labels import group_index
from visalign.core.regression.losses import matching_error
from visalign.core.regression.rows import GUIDANCE, MATRIX_SIGNALS, REGRESSIONS, PairOutput, Regression
from visalign.core.regression.signals import best_worst_pairs, level_position
from visalign.core.surrogates.kl import velocity_kl
from visalign.flow.noise import initial_noise, queue_copy
from visalign.flow.rollout import velocity_of
from visalign.seeds import sample_seed
from visalign.training.loop.algorithm import Collected, Context
from visalign.training.loop.ema import EMA
from visalign.training.loop.judging import reward_weights
from visalign.training.loop.processes import no_sync_unless_last
from visalign.training.loop.sharding import local_shard, max_over_processes
from visalign.training.policy.update import split_updates
from visalign.training.policy.winners import KEY as REPLAY

from .experts import Experts
from .images import ImageAlgorithm
from .merging import guidance_scale, mergeable_adapters, merged_adapters
from .samples import PendingImages, ScoredImages, SelfImitation, StoredImage

LEVELS = 1000  # Training levels of a model, of which a density draws
OLD, AVERAGE = "old", "average"  # File stems of the old policy's weights and of the average's in a checkpoint
PULLS = ("loss/kl", "loss/average")  # Losses that draw to the reference and to the average
SUMS = ("pairs", "loss/policy", *PULLS, "match_error", "anchor_distance")  # Sums over an update's pairs


@dataclass(kw_only=True)
class EndPoints:
    """Training data of an iteration."""

    row: Regression
    images: ScoredImages
    signal: Tensor  # [B] of all processes: advantage or weight of each sample
    present: Tensor  # bool [B]
    value: Tensor  # [B] order within a group: the reward, or the combined signal of several rewards
    levels: int  # S, noise levels that each sample is trained at
    visited: Sequence[int] = ()
    """For an algorithm that learns at visited states: the S stochastic steps, by index among them."""
    guidance: Tensor | None = None  # [b, ...] of this process's samples, where the loss takes the group's direction.
    kl: float = 0.0  # k of this iteration
    metrics: dict[str, float] = field(default_factory=dict)
    drawn: tuple[int, ...] = ()  # Of a replay: further parts of the seeds of its noise
    replays: Sequence[EndPoints | None] = ()  # Self-imitation's replay of each update


Outputs = tuple[PairOutput, Tensor, dict[str, Tensor]]
"""Outputs of the policies on N pairs, signal [N], and [N] those of `PULLS` whose k is above 0."""


@dataclass(frozen=True, kw_only=True)
class RegressionStep:
    """Optimizer update."""

    units: list[Tensor]  # Samples of one loss term, indices among the B: one each, or those of a group
    count: int  # Units that the loss is a mean over, those without a gradient included
    epoch: int
    kl: float  # k of this iteration
    average_kl: float  # That of the pull to the average
    replay: EndPoints | None  # Images of earlier iterations
    on_policy: bool  # True while the weights are those of the rollout, so that the old policy need not be evaluated


class VelocityRegression(ImageAlgorithm):
    """Trains a diffusion policy on a reward by one of `REGRESSIONS`, which `objective.algorithm` names."""

    algorithms = REGRESSIONS
    default = "diffusion_nft"

    def setup(self) -> None:
        policy, row = self.policy, self.settings.regression
        assert row is not None
        prediction = "uniform" if policy.prediction == "velocity" else policy.prediction
        self.row = replace(row, weighting=prediction) if row.weighting == "prediction" else row
        if row.density == "prediction":
            self.row = replace(self.row, density="logit_normal" if policy.prediction == "velocity" else "uniform")
        self.experts = Experts(policy, self.settings.experts or {}, self.records) if row.anchor == "expert" else None
        self.module = self.distribute(
            velocity_of,
            needs_reference=self.row.asks_reference,
            joins="the samples of a group" if self.row.of_groups else None,
        )
        self.imitation: SelfImitation | None = None
        if self.replay_settings is not None:
            self.imitation = SelfImitation(StoredImage, self.replay_settings, self.seed)
        self._merged_layers = mergeable_adapters(policy.module) if self.rollout.merge_adapters else []
        self._levels: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._old: EMA | None = None
        self._average: EMA | None = None
        for scale in (self.rollout.guidance, self.row.reference_guidance):
            with guidance_scale(policy, scale):  # refuses a policy without one before anything is sampled
                pass

    def collect(self, run: Context) -> Collected:
        """Sample with the old policy, decode and score one iteration's groups."""
        iteration = run.counters.iteration
        updates = self.settings.epochs * run.optimizer.updates_per_iteration
        if self._old is None and self.row.asks_old and (self.row.keeps_old or updates > 1):
            self._old = EMA(self.policy.trainable_parameters(), decay=0.5, warmup=False)
        if self._old is not None and not self.row.keeps_old:
            self._old.update(1, decay=0.0)
        if self._average is None and self.row.average_kl > 0:
            self._average = EMA(self.policy.trainable_parameters(), decay=0.5, warmup=False)
        old = self._with_old() if self.row.keeps_old else nullcontext()
        steps, visited = self.rollout.choose_steps(self.seed, iteration) if self.row.visited else ((), ())

        def sample_round(number: int) -> PendingImages:
            self.draw_references(number, iteration, run.clock)
            with merged_adapters(self._merged_layers) if self._merged_layers else nullcontext():
                return self.sample(number, run.clock, steps, iteration)

        with old, self.unsharded(), guidance_scale(self.policy, self.rollout.guidance):
            images, collected = self.collect_images(run, sample_round)
        if images is None:
            return collected
        plain = list(reward_weights(self.scorer.reward).values())
        experience = self._end_points(images, visited, plain if self.balance is None else self.balance.weights(run))
        return replace(collected, experience=experience)

    def _end_points(self, images: ScoredImages, visited: Sequence[int], weights: Sequence[float]) -> EndPoints:
        by_column = self.row.signal in MATRIX_SIGNALS
        reward = images.columns if by_column else images.value
        signal, present = self.row.prepare(reward, images.group, valid=images.valid, weights=weights)
        experience = EndPoints(
            row=self.row,
            images=images,
            signal=signal,
            present=present,
            value=signal if by_column else images.value,
            levels=len(visited) or self.row.level_count(self.rollout.steps),
            visited=visited,
        )
        if (direction := GUIDANCE.get(self.row.loss)) is not None:
            x0, group = images.trajectory.latents, images.batch.group_id
            own_present = present[images.own]
            change = experience.guidance = torch.zeros_like(x0, dtype=torch.promote_types(x0.dtype, torch.float32))
            for label in group.unique():
                rows = ((group == label) & own_present).nonzero()[:, 0]
                if len(rows):
                    change[rows] = direction(x0[rows], signal[images.own[rows]].to(change))
        return experience

    def prepare(self, experience: EndPoints, run: Context) -> list[RegressionStep]:
        """Compute the units of each update and their number, over all processes' samples."""
        if self.balance is not None and self.balance.is_due(run):

            def gradient(weights: Sequence[float]) -> None:
                weighted = self._end_points(experience.images, experience.visited, weights)
                for step in self._steps(weighted, run)[:1]:
                    self.backward(weighted, replace(step, kl=0.0, average_kl=0.0), run)

            self.balance.measure(run, self.parameters(), gradient)
            balanced = self._end_points(experience.images, experience.visited, self.balance.weights(run))
            vars(experience).update(vars(balanced))
        if self.imitation is not None:
            experience.replays = self._replays(self.imitation, experience.images, run)
        steps = self._steps(experience, run)
        if self.balance is not None:
            experience.metrics |= self.balance.metrics(run)
        return steps

    def _replays(self, imitation: SelfImitation, images: ScoredImages, run: Context) -> list[EndPoints | None]:
        """Draw the end points that each update replays, under a regression weighted by Ã."""
        plain: Any = {"anchor": "none", "kl": 0.0, "kl_until": None, "average_kl": 0.0, "reference_guidance": None}
        row = replace(self.row, loss="weighted", loss_options={}, old_decay=(0, 0.0, 0.0), **plain)
        encode, iteration = partial(self.encode, clock=run.clock), run.counters.iteration
        drawn = imitation.replays(images, self.records, encode, iteration, run.optimizer.updates_per_iteration)
        points: dict[str, Any] = {"row": row, "levels": row.level_count(self.rollout.steps), "drawn": (iteration,)}
        return [
            None if r is None else EndPoints(images=r[0], signal=r[1], present=r[1] > 0, value=r[1], **points)
            for r in drawn
        ]

    def _steps(self, experience: EndPoints, run: Context) -> list[RegressionStep]:
        row, group = self.row, experience.images.group
        epochs, updates, iteration = self.settings.epochs, run.optimizer.updates_per_iteration, run.counters.iteration
        parts = list(split_updates(group, epochs, updates, self.seed, iteration, row.of_groups))
        per_epoch = len(parts) // epochs  # fewer than `updates` where there are fewer groups
        kl = experience.kl = row.kl_at(iteration)
        on_policy, steps, trained, total = self._is_on_policy(), [], 0, 0
        for number, sample in enumerate(parts):
            if row.loss in ("gdro", "dpo"):  # ties are broken by the order
                draw = np.random.default_rng(sample_seed(self.seed, "ties", iteration, number))
                sample = sample[torch.from_numpy(draw.permutation(len(sample)))]
            units, count = self._units(experience, sample, max(kl, row.average_kl) > 0, on_policy)
            total += len(sample)
            replay = experience.replays[number % per_epoch] if experience.replays else None
            if units or replay is not None:
                trained += sum(map(len, units))
                epoch = number // per_epoch
                strength: dict[str, Any] = {"kl": kl, "average_kl": row.average_kl}
                chosen: dict[str, Any] = {"units": units, "count": max(1, count), "replay": replay}
                steps.append(RegressionStep(**chosen, epoch=epoch, on_policy=on_policy, **strength))
                on_policy = False
        magnitude = experience.signal[experience.present].abs()
        experience.metrics = (
            {}
            if row.learns_alike
            else {
                "frac_reward_zero_std": float(_without_signal(experience).double().mean()),
                "advantage_abs": float(magnitude.mean()) if len(magnitude) else 0.0,
                "trained_share": trained / max(1, total),
            }
        )
        return steps

    def _units(self, experience: EndPoints, sample: Tensor, pulls: bool, on_policy: bool) -> tuple[list[Tensor], int]:
        """Split an update's samples into (units with a gradient, number of units of the mean)."""
        row, silent = self.row, _without_signal(experience)
        present = sample[experience.present[sample]]
        pulls = pulls or (row.pulls and not (on_policy and row.anchor == "old"))
        if not row.of_groups:
            silent = silent if row.loss in GUIDANCE else experience.signal == 0  # a group's direction is for all of it
            live = present if pulls else present[~silent[present]]
            return list(live[:, None]), len(present)
        group, value = experience.images.group[present], experience.value[present]
        if row.loss == "dpo":
            return list(present[best_worst_pairs(value, group)]), len(group.unique())
        members = [present[group == label] for label in group.unique()]
        return [m for m in members if len(m) > 1 and (pulls or not silent[m].all())], len(members)

    def backward(self, experience: EndPoints, step: RegressionStep, run: Context) -> dict[str, float]:
        """Add the gradient of the update, in micro-batches of flat (sample, level) pairs."""
        local = experience.images.shares.local
        units = [local[unit] for unit in step.units if int(local[unit[0]]) >= 0]
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.policy.device)
        # Σ over units and levels of ℓ / (count · S); DDP averages gradients over the processes
        share = 1 / (step.count * experience.levels)
        scale = run.counters.loss_scale * self.accelerator.num_processes * share
        batches = list(_batches(units, experience.levels, run.micro_batch))
        idle, zero = self.idle(len(batches)), torch.zeros(1, dtype=torch.int64)  # all processes count before a batch
        for batch in batches:
            sums += self._backward_batch(experience, step, batch, run.micro_batch, scale, batch is batches[-1])
        for _ in range(idle):
            pairs, *_ = self._outputs(experience, step, zero, zero)
            self.accelerator.backward(pairs.v.sum() * 0.0)
        if self.accelerator.num_processes > 1:
            sums = torch.as_tensor(self.accelerator.reduce(sums, "sum"))
        totals: dict[str, float] = dict(zip(SUMS, sums.tolist(), strict=True))
        if self.imitation is not None:
            totals["loss/replay"] = 0.0
        if (replay := step.replay) is not None:
            units = list(torch.arange(len(replay.signal))[:, None])
            part = replace(step, units=units, count=len(units), kl=0.0, average_kl=0.0, replay=None, on_policy=True)
            totals["loss/replay"] = self.backward(replay, part, run)["loss/policy"]
        return totals | {name: totals[name] * share for name in ("loss/policy", *PULLS)}

    def _backward_batch(
        self,
        experience: EndPoints,
        step: RegressionStep,
        batch: Sequence[tuple[Tensor, int]],
        size: int,
        scale: float,
        last: bool,
    ) -> Tensor:
        """Add the gradient of some units; return their `SUMS`."""
        row, sample = experience.row, torch.cat([unit for unit, _ in batch])
        level = torch.cat([torch.full((len(unit),), number) for unit, number in batch])
        lengths = [len(unit) for unit, _ in batch]
        share = queue_copy(torch.cat([torch.full((n,), 1 / n) for n in lengths]), self.policy.device)
        if len(sample) <= size:
            with no_sync_unless_last(self.module, self.accelerator, last=last):
                outputs = self._outputs(experience, step, sample, level)
                return self._backward_sum(outputs, self._loss(row, outputs, lengths), share, scale)
        # a group that does not fit: ∂ℓ/∂error of all its samples first, then the network's gradient chunk by
        # chunk; one forward more, and the same update
        parts = torch.arange(len(sample)).split(size)
        with torch.no_grad():
            chunks = [self._outputs(experience, step, sample[part], level[part]) for part in parts]
        error, *values = map(torch.cat, zip(*(row.errors(pairs) for pairs, *_ in chunks), strict=True))
        leaf = error.requires_grad_()
        loss = row.group_loss((leaf, *values), torch.cat([signal for _, signal, _ in chunks]))
        (slope,) = torch.autograd.grad(loss, leaf)
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.policy.device)
        for part in parts:
            with no_sync_unless_last(self.module, self.accelerator, last=last and part is parts[-1]):
                outputs = self._outputs(experience, step, sample[part], level[part])
                surrogate = (row.errors(outputs[0])[0] * slope[part]).sum()
                sums += self._backward_sum(outputs, surrogate, share[part], scale)
        sums[SUMS.index("loss/policy")] = float(loss.detach())
        return sums

    def _loss(self, row: Regression, outputs: Outputs, lengths: Sequence[int]) -> Tensor:
        pairs, signal, _ = outputs
        if not row.of_groups:
            return row.pair_loss(pairs, signal).sum()
        units = zip(*(column.split(list(lengths)) for column in (*row.errors(pairs), signal)), strict=True)
        return torch.stack([row.group_loss(unit[:-1], unit[-1]) for unit in units]).sum()

    def _backward_sum(self, outputs: Outputs, loss: Tensor, share: Tensor, scale: float) -> Tensor:
        """Backpropagate a micro-batch's sum; return its `SUMS`."""
        pairs, _, pulls = outputs
        pull = torch.stack([(pulls[name] * share).sum() if name in pulls else loss.new_zeros(()) for name in PULLS])
        self.accelerator.backward((loss + pull.sum()) * scale)
        with torch.no_grad():
            error = matching_error(pairs.v, pairs.target, pairs.sigma).sum()
            moved = matching_error(pairs.v, pairs.v if pairs.anchor is None else pairs.anchor, pairs.sigma).sum()
            return torch.stack([error.new_tensor(len(pairs.v)), loss, *pull, error, moved]).double()

    def _outputs(self, experience: EndPoints, step: RegressionStep, sample: Tensor, level: Tensor) -> Outputs:
        """Evaluate the policies on N pairs of this process's `sample` [N] at `level` [N], below S."""
        row, images = experience.row, experience.images
        condition = images.condition.select(sample)
        x, target, sigma, time = self._noised(experience, sample, level, step.epoch)
        old = expert = v_ref = v_average = None
        # the others before the own forward: weights are swapped in place
        with torch.no_grad(), self.accelerator.autocast():
            if step.kl > 0 or row.anchor == "reference":
                with self.reference.applied(), guidance_scale(self.policy, row.reference_guidance):
                    v_ref = velocity_of(self.policy, x, sigma, condition, time)
            if row.asks_old and not step.on_policy:
                with self._with_old():
                    old = velocity_of(self.policy, x, sigma, condition, time)
            if step.average_kl > 0 and self._average is not None:
                with self._average.applied():
                    v_average = velocity_of(self.policy, x, sigma, condition, time)
            if self.experts is not None:
                with guidance_scale(self.policy, row.reference_guidance):
                    records = [images.records[i] for i in sample.tolist()]
                    expert = self.experts.velocity(records, x, sigma, condition, time)
        v = self.module(x, sigma, condition, time)
        old = v.detach() if step.on_policy else old
        anchors = {"none": None, "reference": v_ref, "old": old, "expert": expert}
        guidance = None if experience.guidance is None else experience.guidance[sample.to(x.device)]
        networks = {"anchor": anchors[row.anchor], "old": old if row.loss == "dgpo" else None, "guidance": guidance}
        pairs = PairOutput(v=v, target=target, sigma=sigma, **networks)
        strengths = zip(PULLS, (step.kl, step.average_kl), (v_ref, v_average), strict=True)
        pulls = {name: k * velocity_kl(v, other) for name, k, other in strengths if k > 0 and other is not None}
        return pairs, experience.signal[images.own[sample]].to(v), pulls

    def _noised(
        self, experience: EndPoints, sample: Tensor, level: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Noise end points: (x_σ [N, ...] as stored, u = ε − x0, σ [N], time [N]); u is 0 at visited states."""
        row, images, draw = experience.row, experience.images, (epoch, *experience.drawn)
        if row.visited:
            pairs = images.trajectory.pairs(sample, torch.tensor(experience.visited)[level])
            return pairs.x, torch.zeros_like(pairs.mean), pairs.sigma, pairs.time
        key = images.batch.group_id if row.noise == "group" else images.batch.sample_id
        keys = list(zip(key[sample].tolist(), level.tolist(), strict=True))
        # S equal parts of the chosen range of the schedule's T steps, one position in each
        draws = [sample_seed(self.seed, "level", label, number, *draw) / 2**63 for label, number in keys]
        low, high = row.level_range
        within = (level + torch.tensor(draws, dtype=torch.float64)) / experience.levels
        share, sigmas, times = low + (high - low) * within, self.sigmas, self.times
        if row.density != "sampler":
            share = level_position(share, row.density, **row.density_options)
            sigmas, times = self._training_levels()
        position = share * (len(sigmas) - 1)
        step = position.long().clamp(max=len(sigmas) - 2)
        sigma, time = sigmas[step], times[step.to(times.device)]
        if row.continuous:
            sigma = torch.lerp(sigmas[step], sigmas[step + 1], (position - step).to(sigmas.dtype))
            time = self.policy.times(sigma)
        if row.noise == "start":
            seeds = self.sample_seeds(images.batch.sample_id[sample])
        else:
            seeds = [sample_seed(self.seed, "target noise", label, number, *draw) for label, number in keys]
        latents = images.trajectory.latents
        stored = latents[queue_copy(sample, latents.device)]
        x0 = stored.to(torch.promote_types(stored.dtype, torch.float32))
        noise = queue_copy(initial_noise(seeds, self.policy.latent_shape), x0.device).to(x0.dtype)
        sigma, time = queue_copy(sigma, x0.device), queue_copy(time, x0.device)
        s = sigma.to(x0.dtype).reshape(-1, *[1] * (x0.ndim - 1))
        # x_σ = (1 − σ) x0 + σ ε
        return ((1 - s) * x0 + s * noise).to(stored.dtype), noise - x0, sigma.to(x0.dtype), time

    def _training_levels(self) -> tuple[Tensor, Tensor]:
        """Return the model's training levels [LEVELS + 1] and their times, which may depend on the image size."""
        shape = tuple(self.policy.latent_shape)
        if shape not in self._levels:
            last = self.policy.prediction != "velocity"  # diffusers' offset of 1 leaves such schedules one level fewer
            sigmas = self.policy.sigmas(LEVELS - last, timestep_schedule="plain")
            self._levels[shape] = sigmas, self.policy.times(sigmas)
        return self._levels[shape]

    def record(self, experience: EndPoints, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        self.divergence = None
        if self.imitation is not None:
            experience.metrics |= self.imitation.metrics()
        if not sums:
            return experience.metrics
        total = {name: sum(update[name] for update in sums) for name in SUMS}
        total["loss/replay"] = sum(update.get("loss/replay", 0.0) for update in sums)
        kl, pairs = total["loss/kl"], max(1.0, total["pairs"])
        used = {"loss/policy": True, "loss/kl": self.row.kl > 0, "loss/average": self.row.average_kl > 0}
        used["loss/replay"] = self.imitation is not None
        terms = {name: total[name] / len(sums) for name, is_used in used.items() if is_used}
        anchor = {} if self.row.anchor == "none" else {"anchor_distance": total["anchor_distance"] / pairs}
        if experience.kl > 0:
            self.divergence = kl / len(sums) / experience.kl
        elif self.row.anchor == "reference":
            self.divergence = total["anchor_distance"] / pairs
        loss = {"loss": sum(terms.values()), **(terms if len(terms) > 1 else {})}
        matched = {} if self.row.visited else {"match_error": total["match_error"] / pairs}
        return {**experience.metrics, **loss, **anchor, **matched}

    def finish(self, run: Context) -> None:
        """Move the old policy and the average towards the new one, and reset the reference where it is due."""
        super().finish(run)
        if self.imitation is not None:
            run.tensors[REPLAY] = self.imitation.state()
        if self._old is not None and self.row.keeps_old:
            # θ_old ← decay θ_old + (1 − decay) θ
            self._old.update(1, decay=self.row.decay_at(run.counters.iteration - 1))
            run.tensors[OLD] = self._old.state()
        if self._average is not None:
            self._average.update(1, decay=self.row.decay_at(run.counters.iteration, of_average=True))
            run.tensors[AVERAGE] = self._average.state()

    def restore(self, run: Context) -> None:
        """Load the old policy, the average and the reference of a checkpoint."""
        super().restore(run)
        if self.imitation is not None:
            self.imitation.load(run.tensors[REPLAY])
        if self.row.keeps_old and self.row.asks_old:
            self._old = EMA(self.policy.trainable_parameters(), decay=0.5, warmup=False)
            self._old.load(run.tensors[OLD])
        if self.row.average_kl > 0:
            self._average = EMA(self.policy.trainable_parameters(), decay=0.5, warmup=False)
            self._average.load(run.tensors[AVERAGE])

    def _with_old(self) -> AbstractContextManager[None]:
        return nullcontext() if self._old is None else self._old.applied()

    def _is_on_policy(self) -> bool:
        """Return True where the old policy is the current one, bit for bit, in all processes."""
        if self._old is None:
            return True
        stored = self._old.state()
        same = all(
            torch.equal(local_shard(stored[name]), local_shard(weight.detach()).float())
            for name, weight in self.policy.trainable_parameters()
        )
        return same if not self.sharding else not max_over_processes(int(not same), self.accelerator)


def _batches(units: Sequence[Tensor], levels: int, size: int) -> Iterator[list[tuple[Tensor, int]]]:
    """Yield (unit, level) lists of at most `size` pairs, or of one unit that is larger."""
    batch, count = [], 0
    for unit in units:
        for level in range(levels):
            if batch and count + len(unit) > size:
                yield batch
                batch, count = [], 0
            batch.append((unit, level))
            count += len(unit)
    if batch:
        yield batch


def _without_signal(experience: EndPoints) -> Tensor:
    """Mark [B] samples that have no reward, or whose group's rewards are all equal."""
    index, groups = group_index(experience.images.group, len(experience.present))
    low, high = group_extremes(experience.value, experience.present, index, groups)
    return ~experience.present | (low == high)[index]
