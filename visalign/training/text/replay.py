# SPDX-License-Identifier: Apache-2.0
"""Outputs of a text policy and its heads with gradient, as one module that processes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.core import PolicyOutput
from visalign.errors import UserError
from visalign.text import TextPolicy, TextRollout
from visalign.text.rollout import undrawn_rollout
from visalign.training.loop.algorithm import Algorithm, Collected, Context
from visalign.training.loop.processes import share_gradients
from visalign.training.loop.sharding import is_divided, shard, unsharded

from .parts import Demonstrations, LogPartition, ValueFunction


class TextAlgorithm(Algorithm):
    """Base of the trainings of a text policy: its parameters, precision and division among processes."""

    policy: TextPolicy
    module: nn.Module  # `TextReplay` of the policy as the processes share it

    def unsharded(self) -> AbstractContextManager[Any]:
        return unsharded(self.module)

    def next_batches(self, stream: Demonstrations, run: Context, *, per_record: int = 1) -> Collected:
        """Read an iteration's batches of a stream, whose records have `per_record` completions."""
        first, count = run.counters.updates, run.optimizer.updates_per_iteration
        batches = [stream.batch(first + i) for i in range(count)]
        samples = sum(len(batch) for batch in batches) // per_record
        tokens = sum(int((batch.loss_mask != 0).sum()) for batch in batches)
        return Collected(experience=batches, samples=samples, tokens=tokens)

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        return self.policy.trainable_parameters()

    def compute_dtype(self) -> torch.dtype:
        return getattr(self.policy, "compute_dtype", torch.float32)


class TextReplay(nn.Module):
    """Module that computes log-probs, and where asked values, log Z and nucleus entropies (SIREN) of completions.

    A `value_model` takes the place of the policy's own head.
    """

    may_skip: bool
    """Whether a forward may leave out trained parameters: experts without a token, a vision tower without an
    image, an unused head."""

    def __init__(
        self,
        policy: TextPolicy,
        *,
        value: bool = False,
        value_model: ValueFunction | None = None,
        log_partition: LogPartition | None = None,
        nucleus: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.network, self.value = policy.module, value
        self.value_model: Any = value_model
        self.log_z = None if log_partition is None else log_partition.head
        self._policy, self._nucleus = policy, nucleus
        takes_images = getattr(policy, "processor", None) is not None
        has_head = getattr(policy, "value_head", None) is not None
        unused_head = has_head and (not value or value_model is not None)
        experts = any("experts" in name for name, _ in policy.trainable_parameters())
        self.may_skip = unused_head or experts or takes_images

    def forward(
        self,
        rollout: TextRollout,
        rows: Tensor,
        *,
        features: Tensor | None = None,
        demonstrations: TextRollout | None = None,
        demonstration_rows: Tensor | None = None,
    ) -> PolicyOutput:
        """Compute the outputs of b completions `rows`; for none, zeros that depend on the trained parameters.

        `features` [b, H] of the prompts are for log Z, `demonstrations` for PPO-ptx.
        """
        out = self._policy.log_probs(rollout, rows, statistic=self._nucleus)
        log_prob = out.log_prob
        if not len(rows) and is_divided(self):  # the other processes wait for its part of the weights
            mask = torch.ones(1, 1)
            token = undrawn_rollout(0 * mask.long(), mask, 0 * mask.long(), mask)
            log_prob = log_prob + 0.0 * self._policy.log_probs(token).log_prob.sum()
        elif not len(rows):  # DDP waits for the gradients of every process
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            for parameter in trained[:1] if self.may_skip else trained:
                log_prob = log_prob + 0.0 * parameter.sum()
        more: dict[str, Tensor | None] = {}
        if self.value:
            separate = self.value_model is not None
            more["value"] = self.value_model.values(rollout, rows) if separate else out.value
        if self.log_z is not None and features is not None:
            more["log_z"] = self.log_z(features)
        if demonstrations is not None and demonstration_rows is not None:
            more["ptx_log_prob"] = self._policy.log_probs(demonstrations, demonstration_rows).log_prob
            more["ptx_weight"] = demonstrations.loss_mask[demonstration_rows].to(log_prob.device)
        return PolicyOutput(log_prob=log_prob, entropy=out.entropy, nucleus_entropy=out.statistic, **more)


def distribute(replay: TextReplay, accelerator: Accelerator, sharding: bool) -> nn.Module:
    """Share the module among the processes (`share_gradients`), or divide it (`shard`)."""
    if not sharding:
        return share_gradients(replay, accelerator, may_skip=replay.may_skip)
    if replay.may_skip:
        raise UserError(
            "sharding goes without experts, images in prompts and a value head, of which a process may use "
            "fewer than another. Leave sharding out, or train such a model without them."
        )
    shard(replay, accelerator)
    return replay
