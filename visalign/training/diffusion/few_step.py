# SPDX-License-Identifier: Apache-2.0
"""Distil a few-step student from a guided teacher, and align it with a reward: DMD2, TDM, TDM-R1.

The algorithms are `visalign.core.regression.few_step.FEW_STEP`. Student, critic and surrogate are trained weights of
one shape on one base, swapped into the policy, so that the network is in memory once. No denoising loss touches the
student, which would blur it.

Deliberate differences from the published code:
* the critic and the surrogate learn from the iteration's paths, which the student has left by less than one iteration;
* the surrogate is trained where the student is compared, at noised predictions x̂0, not at noised boundaries;
* its errors are those of one scale of guidance; the code compares an unguided surrogate with a guided reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

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
from visalign.errors import UserError
from visalign.flow.noise import initial_noise
from visalign.flow.rollout import check_finite, first_latents, velocity_of
from visalign.flow.trajectory import Trajectory, trajectory_of_latents
from visalign.interfaces import Condition, DiffusionPolicy
from visalign.seeds import sample_seed
from visalign.training.loop.algorithm import Collected, Context
from visalign.training.loop.ema import EMA
from visalign.training.loop.processes import no_sync_unless_last
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.sampler import Batch
from visalign.training.policy.reference import swapped_weights
from visalign.training.policy.update import split_updates

from .images import ImageAlgorithm
from .merging import adapters_off, guidance_scale

STUDENT, TEACHER = "student", "teacher"
SLOW = "slow_surrogate"  # File stem of the surrogate's slow copy in a checkpoint, and key of its updates


class Roles:
    """The teacher, and weights of critic and surrogate that start as it, swapped into the student's policy.

    `teacher` are weights of another model of the same network, by the network's names; None: the policy's own base.
    """

    def __init__(self, policy: DiffusionPolicy, names: Sequence[str], teacher: Mapping[str, Tensor] | None) -> None:
        self._policy = policy
        self._adapters = [part for part in policy.module.modules() if isinstance(part, LoraLayer)]
        trained = policy.trainable_parameters()
        if self._adapters:  # B = 0 is the base
            start = {n: p.detach() * (0 if ".lora_B." in n else 1) for n, p in trained}
        else:
            with policy.reference():
                start = {n: p.detach().clone() for n, p in trained}
        frozen = {n: p for n, p in policy.module.named_parameters() if n not in start}
        self._base: list[tuple[nn.Parameter, Tensor]] = []
        self._teacher: Mapping[str, Tensor] | None = None  # Of a policy without adapters; None: its reference
        if teacher is not None:
            current = frozen if self._adapters else dict(trained)
            names_in = {n: n.replace(".base_layer.", ".") for n in current}
            check_teacher({names_in[n]: p for n, p in current.items()}, teacher)
            loaded = {n: teacher[names_in[n]].to(p) for n, p in current.items()}
            if self._adapters:
                self._base = [(p, loaded[n]) for n, p in frozen.items()]
            else:
                self._teacher = start = loaded
        self.weights = {name: {n: nn.Parameter(w.clone()) for n, w in start.items()} for name in names}

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return "role.name" and parameter of all trained roles."""
        return [(f"{role}.{n}", p) for role, weights in self.weights.items() for n, p in weights.items()]

    @contextmanager
    def acting(self, role: str, state: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Turn the policy into a role, or into an earlier `state` of it, inside the block."""
        if role == STUDENT:
            yield
            return
        before = [base.data for base, _ in self._base]
        with ExitStack() as stack:
            weights = self._teacher if role == TEACHER else state or self.weights[role]
            if weights is None:
                off = adapters_off(self._adapters) if self._adapters else self._policy.reference()
                stack.enter_context(off)
            else:
                stack.enter_context(swapped_weights(self._policy, {n: w.detach() for n, w in weights.items()}))
            try:
                for base, data in self._base:
                    base.data = data
                yield
            finally:
                for (base, _), data in zip(self._base, before, strict=True):
                    base.data = data

    def take_gradient(self, role: str) -> None:
        """Move the gradient that a role's backward left in the policy's parameters to the role's own."""
        for name, parameter in self._policy.trainable_parameters() if role != STUDENT else ():
            self.weights[role][name].grad, parameter.grad = parameter.grad, None


def check_teacher(current: Mapping[str, Tensor], teacher: Mapping[str, Tensor]) -> None:
    """Refuse the weights of a network of other names or shapes."""
    sizes, others = ({n: tuple(w.shape) for n, w in weights.items()} for weights in (current, teacher))
    if differing := sorted(n for n, size in sizes.items() if others.get(n) != size):
        name = differing[0]
        raise UserError(
            f"objective.teacher is another network than model.path: {name} is {others.get(name, 'absent')} there and "
            f"{sizes[name]} here. Name the model of the same architecture that was not distilled."
        )


@dataclass(kw_only=True)
class FewStepPaths:
    """Paths of the student's steps in an iteration: b samples of this process."""

    condition: Condition
    batch: Batch
    x: Tensor  # [b, K, ...] latents before each step
    v: Tensor  # [b, K, ...] the student's velocity there, float32
    group: Tensor  # [B] int64 of all processes
    advantage: Tensor  # [B] float64; 0 where the row learns without a reward


@dataclass(frozen=True, kw_only=True)
class RoleStep:
    """One optimizer update of one role."""

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
        """Build the roles and the trained velocity."""
        assert self.settings.few_step is not None
        self.row = self.settings.few_step
        self.module = self.distribute(velocity_of, needs_reference=False, joins="several roles")
        self.roles = Roles(self.policy, self.row.roles, self.teacher)
        with guidance_scale(self.policy, self.row.teacher_guidance):  # refuses a policy without one
            pass
        surrogate = list(self.roles.weights.get("surrogate", {}).items())
        self._slow = EMA(surrogate, decay=0.5, warmup=False)
        self._paths: list[tuple[Tensor, Tensor]] = []

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Return the student's parameters, then those of the roles."""
        return [*self.policy.trainable_parameters(), *self.roles.parameters()]

    def rates(self, lr: float) -> Mapping[str, float]:
        """Return the learning rates of the roles over the student's."""
        rates = {"critic.": self.row.critic_rate, "surrogate.": self.row.surrogate_rate}
        return {prefix: rate for prefix, rate in rates.items() if prefix[:-1] in self.row.roles}

    def collect(self, run: Context) -> Collected:
        """Sample the student's paths; decode and score their images where a surrogate learns the reward."""
        iteration = run.counters.iteration
        self._paths = []
        with self.unsharded():
            if self.row.surrogate:
                self.draw_references(iteration, iteration, run.clock)
                images, collected = self.collect_images(run, lambda number: self.sample(number, run.clock))
                assert images is not None  # dynamic sampling is refused
                advantage = group_advantages(images.value, images.group, valid=images.valid)
                advantage = advantage.clamp(-self.row.advantage_clip, self.row.advantage_clip)
                batch, condition, group = images.batch, images.condition, images.group
            else:
                batch, records = self.prompts(iteration)
                condition, group = self.encode(records, run.clock), self.gather_all(batch.group_id)
                self.roll_out(condition, batch, torch.arange(len(batch)), (), run.clock)
                advantage = torch.zeros(self.samples, dtype=torch.float64)
                collected = Collected(experience=None, samples=self.samples)
        x, v = (torch.cat(parts) for parts in zip(*self._paths, strict=True))
        paths = FewStepPaths(condition=condition, batch=batch, x=x, v=v, group=group, advantage=advantage)
        return Collected(experience=paths, samples=collected.samples, metrics=collected.metrics)

    def roll_out(
        self, condition: Condition, batch: Batch, rows: Tensor, sde_steps: Sequence[int], clock: PhaseClock
    ) -> Trajectory:
        """Sample the given rows along the ODE and keep the paths."""
        noise = initial_noise(self.sample_seeds(batch.sample_id[rows]), self.policy.latent_shape)
        x, ends = first_latents(self.policy, noise, self.sigmas), []
        with clock.phase("rollout"), torch.no_grad(), self.accelerator.autocast():
            for part in torch.arange(len(x)).split(self.rollout.batch_size):
                chunk, states, velocities = x[part.to(x.device)], [], []
                for k in range(self.rollout.steps):
                    sigma, time = self._level(torch.full((len(part),), k), chunk)
                    states.append(chunk)
                    velocities.append(velocity_of(self.policy, chunk, sigma, condition.select(part), time))
                    length = (self.sigmas[k + 1] - self.sigmas[k]).to(velocities[-1])
                    chunk = (chunk + length * velocities[-1]).to(chunk.dtype)
                self._paths.append((torch.stack(states, 1), torch.stack(velocities, 1)))
                ends.append(chunk)
        check_finite(torch.cat(ends))
        return trajectory_of_latents(torch.cat(ends))

    def prepare(self, experience: FewStepPaths, run: Context) -> list[RoleStep]:
        """Order the updates of the roles: the critic's, the surrogate's, then the student's."""
        iteration, row = run.counters.iteration, self.row
        updates = run.optimizer.updates_per_iteration
        parts = split_updates(experience.group, self.settings.epochs, updates, self.seed, iteration, row.surrogate)
        roles = ["critic"] * row.critic_updates + list(row.roles[1:]) + [STUDENT] * (iteration >= row.warmup)
        order = [(role, sample) for sample in parts for role in roles]
        return [RoleStep(role=role, sample=sample, number=i) for i, (role, sample) in enumerate(order)]

    def backward(self, experience: FewStepPaths, step: RoleStep, run: Context) -> dict[str, float]:
        """Add the gradient of one role's mean loss, in micro-batches of samples."""
        local = self.shares.local[step.sample]
        local = local[local >= 0]
        batches = list(local.split(run.micro_batch)) if len(local) else []
        idle = self.idle(len(batches))  # all processes count before a batch
        metrics = torch.zeros(2, dtype=torch.float64, device=self.policy.device)
        scale = run.counters.loss_scale * self.accelerator.num_processes / len(step.sample)
        preference = self._preference(experience, step, local, run) if step.role == "surrogate" else None
        with self.roles.acting(step.role):
            for rows in batches:
                with no_sync_unless_last(self.module, self.accelerator, last=rows is batches[-1]):
                    loss, other = self._loss(experience, step, rows, preference)
                    self.accelerator.backward(loss.sum() * scale)
                metrics += torch.stack([loss.detach().sum(), other.detach().sum()]).double()
            for _ in range(idle):
                step_index = torch.zeros(1, dtype=torch.int64)
                sigma, time = self._level(step_index, experience.x)
                v = self.module(experience.x[:1, 0], sigma, experience.condition.select(step_index), time)
                self.accelerator.backward(v.sum() * 0.0)
        self.roles.take_gradient(step.role)
        total, other = torch.as_tensor(self.accelerator.reduce(metrics, "sum")).tolist()
        names = {STUDENT: ("loss", "teacher_distance"), "surrogate": ("loss/surrogate", "surrogate_stopped")}
        names |= {"critic": ("loss/critic", "match_error")}
        return dict(zip(names[step.role], (total / len(step.sample), other / len(step.sample)), strict=True))

    def _loss(
        self, experience: FewStepPaths, step: RoleStep, rows: Tensor, preference: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Compute (loss [N], the second of the role's metrics [N])."""
        row, k, x = self.row, self._steps(experience, step, rows), experience.x
        state, v = x[rows, k.to(rows)].clone(), experience.v[rows, k.to(rows)]
        sigma, time = self._level(k, state)
        condition = experience.condition.select(rows)
        if step.role == STUDENT:
            v = self.module(state, sigma, condition, time)
        x0 = state - _over(sigma, v) * v
        query = self._query(experience, step, rows, k, x0.detach(), (x0 + v).detach())
        if step.role == STUDENT:
            return self._student_loss(x0, query)
        v = self.module(query.noised, query.sigma, query.condition, query.time)
        error = (v - query.target).square().flatten(1).mean(1)
        if preference is None:
            return row.critic_loss(v, query.target, query.sigma, query.importance), error
        mine = {name: column[rows].to(error.device) for name, column in preference.items()}
        weights = mine["weight"].to(error), mine["stopped"].bool(), ((k + 1) / self.rollout.steps).to(error)
        return surrogate_loss(error, mine["ref"].to(error), *weights, anchor=row.anchor), mine["stopped"]

    def _student_loss(self, x0: Tensor, query: Query) -> tuple[Tensor, Tensor]:
        """Compute (loss [N], mean |x̂0 − x̂_real| [N]) of the student's predictions."""
        row, scale = self.row, self.row.teacher_guidance
        real, fake = self._clean(query, TEACHER, guidance=scale), self._clean(query, "critic")
        loss = row.student_loss(x0, real, fake)
        if row.surrogate:
            conditional = self._clean(query, TEACHER) if row.rewards_guidance else None
            loss = loss + row.reward_loss(x0, real, self._clean(query, "surrogate", guidance=scale), conditional)
        return loss, (x0 - real).abs().flatten(1).mean(1)

    def _preference(self, experience: FewStepPaths, step: RoleStep, local: Tensor, run: Context) -> dict[str, Tensor]:
        """Compute weight, ref (D_ref) and stopped [b] of this process's samples, over all processes' groups."""
        own = run.counters.own
        if own.get(SLOW, 0):  # the copy follows the update before this one
            self._slow.update(1, decay=self.row.slow_decay_at(own[SLOW] - 1))
        own[SLOW] = own.get(SLOW, 0) + 1
        errors = torch.zeros(3, len(experience.group), dtype=torch.float64, device=self.policy.device)
        for rows in local.split(run.micro_batch) if len(local) else ():
            k = self._steps(experience, step, rows)
            state, v = experience.x[rows, k.to(rows)], experience.v[rows, k.to(rows)]
            x0 = state - _over(self._level(k, state)[0], v) * v
            query = self._query(experience, step, rows, k, x0, x0 + v)
            states = ("surrogate", None), (TEACHER, None), ("surrogate", self._slow.state())
            for column, (role, weights) in zip(errors, states, strict=True):
                with torch.no_grad(), self.accelerator.autocast(), self.roles.acting(role, weights):
                    v = velocity_of(self.policy, query.noised, query.sigma, query.condition, query.time)
                column[self.shares.own[rows]] = (v - query.target).square().flatten(1).mean(1).double()
        errors = torch.as_tensor(self.accelerator.reduce(errors, "sum")).cpu()[:, step.sample]
        advantage, row = experience.advantage[step.sample], self.row
        group = experience.group[step.sample]
        options: dict[str, Any] = {"beta": row.beta, "both_signs": row.both_signs}
        weight, _ = preference_weights(errors[0], errors[1], advantage, group, **options)
        stopped = stopped_samples(*errors, advantage, clip=row.clip, threshold=row.threshold).any(1)
        columns = {"weight": weight, "ref": errors[1], "stopped": stopped.double()}
        table = {name: torch.zeros(len(experience.group), dtype=torch.float64) for name in columns}
        for name, column in columns.items():
            table[name][step.sample] = column
        return {name: column[self.shares.own] for name, column in table.items()}

    def _query(
        self, experience: FewStepPaths, step: RoleStep, rows: Tensor, k: Tensor, x0: Tensor, model_noise: Tensor
    ) -> Query:
        """Noise predictions of steps k [N] to the levels that are drawn for this update."""
        shares = [sample_seed(self.seed, "query", n, step.number) / 2**63 for n in self._keys(experience, step, rows)]
        samples = experience.batch.sample_id[rows].tolist()
        noise = initial_noise(
            [sample_seed(self.seed, "query noise", n, step.number) for n in samples], self.policy.latent_shape
        ).to(x0)
        share = torch.tensor(shares, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
        mid, sigma = self.row.levels(self.sigmas[k].double(), self.sigmas[k + 1].double(), share)
        sigma, mid = sigma.to(x0), mid.to(x0)
        noised, mixed, importance = conditional_renoise(x0, model_noise, noise, mid, sigma)
        return Query(
            noised=noised.to(experience.x.dtype),
            sigma=sigma,
            time=self.policy.times(sigma),
            target=mixed - x0,
            importance=importance,
            condition=experience.condition.select(rows),
        )

    @torch.no_grad()
    def _clean(self, query: Query, role: str, *, guidance: float | None = None) -> Tensor:
        """Predict x̂0 = x_σ − σ v by a role."""
        with self.accelerator.autocast(), self.roles.acting(role), guidance_scale(self.policy, guidance):
            v = velocity_of(self.policy, query.noised, query.sigma, query.condition, query.time)
        return query.noised - _over(query.sigma, v) * v

    def _keys(self, experience: FewStepPaths, step: RoleStep, rows: Tensor) -> list[int]:
        """Return what steps and levels are drawn by: a group's samples are compared at one."""
        batch = experience.batch
        return (batch.group_id if step.role == "surrogate" else batch.sample_id)[rows].tolist()

    def _steps(self, experience: FewStepPaths, step: RoleStep, rows: Tensor) -> Tensor:
        """Draw the student's step [N] of each sample."""
        keys = self._keys(experience, step, rows)
        return torch.tensor([sample_seed(self.seed, "step", n, step.number) % self.rollout.steps for n in keys])

    def _level(self, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.sigmas[k].to(x.device), self.times[k.to(self.times.device)].to(x.device)

    def record(self, experience: FewStepPaths, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Average each metric over the updates of its role."""
        names = dict.fromkeys(name for update in sums for name in update if name != "grad_norm")
        values = {name: [update[name] for update in sums if name in update] for name in names}
        return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}

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


def _over(value: Tensor, event: Tensor) -> Tensor:
    """[N] beside [N, ...]."""
    return value.to(event).reshape(-1, *[1] * (event.ndim - 1))
