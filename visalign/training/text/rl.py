# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of a text policy with any `Objective`: GRPO, DAPO, GSPO, PPO, FlowRL and the rest.

Where this deviates from what trainers usually do, always on purpose:
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
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.core import (
    Objective,
    PolicyOutput,
    Prepared,
    Trajectories,
    count_step,
    penalty_kl_coefficient,
)
from visalign.core.advantages.hidden_states import rank_average
from visalign.core.objective.entropy_stage import entropy_memory, remembers
from visalign.core.objective.reward_stage import riskpo_quantiles
from visalign.core.objective.stages import ADVANTAGES, sample_reward
from visalign.errors import UserError
from visalign.interfaces import TextReward
from visalign.text import TextPolicy, TextRollout
from visalign.training.loop.algorithm import Algorithm, Collected, Context
from visalign.training.loop.judging import RewardScorer, RolloutPrefetcher, as_higher_is_better
from visalign.training.loop.processes import get_accelerator, no_sync_unless_last
from visalign.training.loop.sampler import PromptSampler
from visalign.training.loop.sharding import pad_batches, unsharded
from visalign.training.policy.balance import RewardBalance
from visalign.training.policy.reference import GatedKL, Reference
from visalign.training.policy.update import PolicyStep, backward, prepare_steps, update_metrics

from .collect import TextExperience, Written, collect, write
from .latent_flow import KEY as FLOW
from .latent_flow import LatentFlow
from .parts import (
    Demonstrations,
    Generates,
    LogPartition,
    ProcessJudge,
    TextParts,
    ValueFunction,
    check_parts,
    check_sizes,
)
from .replay import TextReplay, spread
from .self_imitation import KEY, Replayed, SelfImitation
from .settings import (
    DynamicSettings,
    LatentFlowSettings,
    SelfImitationSettings,
    TextObjectiveSettings,
    TextRolloutSettings,
    check_ahead,
)
from .trajectories import needs_reference, nucleus_of

AfterUpdate = Callable[[int], None]

HEADS = ("value_head.", "value_model.", "log_partition.")
"""Beginnings of the names of what is not the policy itself."""


@dataclass(frozen=True)
class Beside:
    """What an update learns from besides the iteration's completions."""

    given: TextRollout | None
    """PPO-ptx's demonstrations."""
    replayed: Replayed | None


class TextRL(Algorithm):
    """Trains a text policy on a reward; an `Algorithm` for `Trainer`.

    Args:
        policy: on its device.
        reward: judges one completion at a time; higher is better (or its sign is turned).
        records: prompt records, each with "prompt"; handed to the reward as metadata.
        rollout: how completions are made.
        objective: which row of the table is optimized.
        seed: of the run.
        accelerator: processes and trackers. None makes one on the policy's device.
        dynamic: dynamic sampling.
        self_imitation: what is learnt from again.
        latent_flow: rewards of single tokens by a flow that learns from right completions; in place of
            `process`.
        generator: who writes the completions; None is the policy.
        value_model: a value network of its own, for PPO; None where the policy has a value head.
        log_partition: log Z of FlowRL.
        process: judges the steps of a completion; its rewards are added to that of the completion's end.
        demonstrations: given completions for PPO-ptx.
        strata: label per record, see `PromptSampler`.
        after_update: called by all processes with the iterations finished after the update, for a server
            that has to take over the weights.
        sharding: divide the model, its gradients and AdamW's moments among the processes (FSDP2).

    Raises:
        UserError: settings that do not fit each other, or an algorithm that lacks a part.
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
        generator: Generates | None = None,
        value_model: ValueFunction | None = None,
        log_partition: LogPartition | None = None,
        process: ProcessJudge | None = None,
        demonstrations: Demonstrations | None = None,
        strata: Sequence[str] | None = None,
        after_update: AfterUpdate | None = None,
        sharding: bool = False,
    ) -> None:
        self.accelerator = get_accelerator(accelerator, policy)
        self.rollout = rollout or TextRolloutSettings()
        self.settings = objective or TextObjectiveSettings()
        self.row = self.settings.build(length=self.rollout.max_new_tokens)
        self._ahead: RolloutPrefetcher[Written] = RolloutPrefetcher(self._write, self.rollout.staleness)
        is_dynamic = dynamic is not None and dynamic.enabled
        check_ahead(self.rollout, self.settings, is_dynamic)
        reward = as_higher_is_better(reward)
        reference = Reference(policy, self.settings)
        self.flow = self._flow(latent_flow, policy, reference, seed, process)
        self.parts = TextParts(
            policy=policy,
            reference=reference,
            generator=policy if generator is None else generator,
            reward=reward,
            judging=RewardScorer(reward, what="completions", beside=self.rollout.scores_in_thread),
            records=records,
            value_model=value_model,
            log_partition=log_partition,
            process=process if self.flow is None else self.flow,
            demonstrations=demonstrations,
            seed=seed,
            accelerator=self.accelerator,
        )
        check_parts(self.parts, self.row, name=self.settings.algorithm, rollout=self.rollout)
        size = self.rollout.prompts_per_iteration, self.rollout.group_size
        check_sizes(self.parts, *size)
        self.sampler = PromptSampler(len(records), *size, seed, strata=strata)
        self.groups = dynamic.groups(size[0]) if is_dynamic and dynamic is not None else None
        self.imitation = self._imitation(self_imitation, seed)
        every = self.settings.balance_every
        self.balance = None if every is None else RewardBalance(reward, every)
        self.after_update = after_update
        heads = {"value_model": value_model, "log_partition": log_partition}
        replay = TextReplay(policy, value=bool(self.row.value), nucleus=nucleus_of(self.row), **heads)
        self.module = spread(replay, self.accelerator, self._checked(sharding))
        self.ratio_bound = self.settings.ratio_bound
        safe = self.settings.algorithm == "safe"
        self.gate = GatedKL(self.settings.kl_threshold) if safe else None
        self._penalty: float | None = None
        self._divergence: float | None = None
        self._had_updates, self._entropies = False, list[float]()

    def _checked(self, sharding: bool) -> bool:
        """`sharding`; refuses to divide what looks at all weights at once, or at them beside the policy.

        Raises:
            UserError: names it.
        """
        parts, settings = self.parts, self.settings
        refused = {
            "a value model": parts.value_model is not None,
            "a log-partition head": parts.log_partition is not None,
            "demonstrations (ptx)": parts.demonstrations is not None,
            "an engine that writes the completions": parts.generator is not parts.policy,
            "objective.balance_every": settings.balance_every is not None,
            "self_imitation": self.imitation is not None,
            "latent_flow": self.flow is not None,
            "objective.reset_reference_every": settings.reset_reference_every is not None,
            "objective.reset_reference_above": settings.reset_reference_above is not None,
            "a reference (objective.changes.kl) without LoRA": needs_reference(self.row)
            and getattr(parts.policy, "lora", None) is None,
        }
        given = [name for name, is_there in refused.items() if is_there]
        if sharding and given:
            raise UserError(f"sharding goes without {given[0]}. Leave one of the two out.")
        return sharding

    def _flow(
        self,
        settings: LatentFlowSettings | None,
        policy: TextPolicy,
        reference: Reference,
        seed: int,
        process: ProcessJudge | None,
    ) -> LatentFlow | None:
        """RLFR's judge of tokens, where there is one.

        Raises:
            UserError: there is another judge of steps.
        """
        if settings is None:
            return None
        if process is not None:
            raise UserError("latent_flow and process both judge steps. Leave one of the two out.")
        return LatentFlow(policy, reference, settings, seed=seed, accelerator=self.accelerator)

    def _imitation(self, settings: SelfImitationSettings | None, seed: int) -> SelfImitation | None:
        """The replay; refuses rows of which a stored completion does not hold what the loss asks for.

        Raises:
            UserError: names the row.
        """
        if settings is None:
            return None
        if self.row.value or self.row.surrogate == "flow_balance":
            lacks = "a value function" if self.row.value else "log Z of the prompt"
            raise UserError(
                f"self_imitation replays completions beside rows that compare groups, and "
                f"objective.algorithm={self.settings.algorithm} has {lacks}. Take 'grpo' or 'dapo', or set "
                "self_imitation=null."
            )
        return SelfImitation(settings, self.row, self.rollout, seed)

    def unsharded(self) -> AbstractContextManager[Any]:
        """Inside, each process has all of the model."""
        return unsharded(self.module)

    def rates(self, lr: float) -> Mapping[str, float]:
        """Factor of the learning rate `lr` for the heads."""
        heads = self.settings.heads_lr
        return {} if heads is None else dict.fromkeys(HEADS, heads / lr)

    @property
    def objective(self) -> Objective:
        """The row, with the present coefficient of PPO-KL or of SAFE's gated KL."""
        if self.gate is not None:
            return self.gate.applied(self.row)
        if self.settings.target_kl is None or self._penalty is None:
            return self.row
        return replace(self.row, surrogate_options={**self.row.surrogate_options, "beta": self._penalty})

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """The policy's, and those of a value network and a log-partition head."""
        parts = self.parts
        named = list(parts.policy.trainable_parameters())
        if parts.value_model is not None:
            named += [(f"value_model.{n}", p) for n, p in parts.value_model.named_parameters()]
        if parts.log_partition is not None:
            named += [(f"log_partition.{n}", p) for n, p in parts.log_partition.head.named_parameters()]
        return named

    def compute_dtype(self) -> torch.dtype:
        """Of the policy's network."""
        return getattr(self.parts.policy, "compute_dtype", torch.float32)

    def collect(self, run: Context) -> Collected:
        """Completions made, judged and, with dynamic sampling, chosen."""
        iteration = run.counters.iteration
        write = partial(self._written, run)
        with self.unsharded():
            made = collect(self.parts, write, self.groups, iteration, self.rollout, self.row, run.clock)
        self._had_updates = made.experience is not None
        if made.experience is not None:
            self._remember(made.experience, run)
        return made

    def _remember(self, experience: TextExperience, run: Context) -> None:
        """Hand on what the row keeps of earlier iterations, and keep what it wants of this one."""
        row, t = self.row, experience.trajectories
        if remembers(row) is not None:
            before = self._entropies
            self._entropies = entropy_memory(row, t, before)
            experience.trajectories = t = replace(t, entropy_before=before[0] if before else None)
        if row.advantage == "riskpo":
            experience.trajectories = t = replace(t, quantiles=run.counters.own.get("quantiles"))
            reward = sample_reward(t, row.kl_in_reward)
            run.counters.own["quantiles"] = riskpo_quantiles(t, reward, **row.advantage_options)
        if t.rank is not None:
            before, rate = run.counters.own.get("rank_average"), row.advantage_options.get("rate", 0.3)
            experience.trajectories = replace(t, rank_average=before)
            known = torch.where(t.present()[:, None], t.rank, torch.nan)
            run.counters.own["rank_average"] = rank_average(known, before, rate=rate)

    def _write(self, number: int, run: Context) -> Written:
        return write(self.parts, self.sampler, number, self.rollout, run.clock)

    def _written(self, run: Context, number: int) -> Written:
        """The completions of a round; of an iteration, perhaps made in the one before."""
        return self._write(number, run) if self.groups is not None else self._ahead.take(run)

    def prepare(self, experience: TextExperience, run: Context) -> list[PolicyStep]:
        """Advantages, selections, denominators and the split into updates of whole groups."""
        t, updates, epochs = (
            experience.trajectories,
            run.optimizer.updates_per_iteration,
            self.settings.epochs,
        )
        if "metric" in ADVANTAGES[self.row.advantage].needs:
            t = experience.trajectories = replace(t, metric=self._metric(t))
        if self.imitation is not None:
            experience.replayed = self.imitation.draw(t, run, updates, epochs)
        steps, alone = partial(self._steps, run=run), partial(self._alone, run=run)
        if self.balance is None:
            found = steps(experience)
        else:
            found = self.balance.prepare(experience, run, self.parameters(), steps, alone)
        if self.flow is not None:
            outcome = sample_reward(replace(t, process_reward=None), 0.0)[experience.shares.own]
            right = outcome >= self.flow.settings.right_at  # NaN, failed, is not
            self.flow.learn(experience.rollout, right, run.counters.iteration)
        if self.imitation is not None:
            self.imitation.keep(experience.rollout, experience.shares.own, t, found, run)
        return found

    def _metric(self, t: Trajectories) -> Tensor:
        """[B] what splits CANON's groups; NaN, missing, without a token."""
        length = (t.weight != 0).sum(1)
        if self.settings.metric == "length":
            return length.double()
        if t.entropy is None:
            raise UserError(
                "objective.algorithm=canon splits groups by entropy, which who wrote these completions does "
                "not say. Set objective.metric=length, or rollout.recompute=true."
            )
        return torch.where(t.weight != 0, t.entropy, 0.0).sum(1) / length

    def _alone(self, experience: TextExperience, sample: Tensor, run: Context) -> None:
        """Add the gradient of the first update on these samples, of the rewards alone."""
        row, self.row = self.row, replace(self.row, kl=0.0, entropy=0.0, ptx=0.0)
        steps = self._steps(experience, run)
        for step in [step for step in steps if torch.equal(step.sample, sample)][:1]:
            self.backward(experience, replace(step, extra=None), run)
        self.row = row

    def _steps(self, experience: TextExperience, run: Context) -> list[PolicyStep]:
        updates, first = run.optimizer.updates_per_iteration, run.counters.updates
        total = updates * self.settings.epochs
        given: list[TextRollout | None] = [None] * total
        if self.parts.demonstrations is not None and self.row.ptx:
            given = [self.parts.demonstrations.batch(first + i) for i in range(total)]
            weight = given[0].loss_mask if given[0] is not None else None
            experience.trajectories = replace(experience.trajectories, ptx_weight=weight)
        again = experience.replayed or [None] * total
        extras = [None if a is b is None else Beside(a, b) for a, b in zip(given, again, strict=True)]
        steps, experience.signal = prepare_steps(
            self.objective,
            self.settings,
            experience.trajectories,
            updates=updates,
            seed=self.parts.seed,
            iteration=run.counters.iteration,
            whole_groups=True,
            extras=extras,
        )
        return steps

    def backward(self, experience: TextExperience, step: PolicyStep, run: Context) -> dict[str, float]:
        """The policy's log-probs with gradient, in micro-batches of completions, the longest first; then of
        what is learnt from again."""
        scale = run.counters.loss_scale
        own = self._micro_batches(experience, step, run.micro_batch)
        found = backward(self.objective, own, self.accelerator, scale=scale)
        again = None if step.extra is None else step.extra.replayed
        if self.imitation is not None and again is not None:
            rows = self._replayed(again, run.micro_batch)
            sums = backward(self.imitation.row, rows, self.accelerator, scale=scale)
            found["loss/replay"] = sums["loss/policy"]
        return found

    def _replayed(self, again: Replayed, size: int) -> Iterator[tuple[Prepared, PolicyOutput]]:
        """This process's share of stored completions."""
        process = self.accelerator
        places = torch.arange(len(again.rollout))[process.process_index :: process.num_processes]
        parts = places.split(size)
        for number, part in enumerate(parts):
            with no_sync_unless_last(self.module, process, last=number == len(parts) - 1):
                output = self.module(again.rollout, part)
                yield again.prepared.rows(part).to(output.log_prob.device), output

    def record(self, experience: TextExperience, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Metrics of the updates; moves PPO-KL's coefficient."""
        found = {**experience.signal, **update_metrics(sums)}
        for part in (self.imitation, self.flow):
            found |= {} if part is None else part.metrics()
        self._divergence = found.get("kl")
        if self.gate is not None:
            found["penalty"] = self.objective.kl
            self.gate.move(experience.trajectories, found.get("kl"))
        target = self.settings.target_kl
        if target is not None:
            used = float(self.objective.surrogate_options.get("beta", 1.0))
            moved = self._moved(experience)
            self._penalty = float(penalty_kl_coefficient(used, moved, target=target))
            found |= {"kl_old": moved, "penalty": used}
        return found

    def wait_for_rewards(self) -> None:
        """Wait until nothing is being judged."""
        self.parts.judging.wait_for_rewards()

    def finish(self, run: Context) -> None:
        """Keep the counters of dynamic sampling and of PPO-KL; hand the weights to a server."""
        self.parts.reference.finish(run, self._divergence)
        if self.groups is not None:
            run.counters.own["groups"] = self.groups.state_dict()
        if self._penalty is not None:
            run.counters.own["penalty"] = self._penalty
        if self.gate is not None:
            run.counters.own["kl_gate"] = self.gate.state()
        if self._entropies:
            run.counters.own["entropies"] = self._entropies
        if self.imitation is not None:
            run.tensors[KEY] = self.imitation.state()
        if self.flow is not None:
            run.tensors[FLOW] = self.flow.state()
        if self.after_update is not None and self._had_updates:
            with run.clock.phase("sync"):
                self.after_update(run.counters.iteration)

    def restore(self, run: Context) -> None:
        """Go on from a checkpoint; whoever writes the completions still has other weights."""
        own = run.counters.own
        self.parts.reference.restore(run)
        self._penalty = own.get("penalty")
        self._entropies = own.get("entropies", [])
        if self.gate is not None and "kl_gate" in own:
            self.gate.load(own["kl_gate"])
        if self.groups is not None and "groups" in own:
            self.groups.load_state_dict(own["groups"])
        if self.imitation is not None and KEY in run.tensors:
            self.imitation.load(run.tensors[KEY])
        if self.flow is not None and FLOW in run.tensors:
            self.flow.load(run.tensors[FLOW])
        if self.after_update is not None:
            self.after_update(run.counters.iteration)

    @torch.no_grad()
    def _moved(self, experience: TextExperience) -> float:
        """KL(π_old‖π) per token after the last step, k3."""
        t = experience.trajectories
        with self.unsharded():
            now = experience.shares.gather_all(self.parts.policy.log_probs(experience.rollout).log_prob)
        log_ratio = (now - t.old_log_prob).double()
        return float((log_ratio.expm1() - log_ratio)[t.weight != 0].mean())

    def _micro_batches(
        self, experience: TextExperience, step: PolicyStep, size: int
    ) -> Iterator[tuple[Prepared, PolicyOutput]]:
        prepared, process = step.prepared, self.accelerator
        given = None if step.extra is None else step.extra.given
        if given is not None:
            prepared = replace(prepared, ptx_counts=count_step(given.loss_mask))
        local = experience.shares.local[step.sample]
        places = (step.live & (local >= 0)).nonzero()[:, 0]
        places = places[torch.argsort((prepared.weight[places] != 0).sum(1), stable=True, descending=True)]
        parts, shares = pad_batches(places.split(size), self.module, process), []
        if given is not None:
            own = torch.arange(len(given)).tensor_split(process.num_processes)[process.process_index]
            shares = own.chunk(len(parts))
        for number, part in enumerate(parts):
            share = shares[number] if number < len(shares) else None
            with no_sync_unless_last(self.module, process, last=number == len(parts) - 1):
                output = self._output(experience, local[part], given, share)
                yield prepared.rows(part).to(output.log_prob.device), output

    def _output(
        self, experience: TextExperience, sample: Tensor, given: Any, share: Tensor | None
    ) -> PolicyOutput:
        """What policy and heads say of n completions, and of the micro-batch's share of demonstrations."""
        features = None if experience.features is None else experience.features[sample]
        return self.module(
            experience.rollout,
            sample,
            features=features,
            given=None if share is None else given,
            given_rows=share,
        )
