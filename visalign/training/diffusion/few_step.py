# SPDX-License-Identifier: Apache-2.0
"""Distil a few-step student from a guided teacher, and align it with a reward: DMD2, TDM, TDM-R1.

The algorithms are `visalign.core.FEW_STEP`. Student, critic and surrogate are trained weights of one shape on one
base, so that the network is in memory once. No denoising loss touches the student, which would blur it.

Deliberate differences from the published code:
* the critic and the surrogate learn from the iteration's paths, which the student has left by less than one iteration;
* the surrogate is trained where the student is compared, at noised predictions x̂0, not at noised boundaries;
* its errors are those of one scale of guidance; the code compares an unguided surrogate with a guided reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from visalign.core.advantages.group import group_advantages
from visalign.core.regression.few_step import (
    FEW_STEP,
    conditional_renoise,
    preference_weights,
    stopped_samples,
    surrogate_loss,
)
from visalign.core.surrogates.ratios import expand_over_event
from visalign.errors import UserError
from visalign.flow.noise import initial_noise
from visalign.flow.rollout import check_finite, first_latents, velocity_of
from visalign.flow.trajectory import Trajectory, trajectory_of_latents
from visalign.interfaces import Condition, DiffusionPolicy
from visalign.seeds import sample_seed
from visalign.swapping import lora_disabled, swapped_weights
from visalign.training.loop.algorithm import Collected, Context
from visalign.training.loop.ema import EMA
from visalign.training.loop.processes import synced_last
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.sampler import Batch
from visalign.training.policy.update import split_updates

from .images import ImageAlgorithm
from .merging import guidance_scale

STUDENT, TEACHER, CRITIC, SURROGATE = "student", "teacher", "critic", "surrogate"
SLOW = "slow_surrogate"  # File stem of the surrogate's slow copy in a checkpoint, and key of its updates
METRICS = {
    STUDENT: ("loss", "teacher_distance"),
    CRITIC: ("loss/critic", "match_error"),
    SURROGATE: ("loss/surrogate", "surrogate_stopped"),
}


class Roles:
    """The teacher, and weights of critic and surrogate that start as it, swapped into the student's policy.

    `teacher` are weights of another model of the same network, by the network's names; None: the policy's own base.
    """

    def __init__(self, policy: DiffusionPolicy, names: Sequence[str], teacher: Mapping[str, Tensor] | None) -> None:
        self._policy, trained = policy, policy.trainable_parameters()
        self._layers = [part for part in policy.module.modules() if isinstance(part, LoraLayer)]
        with policy.reference():
            start = {n: p.detach().clone() for n, p in trained}
        if self._layers:  # B = 0 is the base
            start = {n: torch.zeros_like(p) if ".lora_B." in n else p for n, p in start.items()}
        self._base: tuple[list[Tensor], list[Tensor]] = [], []  # Frozen weights, and the teacher's
        self._teacher: Mapping[str, Tensor] | None = None  # Of a policy without adapters; None: its reference
        if teacher is not None:
            current = dict(trained)
            if self._layers:
                current = {n: p for n, p in policy.module.named_parameters() if n not in start}
            check_teacher({n.replace(".base_layer.", "."): p for n, p in current.items()}, teacher)
            loaded = {n: teacher[n.replace(".base_layer.", ".")].to(p) for n, p in current.items()}
            if self._layers:
                self._base = list(current.values()), list(loaded.values())
            else:
                self._teacher = start = loaded
        self.weights = {name: {n: nn.Parameter(w.clone()) for n, w in start.items()} for name in names}

    @contextmanager
    def acting(self, role: str, state: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Turn the policy into a role, or into an earlier `state` of it, inside the block."""
        if role == STUDENT:
            yield
            return
        weights = self._teacher if role == TEACHER else state or self.weights[role]
        context = lora_disabled(self._layers) if self._layers else self._policy.reference()
        if weights is not None:
            trained = self._policy.trainable_parameters()
            context = swapped_weights([p for _, p in trained], [weights[n].detach().to(p.dtype) for n, p in trained])
        with swapped_weights(*self._base), context:
            yield


def check_teacher(current: Mapping[str, Tensor], teacher: Mapping[str, Tensor]) -> None:
    """Refuse the weights of a network of other names or shapes."""
    sizes, teacher_sizes = ({n: tuple(w.shape) for n, w in weights.items()} for weights in (current, teacher))
    if differing := sorted(n for n, size in sizes.items() if teacher_sizes.get(n) != size):
        name = differing[0]
        raise UserError(
            f"objective.teacher is another network than model.path: {name} is {teacher_sizes.get(name, 'absent')} "
            f"there and {sizes[name]} here. Name the model of the same architecture that was not distilled."
        )


@dataclass(kw_only=True)
class FewStepPaths:
    """Paths of the student's steps in an iteration: b samples of this process."""

    condition: Condition
    batch: Batch
    x: Tensor  # [b, K, ...] latents before each step
    v: Tensor  # [b, K, ...] the student's velocity there, float32
    group: Tensor  # [B] int64 of all processes
    advantage: Tensor  # [B] float64; NaN where the reward failed, 0 without one


@dataclass(frozen=True, kw_only=True)
class RoleStep:
    """Optimizer update of one role."""

    role: str
    sample: Tensor  # Indices among the B
    number: int  # Index of the update in its iteration


@dataclass(frozen=True, kw_only=True)
class Query:
    """N predictions x̂0, noised to the levels that they are compared at."""

    noised: Tensor
    sigma: Tensor
    time: Tensor
    target: Tensor  # u = ε' − x̂0
    importance: Tensor
    condition: Condition


class FewStepDistillation(ImageAlgorithm):
    """Trains a few-step student by one of `FEW_STEP`; the steps are `rollout.steps`, along the ODE."""

    algorithms = FEW_STEP
    default = "dmd2"

    def setup(self) -> None:
        assert self.settings.few_step is not None
        self.row = self.settings.few_step
        self.module = self.distribute(velocity_of, needs_reference=False, joins="several roles")
        with guidance_scale(self.policy, self.row.teacher_guidance):  # refuses a policy without one
            self.roles = Roles(self.policy, self.row.roles, self.teacher)
        self._slow = EMA(list(self.roles.weights.get(SURROGATE, {}).items()), decay=0.5, warmup=False)
        self._paths: list[tuple[Tensor, Tensor]] = []

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Return the student's parameters, then those of the roles."""
        roles = [(f"{role}.{n}", p) for role, weights in self.roles.weights.items() for n, p in weights.items()]
        return [*self.policy.trainable_parameters(), *roles]

    def rates(self, lr: float) -> Mapping[str, float]:
        """Return the learning rates of the roles over the student's."""
        return dict.fromkeys((f"{CRITIC}.", f"{SURROGATE}."), self.row.role_rate)

    def collect(self, run: Context) -> Collected:
        """Sample the student's paths; decode and score their images where a surrogate learns the reward."""
        iteration, self._paths = run.counters.iteration, []
        advantage, metrics = torch.zeros(self.samples, dtype=torch.float64), {}
        with self.unsharded():
            if self.row.surrogate:
                self.draw_references(iteration, iteration, run.clock)
                images, collected = self.collect_images(run, lambda number: self.sample(number, run.clock))
                assert images is not None  # dynamic sampling is refused
                advantage = group_advantages(images.value, images.group, valid=images.valid)
                advantage = advantage.clamp(-self.row.advantage_clip, self.row.advantage_clip)
                advantage = torch.where(images.valid, advantage, torch.nan)
                batch, condition, metrics = images.batch, images.condition, collected.metrics
            else:
                batch, records = self.prompts(iteration)
                condition = self.encode(records, run.clock)
                self.roll_out(condition, batch, torch.arange(len(batch)), (), run.clock)
        x, v = (torch.cat(parts) for parts in zip(*self._paths, strict=True))
        group = self.shares.gather_all(batch.group_id)
        paths = FewStepPaths(condition=condition, batch=batch, x=x, v=v, group=group, advantage=advantage)
        return Collected(experience=paths, samples=self.samples, metrics=metrics)

    def roll_out(
        self, condition: Condition, batch: Batch, rows: Tensor, sde_steps: Sequence[int], clock: PhaseClock
    ) -> Trajectory:
        """Sample the given rows along the ODE and keep their paths."""
        noise = initial_noise(self.sample_seeds(batch.sample_id[rows]), self.policy.latent_shape)
        chunks, ends = first_latents(self.policy, noise, self.sigmas).split(self.batch_size), []
        with clock.phase("rollout"), torch.no_grad(), self.accelerator.autocast():
            for x, part in zip(chunks, torch.arange(len(rows)).split(self.batch_size), strict=True):
                path = []
                for k in range(self.rollout.steps):
                    sigma, time = self._level(torch.full((len(x),), k), x)
                    v = velocity_of(self.policy, x, sigma, condition.select(part), time)
                    path.append((x, v))
                    x = (x + (self.sigmas[k + 1] - self.sigmas[k]).to(v) * v).to(x.dtype)
                self._paths.append((torch.stack([x for x, _ in path], 1), torch.stack([v for _, v in path], 1)))
                ends.append(x)
        check_finite(torch.cat(ends))
        return trajectory_of_latents(torch.cat(ends))

    def prepare(self, experience: FewStepPaths, run: Context) -> list[RoleStep]:
        """Order the updates of the roles: the critic's, the surrogate's, then the student's."""
        iteration, row = run.counters.iteration, self.row
        updates = run.optimizer.updates_per_iteration
        parts = split_updates(experience.group, self.settings.epochs, updates, self.seed, iteration, row.surrogate)
        roles = [CRITIC] * row.critic_updates + list(row.roles[1:]) + [STUDENT] * (iteration >= row.warmup)
        order = enumerate((role, sample) for sample in parts for role in roles)
        return [RoleStep(role=role, sample=sample, number=number) for number, (role, sample) in order]

    def backward(self, experience: FewStepPaths, step: RoleStep, run: Context) -> dict[str, float]:
        """Add the gradient of one role's mean loss, in micro-batches of samples."""
        local = self.shares.local[step.sample]
        batches = [rows for rows in local[local >= 0].split(run.micro_batch) if len(rows)]
        idle, zero = self.idle(len(batches)), torch.zeros(1, dtype=torch.int64)  # all processes count before a batch
        sums = torch.zeros(2, dtype=torch.float64, device=self.policy.device)
        scale = run.counters.loss_scale * self.accelerator.num_processes / len(step.sample)
        preference = self._preference(experience, step, batches, run) if step.role == SURROGATE else {}
        with self.roles.acting(step.role):
            for rows in synced_last(batches, self.module, self.accelerator):
                loss, measured = self._loss(experience, step, rows, preference)
                self.accelerator.backward(loss.sum() * scale)
                sums += torch.stack([loss.detach().sum(), measured.detach().sum()]).double()
            for _ in range(idle):
                sigma, time = self._level(zero, experience.x)
                v = self.module(experience.x[:1, 0], sigma, experience.condition.select(zero), time)
                self.accelerator.backward(v.sum() * 0.0)
        if step.role != STUDENT:  # the gradient is in the policy's parameters, in whose place the role's were
            for name, parameter in self.policy.trainable_parameters():
                self.roles.weights[step.role][name].grad, parameter.grad = parameter.grad, None
        sums = torch.as_tensor(self.accelerator.reduce(sums, "sum")) / len(step.sample)
        return dict(zip(METRICS[step.role], sums.tolist(), strict=True))

    def _loss(
        self, experience: FewStepPaths, step: RoleStep, rows: Tensor, preference: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute (loss [N], the second of the role's metrics [N])."""
        row = self.row
        k, x0, query = self._predictions(experience, step, rows)
        if step.role == STUDENT:
            return self._student_loss(x0, query)
        v = self.module(query.noised, query.sigma, query.condition, query.time)
        error = (v - query.target).square().flatten(1).mean(1)
        if step.role == CRITIC:
            return row.critic_loss(v, query.target, query.sigma, query.importance), error
        weight, ref, stopped = (preference[name][self.shares.own[rows]].to(error) for name in preference)
        time_weight = ((k + 1) / self.rollout.steps).to(error)  # nearer the image that was scored
        return surrogate_loss(error, ref, weight, stopped > 0, time_weight, anchor=row.anchor), stopped

    def _student_loss(self, x0: Tensor, query: Query) -> tuple[Tensor, Tensor]:
        """Compute (loss [N], mean |x̂0 − x̂_real| [N]) of the student's predictions."""
        row, scale = self.row, self.row.teacher_guidance
        real = self._clean(query, TEACHER, guidance=scale)
        loss = row.student_loss(x0, real, self._clean(query, CRITIC))
        if row.surrogate:
            conditional = self._clean(query, TEACHER) if row.rewards_guidance else None
            loss = loss + row.reward_loss(x0, real, self._clean(query, SURROGATE, guidance=scale), conditional)
        return loss, (x0 - real).abs().flatten(1).mean(1)

    def _preference(
        self, experience: FewStepPaths, step: RoleStep, batches: Sequence[Tensor], run: Context
    ) -> dict[str, Tensor]:
        """Compute weight, D_ref and stopped [B] of the surrogate's loss, over all processes' groups."""
        counts, row = run.counters.own, self.row
        if counts.setdefault(SLOW, 0):  # the copy follows the update before this one
            self._slow.update(1, decay=row.slow_decay_at(counts[SLOW] - 1))
        counts[SLOW] += 1
        errors = torch.zeros(3, len(experience.group), dtype=torch.float64, device=self.policy.device)
        for rows in batches:
            query = self._predictions(experience, step, rows)[-1]
            states = (SURROGATE, None), (TEACHER, None), (SURROGATE, self._slow.state())
            for column, (role, weights) in zip(errors, states, strict=True):
                difference = self._velocity(query, role, weights) - query.target
                column[self.shares.own[rows]] = difference.square().flatten(1).mean(1).double()
        errors = torch.as_tensor(self.accelerator.reduce(errors, "sum")).cpu()
        scored = step.sample[experience.advantage[step.sample].isfinite()]  # what failed counts in no group
        error, ref, slow, group = *errors[:, scored], experience.group[scored]
        advantage = experience.advantage[scored]
        weight, _ = preference_weights(error, ref, advantage, group, beta=row.beta)
        stopped = stopped_samples(error, ref, slow, advantage, clip=row.clip, threshold=row.threshold).any(1)
        columns = {name: torch.zeros_like(experience.advantage) for name in ("weight", "stopped")}
        for column, values in zip(columns.values(), (weight, stopped.double()), strict=True):
            column[scored] = values
        return {"weight": columns["weight"], "ref": errors[1], "stopped": columns["stopped"]}

    def _predictions(self, experience: FewStepPaths, step: RoleStep, rows: Tensor) -> tuple[Tensor, Tensor, Query]:
        """Return (steps k [N], x̂0 [N, ...], noised x̂0) of the given rows, the student's with gradient in its update.

        Step, level and noise are functions of the seed, the sample and the update; a group that is compared has one
        step and one level.
        """
        batch = experience.batch
        keys = (batch.group_id if step.role == SURROGATE else batch.sample_id)[rows].tolist()
        k = torch.tensor([sample_seed(self.seed, "step", n, step.number) % self.rollout.steps for n in keys])
        x, v = (column[rows, k.to(rows)] for column in (experience.x, experience.v))
        level, condition = self._level(k, x), experience.condition.select(rows)
        if step.role == STUDENT:
            v = self.module(x, level[0], condition, level[1])
        x0 = x - expand_over_event(level[0].to(v), v) * v
        with torch.no_grad():
            shares = [sample_seed(self.seed, "query", n, step.number) / 2**63 for n in keys]
            share = torch.tensor(shares, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
            mid, sigma = (s.to(x0) for s in self.row.levels(self.sigmas[k], self.sigmas[k + 1], share))
            seeds = [sample_seed(self.seed, "query noise", n, step.number) for n in batch.sample_id[rows].tolist()]
            noise = initial_noise(seeds, self.policy.latent_shape).to(x0)
            noised, mixed, importance = conditional_renoise(x0, x0 + v, noise, mid, sigma)  # ε = x̂0 + v
            query = Query(
                noised=noised.to(x.dtype),
                sigma=sigma,
                time=self.policy.times(sigma),
                target=mixed - x0,
                importance=importance,
                condition=condition,
            )
        return k, x0, query

    @torch.no_grad()
    def _velocity(self, query: Query, role: str, state: Mapping[str, Tensor] | None = None) -> Tensor:
        with self.accelerator.autocast(), self.roles.acting(role, state):
            return velocity_of(self.policy, query.noised, query.sigma, query.condition, query.time)

    def _clean(self, query: Query, role: str, *, guidance: float | None = None) -> Tensor:
        """Predict x̂0 = x_σ − σ v by a role."""
        with guidance_scale(self.policy, guidance):
            v = self._velocity(query, role)
        return query.noised - expand_over_event(query.sigma.to(v), v) * v

    def _level(self, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.sigmas[k].to(x.device), self.times[k.to(self.times.device)].to(x.device)

    def record(self, experience: FewStepPaths, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        values = {name: [u[name] for u in sums if name in u] for names in METRICS.values() for name in names}
        return {name: sum(numbers) / len(numbers) for name, numbers in values.items() if numbers}

    def finish(self, run: Context) -> None:
        """Store the surrogate's slow copy."""
        super().finish(run)
        if self.row.surrogate:
            run.tensors[SLOW] = self._slow.state()

    def restore(self, run: Context) -> None:
        """Load the surrogate's slow copy."""
        super().restore(run)
        if self.row.surrogate:
            self._slow.load(run.tensors[SLOW])
