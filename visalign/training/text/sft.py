# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning on demonstrations: a cold start before reinforcement learning.

The loss of an optimizer step is the mean of −log π over the completions' tokens of its whole batch, so that a
micro-batch size changes memory and nothing else. (Loops that average the means of micro-batches weight the tokens of
short completions more.) Update n learns batch n of the stream, so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from visalign.core import aggregate, count_step
from visalign.text import TextPolicy, TextRollout
from visalign.training.loop.algorithm import Collected, Context
from visalign.training.loop.processes import get_accelerator, synced_last
from visalign.training.loop.sharding import pad_batches

from .parts import Demonstrations
from .replay import TextAlgorithm, TextReplay, distribute


class SFT(TextAlgorithm):
    """Training of a text policy on demonstrations; an `Algorithm` for `Trainer`.

    Each update takes a batch of the stream (`visalign.adapters.DemonstrationBatches`), which the processes share.
    `sharding` divides the model, its gradients and AdamW's moments among the processes (FSDP2).
    """

    def __init__(
        self,
        policy: TextPolicy,
        demonstrations: Demonstrations,
        *,
        accelerator: Accelerator | None = None,
        sharding: bool = False,
    ) -> None:
        self.accelerator = get_accelerator(accelerator, policy)
        self.policy, self.demonstrations = policy, demonstrations
        self.module = distribute(TextReplay(policy), self.accelerator, sharding)

    def collect(self, run: Context) -> Collected:
        return self.next_batches(self.demonstrations, run)

    def backward(self, experience: Any, step: TextRollout, run: Context) -> dict[str, float]:
        """Add the gradient of the mean of −log π over a batch's tokens."""
        scale = run.counters.loss_scale
        loss = backward_nll(self.module, step, self.accelerator, micro_batch=run.micro_batch, scale=scale)
        return {"loss": loss, "tokens": float((step.loss_mask != 0).sum()), "samples": float(len(step))}

    def record(self, experience: Any, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        tokens = sum(update["tokens"] for update in sums)
        nll = sum(update["loss"] * update["tokens"] for update in sums) / tokens
        return {
            "loss": sum(update["loss"] for update in sums) / len(sums),
            "perplexity": math.exp(min(nll, 700.0)),  # exp overflows at 710
            "length_mean": tokens / sum(update["samples"] for update in sums),
        }


def backward_nll(
    module: nn.Module, batch: TextRollout, accelerator: Accelerator, *, micro_batch: int, scale: float = 1.0
) -> float:
    """Add the gradient of L = −Σ w log π / Σ w over a batch of demonstrations, w their loss mask [B, T]; return L."""
    live = (batch.loss_mask != 0).any(1).nonzero()[:, 0]
    counts = count_step(batch.loss_mask)
    longest_first = live[torch.argsort((batch.loss_mask[live] != 0).sum(1), stable=True, descending=True)]
    world, total = accelerator.num_processes, torch.zeros((), dtype=torch.float64, device=accelerator.device)
    local = longest_first[accelerator.process_index :: world].split(micro_batch)
    for rows in synced_last(pad_batches(local, module, accelerator), module, accelerator):
        log_prob = module(batch, rows).log_prob
        mask = batch.loss_mask[rows].to(log_prob.device)
        share = aggregate(-log_prob, mask, "token_mean", counts.to(log_prob.device))
        accelerator.backward(share * (scale * world))  # DDP averages over the processes
        total += share.detach()
    return float(torch.as_tensor(accelerator.reduce(total, "sum")))
