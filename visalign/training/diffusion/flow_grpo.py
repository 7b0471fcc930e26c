# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO (arXiv 2505.05470) and its kin: a diffusion policy trained along its SDE by any `Objective`.

Where this deviates from the published code, always on purpose:
* old log-probabilities come from the rollout, whose latents are rounded before theirs is taken; the ratio is
  checked to be 1 at the first update;
* groups are ids, so prompts that begin alike are not merged; the sampler cannot lag behind a prefetching
  loader;
* samples without signal are left out of the backward, but stay in the denominator, so the update is the same;
* the KL is the exact Gaussian one, with |dt| in the variance, or that of velocities (`Objective.kl_form`);
* every random draw is a function of (seed, name, iteration or sample), so a resumed run equals an
  uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visalign.core import PolicyOutput, Prepared, Trajectories
from visalign.core.rewards.steps import branch_rewards, turning_point_rewards
from visalign.core.surrogates.kl import gaussian_kl, velocity_kl
from visalign.core.surrogates.ratios import guard_log_ratio, guard_step_weight
from visalign.errors import UserError
from visalign.flow.replay import RATIO_BOUND, replay_pairs
from visalign.flow.rollout import complete, predict_clean
from visalign.flow.trajectory import Pairs, Trajectory
from visalign.flow.transitions import Kernel
from visalign.flow.windows import window_steps
from visalign.interfaces import Condition, DiffusionPolicy
from visalign.seeds import sample_seed
from visalign.training.loop.algorithm import Collected, Context
from visalign.training.loop.judging import RolloutPrefetcher, reward_weights
from visalign.training.loop.processes import no_sync_unless_last
from visalign.training.policy.settings import MATRIX_ADVANTAGES, reads_reference_log_prob
from visalign.training.policy.update import (
    PolicyStep,
    backward,
    couples_decisions,
    flat_rows,
    prepare_steps,
    update_metrics,
)

from .images import Drawn, ImageAlgorithm, Images
from .rollout_settings import RolloutSettings
from .settings import DiffusionObjectiveSettings


class ReplayModule(nn.Module):
    """`visalign.flow.replay` as a module, so that DDP wraps it and synchronises the policy's gradients."""

    def __init__(self, policy: DiffusionPolicy) -> None:
        super().__init__()
        self.network = policy.module
        self._policy = policy

    def forward(self, condition: Condition, pairs: Pairs, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
        """(log_prob [N], mean [N, ...], velocity [N, ...]) of the pairs under the current weights."""
        stats = replay_pairs(self._policy, condition, pairs, kernel)
        return stats.log_prob, stats.mean, stats.v


@dataclass(kw_only=True)
class Experience:
    """What an iteration learns from: b samples of this process, and what is known of all B."""

    condition: Condition
    trajectory: Trajectory
    trained: Tensor
    """[T] int64, the steps to train on: places among the stochastic steps of `trajectory`."""
    trajectories: Trajectories
    """[B, T] of all processes in rank order, on the CPU."""
    node: Tensor
    """[b, T] int64 of this process, the first of its samples that have the trained step in common."""
    first: int
    """Place of this process's first sample among the B."""
    signal: dict[str, float] = field(default_factory=dict)


class FlowGRPO(ImageAlgorithm):
    """Trains a diffusion policy on a reward; an `Algorithm` for `visalign.training.loop.trainer.Trainer`.

    Args:
        policy: on the accelerator's device.
        reward: judges one image at a time; higher is better (or its sign is turned).
        records: prompt records, each with "prompt"; handed to the reward as metadata.
        rollout: how samples are made.
        objective: which row of the table is optimized.
        seed: of the run.
        accelerator: device, processes and trackers, without mixed precision: that is the policy's own matter.
            None makes one on the policy's device.
        strata: label per record, see `PromptSampler`.
        cycle: see `PromptSampler`.
        sharding: divide the network, its gradients and AdamW's moments among the processes (FSDP2).
        features: of images [b, 3, H, W], by which the diversity of a group is measured, [b, d]; None: it is
            not.

    Raises:
        UserError: settings that do not fit each other.
    """

    def begin(self) -> None:
        """The objective, and the module that the processes share or divide."""
        self.objective = self.settings.build(length=self.rollout.trained_per_image)
        step_weights(self.settings, self.rollout, self.source.sigmas)  # refused before an image is made
        joins = "the steps of an image" if couples_decisions(self.objective) else None
        self.module = self.spread(
            ReplayModule(self.policy), asks_reference=self._needs_reference(), joins=joins
        )
        self._ahead: RolloutPrefetcher[tuple[Drawn, tuple[int, ...]]] = RolloutPrefetcher(
            self._draw, self.rollout.staleness
        )

    def _needs_reference(self) -> bool:
        objective = self.objective
        return objective.kl > 0 or bool(objective.kl_in_reward) or reads_reference_log_prob(objective)

    @property
    def ratio_bound(self) -> float | None:  # type: ignore[override]  # an attribute elsewhere; here it follows the size
        """The bound grows with what the log-ratio is a sum over; the guard's is a mean under either norm."""
        if self.settings.ratio_bound is not None:
            return self.settings.ratio_bound
        is_sum = self.objective.ratio == "log_prob" and self.rollout.log_prob_reduction == "sum"
        return RATIO_BOUND * (math.prod(self.policy.latent_shape) if is_sum else 1)

    def collect(self, run: Context) -> Collected:
        """Sample, decode and judge one iteration's groups; see `ImageSource.collect`."""
        with self.unsharded():
            return self._collect(run)

    def _draw(self, iteration: int, run: Context) -> tuple[Drawn, tuple[int, ...]]:
        """An iteration's samples, and which of their stochastic steps are trained on."""
        sde_steps, trained = choose_steps(self.rollout, self.seed, iteration)
        return self.source.draw(iteration, run.clock, sde_steps), trained

    def _collect(self, run: Context) -> Collected:
        drawn, trained = self._ahead.take(run)
        made = self.constrained(self.source.judged(drawn, run.clock), run)
        node = made.trajectory.node[:, list(trained)]
        experience = Experience(
            condition=made.condition,
            trajectory=made.trajectory,
            trained=torch.tensor(trained),
            trajectories=self._credited(self._trajectories(made, trained), made, trained, node, run),
            node=node,
            first=made.first,
        )
        with run.clock.phase("replay"):
            self._ask_again(experience, run.micro_batch)
        return Collected(experience=experience, samples=self.source.samples, metrics=made.metrics)

    def _trajectories(self, made: Images, trained: Sequence[int]) -> Trajectories:
        trajectory = made.trajectory
        old = self.source.gather_all(trajectory.log_prob[:, list(trained)].contiguous())
        of_steps = step_weights(self.settings, self.rollout, self.source.sigmas)
        factor = of_steps[[trajectory.sde_steps[step] for step in trained]]
        one_by_one = self.objective.advantage in MATRIX_ADVANTAGES
        weights = list(reward_weights(self.source.reward).values())
        plain = self.settings.step_weights is None and self.objective.step_weight == "uniform"
        return Trajectories(
            weight=torch.ones_like(old),
            old_log_prob=torch.zeros_like(old) if self.objective.ratio == "guard" else old,
            group=made.group,
            reward=made.columns if one_by_one else made.value,
            reward_weights=weights if one_by_one else (),
            valid=made.valid,
            metric=self._metric(made),
            loss_weight=None if plain else factor.to(old.dtype).expand_as(old).contiguous(),
            decisions="denoising_steps",
        )

    def _credited(
        self, found: Trajectories, made: Images, trained: Sequence[int], node: Tensor, run: Context
    ) -> Trajectories:
        """With a reward of each trained step; R_k is that of the image without noise from step k on."""
        how, trajectory, source = self.settings.credit, made.trajectory, self.source
        if how == "image":
            return found
        if how == "branches":
            value = torch.where(made.valid, made.value, torch.nan)
            return self._earning(found, branch_rewards(value, source.gather_all(node + made.first)))
        levels = []
        for k, step in enumerate(trajectory.sde_steps):
            if how == "one_step":
                latents = predict_clean(trajectory, k)
            else:
                with run.clock.phase("rollout"), self.accelerator.autocast():
                    latents = complete(
                        self.policy,
                        made.condition,
                        trajectory.x[:, k],
                        sigmas=source.sigmas,
                        step=step,
                        batch_size=self.rollout.batch_size,
                        solver=self.rollout.solver,
                    )
            scores = source.judge(latents, made.records, run.clock)
            levels.append(torch.where(scores.valid, scores.value, torch.nan).double().cpu())
        level = source.gather_all(torch.stack(levels, 1))
        # after the last stochastic step the rollout is its own deterministic rest: R_n = R
        middle = torch.cat([level[:, 1:], made.value[:, None]], 1)
        made_of = turning_point_rewards(made.value, level[:, 0], middle)
        step_reward = made_of.increment if how == "one_step" else made_of.step_reward
        return self._earning(found, step_reward[:, list(trained)])

    def _earning(self, found: Trajectories, step_reward: Tensor) -> Trajectories:
        """With rewards [B, T] of the trained steps, NaN where they are not known."""
        reward = step_reward.to(found.old_log_prob.dtype)
        known = torch.isfinite(reward).all(1)
        assert found.valid is not None
        return replace(found, process_reward=reward.nan_to_num() * known[:, None], valid=found.valid & known)

    def _metric(self, made: Images) -> Tensor | None:
        """[B] the part of the reward that splits groups, where one is named."""
        if self.settings.metric is None:
            return None
        if self.settings.metric not in made.parts:
            raise UserError(
                f"objective.metric is {self.settings.metric!r}, and the parts of the reward "
                f"{self.source.reward.name!r} are: {', '.join(made.parts) or 'none'}. Name one of them, or "
                "add a term of that label and weight 0 to rewards.terms."
            )
        return made.parts[self.settings.metric]

    def _ask_again(self, experience: Experience, micro_batch: int) -> None:
        """Add what the policy or the reference says of the steps, where the objective asks for it."""
        more: dict[str, Tensor] = {}
        if self.objective.kl_in_reward or reads_reference_log_prob(self.objective):
            with self.reference.applied():
                more["ref_log_prob"] = self._log_probs(experience, micro_batch)
        if self.objective.importance_sampling is not None:
            more["rollout_log_prob"] = experience.trajectories.old_log_prob
            more["old_log_prob"] = self._log_probs(experience, micro_batch)
        if more:
            experience.trajectories = replace(experience.trajectories, **more)

    @torch.no_grad()
    def _log_probs(self, experience: Experience, micro_batch: int) -> Tensor:
        """[B, T] of all samples' trained steps under the present weights, as the update computes them."""
        node = experience.node
        sample, decision = (node == torch.arange(len(node))[:, None]).nonzero(as_tuple=True)
        step = experience.trained[decision]
        found = []
        for at in torch.arange(len(sample)).split(micro_batch):
            with self.accelerator.autocast():
                stats = replay_pairs(
                    self.policy,
                    experience.condition.select(sample[at]),
                    experience.trajectory.pairs(sample[at], step[at]),
                    experience.trajectory.kernel,
                )
            found.append(stats.log_prob)
        said = torch.cat(found)
        log_prob = said.new_empty(node.shape).index_put(
            (sample.to(said.device), decision.to(said.device)), said
        )
        return self.source.gather_all(log_prob.gather(0, node.to(said.device)))

    def prepare(self, experience: Experience, run: Context) -> list[PolicyStep]:
        """Advantages, denominators and the split into updates, over all processes' samples."""
        steps, alone = partial(self._steps, run=run), partial(self._alone, run=run)
        if self.balance is None:
            return steps(experience)
        return self.balance.prepare(experience, run, self.parameters(), steps, alone)

    def _alone(self, experience: Experience, sample: Tensor, run: Context) -> None:
        """Add the gradient of the first update on these samples, without the KL's."""
        objective, self.objective = self.objective, replace(self.objective, kl=0.0)
        steps = self._steps(experience, run)
        for step in [step for step in steps if torch.equal(step.sample, sample)][:1]:
            self.backward(experience, step, run)
        self.objective = objective

    def _steps(self, experience: Experience, run: Context) -> list[PolicyStep]:
        steps, experience.signal = prepare_steps(
            self.objective,
            self.settings,
            experience.trajectories,
            updates=run.optimizer.updates_per_iteration,
            seed=self.seed,
            iteration=run.counters.iteration,
            whole_groups=self.rollout.branch is not None,
        )
        return steps

    def backward(self, experience: Experience, step: PolicyStep, run: Context) -> dict[str, float]:
        """Replay the stored steps with gradient, in micro-batches of flat (sample, step) pairs."""
        return backward(
            self.objective,
            self._micro_batches(experience, step, run.micro_batch),
            self.accelerator,
            scale=run.counters.loss_scale,
        )

    def record(self, experience: Experience, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Metrics of the updates."""
        options = self.objective.surrogate_options
        clip = [options[name] for name in ("eps_low", "eps_high") if name in options]
        found = update_metrics(sums)
        self.divergence = found.get("kl")
        return {
            **experience.signal,
            **found,
            **({"clip_range": min(clip)} if clip else {}),
        }

    def _micro_batches(
        self, experience: Experience, step: PolicyStep, size: int
    ) -> Iterator[tuple[Prepared, PolicyOutput]]:
        """Rows and the policy's numbers for them; absent decisions where this process is `idle`."""
        own = step.local_rows(experience.first, len(experience.trajectory))
        place, decision, times = self._pairs(experience, step, own)
        idle = self.idle(math.ceil(len(place) / size))
        first = torch.zeros(1, dtype=torch.int64)
        one = flat_rows(step.prepared, first, first)
        nothing = replace(one, weight=torch.zeros_like(one.weight)).to(self.policy.device)
        for _ in range(idle):
            yield nothing, self._output(experience, first, first)
        if not len(own):
            return
        if couples_decisions(self.objective):
            yield from self._whole_samples(experience, step, own, size)
            return
        for at in torch.arange(len(place)).split(size):
            rows = flat_rows(step.prepared, place[at], decision[at])
            rows = replace(rows, weight=rows.weight * times[at, None]).to(self.policy.device)
            sample = step.sample[place[at]] - experience.first
            with self._sync(int(at[-1]) == len(place) - 1):
                yield rows, self._output(experience, sample, decision[at])

    @staticmethod
    def _pairs(experience: Experience, step: PolicyStep, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(place, decision, in how many samples) of N pairs: what samples have in common is there once.

        The loss of such a pair counts for each of its samples, so the update is that of all of them: at every
        step the mean over paths.
        """
        steps = len(experience.trained)
        node = experience.node[step.sample[own] - experience.first]
        label, place = (node * steps + torch.arange(steps)).flatten(), torch.arange(node.numel())
        found, index, times = label.unique(return_inverse=True, return_counts=True)
        first = torch.full_like(found, len(place)).scatter_reduce(0, index, place, "amin").sort().values
        return own[first // steps], first % steps, times[index[first]]

    def _whole_samples(
        self, experience: Experience, step: PolicyStep, own: Tensor, size: int
    ) -> Iterator[tuple[Prepared, PolicyOutput]]:
        """All decisions of a sample side by side."""
        steps = len(experience.trained)
        whole = own.split(max(1, size // steps))
        for number, places in enumerate(whole):
            sample = step.sample[places] - experience.first
            rows = step.prepared.rows(places).to(self.policy.device)
            last = number == len(whole) - 1
            if steps <= size:
                with self._sync(last):
                    yield rows, self._output(experience, sample)
            else:
                yield from self._in_two_passes(experience, rows, sample, size, last)

    def _sync(self, last: bool) -> AbstractContextManager[Any]:
        return no_sync_unless_last(self.module, self.accelerator, last=last)

    def _in_two_passes(
        self, experience: Experience, rows: Prepared, sample: Tensor, size: int, last: bool
    ) -> Iterator[tuple[Prepared, PolicyOutput]]:
        """One sample whose steps do not fit into a micro-batch: ∂L/∂log π of all of them first, then the
        network's gradient in parts. It costs one forward more and gives the same update."""
        parts = torch.arange(len(experience.trained)).split(size)
        with torch.no_grad():
            found = [self._output(experience, sample.expand(len(part)), part) for part in parts]
        names = [name for name, value in vars(found[0]).items() if value is not None]
        leaves = {
            name: torch.cat([getattr(one, name) for one in found]).view(1, -1).requires_grad_()
            for name in names
        }
        yield rows, PolicyOutput(**leaves)
        for part in parts:
            with self._sync(last and part is parts[-1]):
                now = self._output(experience, sample.expand(len(part)), part)
                pairs = [(getattr(now, name)[:, 0], leaf.grad) for name, leaf in leaves.items()]
                live = [(value, grad[0, part]) for value, grad in pairs if grad is not None]
                torch.autograd.backward([value for value, _ in live], [grad for _, grad in live])

    def _output(self, experience: Experience, sample: Tensor, decision: Tensor | None = None) -> PolicyOutput:
        """What the policy says of N single decisions [N, 1], or of all decisions of n samples [n, T].

        Args:
            experience: the stored steps.
            sample: [N] places among this process's samples.
            decision: [N] places among the trained steps; None for all of each sample.
        """
        steps = len(experience.trained)
        shape = (len(sample), 1 if decision is not None else steps)
        if decision is None:
            decision = torch.arange(steps).repeat(len(sample))
            sample = sample.repeat_interleave(steps)
        pairs = experience.trajectory.pairs(sample, experience.trained[decision])
        condition, kernel = experience.condition.select(sample), experience.trajectory.kernel
        reference = None
        if self.objective.kl > 0:  # before the policy's own forward: a reference may swap weights in place
            with torch.no_grad(), self.accelerator.autocast(), self.reference.applied():
                reference = replay_pairs(self.policy, condition, pairs, kernel)
        log_prob, mean, v = self.module(condition, pairs, kernel)
        if self.objective.ratio == "guard":
            noise = (pairs.x_next.to(pairs.mean) - pairs.mean) / _over(pairs.std, pairs.mean)
            log_prob = guard_log_ratio(noise, mean, pairs.mean)
        reduction: Any = kernel.log_prob_reduction
        more: dict[str, Tensor] = {}
        if reference is not None and self.objective.kl_form == "velocity":
            more["kl"] = velocity_kl(v, reference.v)
        elif reference is not None:
            more["kl"] = gaussian_kl(mean, reference.mean, pairs.std, log_prob_reduction=reduction)
        if self.objective.surrogate in ("dppo", "ppo_kl"):
            more["divergence"] = gaussian_kl(mean, pairs.mean, pairs.std, log_prob_reduction=reduction)
        return PolicyOutput(
            log_prob=log_prob.view(shape), **{name: value.view(shape) for name, value in more.items()}
        )


def _over(value: Tensor, event: Tensor) -> Tensor:
    """[N] beside [N, ...]."""
    return value.reshape(-1, *[1] * (event.ndim - 1))


def choose_steps(settings: RolloutSettings, seed: int, iteration: int) -> tuple[list[int], tuple[int, ...]]:
    """The stochastic steps of an iteration, and which of them (by place) are trained on."""
    sde_steps = settings.stochastic
    if settings.sde_window is None:
        return sde_steps, tuple(sde_steps.index(step) for step in settings.trained)
    draw = np.random.default_rng(sample_seed(seed, "noise steps", iteration))
    places = window_steps(
        len(sde_steps),
        settings.sde_window,
        iteration,
        order=settings.sde_window_order,  # type: ignore[arg-type]  # checked by the settings
        every=settings.sde_window_every,
        stride=settings.sde_window_stride,
        roll_back=settings.sde_window_roll_back,
        draw=draw,
    )
    chosen = [sde_steps[place] for place in places]
    return chosen, tuple(range(len(chosen)))


def step_weights(settings: DiffusionObjectiveSettings, rollout: RolloutSettings, sigmas: Tensor) -> Tensor:
    """[T] float32 factor of the policy's loss at each denoising step.

    "inverse_dt" is GRPO-Guard's 1/|dt| divided by its mean over the trained steps, so that the choice does
    not change the scale of the loss; GRPO-Guard itself leaves it undivided.

    Raises:
        UserError: `objective.step_weights` has not one weight per step.
    """
    if settings.step_weights is not None:
        if len(settings.step_weights) != rollout.steps:
            raise UserError(
                f"objective.step_weights has {len(settings.step_weights)} weights for {rollout.steps} "
                "steps; give one for each step, 0 for those that are not trained."
            )
        return torch.tensor(settings.step_weights, dtype=torch.float32)
    if settings.build(length=1).step_weight == "uniform":
        return torch.ones(rollout.steps)
    weight = guard_step_weight(sigmas.diff().float().cpu())
    return weight / weight[rollout.trained].mean()
