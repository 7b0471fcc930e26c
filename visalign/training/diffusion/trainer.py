# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO (arXiv 2505.05470): group-relative policy optimization of a flow-matching model along its SDE.

Where this deviates from the published code, always on purpose:
* old log-probabilities come from the rollout, whose latents are rounded before theirs is taken; the ratio is
  checked to be 1 at the first update;
* groups are ids, so prompts that begin alike are not merged; the sampler cannot lag behind a prefetching
  loader;
* samples without signal are left out of the backward, but stay in the denominator, so the update is the same;
* the KL is the exact Gaussian one, with |dt| in the variance;
* every random draw is a function of (seed, name, iteration or sample), so a resumed run equals an
  uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from visalign.interfaces import DiffusionPolicy, PointwiseReward
from visalign.training.loop.checkpoint import Checkpoint
from visalign.training.loop.counters import Progressed
from visalign.training.loop.ema import EMA
from visalign.training.loop.judging import oriented
from visalign.training.loop.loop import Evaluate, Keeping, Loop, TrainResult
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.progress import TrainingProgress
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.sampler import PromptSampler
from visalign.training.loop.state import RunState, restore_tensors, tensors_of

from .collect import Team, collect
from .loss import ReplayModule, step_weights
from .settings import ObjectiveSettings, RolloutSettings
from .update import optimize


class FlowGRPOTrainer:
    """Trains a policy on a reward.

    Args:
        policy: on `accelerator.device`.
        reward: judges one image at a time; higher is better (or its sign is turned).
        records: prompt records, each with "prompt"; handed to the reward as metadata.
        rollout: how samples are made.
        objective: what is optimized.
        optimizer: how the weights move.
        keeping: length, checkpoints, evaluation.
        seed: of the run.
        accelerator: device, processes and trackers, without mixed precision: that is the policy's own matter.
        strata: label per record, see `PromptSampler`.
        cycle: see `PromptSampler`.
        evaluate: called with the iteration while the averaged weights are in place; its numbers are logged as
            `heldout/...`. Called in the main process only.
        progress: where the records are shown.

    Raises:
        UserError: settings that do not fit each other.
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        reward: PointwiseReward,
        records: Sequence[Mapping[str, Any]],
        *,
        rollout: RolloutSettings,
        objective: ObjectiveSettings,
        optimizer: OptimizerSettings,
        keeping: Keeping,
        seed: int,
        accelerator: Accelerator,
        strata: Sequence[str] | None = None,
        cycle: Sequence[str] | None = None,
        evaluate: Evaluate | None = None,
        progress: TrainingProgress | None = None,
    ) -> None:
        self.rollout, self.objective, self.optimizer_settings, self.keeping = (
            rollout,
            objective,
            optimizer,
            keeping,
        )
        self.accelerator = accelerator
        self.clock = PhaseClock()
        self.team = Team(
            policy=policy,
            reward=oriented(reward),
            records=records,
            accelerator=accelerator,
            clock=self.clock,
            seed=seed,
        )
        self.sampler = PromptSampler(
            len(records), rollout.prompts_per_iteration, rollout.group_size, seed, strata=strata, cycle=cycle
        )
        self.weight = step_weights(
            objective, rollout, policy.sigmas(rollout.steps, timestep_schedule=rollout.timestep_schedule)
        )
        policy.module.eval()  # dropout would make the replay another function than the rollout
        self.parameters = policy.trainable_parameters()
        self.optimizer = torch.optim.AdamW(
            [parameter for _, parameter in self.parameters],
            lr=optimizer.lr,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        every = optimizer.ema_every if optimizer.ema_decay else 1
        self.ema = EMA(self.parameters, decay=optimizer.ema_decay, every=every, warmup=optimizer.ema_warmup)
        self.module = accelerator.prepare_model(ReplayModule(policy))
        self.evaluate = evaluate
        self.progress = progress or TrainingProgress(keeping.iterations, enabled=False)
        self.loop = Loop(self, keeping, accelerator, self.clock, self.progress)
        self.state = RunState()
        self._checked = False

    def train(self) -> TrainResult:
        """Run until the last iteration, the time budget, or Ctrl-C; the last state is always saved.

        Raises:
            RewardFailure: too many samples could not be judged.
            RatioError: the ratio is not 1 at the first update.
            CheckpointError: a checkpoint could not be written.
        """
        return self.loop.train()

    def save(self) -> None:
        """Write a checkpoint now; see `Loop.save`."""
        self.loop.save()

    def resume(self) -> bool:
        """Take up the newest whole checkpoint; see `Loop.resume`."""
        return self.loop.resume()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds: weights, averages, AdamW's moments."""
        return tensors_of(self.parameters, self.ema, self.optimizer)

    def restore(self, loaded: Checkpoint) -> None:
        """Take up a checkpoint.

        Raises:
            CheckpointError: it has other parameters than the model.
        """
        restore_tensors(loaded, self.parameters, self.ema, self.optimizer)
        self.state = RunState(**loaded.state)

    def iterate(self) -> dict[str, Any]:
        """One iteration: experience, updates, perhaps an evaluation; returns its record."""
        state, count = self.state, self.team.policy.forward_count
        spent = count.equivalents
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        batch = self.sampler.batch(state.iteration, rank, world)
        experience = collect(self.team, batch, state.iteration, self.rollout, self.objective)
        before = Progressed(updates=state.updates, skipped=state.skipped, checked=self._checked)
        with self.clock.phase("update"):
            after, updated = optimize(
                self.module,
                self.team,
                experience,
                self.optimizer,
                self.ema,
                self.weight,
                self.objective,
                self.optimizer_settings,
                iteration=state.iteration,
                before=before,
            )
        own = torch.tensor([count.equivalents - spent], device=self.accelerator.device)
        passes = int(self.accelerator.reduce(own, "sum"))  # type: ignore[arg-type]
        images = self.rollout.prompts_per_iteration * self.rollout.group_size
        self._checked = after.checked
        state.updates, state.skipped = after.updates, after.skipped
        state.iteration += 1
        state.images += images
        state.forward_equivalents += passes
        heldout = self.loop.evaluated(self.evaluate, self.ema)
        return {
            "iteration": state.iteration,
            "images": state.images,
            **experience.metrics,
            **updated,
            "forward_equivalents_per_image": passes / images,
            **heldout,
            **self.loop.timed(images),
        }
