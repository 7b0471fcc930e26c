# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning on given answers: a cold start before reinforcement learning.

The loss of an optimizer step is the mean of −log π over the answers' tokens of its whole batch. The prompts'
tokens have no loss, every token counts alike whatever answer it stands in, and the denominator is that of the
batch, so a micro-batch size changes memory and nothing else. (Loops that average the means of micro-batches
weight the tokens of short answers more.) Update n learns batch n of the stream, so a resumed run equals an
uninterrupted one; nothing here is drawn at random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.core import aggregate, count_step
from visalign.errors import UserError
from visalign.text import TextPolicy, TextRollout
from visalign.training.loop.checkpoint import Checkpoint
from visalign.training.loop.ema import EMA
from visalign.training.loop.loop import Evaluate, Keeping, Loop, TrainResult
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.progress import TrainingProgress
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.state import restore_tensors, tensors_of

from .update import WrittenAnswers


@dataclass(kw_only=True)
class SFTState:
    """The counters of a run; they and the tensors are all that a checkpoint needs."""

    iteration: int = 0
    """Iterations finished."""
    updates: int = 0
    """Optimizer updates, those that were skipped included; also the number of the next batch."""
    skipped: int = 0
    samples: int = 0
    """Answers read, repeats included."""
    tokens: int = 0
    """Tokens of these."""
    seconds: float = 0.0
    """Wall-clock seconds, those before a resume included."""


class SFTTrainer:
    """Trains a text policy on given answers, in one process.

    Args:
        policy: on its device.
        answers: the stream of batches (`visalign.adapters.causal_lm.written_answers.WrittenBatches`).
        optimizer: how the weights move; each of the `updates_per_iteration` takes a batch of its own, and
            `micro_batch` counts answers.
        keeping: length, checkpoints, evaluation.
        accelerator: trackers; one process.
        evaluate: called with the iteration while the averaged weights are in place; logged as `heldout/...`.
        progress: where the records are shown.

    Raises:
        UserError: several processes.
    """

    def __init__(
        self,
        policy: TextPolicy,
        answers: WrittenAnswers,
        *,
        optimizer: OptimizerSettings,
        keeping: Keeping,
        accelerator: Accelerator,
        evaluate: Evaluate | None = None,
        progress: TrainingProgress | None = None,
    ) -> None:
        if accelerator.num_processes > 1:
            raise UserError(
                f"Text policies train in one process, and {accelerator.num_processes} were started. Start "
                "the command without accelerate launch or torchrun."
            )
        self.policy, self.answers = policy, answers
        self.optimizer_settings, self.keeping, self.evaluate = optimizer, keeping, evaluate
        self.parameters = list(policy.trainable_parameters())
        self.optimizer = torch.optim.AdamW(
            [parameter for _, parameter in self.parameters],
            lr=optimizer.lr,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        every = optimizer.ema_every if optimizer.ema_decay else 1
        self.ema = EMA(self.parameters, decay=optimizer.ema_decay, every=every, warmup=optimizer.ema_warmup)
        self.clock = PhaseClock()
        self.progress = progress or TrainingProgress(keeping.iterations, enabled=False)
        self.loop = Loop(self, keeping, accelerator, self.clock, self.progress)
        self.state = SFTState()

    def train(self) -> TrainResult:
        """Run until the last iteration, the time budget, or Ctrl-C; the last state is always saved.

        Raises:
            UserError: a batch that cannot be made, or has nothing to learn.
            CheckpointError: a checkpoint could not be written.
        """
        return self.loop.train()

    def resume(self) -> bool:
        """Take up the newest whole checkpoint; see `Loop.resume`."""
        return self.loop.resume()

    def iterate(self) -> dict[str, Any]:
        """One iteration: updates, perhaps an evaluation; returns its record."""
        state, steps = self.state, []
        with self.clock.phase("update"):
            for _ in range(self.optimizer_settings.updates_per_iteration):
                steps.append(self._update())
        self.optimizer.zero_grad(set_to_none=True)
        samples = sum(step.samples for step in steps)
        tokens = sum(step.tokens for step in steps)
        state.iteration += 1
        state.samples += samples
        state.tokens += tokens
        nll = sum(step.loss * step.tokens for step in steps) / tokens
        norms = [step.norm for step in steps if math.isfinite(step.norm)]
        record = {
            "iteration": state.iteration,
            "updates": state.updates,
            "updates_skipped": state.skipped,
            "samples": state.samples,
            "tokens": state.tokens,
            "loss": float(np.mean([step.loss for step in steps])),
            "perplexity": math.exp(min(nll, 700.0)),
            "length_mean": tokens / samples,
            "grad_norm": float(np.mean(norms)) if norms else math.nan,
            "lr": steps[-1].lr,
        }
        return {**record, **self.loop.evaluated(self.evaluate, self.ema), **self.loop.timed(samples)}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds: weights, averages, AdamW's moments."""
        return tensors_of(self.parameters, self.ema, self.optimizer)

    def restore(self, loaded: Checkpoint) -> None:
        """Take up a checkpoint.

        Raises:
            CheckpointError: it has other parameters than the model.
        """
        restore_tensors(loaded, self.parameters, self.ema, self.optimizer)
        self.state = SFTState(**loaded.state)

    def _update(self) -> _Step:
        """One optimizer step on the stream's next batch; left out where its gradient is not finite."""
        state, pace = self.state, self.optimizer_settings
        batch, lr = self.answers.batch(state.updates), pace.lr_at(state.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        loss = backward_nll(self.policy, batch, micro_batch=pace.micro_batch)
        parameters = [parameter for _, parameter in self.parameters]
        norm = float(nn.utils.clip_grad_norm_(parameters, pace.max_grad_norm))
        state.updates += 1
        if math.isfinite(norm):
            self.optimizer.step()
            self.ema.update(state.updates)
        else:
            state.skipped += 1
        return _Step(loss=loss, norm=norm, lr=lr, samples=len(batch), tokens=int((batch.weight != 0).sum()))


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What one optimizer step did."""

    loss: float
    norm: float
    lr: float
    samples: int
    tokens: int


def backward_nll(policy: TextPolicy, batch: TextRollout, *, micro_batch: int) -> float:
    """Add the gradient of L = −Σ w log π / Σ w over a batch of given answers to the parameters.

    Args:
        policy: whose parameters get the gradient.
        batch: B answers; w is their weight [B, T].
        micro_batch: answers that go through the network together; memory only.

    Returns:
        L in nats per token.

    Raises:
        UserError: a batch without a token to learn.
    """
    live = (batch.weight != 0).any(1).nonzero()[:, 0]
    if not len(live):
        raise UserError(
            f"A batch of {len(batch)} given answers has weight 0 everywhere: there is no token to learn. "
            "Give answers with at least one token of weight 1."
        )
    counts = count_step(batch.weight)
    longest_first = torch.argsort((batch.weight[live] != 0).sum(1), stable=True, descending=True)
    total = 0.0
    for rows in live[longest_first].split(micro_batch):
        log_prob = policy.log_probs(batch, rows).log_prob
        weight = batch.weight[rows].to(log_prob.device)
        share = aggregate(-log_prob, weight, "token_mean", counts.to(log_prob.device))
        share.backward()
        total += float(share.detach())
    return total
