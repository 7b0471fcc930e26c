# SPDX-License-Identifier: Apache-2.0
"""A diffusion policy trained by regression of its velocity at noised end points: DiffusionNFT, AWM, RAM, ...

The rows are `visalign.core.REGRESSIONS`. They need no log-probs and no ratio: they sample along the ODE on
any timesteps and learn from clean latents alone, but for "opd", which learns at the states that it visits.

Where this deviates from the published code, always on purpose:
* the old policy is not asked while it is the current one, and the reference only where the row leans on it;
* samples without signal are left out where they have no gradient, but stay in the denominator;
* levels and noise are functions of (seed, sample or group, pass): a resumed run equals an uninterrupted one;
* noise levels are stratified over the sampler's timesteps: S levels of a sample lie in S equal parts of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from visalign.core.groups.group_statistics import group_extremes
from visalign.core.groups.labels import group_index
from visalign.core.regression.losses import covariance_guidance
from visalign.core.regression.rows import MATRIX_SIGNALS, PairOutput, Regression
from visalign.core.regression.signals import best_worst_pairs
from visalign.core.surrogates.kl import velocity_kl
from visalign.errors import UserError
from visalign.flow.noise import initial_noise
from visalign.flow.rollout import velocity_of
from visalign.interfaces import Condition, DiffusionPolicy
from visalign.seeds import sample_seed
from visalign.training.loop.algorithm import Collected, Context
from visalign.training.loop.ema import EMA
from visalign.training.loop.judging import reward_weights
from visalign.training.loop.processes import no_sync_unless_last
from visalign.training.loop.sharding import local_shard, max_over_processes
from visalign.training.policy.update import split_updates

from .experts import Experts
from .flow_grpo import choose_steps
from .guidance import check_guidance, guided
from .images import ImageAlgorithm, Images
from .merging import mergeable_adapters, merged_adapters
from .rollout_settings import RolloutSettings
from .settings import DiffusionObjectiveSettings, check_sampling

OLD = "old"
"""File stem of the old policy in a checkpoint."""
SUMS = ("pairs", "loss/policy", "loss/kl", "match_error", "anchor_distance")
"""What is added up over an update's pairs."""


class VelocityModule(nn.Module):
    """The policy's velocity as a module, so that DDP wraps it and synchronises the policy's gradients."""

    def __init__(self, policy: DiffusionPolicy) -> None:
        super().__init__()
        self.network = policy.module
        self._policy = policy

    def forward(self, condition: Condition, x: Tensor, sigma: Tensor, time: Tensor) -> Tensor:
        """[N, ...] under the current weights."""
        return velocity_of(self._policy, x, sigma, condition, time)


@dataclass(kw_only=True)
class EndPoints:
    """What an iteration learns from."""

    made: Images
    signal: Tensor
    """[B] of all processes: what each sample says."""
    present: Tensor
    """bool [B]."""
    value: Tensor
    """[B] which of a group is the better: the reward, or what a row for several rewards makes of them."""
    levels: int
    """S, noise levels that each sample is trained at."""
    visited: Sequence[int] = ()
    """Of a row that learns at visited states: the S stochastic steps, by their place among them."""
    guidance: Tensor | None = None
    """[b, ...] of this process's samples, where the row takes the group's."""
    kl: float = 0.0
    """k of this iteration."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RegressionStep:
    """One optimizer update."""

    units: list[Tensor]
    """Samples, places among the B, that a loss is made of: one each, or those of a group."""
    count: int
    """Units that the loss is a mean over, those without a gradient included."""
    epoch: int
    kl: float
    """k of this iteration."""
    on_policy: bool
    """Whether the weights are still those of the rollout, so that the old policy need not be asked."""


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    """What the policies say of N pairs."""

    pairs: PairOutput
    signal: Tensor
    kl: Tensor | None
    """[N] k · mean |v − v_ref|²."""


class VelocityRegression(ImageAlgorithm):
    """Trains a diffusion policy on a reward by a row of `REGRESSIONS`; an `Algorithm` for
    `visalign.training.loop.trainer.Trainer`.

    Args: as `FlowGRPO`; `objective.algorithm` names a regression.

    Raises:
        UserError: settings that do not fit each other.
    """

    usual = "diffusion_nft"

    def begin(self) -> None:
        """The row, its levels, and the module that the processes share or divide."""
        policy = self.policy
        row = regression_for_run(self.settings, self.rollout, self.accelerator.num_processes)
        prediction = "uniform" if policy.prediction == "velocity" else policy.prediction
        self.row = replace(row, weighting=prediction) if row.weighting == "prediction" else row
        self.experts = None
        if self.row.anchor == "expert":
            self.experts = Experts(policy, self.settings.experts or {}, self.source.records)
        self.module = self.spread(
            VelocityModule(policy),
            asks_reference=self.row.asks_reference,
            joins="the samples of a group" if self.row.of_groups else None,
        )
        self._merging = mergeable_adapters(policy.module) if self.rollout.merge_adapters else []
        self._old: EMA | None = None
        for scale in (self.rollout.guidance, self.row.reference_guidance):
            check_guidance(policy, scale, self.source.records[0])

    def collect(self, run: Context) -> Collected:
        """Sample with the old policy, decode and judge one iteration's groups."""
        updates = self.settings.epochs * run.optimizer.updates_per_iteration
        if self._old is None and self.row.anchor == "old" and (self.row.keeps_old or updates > 1):
            self._old = EMA(self.policy.trainable_parameters(), decay=0.5, warmup=False)
        if self._old is not None and not self.row.keeps_old:
            self._blend(0.0)
        old = self._as_old() if self.row.keeps_old else nullcontext()
        steps, visited = self._sde_steps(run.counters.iteration)
        merged = merged_adapters(self._merging) if self._merging else nullcontext()
        with old, self.unsharded(), merged, guided(self.policy, self.rollout.guidance):
            made = self.constrained(self.source.collect(run.counters.iteration, run.clock, steps), run)
        experience = self._said(made, visited, self._weights(run))
        return Collected(experience=experience, samples=self.source.samples, metrics=made.metrics)

    def _sde_steps(self, iteration: int) -> tuple[Sequence[int], Sequence[int]]:
        """The stochastic steps, where the row learns at what they visit, and which of them (by place) it
        takes."""
        if not self.row.visited:
            return (), ()
        return choose_steps(self.rollout, self.seed, iteration)

    def _weights(self, run: Context) -> Sequence[float]:
        """Of the rewards, for a row that takes them one by one."""
        named = reward_weights(self.source.reward).values()
        return list(named) if self.balance is None else self.balance.weights(run)

    def _said(self, made: Images, visited: Sequence[int], weights: Sequence[float]) -> EndPoints:
        """What the samples say under weights of the rewards."""
        several = self.row.signal in MATRIX_SIGNALS
        reward = made.columns if several else made.value
        signal, present = self.row.prepare(reward, made.group, valid=made.valid, weights=weights)
        value = signal if several else made.value
        levels = len(visited) or self.row.level_count(self.rollout.steps)
        experience = EndPoints(
            made=made, signal=signal, present=present, value=value, levels=levels, visited=visited
        )
        if self.row.loss == "covariance":
            experience.guidance = self._guidance(experience)
        return experience

    def _guidance(self, experience: EndPoints) -> Tensor:
        """[b, ...] the direction of each sample's group."""
        made = experience.made
        x0 = made.trajectory.latents
        found = torch.zeros(x0.shape, dtype=torch.promote_types(x0.dtype, torch.float32), device=x0.device)
        for label in made.batch.group_id.unique():
            of_group = made.batch.group_id == label
            places = (of_group & experience.present[made.first : made.first + len(x0)]).nonzero()[:, 0]
            signal = experience.signal[made.first + places].to(found)
            if len(places):
                found[of_group] = covariance_guidance(x0[places], signal)
        return found

    def prepare(self, experience: EndPoints, run: Context) -> list[RegressionStep]:
        """The units of each update and their number, over all processes' samples."""
        if self.balance is not None and self.balance.is_due(run):

            def gradient(weights: Sequence[float]) -> None:
                alone = self._said(experience.made, experience.visited, weights)
                for step in self._steps(alone, run)[:1]:
                    self.backward(alone, replace(step, kl=0.0), run)

            self.balance.measure(run, self.parameters(), gradient)
            balanced = self._said(experience.made, experience.visited, self.balance.weights(run))
            vars(experience).update(vars(balanced))
        steps = self._steps(experience, run)
        if self.balance is not None:
            experience.metrics |= self.balance.metrics(run)
        return steps

    def _steps(self, experience: EndPoints, run: Context) -> list[RegressionStep]:
        row, group = self.row, experience.made.group
        per_epoch = run.optimizer.updates_per_iteration
        parts = split_updates(
            group, self.settings.epochs, per_epoch, self.seed, run.counters.iteration, row.of_groups
        )
        kl = experience.kl = row.kl_at(run.counters.iteration)
        on_policy, steps, trained, seen = self._is_on_policy(), [], 0, 0
        for number, sample in enumerate(parts):
            units, count = self._units(experience, sample, kl > 0, on_policy)
            seen += len(sample)
            if units:
                trained += sum(map(len, units))
                epoch = number // per_epoch
                steps.append(
                    RegressionStep(units=units, count=count, epoch=epoch, kl=kl, on_policy=on_policy)
                )
                on_policy = False
        known = experience.signal[experience.present].abs()
        experience.metrics = {
            "frac_reward_zero_std": float(_silent(experience).double().mean()),
            "advantage_abs": float(known.mean()) if len(known) else 0.0,
            "trained_share": trained / max(1, seen),
        }
        return steps

    def _units(
        self, experience: EndPoints, sample: Tensor, pulls: bool, on_policy: bool
    ) -> tuple[list[Tensor], int]:
        """(those with a gradient, how many the loss is a mean over) of an update's samples."""
        row = self.row
        present = sample[experience.present[sample]]
        pulls = pulls or (row.pulls and not (on_policy and row.anchor == "old"))
        if not row.of_groups:
            live = present if pulls else present[experience.signal[present] != 0]
            return list(live[:, None]), len(present)
        group, value = experience.made.group[present], experience.value[present]
        if row.loss == "dpo":
            return list(present[best_worst_pairs(value, group)]), len(group.unique())
        members = [present[group == label] for label in group.unique()]
        silent = _silent(experience)
        equal = pulls and row.pulls  # else a group of equal rewards says nothing at all
        return [m for m in members if len(m) > 1 and (equal or not silent[m].all())], len(members)

    def backward(self, experience: EndPoints, step: RegressionStep, run: Context) -> dict[str, float]:
        """Add the gradient of the update, in micro-batches of flat (sample, level) pairs."""
        first, size = experience.made.first, len(experience.made.batch)
        own = [unit - first for unit in step.units if first <= int(unit[0]) < first + size]
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.policy.device)
        # Σ over units and levels of ℓ / (count · S); DDP averages gradients over the processes
        share = 1 / (step.count * experience.levels)
        scale = run.counters.loss_scale * self.accelerator.num_processes * share
        batches = list(self._batches(own, experience.levels, run.micro_batch))
        idle, nothing = self.idle(len(batches)), torch.zeros(1, dtype=torch.int64)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            sums += self._backward_batch(experience, step, batch, run.micro_batch, scale, last)
        for _ in range(idle):
            said = self._ask(experience, step, nothing, nothing)
            self.accelerator.backward(said.pairs.v.sum() * 0.0)
        if self.accelerator.num_processes > 1:
            sums = torch.as_tensor(self.accelerator.reduce(sums, "sum"))
        found = dict(zip(SUMS, sums.tolist(), strict=True))
        return {**found, "loss/policy": found["loss/policy"] * share, "loss/kl": found["loss/kl"] * share}

    def _batches(self, units: Sequence[Tensor], levels: int, size: int) -> Iterator[list[tuple[Tensor, int]]]:
        """(unit, level) lists of at most `size` pairs, or of one unit that is larger."""
        batch, held = [], 0
        for unit in units:
            for level in range(levels):
                if batch and held + len(unit) > size:
                    yield batch
                    batch, held = [], 0
                batch.append((unit, level))
                held += len(unit)
        if batch:
            yield batch

    def _backward_batch(
        self,
        experience: EndPoints,
        step: RegressionStep,
        batch: Sequence[tuple[Tensor, int]],
        size: int,
        scale: float,
        last: bool,
    ) -> Tensor:
        """Gradient of some units; their `SUMS`."""
        sample = torch.cat([unit for unit, _ in batch])
        level = torch.cat([torch.full((len(unit),), number) for unit, number in batch])
        lengths = [len(unit) for unit, _ in batch]
        share = torch.cat([torch.full((n,), 1 / n) for n in lengths]).to(self.policy.device)
        if len(sample) <= size:
            with no_sync_unless_last(self.module, self.accelerator, last=last):
                said = self._ask(experience, step, sample, level)
                return self._finish(said, self._loss(said, lengths), share, scale)
        # a group that does not fit: ∂ℓ/∂error of all its samples first, then the network's part by part; one
        # forward more, and the same update
        parts = torch.arange(len(sample)).split(size)
        with torch.no_grad():
            found = [self._ask(experience, step, sample[part], level[part]) for part in parts]
        errors = [self.row.errors(said.pairs) for said in found]
        leaf = torch.cat([error for error, _ in errors]).requires_grad_()
        rest = torch.cat([other for _, other in errors]), torch.cat([said.signal for said in found])
        loss = self.row.group_loss(leaf, *rest)
        (slope,) = torch.autograd.grad(loss, leaf)
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.policy.device)
        for part in parts:
            with no_sync_unless_last(self.module, self.accelerator, last=last and part is parts[-1]):
                said = self._ask(experience, step, sample[part], level[part])
                own = (self.row.errors(said.pairs)[0] * slope[part]).sum()
                sums += self._finish(said, own, share[part], scale)
        sums[SUMS.index("loss/policy")] = float(loss.detach())
        return sums

    def _loss(self, said: _Outputs, lengths: Sequence[int]) -> Tensor:
        """The sum of the units' losses."""
        if not self.row.of_groups:
            return self.row.pair_loss(said.pairs, said.signal).sum()
        rows = (*self.row.errors(said.pairs), said.signal)
        units = zip(*(each.split(list(lengths)) for each in rows), strict=True)
        return torch.stack([self.row.group_loss(*unit) for unit in units]).sum()

    def _finish(self, said: _Outputs, loss: Tensor, share: Tensor, scale: float) -> Tensor:
        """Backward of a micro-batch's sum; its `SUMS`."""
        pull = loss.new_zeros(()) if said.kl is None else (said.kl * share).sum()
        self.accelerator.backward((loss + pull) * scale)
        with torch.no_grad():
            v, anchor = said.pairs.v, said.pairs.anchor
            error = _mean_square(v, said.pairs.target).sum()
            moved = error.new_zeros(()) if anchor is None else _mean_square(v, anchor).sum()
            return torch.stack([error.new_tensor(len(v)), loss, pull, error, moved]).double()

    def _ask(self, experience: EndPoints, step: RegressionStep, sample: Tensor, level: Tensor) -> _Outputs:
        """What the policies say of N pairs.

        Args:
            experience: the end points.
            step: of the update.
            sample: [N] places among this process's samples.
            level: [N] which of the S levels.
        """
        row, made = self.row, experience.made
        condition = made.condition.select(sample)
        x, target, sigma, time = self._noised(experience, sample, level, step.epoch)
        anchor = v_ref = None
        # the others before the own forward: weights are swapped in place
        with torch.no_grad(), self.accelerator.autocast():
            if step.kl > 0 or row.anchor == "reference":
                with self.reference.applied(), guided(self.policy, row.reference_guidance):
                    v_ref = velocity_of(self.policy, x, sigma, condition, time)
            if row.anchor == "old" and not step.on_policy:
                with self._as_old():
                    anchor = velocity_of(self.policy, x, sigma, condition, time)
            if self.experts is not None:
                with guided(self.policy, row.reference_guidance):
                    records = [made.records[i] for i in sample.tolist()]
                    anchor = self.experts.velocity(records, x, sigma, condition, time)
        v = self.module(condition, x, sigma, time)
        old = v.detach() if step.on_policy else anchor
        anchors = {"none": None, "reference": v_ref, "old": old, "expert": anchor}
        guidance = None if experience.guidance is None else experience.guidance[sample.to(x.device)]
        pairs = PairOutput(v=v, target=target, sigma=sigma, anchor=anchors[row.anchor], guidance=guidance)
        kl = step.kl * velocity_kl(v, v_ref) if step.kl > 0 and v_ref is not None else None
        return _Outputs(pairs=pairs, signal=experience.signal[made.first + sample].to(v), kl=kl)

    def _noised(
        self, experience: EndPoints, sample: Tensor, level: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(x_σ [N, ...] as stored, u = ε − x0, σ [N], time [N]) of pairs; u is 0 where x_σ was visited."""
        row, sigmas, made = self.row, self.source.sigmas, experience.made
        if row.visited:
            pairs = made.trajectory.pairs(sample, torch.tensor(experience.visited)[level])
            return pairs.x, torch.zeros_like(pairs.mean), pairs.sigma, pairs.time
        key = made.batch.group_id if row.noise == "group" else made.batch.sample_id
        places = list(zip(key[sample].tolist(), level.tolist(), strict=True))
        # S equal parts of the chosen stretch of the schedule's T steps, one place in each
        draws = [sample_seed(self.seed, "level", one, number, epoch) / 2**63 for one, number in places]
        low, high = row.level_range
        within = (level + torch.tensor(draws, dtype=torch.float64)) / experience.levels
        place = (low + (high - low) * within) * self.rollout.steps
        step = place.long().clamp(max=self.rollout.steps - 1)
        sigma, time = sigmas[step], self.source.times[step.to(self.source.times.device)]
        if row.continuous:
            sigma = torch.lerp(sigmas[step], sigmas[step + 1], (place - step).to(sigmas.dtype))
            time = self.policy.times(sigma)
        if row.noise == "start":
            seeds = self.source.sample_seeds(made.batch.sample_id[sample])
        else:
            seeds = [sample_seed(self.seed, "target noise", one, number, epoch) for one, number in places]
        stored = made.trajectory.latents[sample.to(made.trajectory.latents.device)]
        x0 = stored.to(torch.promote_types(stored.dtype, torch.float32))
        noise = initial_noise(seeds, self.policy.latent_shape).to(x0)
        sigma, time = sigma.to(x0.device), time.to(x0.device)
        wide = sigma.to(x0.dtype).reshape(-1, *[1] * (x0.ndim - 1))
        # x_σ = (1 − σ) x0 + σ ε
        return ((1 - wide) * x0 + wide * noise).to(stored.dtype), noise - x0, sigma.to(x0.dtype), time

    def record(self, experience: EndPoints, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Metrics of the updates."""
        self.divergence = None
        if not sums:
            return experience.metrics
        total = {name: sum(each[name] for each in sums) for name in SUMS}
        policy, kl, pairs = (total[name] for name in ("loss/policy", "loss/kl", "pairs"))
        terms = {"loss/policy": policy / len(sums), "loss/kl": kl / len(sums)} if self.row.kl else {}
        anchor = {} if self.row.anchor == "none" else {"anchor_distance": total["anchor_distance"] / pairs}
        if experience.kl > 0:
            self.divergence = kl / len(sums) / experience.kl
        elif self.row.anchor == "reference":
            self.divergence = total["anchor_distance"] / pairs
        loss = {"loss": (policy + kl) / len(sums), **terms}
        matched = {} if self.row.visited else {"match_error": total["match_error"] / pairs}
        return {**experience.metrics, **loss, **anchor, **matched}

    def finish(self, run: Context) -> None:
        """Move the old policy after the new one, and the reference where it is due."""
        super().finish(run)
        if self._old is not None and self.row.keeps_old:
            self._blend(self.row.decay_at(run.counters.iteration - 1))
            run.tensors[OLD] = self._old.state()

    def restore(self, run: Context) -> None:
        """Take up the old policy and the reference of a checkpoint."""
        super().restore(run)
        if self.row.keeps_old and self.row.anchor == "old":
            self._old = EMA(self.policy.trainable_parameters(), decay=0.5, warmup=False)
            self._old.load(run.tensors[OLD])

    def _blend(self, decay: float) -> None:
        """θ_old ← decay θ_old + (1 − decay) θ."""
        assert self._old is not None
        self._old.decay = decay
        self._old.update(1)

    def _as_old(self) -> AbstractContextManager[None]:
        """Inside, the policy is the old one; without one it is the current."""
        return nullcontext() if self._old is None else self._old.applied()

    def _is_on_policy(self) -> bool:
        """Whether the old policy is the current one, bit for bit, in all processes."""
        if self._old is None:
            return True
        stored, named = self._old.state(), self.policy.trainable_parameters()
        same = all(
            torch.equal(local_shard(stored[name]), local_shard(weight.detach()).float())
            for name, weight in named
        )
        return same if not self.sharding else not max_over_processes(int(not same), self.accelerator)


def regression_for_run(
    objective: DiffusionObjectiveSettings, rollout: RolloutSettings, world: int = 1
) -> Regression:
    """The regression of a run, refused where the rollout or the processes do not fit it.

    Raises:
        UserError: with what to set instead.
    """
    row = objective.regression
    if row is None:
        raise UserError(f"objective.algorithm={objective.algorithm} is no regression; use FlowGRPO.")
    check_sampling(objective, rollout)
    if (row.of_groups or row.loss == "covariance") and rollout.prompts_per_iteration % world:
        raise UserError(
            f"objective.algorithm={objective.algorithm} compares the samples of a group, and "
            f"rollout.prompts_per_iteration={rollout.prompts_per_iteration} would spread one over {world} "
            f"processes. Use a multiple of {world}."
        )
    return row


def _silent(experience: EndPoints) -> Tensor:
    """bool [B]: the sample's group has one reward alone, or the sample none."""
    index, groups = group_index(experience.made.group, len(experience.present))
    low, high = group_extremes(experience.value, experience.present, index, groups)
    return ~experience.present | (low == high)[index]


def _mean_square(a: Tensor, b: Tensor) -> Tensor:
    """mean |a − b|² of each row."""
    return (a - b).square().flatten(1).mean(1)
