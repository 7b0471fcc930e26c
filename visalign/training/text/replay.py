# SPDX-License-Identifier: Apache-2.0
"""What a text policy and its heads say with gradient, as one module that processes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.core import PolicyOutput
from visalign.errors import UserError
from visalign.text import Sampling, TextPolicy, TextRollout
from visalign.training.loop.processes import share_gradients
from visalign.training.loop.sharding import is_divided, shard

from .parts import LogPartition, ValueFunction


class TextReplay(nn.Module):
    """The policy's log-probs, the values of its head or of another network, and log Z of completions.

    Args:
        policy: with `module`.
        value: whether values are asked for.
        value_model: whose values are taken in place of the policy's own.
        log_partition: FlowRL's.
        nucleus: log-probs of the vocabulary to the nucleus entropy, for SIREN.
    """

    may_skip: bool
    """Whether a forward may leave out trained parameters: experts that no token went to, an eye without an
    image to see, a head that is not asked."""

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
        blind = getattr(policy, "processor", None) is None
        idle = getattr(policy, "value_head", None) is not None and (not value or value_model is not None)
        experts = any("experts" in name for name, _ in policy.trainable_parameters())
        self.may_skip = idle or experts or not blind

    def forward(
        self,
        rollout: TextRollout,
        rows: Tensor,
        *,
        features: Tensor | None = None,
        given: TextRollout | None = None,
        given_rows: Tensor | None = None,
    ) -> PolicyOutput:
        """What is said of b completions; of none, zeros that depend on the trained parameters.

        Args:
            rollout: B completions.
            rows: [b] which of them.
            features: [b, H] of the prompts, for log Z.
            given: pretraining text of PPO-ptx.
            given_rows: which of it.
        """
        out = self._policy.log_probs(rollout, rows, statistic=self._nucleus)
        log_prob = out.log_prob
        if not len(rows) and is_divided(self):  # the others wait for its weights
            log_prob = log_prob + 0.0 * self._policy.log_probs(_token()).log_prob.sum()
        elif not len(rows):  # the exchange of gradients waits for those of every process
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            for parameter in trained[:1] if self.may_skip else trained:
                log_prob = log_prob + 0.0 * parameter.sum()
        more: dict[str, Tensor | None] = {}
        if self.value:
            own = self.value_model is None
            more["value"] = out.value if own else self.value_model.values(rollout, rows)
        if self.log_z is not None and features is not None:
            more["log_z"] = self.log_z(features)
        if given is not None and given_rows is not None:
            more["ptx_log_prob"] = self._policy.log_probs(given, given_rows).log_prob
            more["ptx_weight"] = given.loss_mask[given_rows].to(log_prob.device)
        return PolicyOutput(log_prob=log_prob, entropy=out.entropy, nucleus_entropy=out.statistic, **more)


def _token() -> TextRollout:
    """One token after another."""
    zero = torch.zeros(1, 1)
    return TextRollout(
        prompt_ids=zero.long(),
        prompt_mask=zero + 1,
        completion_ids=zero.long(),
        loss_mask=zero + 1,
        log_prob=zero,
        full_log_prob=zero,
        entropy=zero,
        text=[""],
        stop_reason=["length"],
        group=[0],
        prompt=[""],
        seed=[0],
        sampling=Sampling(),
    )


def spread(replay: TextReplay, accelerator: Accelerator, sharding: bool) -> nn.Module:
    """The module that the processes share (`shared`), or divide (`shard`).

    Raises:
        UserError: a forward may leave out weights that the other processes wait for, or see `shard`.
    """
    if not sharding:
        return share_gradients(replay, accelerator, may_skip=replay.may_skip)
    if replay.may_skip:
        raise UserError(
            "sharding goes without experts, images in prompts and a value head, of which a process may use "
            "fewer than another. Leave sharding out, or train such a model without them."
        )
    shard(replay, accelerator)
    return replay
