# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO (arXiv 2505.05470): group-relative policy optimisation of a flow-matching model along its SDE.

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

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from visalign.interfaces import DiffusionPolicy, PointwiseReward

from . import checkpoint
from .collect import Team, collect, oriented
from .ema import EMA
from .loss import ReplayModule, step_weights
from .metrics import MetricsFile
from .progress import TrainingProgress
from .runtime import InterruptFlag, PhaseClock
from .sampler import PromptSampler
from .settings import ObjectiveSettings, OptimiserSettings, RolloutSettings
from .state import RunState, restore_tensors, tensors_of
from .update import Progressed, optimise

Evaluate = Callable[[int], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a call of `train` ended."""

    state: RunState
    stopped: str
    """"finished", "interrupted" (Ctrl-C) or "max_seconds"."""


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """How long a run goes on, and what it writes down on the way."""

    folder: Path
    """Run folder; `metrics.jsonl` and `checkpoints/` go there."""
    iterations: int
    checkpoint_every: int = 10
    """Iterations between two checkpoints; one more is written at the end."""
    keep_checkpoints: int = 2
    evaluate_every: int = 0
    """Iterations between two evaluations; 0 for none."""
    max_seconds: float | None = None
    """Stop at the end of the iteration in which the run's training time reaches this; where that is depends
    on the machine, so two such runs may differ in length."""
    config: Mapping[str, Any]
    """The run's configuration as JSON values; a resume under another one is refused."""
    free_keys: Collection[str] = ()
    """Dotted keys of `config` that may differ on resume."""


class FlowGRPOTrainer:
    """Trains a policy on a reward.

    Args:
        policy: on `accelerator.device`.
        reward: judges one image at a time; higher is better (or its sign is turned).
        records: prompt records, each with "prompt"; handed to the reward as metadata.
        rollout: how samples are made.
        objective: what is optimised.
        optimiser: how the weights move.
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
        optimiser: OptimiserSettings,
        keeping: Keeping,
        seed: int,
        accelerator: Accelerator,
        strata: Sequence[str] | None = None,
        cycle: Sequence[str] | None = None,
        evaluate: Evaluate | None = None,
        progress: TrainingProgress | None = None,
    ) -> None:
        self.rollout, self.objective, self.optimiser, self.keeping = rollout, objective, optimiser, keeping
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
        self.weight = step_weights(objective, rollout, policy.sigmas(rollout.steps, grid=rollout.grid))
        policy.module.eval()  # dropout would make the replay another function than the rollout
        self.parameters = policy.trainable_parameters()
        self.optimizer = torch.optim.AdamW(
            [parameter for _, parameter in self.parameters],
            lr=optimiser.lr,
            betas=(optimiser.betas[0], optimiser.betas[1]),
            eps=optimiser.eps,
            weight_decay=optimiser.weight_decay,
        )
        every = optimiser.ema_every if optimiser.ema_decay else 1
        self.ema = EMA(self.parameters, decay=optimiser.ema_decay, every=every, warmup=optimiser.ema_warmup)
        self.module = accelerator.prepare_model(ReplayModule(policy))
        self.evaluate = evaluate
        self.progress = progress or TrainingProgress(keeping.iterations, enabled=False)
        self.state = RunState()
        self._checked = False

    def train(self) -> TrainResult:
        """Run until the last iteration, the time budget, or Ctrl-C; the last state is always saved.

        A resumed run whose budget is spent does nothing, as one that has reached its last iteration.

        Raises:
            RewardFailure: too many samples could not be judged.
            RatioError: the ratio is not 1 at the first update.
            CheckpointError: a checkpoint could not be written.
        """
        metrics = None
        if self.accelerator.is_main_process:
            metrics = MetricsFile(self.keeping.folder / "metrics.jsonl", after=self.state.iteration)
        saved = self.state.iteration
        self.clock.take()
        with InterruptFlag(self.progress.note) as interrupt:
            stopped = "max_seconds" if self._agreed(self._is_over_budget()) else "finished"
            while stopped == "finished" and self.state.iteration < self.keeping.iterations:
                record = self._iterate()
                if metrics is not None:
                    metrics.write(record)
                self.accelerator.log(record, step=self.state.iteration)
                self.progress.update(record)
                stopped = self._why_stop(interrupt)
                if stopped != "finished" or self.state.iteration % self.keeping.checkpoint_every == 0:
                    with self.clock.phase("checkpoint"):
                        self.save()
                    saved = self.state.iteration
            if saved != self.state.iteration:
                self.save()
        return TrainResult(state=self.state, stopped=stopped)

    def _why_stop(self, interrupt: InterruptFlag) -> str:
        """What all processes agree on: "finished" means go on."""
        if self._agreed(interrupt.raised):
            return "interrupted"
        return "max_seconds" if self._agreed(self._is_over_budget()) else "finished"

    def _is_over_budget(self) -> bool:
        budget = self.keeping.max_seconds
        return budget is not None and self.state.seconds >= budget

    def _agreed(self, own: bool) -> bool:
        """Whether any process says so: all of them have to stop at the same iteration."""
        said = torch.tensor([int(own)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(said, "sum").any())  # type: ignore[union-attr]

    def _iterate(self) -> dict[str, Any]:
        """One iteration: experience, updates, perhaps an evaluation; returns its record."""
        state, count = self.state, self.team.policy.forward_count
        spent = count.equivalents
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        batch = self.sampler.batch(state.iteration, rank, world)
        experience = collect(self.team, batch, state.iteration, self.rollout, self.objective)
        before = Progressed(updates=state.updates, skipped=state.skipped, checked=self._checked)
        with self.clock.phase("update"):
            after, updated = optimise(
                self.module,
                self.team,
                experience,
                self.optimizer,
                self.ema,
                self.weight,
                self.objective,
                self.optimiser,
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
        heldout = self._evaluated()
        return {
            "iteration": state.iteration,
            "images": state.images,
            **experience.metrics,
            **updated,
            "forward_equivalents_per_image": passes / images,
            **heldout,
            **self._times(images),
        }

    def _evaluated(self) -> dict[str, float]:
        every = self.keeping.evaluate_every
        if self.evaluate is None or not every or self.state.iteration % every:
            return {}
        found: Mapping[str, float] = {}
        with self.clock.phase("evaluation"):
            if self.accelerator.is_main_process:
                with self.ema.applied():
                    found = self.evaluate(self.state.iteration)
            self.accelerator.wait_for_everyone()
        return {f"heldout/{name}": value for name, value in found.items()}

    def _times(self, images: int) -> dict[str, float]:
        seconds = self.clock.take()
        total = seconds.pop("total")
        training = total - seconds.get("evaluation", 0.0) - seconds.get("checkpoint", 0.0)
        self.state.seconds += total
        other = max(0.0, total - sum(seconds.values()))
        phases = {f"seconds/{name}": value for name, value in {**seconds, "other": other}.items()}
        return {"seconds": total, **phases, "images_per_second": images / max(training, 1e-9)}

    def save(self) -> None:
        """Write a checkpoint of the present state (main process; the others wait).

        Raises:
            CheckpointError: it could not be written.
        """
        if self.accelerator.is_main_process:
            checkpoint.save(
                self.keeping.folder / "checkpoints",
                self.state.iteration,
                tensors_of(self.parameters, self.ema, self.optimizer),
                asdict(self.state),
                self.keeping.config,
                keep=self.keeping.keep_checkpoints,
            )
        self.accelerator.wait_for_everyone()

    def resume(self) -> bool:
        """Take up the newest whole checkpoint; says so, and why a newer one was passed over.

        Returns:
            Whether there was one; if not, the run starts at iteration 0.

        Raises:
            CheckpointError: every checkpoint is damaged, or it belongs to another configuration.
        """
        root = self.keeping.folder / "checkpoints"
        folder, passed = checkpoint.newest_intact(root)
        for reason in passed:
            self.progress.note(f"Passing over a checkpoint: {reason}")
        if folder is None:
            if passed:
                raise checkpoint.CheckpointError(
                    f"none of the {len(passed)} checkpoints in {root} is whole: {passed[0]} Start a new run "
                    f"in another output folder, or delete {root} and resume to train this one from the start."
                )
            self.progress.note("No checkpoint yet: starting at iteration 0.")
            return False
        loaded = checkpoint.load(folder, self.keeping.config, free=self.keeping.free_keys)
        restore_tensors(loaded, self.parameters, self.ema, self.optimizer)
        self.state = RunState(**loaded.state)
        self.progress.go_on(self.state.iteration, self.state.seconds)
        self.progress.note(f"Resumed from {folder} after iteration {loaded.step}.")
        return True
