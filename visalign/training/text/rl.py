# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of a text policy with any `Objective`: GRPO, DAPO, GSPO, PPO, FlowRL and the rest.

Deliberate deviations from common trainers:
* denominators, advantages and selections are those of the whole optimizer step, so a micro-batch size changes
  memory and nothing else;
* the ratio is of the distribution that was sampled (temperature, top-k, top-p), and is checked to be 1 at the
  first step;
* a completion whose reward failed leaves its group's statistics and the loss;
* completions without signal cost no backward pass, but stay in the denominator;
* every random draw is a function of (seed, name, iteration or sample): a resumed run equals an
  uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.core import Objective, PolicyOutput, Prepared, Trajectories, count_step, penalty_kl_coefficient
from visalign.core.advantages.hidden_states import rank_average
from visalign.core.objective.entropy_stage import entropy_memory, remembers
from visalign.core.objective.stages import ADVANTAGES, sample_reward
from visalign.errors import UserError
from visalign.interfaces import TextReward
from visalign.seeds import sample_seed
from visalign.text import TextPolicy, TextRollout
from visalign.training.loop.algorithm import Collected, Context
from visalign.training.loop.dynamic_groups import DynamicGroups, DynamicSettings
from visalign.training.loop.judging import RewardScorer, RolloutPrefetcher, as_higher_is_better
from visalign.training.loop.processes import get_accelerator, synced_last
from visalign.training.loop.sampler import PromptSampler
from visalign.training.loop.sharding import pad_batches
from visalign.training.policy.balance import RewardBalance
from visalign.training.policy.learning_reward import LearningReward
from visalign.training.policy.reference import GatedKL, Reference
from visalign.training.policy.update import PolicyStep, backward, prepare_steps, update_metrics, with_bundles
from visalign.training.policy.winners import KEY as IMITATION_KEY

from .collect import PendingRound, TextExperience, collect, sample_completions
from .entropy_metrics import covariance_metrics, entropy_drop
from .latent_flow import LatentFlow
from .parts import (
    CompletionGenerator,
    Demonstrations,
    LogPartition,
    ProcessReward,
    TextParts,
    ValueFunction,
    check_parts,
)
from .replay import TextAlgorithm, TextReplay, distribute
from .self_imitation import Replay, SelfImitation
from .settings import LatentFlowSettings, SelfImitationSettings, TextObjectiveSettings, TextRolloutSettings
from .trajectories import needs_reference, nucleus_of

HEADS = ("value_head.", "value_model.", "log_partition.")
"""Prefixes of parameters that do not belong to the policy itself."""


class TextRL(TextAlgorithm):
    """Reinforcement learning of a text policy; an `Algorithm` for `Trainer`.

    The reward gets the prompt records, each with "prompt", as metadata. `generator` generates the
    completions, None is the policy. `value_model` is a separate value network for PPO, `process` rewards a
    completion's steps (`latent_flow` its tokens, in place of it), `demonstrations` are of PPO-ptx. All
    processes call `after_update` with the iterations finished after an update, for a server that loads the
    weights. `sharding` divides the model, its gradients and AdamW's moments among the processes (FSDP2).
    """

    def __init__(
        self,
        policy: TextPolicy,
        reward: TextReward,
        records: Sequence[Mapping[str, Any]],
        *,
        rollout: TextRolloutSettings | None = None,
        objective: TextObjectiveSettings | None = None,
        seed: int = 0,
        accelerator: Accelerator | None = None,
        dynamic: DynamicSettings | None = None,
        self_imitation: SelfImitationSettings | None = None,
        latent_flow: LatentFlowSettings | None = None,
        generator: CompletionGenerator | None = None,
        value_model: ValueFunction | None = None,
        log_partition: LogPartition | None = None,
        process: ProcessReward | None = None,
        demonstrations: Demonstrations | None = None,
        after_update: Callable[[int], None] | None = None,
        strata: Sequence[str] | None = None,
        cycle: Sequence[str] | None = None,
        sharding: bool = False,
    ) -> None:
        self.accelerator = get_accelerator(accelerator, policy)
        self.rollout = rollout or TextRolloutSettings()
        self.settings = objective or TextObjectiveSettings()
        base = self.settings.build(length=self.rollout.max_new_tokens)
        self.policy = policy
        self._prefetcher = RolloutPrefetcher[PendingRound](self._sample_iteration, self.rollout.staleness)
        reward, reference = as_higher_is_better(reward), Reference(policy, self.settings)
        self.learner = process if isinstance(process, LearningReward) else None
        if latent_flow is not None:
            if process is not None:
                raise UserError("latent_flow and process both score steps. Leave one of the two out.")
            process = self.learner = LatentFlow(
                policy, reference, latent_flow, seed=seed, accelerator=self.accelerator
            )
        self.parts = TextParts(
            policy=policy,
            reference=reference,
            generator=policy if generator is None else generator,
            scorer=RewardScorer(reward, in_thread=self.rollout.overlap > 1 or self.rollout.staleness > 0),
            records=records,
            rollout=self.rollout,
            objective=base,
            value_model=value_model,
            log_partition=log_partition,
            process=process,
            demonstrations=demonstrations,
            seed=seed,
            accelerator=self.accelerator,
        )
        prompts, size = self.rollout.prompts_per_iteration, self.rollout.group_size
        order: dict[str, Any] = {"strata": strata, "cycle": cycle, "compared": self.settings.compares}
        self.sampler = PromptSampler(len(records), prompts, size, seed, **order)
        self.groups = DynamicGroups(prompts, dynamic) if dynamic is not None and dynamic.enabled else None
        check_parts(self.parts, name=self.settings.algorithm, dynamic=self.groups is not None)
        self.imitation: SelfImitation | None = None
        if self_imitation is not None:
            if self.parts.objective.value or self.parts.objective.surrogate == "flow_balance":
                raise UserError(
                    "self_imitation replays completions of algorithms that compare groups, and "
                    f"objective.algorithm={self.settings.algorithm} has a value function, or log Z of the "
                    "prompt. Use 'grpo' or 'dapo', or set self_imitation=null."
                )
            self.imitation = SelfImitation(self_imitation, self.parts.objective, self.rollout, seed)
        every = self.settings.balance_every
        self.balance = None if every is None else RewardBalance(reward, every)
        self.after_update = after_update
        if sharding:
            self._check_sharding()
        replay = TextReplay(
            policy,
            value=bool(self.parts.objective.value),
            nucleus=nucleus_of(self.parts.objective),
            value_model=value_model,
            log_partition=log_partition,
        )
        self.module = distribute(replay, self.accelerator, sharding)
        self.ratio_bound = self.settings.ratio_bound
        self.gate = GatedKL(self.settings.kl_threshold) if self.settings.algorithm == "safe" else None
        self._kl_penalty: float | None = None
        self._last_kl: float | None = None
        self._had_updates = False

    def _check_sharding(self) -> None:
        parts, settings = self.parts, self.settings
        conflicts = {
            "a value model": parts.value_model is not None,
            "a log-partition head": parts.log_partition is not None,
            "demonstrations (ptx)": parts.demonstrations is not None,
            "an engine that writes the completions": parts.generator is not parts.policy,
            "objective.balance_every": settings.balance_every is not None,
            "self_imitation": self.imitation is not None,
            "latent_flow or process.online": self.learner is not None,
            "objective.reset_reference_every": settings.reset_reference_every is not None,
            "objective.reset_reference_above": settings.reset_reference_above is not None,
            "a reference (objective.changes.kl) without LoRA": needs_reference(self.parts.objective)
            and getattr(parts.policy, "lora", None) is None,
        }
        if name := next((name for name, is_used in conflicts.items() if is_used), None):
            raise UserError(f"sharding goes without {name}. Leave one of the two out.")

    def rates(self, lr: float) -> Mapping[str, float]:
        heads = self.settings.heads_lr
        return {} if heads is None else dict.fromkeys(HEADS, heads / lr)

    @property
    def objective(self) -> Objective:
        """The objective with the present coefficient of PPO-KL or of SAFE's gated KL."""
        base = self.parts.objective
        if self.gate is not None:
            return self.gate.applied(base)
        if self.settings.target_kl is None or self._kl_penalty is None:
            return base
        return replace(base, surrogate_options={**base.surrogate_options, "beta": self._kl_penalty})

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        parts = self.parts
        parameters = list(self.policy.trainable_parameters())
        if parts.value_model is not None:
            parameters += [(f"value_model.{n}", p) for n, p in parts.value_model.named_parameters()]
        if parts.log_partition is not None:
            parameters += [(f"log_partition.{n}", p) for n, p in parts.log_partition.head.named_parameters()]
        return parameters

    def collect(self, run: Context) -> Collected:
        """Sample and score completions and, with dynamic sampling, select groups."""

        self.parts.scorer.iteration = run.counters.iteration

        def sample_round(number: int) -> PendingRound:
            return self._sample(number, run) if self.groups is not None else self._prefetcher.next(run)

        with self.unsharded():
            collected = collect(self.parts, sample_round, self.groups, run.counters.iteration, run.clock)
        self._had_updates = collected.experience is not None
        drop = entropy_drop(collected.metrics["entropy"], run.counters.own)
        collected = replace(collected, metrics={**collected.metrics, **drop})
        if collected.experience is not None:
            self._update_memory(collected.experience, run)
        return collected

    def _sample(self, number: int, run: Context) -> PendingRound:
        return sample_completions(self.parts, self.sampler, number, run.clock)

    def _sample_iteration(self, iteration: int, run: Context) -> PendingRound:
        with self.parts.scorer.at(iteration):
            return self._sample(iteration, run)

    def _update_memory(self, experience: TextExperience, run: Context) -> None:
        objective, t, memory = self.parts.objective, experience.trajectories, run.counters.own
        if remembers(objective) is not None:
            before = memory.get("entropies", [])
            memory["entropies"] = entropy_memory(objective, t, before)
            t = replace(t, entropy_before=before[0] if before else None)
        t = with_bundles(objective, t, memory)
        if (rank := t.rank) is not None:
            average, rate = memory.get("rank_average"), objective.advantage_options.get("rate", 0.3)
            t = replace(t, rank_average=average)
            valid_rank = torch.where(t.present()[:, None], rank, torch.nan)
            memory["rank_average"] = rank_average(valid_rank, average, rate=rate)
        experience.trajectories = t

    def prepare(self, experience: TextExperience, run: Context) -> list[PolicyStep]:
        """Compute advantages, selections, denominators and the split into updates of whole groups."""
        t = experience.trajectories
        if "metric" in ADVANTAGES[self.parts.objective.advantage].needs:
            t = experience.trajectories = replace(t, metric=self._canon_metric(t))
        if self.imitation is not None:
            updates, epochs = run.optimizer.updates_per_iteration, self.settings.epochs
            experience.replays = self.imitation.draw(t, run, updates, epochs)
        prepare = partial(self._steps, run=run, objective=self.objective)
        if self.balance is None:
            steps = prepare(experience)
        else:
            add_gradient = partial(self._add_reward_gradient, run=run)
            steps = self.balance.prepare(experience, run, self.parameters(), prepare, add_gradient)
        if self.learner is not None:
            outcome = sample_reward(replace(t, process_reward=None), 0.0)[experience.shares.own]
            self.learner.learn(experience.rollout, outcome, run.counters.iteration)
        if self.imitation is not None:
            self.imitation.keep(experience.rollout, experience.shares.own, t, steps, run)
        return steps

    def _canon_metric(self, t: Trajectories) -> Tensor:
        """Compute the quantity [B] that splits CANON's groups; NaN without a token."""
        length = (t.weight != 0).sum(1)
        if self.settings.metric == "length":
            return length.double()
        if t.entropy is None:
            raise UserError(
                "objective.algorithm=canon splits groups by entropy, which the generator of these "
                "completions does not report. Set objective.metric=length, or rollout.recompute=true."
            )
        return torch.where(t.weight != 0, t.entropy, 0.0).sum(1) / length

    def _add_reward_gradient(self, experience: TextExperience, sample: Tensor, run: Context) -> None:
        """Add the gradient of the first update on these samples, of the rewards alone."""
        objective = replace(self.objective, kl=0.0, entropy=0.0, ptx=0.0)
        steps = self._steps(experience, run, objective)
        for step in [step for step in steps if torch.equal(step.sample, sample)][:1]:
            self._backward(experience, replace(step, extra=None), run, objective)

    def _steps(self, experience: TextExperience, run: Context, objective: Objective) -> list[PolicyStep]:
        updates, first = run.optimizer.updates_per_iteration, run.counters.updates
        total = updates * self.settings.epochs
        demonstrations: list[TextRollout | None] = [None] * total
        if self.parts.demonstrations is not None and objective.ptx:
            batches = [self.parts.demonstrations.batch(first + i) for i in range(total)]
            experience.trajectories = replace(experience.trajectories, ptx_weight=batches[0].loss_mask)
            demonstrations = list(batches)  # every epoch learns new ones
        t, iteration, drawn = experience.trajectories, run.counters.iteration, None
        if self.settings.pf_ppo is not None:
            reward = torch.where(t.present(), sample_reward(t, 0.0), torch.nan)
            drawn = self.settings.pf_ppo.draw(reward, sample_seed(self.parts.seed, "pf_ppo", iteration))
        pairs = zip(demonstrations, experience.replays or [None] * total, strict=True)  # `PolicyStep.extra`
        steps, experience.signal = prepare_steps(
            objective,
            self.settings,
            t,
            updates=updates,
            seed=self.parts.seed,
            iteration=iteration,
            whole_groups=True,
            drawn=drawn,
            extras=[pair if any(part is not None for part in pair) else None for pair in pairs],
        )
        if steps:
            spread = covariance_metrics(
                [step.prepared for step in steps[: max(1, len(steps) // self.settings.epochs)]]
            )
            experience.signal |= spread
            rate = sum(run.optimizer.lr_at(first + number) for number in range(len(steps)))
            run.counters.own["entropy_drop_foreseen"] = rate * spread.get("covariance/mean", 0.0)
        return steps

    def backward(self, experience: TextExperience, step: PolicyStep, run: Context) -> dict[str, float]:
        """Add the gradient of an update, in micro-batches of completions, the longest first; then of the replay."""
        return self._backward(experience, step, run, self.objective)

    def _backward(
        self, experience: TextExperience, step: PolicyStep, run: Context, objective: Objective
    ) -> dict[str, float]:
        scale = run.counters.loss_scale
        micro_batches = self._micro_batches(experience, step, run.micro_batch)
        sums = backward(objective, micro_batches, self.accelerator, scale=scale)
        replay: Replay | None = (step.extra or (None, None))[1]
        if self.imitation is not None and replay is not None:
            micro_batches = self._replay_micro_batches(replay, run.micro_batch)
            replay_sums = backward(self.imitation.objective, micro_batches, self.accelerator, scale=scale)
            sums["loss/replay"] = replay_sums["loss/policy"]
        return sums

    def _micro_batches(
        self, experience: TextExperience, step: PolicyStep, size: int
    ) -> Iterator[tuple[Prepared, PolicyOutput]]:
        """Yield this process's samples with signal, each micro-batch with its share of demonstrations."""
        prepared, accelerator = step.prepared, self.accelerator
        demonstrations: TextRollout | None = (step.extra or (None, None))[0]
        if demonstrations is not None:
            prepared = replace(prepared, ptx_counts=count_step(demonstrations.loss_mask))
        local, rows = experience.shares.local[step.sample], step.local_rows(experience.shares.local)
        rows = rows[torch.argsort((prepared.weight[rows] != 0).sum(1), stable=True, descending=True)]
        batches: list[Tensor] = pad_batches(rows.split(size), self.module, accelerator)
        shares: Sequence[Tensor | None] = [None] * len(batches)
        if demonstrations is not None:
            world, rank = accelerator.num_processes, accelerator.process_index
            chunks = torch.arange(len(demonstrations)).tensor_split(world)[rank].chunk(len(batches))
            shares = [*chunks, *[None] * (len(batches) - len(chunks))]
        pairs = list(zip(batches, shares, strict=True))
        for batch, share in synced_last(pairs, self.module, accelerator):
            sample = local[batch]
            output = self.module(
                experience.rollout,
                sample,
                features=None if experience.features is None else experience.features[sample],
                demonstrations=None if share is None else demonstrations,
                demonstration_rows=share,
            )
            yield prepared.rows(batch).to(output.log_prob.device), output

    def _replay_micro_batches(self, replay: Replay, size: int) -> Iterator[tuple[Prepared, PolicyOutput]]:
        """Yield this process's share of stored completions."""
        accelerator = self.accelerator
        rows = torch.arange(len(replay.rollout))[accelerator.process_index :: accelerator.num_processes]
        for batch in synced_last(rows.split(size), self.module, accelerator):
            output = self.module(replay.rollout, batch)
            yield replay.prepared.rows(batch).to(output.log_prob.device), output

    def record(self, experience: TextExperience, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return metrics of the updates, and adapt the coefficients of PPO-KL and SAFE."""
        metrics = {**experience.signal, **update_metrics(sums)}
        for part in (self.imitation, self.learner):
            metrics |= {} if part is None else part.metrics()
        self._last_kl = metrics.get("kl")
        if self.gate is not None:
            metrics["penalty"] = self.objective.kl
            self.gate.move(experience.trajectories, metrics.get("kl"))
        target = self.settings.target_kl
        if target is not None:
            penalty = float(self.objective.surrogate_options.get("beta", 1.0))
            kl_old = self._kl_after_update(experience)
            self._kl_penalty = float(penalty_kl_coefficient(penalty, kl_old, target=target))
            metrics |= {"kl_old": kl_old, "penalty": penalty}
        return metrics

    @torch.no_grad()
    def _kl_after_update(self, experience: TextExperience) -> float:
        """Compute KL(π_old‖π) per token after the last step, k3 = r − 1 − log r."""
        t = experience.trajectories
        with self.unsharded():
            log_prob = self.parts.policy.log_probs(experience.rollout).log_prob
            log_ratio = (experience.shares.gather_all(log_prob) - t.old_log_prob).double()
        return float((log_ratio.expm1() - log_ratio)[t.weight != 0].mean())

    def wait_for_rewards(self) -> None:
        self.parts.scorer.wait()

    def finish(self, run: Context) -> None:
        """Save the state for a checkpoint, and hand the weights to a server."""
        memory = run.counters.own
        self.parts.reference.finish(run, self._last_kl)
        if self.groups is not None:
            memory["rounds"] = self.groups.round
        if self._kl_penalty is not None:
            memory["penalty"] = self._kl_penalty
        if self.gate is not None:
            memory["kl_gate"] = self.gate.state()
        for key, part in self._stateful():
            run.tensors[key] = part.state()
        if self.after_update is not None and self._had_updates:  # else the server has these weights
            with run.clock.phase("sync"):
                self.after_update(run.counters.iteration)

    def restore(self, run: Context) -> None:
        """Continue from a checkpoint; a server still has other weights."""
        memory = run.counters.own
        self.parts.reference.restore(run)
        self._kl_penalty = memory.get("penalty")
        if self.gate is not None and "kl_gate" in memory:
            self.gate.load(memory["kl_gate"])
        if self.groups is not None:
            self.groups.round = memory.get("rounds", 0)
        for key, part in self._stateful():
            if key in run.tensors:
                part.load(run.tensors[key])
        if self.after_update is not None:
            self.after_update(run.counters.iteration)

    def _stateful(self) -> list[tuple[str, Any]]:
        """Parts whose state checkpoints hold, by file stem."""
        parts = [] if self.imitation is None else [(IMITATION_KEY, self.imitation)]
        return parts if self.learner is None else [*parts, (self.learner.key, self.learner)]
