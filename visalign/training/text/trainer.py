# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of a text policy with any `Objective`: GRPO, DAPO, GSPO, PPO, FlowRL and the rest.

Where this deviates from what trainers usually do, always on purpose:
* denominators, advantages and selections are those of the whole optimizer step, so a micro-batch size changes
  memory and nothing else;
* the ratio is of the distribution that was sampled (temperature, top-k, top-p), and is checked to be 1 at the
  first step;
* an answer whose reward failed leaves its group's statistics and the loss;
* answers without signal cost no backward pass, but stay in the denominator;
* every random draw is a function of (seed, name, iteration or sample): a resumed run equals an
  uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.core import Objective, penalty_kl_coefficient
from visalign.errors import UserError
from visalign.interfaces import TextReward
from visalign.text import TextPolicy
from visalign.training.loop.checkpoint import Checkpoint
from visalign.training.loop.counters import Progressed
from visalign.training.loop.ema import EMA
from visalign.training.loop.judging import oriented
from visalign.training.loop.loop import Evaluate, Keeping, Loop, TrainResult
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.progress import TrainingProgress
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.sampler import PromptSampler
from visalign.training.loop.state import restore_tensors, tensors_of

from .collect import collect
from .dynamic_groups import DynamicGroups
from .settings import DynamicSettings, TextObjectiveSettings, TextRolloutSettings
from .team import Generates, LogPartition, ProcessJudge, TextTeam, ValueFunction, check_parts
from .update import WrittenAnswers, optimize

AfterUpdate = Callable[[int], None]


@dataclass(kw_only=True)
class TextState:
    """The counters of a run; they and the tensors are all that a checkpoint needs."""

    iteration: int = 0
    """Iterations finished."""
    updates: int = 0
    skipped: int = 0
    samples: int = 0
    """Answers made for training, those of dropped groups included."""
    tokens: int = 0
    """Tokens of these."""
    beta: float | None = None
    """Adapted coefficient of PPO-KL; None before the first iteration."""
    groups: dict[str, Any] | None = None
    """Counters of dynamic sampling."""
    seconds: float = 0.0
    """Wall-clock seconds, those before a resume included."""


class TextTrainer:
    """Trains a text policy on a reward, in one process.

    Args:
        policy: on its device.
        reward: judges one answer at a time; higher is better (or its sign is turned).
        records: prompt records, each with "prompt"; handed to the reward as metadata.
        rollout: how answers are made.
        objective: what is optimized.
        optimizer: how the weights move; `micro_batch` counts answers.
        keeping: length, checkpoints, evaluation.
        seed: of the run.
        accelerator: trackers; one process.
        dynamic: dynamic sampling.
        generator: who writes the answers; None is the policy.
        value_model: a value network of its own, for PPO; None where the policy has a value head.
        log_partition: log Z of FlowRL.
        process: judges the steps of an answer; its rewards are added to that of the answer's end.
        written: given answers for PPO-ptx.
        strata: label per record, see `PromptSampler`.
        evaluate: called with the iteration while the averaged weights are in place; logged as `heldout/...`.
        after_update: called with the iterations finished after the update, for a server that has to take
            over the weights.
        progress: where the records are shown.

    Raises:
        UserError: settings that do not fit each other, an algorithm that lacks a part, or several processes.
    """

    def __init__(
        self,
        policy: TextPolicy,
        reward: TextReward,
        records: Sequence[Mapping[str, Any]],
        *,
        rollout: TextRolloutSettings,
        objective: TextObjectiveSettings,
        optimizer: OptimizerSettings,
        keeping: Keeping,
        seed: int,
        accelerator: Accelerator,
        dynamic: DynamicSettings | None = None,
        generator: Generates | None = None,
        value_model: ValueFunction | None = None,
        log_partition: LogPartition | None = None,
        process: ProcessJudge | None = None,
        written: WrittenAnswers | None = None,
        strata: Sequence[str] | None = None,
        evaluate: Evaluate | None = None,
        after_update: AfterUpdate | None = None,
        progress: TrainingProgress | None = None,
    ) -> None:
        _one_process(accelerator)
        self.rollout, self.settings, self.optimizer_settings, self.keeping = (
            rollout,
            objective,
            optimizer,
            keeping,
        )
        self.objective = objective.build(max_new_tokens=rollout.max_new_tokens)
        self.clock, self.written = PhaseClock(), written
        self.evaluate, self.after_update = evaluate, after_update
        self.team = TextTeam(
            policy=policy,
            generator=policy if generator is None else generator,
            reward=oriented(reward),
            records=records,
            value_model=value_model,
            log_partition=log_partition,
            process=process,
            clock=self.clock,
            seed=seed,
        )
        check_parts(
            self.team,
            self.objective,
            name=objective.algorithm,
            recomputed=rollout.recompute or self.objective.correction is not None,
            has_written=written is not None,
        )
        self.sampler = PromptSampler(
            len(records), rollout.prompts_per_iteration, rollout.group_size, seed, strata=strata
        )
        self.groups = _groups(dynamic, rollout)
        self.parameters = self._named_parameters()
        self.optimizer = self._adamw()
        every = optimizer.ema_every if optimizer.ema_decay else 1
        self.ema = EMA(self.parameters, decay=optimizer.ema_decay, every=every, warmup=optimizer.ema_warmup)
        self.progress = progress or TrainingProgress(keeping.iterations, enabled=False)
        self.loop = Loop(self, keeping, accelerator, self.clock, self.progress)
        self.state = TextState()
        self._checked = False

    def train(self) -> TrainResult:
        """Run until the last iteration, the time budget, or Ctrl-C; the last state is always saved.

        Raises:
            RewardFailure: too many answers could not be judged.
            RatioError: the ratio is not 1 at the first step.
            CheckpointError: a checkpoint could not be written.
        """
        return self.loop.train()

    def resume(self) -> bool:
        """Take up the newest whole checkpoint; see `Loop.resume`."""
        return self.loop.resume()

    def iterate(self) -> dict[str, Any]:
        """One iteration: answers, updates, perhaps an evaluation; returns its record."""
        state, objective = self.state, self._present_objective()
        experience, made = collect(
            self.team, self.sampler, self.groups, state.iteration, self.rollout, objective
        )
        before = Progressed(updates=state.updates, skipped=state.skipped, checked=self._checked)
        updated: dict[str, float] = {"updates": state.updates, "updates_skipped": state.skipped}
        if experience is not None:
            with self.clock.phase("update"):
                after, updated = optimize(
                    self.team,
                    experience,
                    objective,
                    self.settings,
                    self.optimizer,
                    self.ema,
                    self.optimizer_settings,
                    self.written,
                    iteration=state.iteration,
                    before=before,
                )
            self._checked = after.checked
            state.updates, state.skipped = after.updates, after.skipped
        state.iteration += 1
        state.samples += made.samples
        state.tokens += made.tokens
        if self.groups is not None:
            state.groups = self.groups.state_dict()
        record = {"iteration": state.iteration, "samples": state.samples, "tokens": state.tokens}
        record |= made.metrics | updated | self._adapted(updated)
        if self.after_update is not None and experience is not None:
            with self.clock.phase("sync"):
                self.after_update(state.iteration)
        return {**record, **self.loop.evaluated(self.evaluate, self.ema), **self.loop.timed(made.samples)}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds: weights, averages, AdamW's moments."""
        return tensors_of(self.parameters, self.ema, self.optimizer)

    def restore(self, loaded: Checkpoint) -> None:
        """Take up a checkpoint.

        Raises:
            CheckpointError: it has other parameters than the model.
        """
        restore_tensors(loaded, self.parameters, self.ema, self.optimizer)
        self.state = TextState(**loaded.state)
        if self.groups is not None and self.state.groups is not None:
            self.groups.load_state_dict(self.state.groups)
        if self.after_update is not None:  # whoever writes the answers still has other weights
            self.after_update(self.state.iteration)

    def _present_objective(self) -> Objective:
        """The objective with the present coefficient of PPO-KL."""
        if self.settings.target_kl is None or self.state.beta is None:
            return self.objective
        options = {**self.objective.surrogate_options, "beta": self.state.beta}
        return replace(self.objective, surrogate_options=options)

    def _adapted(self, updated: Mapping[str, float]) -> dict[str, float]:
        """Move PPO-KL's coefficient; its value of this iteration for the record."""
        if self.settings.target_kl is None:
            return {}
        used = float(self._present_objective().surrogate_options.get("beta", 1.0))
        moved = updated.get("kl_old", float("nan"))
        self.state.beta = float(penalty_kl_coefficient(used, moved, target=self.settings.target_kl))
        return {"penalty": used}

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        named = list(self.team.policy.trainable_parameters())
        if self.team.value_model is not None:
            named += [(f"value_model.{n}", p) for n, p in self.team.value_model.named_parameters()]
        if self.team.log_partition is not None:
            named += [(f"log_partition.{n}", p) for n, p in self.team.log_partition.head.named_parameters()]
        return named

    def _adamw(self) -> torch.optim.AdamW:
        pace, heads = self.optimizer_settings, ("value_head.", "value_model.", "log_partition.")
        own = [p for name, p in self.parameters if not name.startswith(heads)]
        theirs = [p for name, p in self.parameters if name.startswith(heads)]
        scale = 1.0 if self.settings.heads_lr is None else self.settings.heads_lr / pace.lr
        groups = [{"params": own, "scale": 1.0}, {"params": theirs, "scale": scale}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=pace.lr,
            betas=(pace.betas[0], pace.betas[1]),
            eps=pace.eps,
            weight_decay=pace.weight_decay,
        )


def _one_process(accelerator: Accelerator) -> None:
    if accelerator.num_processes > 1:
        raise UserError(
            f"Text policies train in one process, and {accelerator.num_processes} were started. Start the "
            "command without accelerate launch or torchrun."
        )


def _groups(dynamic: DynamicSettings | None, rollout: TextRolloutSettings) -> DynamicGroups | None:
    is_on = dynamic is not None and dynamic.enabled
    return dynamic.groups(rollout.prompts_per_iteration) if is_on and dynamic is not None else None
