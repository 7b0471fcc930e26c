# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO (arXiv 2505.05470) and variants: train a diffusion policy along its SDE with any `Objective`.

Deliberate differences from the published code:
* old log-probabilities come from the rollout, whose latents are rounded before theirs is taken; the ratio is
  checked to be 1 at the first update;
* groups are ids, so prompts that begin alike are not merged; the sampler cannot lag behind a prefetching
  loader;
* samples without signal are left out of the backward, but stay in the denominator, so the update is the same;
  `drop_zero_signal=True` is the published filter, whose mean is over the samples with a signal alone;
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

import torch
from torch import Tensor

from visalign.core import Objective, PolicyOutput, Prepared, Trajectories
from visalign.core.rewards.steps import branch_advantages, turning_point_rewards
from visalign.core.surrogates.kl import gaussian_kl, velocity_kl
from visalign.core.surrogates.ratios import guard_log_ratio
from visalign.errors import UserError
from visalign.flow.rollout import RATIO_BOUND, complete, predict_clean, replay
from visalign.flow.trajectory import Trajectory
from visalign.interfaces import Condition
from visalign.training.loop.algorithm import Collected, Context
from visalign.training.loop.judging import RolloutPrefetcher, reward_weights
from visalign.training.loop.processes import Shares, no_sync_unless_last
from visalign.training.policy.reference import KEY as RESET_KEY
from visalign.training.policy.settings import MATRIX_ADVANTAGES, needs_reference, needs_reference_log_prob
from visalign.training.policy.update import (
    PolicyStep,
    backward,
    couples_decisions,
    flat_rows,
    prepare_steps,
    update_metrics,
    with_bundles,
)

from .images import ImageAlgorithm
from .references import ReferenceRewards
from .samples import PendingImages, ScoredImages


@dataclass(kw_only=True)
class Experience:
    """Training data of an iteration: b samples of this process, and the numbers of all B."""

    objective: Objective
    condition: Condition
    trajectory: Trajectory
    trained: Tensor  # [T] int64, the steps to train on: indices among the stochastic steps of `trajectory`
    trajectories: Trajectories  # [B, T] of all processes in rank order, on the CPU
    node: Tensor  # [b, T] int64, the first of this process's samples that shares the trained step
    prompt: Tensor  # [b] int64, indices into the training prompts
    shares: Shares  # Owner of each of the B samples
    signal: dict[str, float] = field(default_factory=dict)


class PromptLogPartition(torch.nn.Module):
    """FlowRL's log Z of N training prompts: one number that all share plus one of each; 0 before training.

    The paper (arXiv 2509.15207, section 3.3) reads it from the prompt's hidden states; image models encode prompts in
    ways that have nothing in common.
    """

    def __init__(self, prompts: int) -> None:
        super().__init__()
        self.shared, self.prompt = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(prompts))

    def forward(self, index: Tensor) -> Tensor:
        """Return log Z [n] of the prompts `index` [n]."""
        return self.shared + self.prompt[index.to(self.prompt.device)]


class FlowGRPO(ImageAlgorithm):
    """Trains a diffusion policy on a reward; its arguments are those of `ImageAlgorithm`."""

    log_z: PromptLogPartition | None = None  # Of FlowRL
    reference_rewards: ReferenceRewards | None = None  # Of PAR

    def setup(self) -> None:
        self.objective = self.settings.build(length=self.rollout.trained_per_image)
        joins = "the steps of an image" if couples_decisions(self.objective) else None
        self._scores_reference = needs_reference_log_prob(self.objective)
        if self.objective.surrogate == "flow_balance":
            self.log_z = PromptLogPartition(len(self.records)).to(self.policy.device)
        if self.objective.advantage == "par":
            self.reference_rewards = ReferenceRewards(self, self.objective.advantage_options.get("references", 1))
        uses_reference = needs_reference(self.objective)
        self.module = self.distribute(replay, needs_reference=uses_reference, joins=joins, head=self.log_z)
        self._prefetcher = RolloutPrefetcher(self._sample, self.rollout.staleness)

    @property
    def ratio_bound(self) -> float | None:  # type: ignore[override]  # an attribute elsewhere; here it follows the size
        """Bound of |log r| at the first update; it grows with the numbers that the log-ratio sums over."""
        if self.settings.ratio_bound is not None:
            return self.settings.ratio_bound
        is_sum = self.objective.ratio == "log_prob" and self.rollout.log_prob_reduction == "sum"
        return RATIO_BOUND * (math.prod(self.policy.latent_shape) if is_sum else 1)

    def _sample(self, iteration: int, run: Context) -> PendingImages:
        with self.scorer.at(iteration):
            self.draw_references(iteration, iteration, run.clock)
            return self.sample(iteration, run.clock, self.rollout.choose_steps(self.seed, iteration)[0])

    def collect(self, run: Context) -> Collected:
        """Sample, decode and score one iteration's groups."""
        iteration = run.counters.iteration
        sde_steps, trained = self.rollout.choose_steps(self.seed, iteration)

        def sample_round(number: int) -> PendingImages:
            if self.groups is None:
                return self._prefetcher.next(run)
            self.draw_references(number, iteration, run.clock)
            return self.sample(number, run.clock, sde_steps, iteration)

        with self.unsharded():
            images, collected = self.collect_images(run, sample_round)
            if images is None:
                return collected
            node = images.trajectory.node[:, list(trained)]
            trajectories = self._credit(self._trajectories(images, trained), images, trained, node, run)
            experience = Experience(
                objective=self.objective,
                condition=images.condition,
                trajectory=images.trajectory,
                trained=torch.tensor(trained),
                trajectories=self._more_inputs(trajectories, images, collected.metrics, run),
                node=node,
                prompt=images.batch.prompt_index,
                shares=images.shares,
            )
            with run.clock.phase("replay"):
                self._add_log_probs(experience, run.micro_batch)
        return replace(collected, experience=experience)

    def _trajectories(self, images: ScoredImages, trained: Sequence[int]) -> Trajectories:
        trajectory, step_weights, loss_weight = images.trajectory, self.settings.step_weights, None
        old = images.shares.gather_all(trajectory.log_prob[:, list(trained)].contiguous())
        if step_weights is not None or self.objective.step_weight != "uniform":
            if step_weights is None:
                levels = self.sigmas.float().cpu()
                factor = trajectory.kernel.step_weight(self.objective.step_weight, levels[:-1], levels[1:])
                # GRPO-Guard leaves 1/|dt| undivided; over its mean it does not change the scale of the loss
                factor = factor / factor[self.rollout.trained].mean()
            else:
                factor = torch.tensor(step_weights, dtype=torch.float32)
            factor = factor[[trajectory.sde_steps[step] for step in trained]]
            loss_weight = factor.to(old.dtype).expand_as(old).contiguous()
        by_column = self.objective.advantage in MATRIX_ADVANTAGES
        return Trajectories(
            weight=torch.ones_like(old),
            old_log_prob=torch.zeros_like(old) if self.objective.ratio == "guard" else old,
            group=images.group,
            reward=images.columns if by_column else images.value,
            reward_weights=list(reward_weights(self.scorer.reward).values()) if by_column else (),
            valid=images.valid,
            metric=self._metric(images),
            loss_weight=loss_weight,
            decisions="denoising_steps",
        )

    def _credit(
        self, trajectories: Trajectories, images: ScoredImages, trained: Sequence[int], node: Tensor, run: Context
    ) -> Trajectories:
        """Add a reward of each trained step, where `objective.credit` asks for one."""
        credit, trajectory = self.settings.credit, images.trajectory
        if credit == "image":
            return trajectories
        if credit == "branches":
            value = torch.where(images.valid, images.value, torch.nan)
            advantage = branch_advantages(value, images.shares.gather_all(images.own[node]), images.group)
            return replace(trajectories, advantage=advantage)
        levels = []  # R_k: reward of the image that is completed without noise from stochastic step k
        for k, step in enumerate(trajectory.sde_steps):
            if credit == "one_step":
                latents = predict_clean(trajectory, k)
            else:
                with run.clock.phase("rollout"), self.accelerator.autocast():
                    latents = complete(
                        self.policy,
                        images.condition,
                        trajectory.x[:, k],
                        sigmas=self.sigmas,
                        step=step,
                        batch_size=self.batch_size,
                        solver=self.rollout.solver,
                    )
            scores = self.score(latents, images.records, run.clock)
            levels.append(torch.where(scores.valid, scores.value, torch.nan).double().cpu())
        level = images.shares.gather_all(torch.stack(levels, 1))
        # after the last stochastic step the rollout is its own deterministic rest: R_n = R
        rewards = turning_point_rewards(images.value, level[:, 0], torch.cat([level[:, 1:], images.value[:, None]], 1))
        step_reward = rewards.increment if credit == "one_step" else rewards.step_reward
        step_reward = step_reward[:, list(trained)].to(trajectories.old_log_prob.dtype)
        finite = torch.isfinite(step_reward).all(1)  # a sample with a NaN among them becomes invalid
        process_reward = step_reward.nan_to_num() * finite[:, None]
        return replace(trajectories, process_reward=process_reward, valid=images.valid & finite)

    def _more_inputs(
        self, t: Trajectories, images: ScoredImages, metrics: Mapping[str, float], run: Context
    ) -> Trajectories:
        """Add rewards of the reference, the monitored variety, or bundles, where the objective needs them."""
        if self.reference_rewards is not None:
            t = replace(t, reference_reward=self.reference_rewards.of(images, run))
        if self.objective.selection == "entrocraft":
            t = replace(t, entropy=torch.full_like(t.weight, metrics["diversity"]))
        return with_bundles(self.objective, t, run.counters.own)

    def _metric(self, images: ScoredImages) -> Tensor | None:
        """Return [B] the part of the reward that splits groups, where `objective.metric` names one."""
        name = self.settings.metric
        if name is not None and name not in images.parts:
            raise UserError(
                f"objective.metric is {name!r}, and the parts of the reward {self.scorer.reward.name!r} are: "
                f"{', '.join(images.parts) or 'none'}. Name one of them, or add a term of that label and "
                "weight 0 to rewards.terms."
            )
        return None if name is None else images.parts[name]

    def _add_log_probs(self, experience: Experience, micro_batch: int) -> None:
        """Add log-probs of the reference or the current policy, where the objective needs them."""
        columns: dict[str, Tensor] = {}
        if self._scores_reference:
            with self.reference.applied():
                columns["ref_log_prob"] = self._log_probs(experience, micro_batch)
        if self.objective.importance_sampling is not None:
            columns["rollout_log_prob"] = experience.trajectories.old_log_prob
            columns["old_log_prob"] = self._log_probs(experience, micro_batch)
        if columns:
            experience.trajectories = replace(experience.trajectories, **columns)

    @torch.no_grad()
    def _log_probs(self, experience: Experience, micro_batch: int) -> Tensor:
        """Compute [B, T] log-probs of all trained steps under the current weights, as the update does."""
        node = experience.node
        sample, decision = (node == torch.arange(len(node))[:, None]).nonzero(as_tuple=True)
        step = experience.trained[decision]
        chunks = []
        for rows in torch.arange(len(sample)).split(micro_batch):
            with self.accelerator.autocast():
                condition = experience.condition.select(sample[rows])
                pairs = experience.trajectory.pairs(sample[rows], step[rows])
                chunks.append(replay(self.policy, condition, pairs, experience.trajectory.kernel).log_prob)
        flat = torch.cat(chunks)
        log_prob = flat.new_empty(node.shape).index_put((sample.to(flat.device), decision.to(flat.device)), flat)
        return experience.shares.gather_all(log_prob.gather(0, node.to(flat.device)))

    def prepare(self, experience: Experience, run: Context) -> list[PolicyStep]:
        """Compute advantages and denominators over all processes' samples, and split them into updates."""
        steps, gradient = partial(self._steps, run=run), partial(self._add_reward_gradient, run=run)
        if self.balance is None:
            return steps(experience)
        return self.balance.prepare(experience, run, self.parameters(), steps, gradient)

    def _add_reward_gradient(self, experience: Experience, sample: Tensor, run: Context) -> None:
        """Add the gradient of the first update on these samples, without the KL's."""
        experience = replace(experience, objective=replace(experience.objective, kl=0.0))
        for step in [step for step in self._steps(experience, run) if torch.equal(step.sample, sample)][:1]:
            self.backward(experience, step, run)

    def _steps(self, experience: Experience, run: Context) -> list[PolicyStep]:
        steps, experience.signal = prepare_steps(
            experience.objective,
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
            experience.objective,
            self._micro_batches(experience, step, run.micro_batch),
            self.accelerator,
            scale=run.counters.loss_scale,
        )

    def record(self, experience: Experience, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        options = self.objective.surrogate_options
        bounds = [options[name] for name in ("eps_low", "eps_high") if name in options]
        metrics = update_metrics(sums)
        self.divergence = metrics.get("kl")
        return {**experience.signal, **metrics, **({"clip_range": min(bounds)} if bounds else {})}

    def finish(self, run: Context) -> None:
        """Store the rewards of the reference, and forget them where it is another one now."""
        reset = run.counters.own.get(RESET_KEY)
        super().finish(run)
        if self.reference_rewards is not None:
            if run.counters.own.get(RESET_KEY) != reset:
                self.reference_rewards.load({})
            run.tensors["reference_rewards"] = self.reference_rewards.state()

    def restore(self, run: Context) -> None:
        """Load the rewards of the reference of a checkpoint."""
        super().restore(run)
        if self.reference_rewards is not None:
            self.reference_rewards.load(run.tensors["reference_rewards"])

    def parameters(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        """Return the policy's trained parameters, and those of FlowRL's log Z."""
        head = () if self.log_z is None else self.log_z.named_parameters()
        return [*super().parameters(), *((f"log_z.{name}", parameter) for name, parameter in head)]

    def _micro_batches(
        self, experience: Experience, step: PolicyStep, size: int
    ) -> Iterator[tuple[Prepared, PolicyOutput]]:
        """Yield rows and the policy's outputs for them; rows of weight 0 where this process is `idle`."""
        local = step.local_rows(experience.shares.local)
        row, decision, count = self._pairs(experience, step, local)
        zero = torch.zeros(1, dtype=torch.int64)
        first = flat_rows(step.prepared, zero, zero)
        weightless = replace(first, weight=torch.zeros_like(first.weight)).to(self.policy.device)
        for _ in range(self.idle(math.ceil(len(row) / size))):
            yield weightless, self._output(experience, zero, zero)
        if not len(local):
            return
        if couples_decisions(experience.objective):
            yield from self._whole_samples(experience, step, local, size)
            return
        for batch in torch.arange(len(row)).split(size):
            rows = flat_rows(step.prepared, row[batch], decision[batch])
            rows = replace(rows, weight=rows.weight * count[batch, None]).to(self.policy.device)
            sample = experience.shares.local[step.sample[row[batch]]]
            with self._no_sync(int(batch[-1]) == len(row) - 1):
                yield rows, self._output(experience, sample, decision[batch])

    def _pairs(self, experience: Experience, step: PolicyStep, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """List (row, decision, number of samples) of N pairs; a step that samples share is listed once.

        The loss of a shared pair counts for each of its samples, so the update is that of all of them.
        """
        steps = len(experience.trained)
        node = experience.node[experience.shares.local[step.sample[local]]]
        label, position = (node * steps + torch.arange(steps)).flatten(), torch.arange(node.numel())
        labels, index, count = label.unique(return_inverse=True, return_counts=True)
        first = torch.full_like(labels, len(position)).scatter_reduce(0, index, position, "amin")
        first = first.sort().values
        return local[first // steps], first % steps, count[index[first]]

    def _whole_samples(
        self, experience: Experience, step: PolicyStep, local: Tensor, size: int
    ) -> Iterator[tuple[Prepared, PolicyOutput]]:
        """Yield all decisions of each sample together, for objectives that join them."""
        steps = len(experience.trained)
        batches = local.split(max(1, size // steps))
        for batch in batches:
            sample, last = experience.shares.local[step.sample[batch]], batch is batches[-1]
            rows = step.prepared.rows(batch).to(self.policy.device)
            if steps > size:
                yield from self._in_two_passes(experience, rows, sample, size, last)
                continue
            with self._no_sync(last):
                yield rows, self._output(experience, sample)

    def _no_sync(self, last: bool) -> AbstractContextManager[Any]:
        return no_sync_unless_last(self.module, self.accelerator, last=last)

    def _in_two_passes(
        self, experience: Experience, rows: Prepared, sample: Tensor, size: int, last: bool
    ) -> Iterator[tuple[Prepared, PolicyOutput]]:
        """Yield one sample whose steps do not fit into a micro-batch.

        ∂L/∂log π of all its steps comes first, then the network's gradient chunk by chunk: one forward more,
        the same update.
        """
        chunks = torch.arange(len(experience.trained)).split(size)
        with torch.no_grad():
            outputs = [self._output(experience, sample.expand(len(chunk)), chunk) for chunk in chunks]
        names = [name for name, value in vars(outputs[0]).items() if value is not None and name != "log_z"]
        leaves = {
            name: torch.cat([getattr(output, name) for output in outputs]).view(1, -1).requires_grad_()
            for name in names
        }
        log_z = None if outputs[0].log_z is None else outputs[0].log_z[:1].requires_grad_()
        yield rows, PolicyOutput(**leaves, log_z=log_z)
        for chunk in chunks:
            with self._no_sync(last and chunk is chunks[-1]):
                output = self._output(experience, sample.expand(len(chunk)), chunk)
                pairs = [(getattr(output, name)[:, 0], leaf.grad) for name, leaf in leaves.items()]
                pairs = [(value, grad[0, chunk]) for value, grad in pairs if grad is not None]
                if log_z is not None and log_z.grad is not None and output.log_z is not None and chunk is chunks[-1]:
                    pairs.append((output.log_z[:1], log_z.grad))
                torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])

    def _output(self, experience: Experience, sample: Tensor, decision: Tensor | None = None) -> PolicyOutput:
        """Evaluate the policy on single decisions [N, 1] of `sample` [N], or on all decisions of n samples [n, T]."""
        objective, steps = experience.objective, len(experience.trained)
        shape, prompts = (len(sample), 1 if decision is not None else steps), sample
        if decision is None:
            decision = torch.arange(steps).repeat(len(sample))
            sample = sample.repeat_interleave(steps)
        pairs = experience.trajectory.pairs(sample, experience.trained[decision])
        condition, kernel = experience.condition.select(sample), experience.trajectory.kernel
        reference = None
        if objective.kl > 0:  # before the policy's own forward: a reference may swap weights in place
            with torch.no_grad(), self.accelerator.autocast(), self.reference.applied():
                reference = replay(self.policy, condition, pairs, kernel)
        stats = self.module(condition, pairs, kernel)
        log_prob, mean = stats.log_prob, stats.mean
        if objective.ratio == "guard":
            std = pairs.std.reshape(-1, *[1] * (pairs.mean.ndim - 1))
            log_prob = guard_log_ratio((pairs.x_next.to(pairs.mean) - pairs.mean) / std, mean, pairs.mean)
        reduction: Any = kernel.log_prob_reduction
        terms = {"log_prob": log_prob}
        if reference is not None and objective.kl_form == "velocity":
            terms["kl"] = velocity_kl(stats.v, reference.v)
        elif reference is not None:
            terms["kl"] = gaussian_kl(mean, reference.mean, pairs.std, log_prob_reduction=reduction)
        if objective.surrogate in ("dppo", "ppo_kl"):
            terms["divergence"] = gaussian_kl(mean, pairs.mean, pairs.std, log_prob_reduction=reduction)
        log_z = None if self.log_z is None else self.log_z(experience.prompt[prompts])
        return PolicyOutput(**{name: value.view(shape) for name, value in terms.items()}, log_z=log_z)
