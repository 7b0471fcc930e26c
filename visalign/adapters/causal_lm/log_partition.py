# SPDX-License-Identifier: Apache-2.0
"""FlowRL's learned log-partition: log Z_φ(x) of a prompt, from the policy's own hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from visalign.errors import UserError
from visalign.text import TextRollout

from .policy import CausalLMPolicy


class LogPartitionHead(nn.Module):
    """log Z of [b, H] features by three linear layers, at first 0: FlowRL, arXiv 2509.15207, section 3.3."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        layers = [(nn.Linear(hidden_size, hidden_size), nn.GELU(), nn.LayerNorm(hidden_size)) for _ in range(2)]
        self.trunk = nn.Sequential(*layers[0], *layers[1])
        self.out = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, features: Tensor) -> Tensor:
        """[b, H] -> [b] float32."""
        return self.out(self.trunk(features.float()))[:, 0]


class PromptLogPartition:
    """log Z of a rollout's prompts by a trained `head` [b, H] -> [b] on their mean last hidden state.

    The features carry no gradient: trajectory balance must not move the policy by way of log Z.
    """

    def __init__(self, policy: CausalLMPolicy, *, seed: int = 0) -> None:
        self._policy = policy
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head: nn.Module = LogPartitionHead(policy.hidden_size).to(policy.device)

    @torch.no_grad()
    def features(self, rollout: TextRollout) -> Tensor:
        """Return the mean hidden state [B, H] float32 of each sample's prompt; raises for prompts with images."""
        if rollout.images is not None:
            raise UserError("log Z reads text only, and this rollout has images. Use another algorithm than FlowRL.")
        if not len(rollout):
            return torch.zeros(0, self._policy.hidden_size)
        rows = torch.cat([rollout.prompt_mask.long(), rollout.prompt_ids], 1)
        unique, inverse = torch.unique(rows, dim=0, return_inverse=True)
        mask, ids = unique.to(self._policy.device).chunk(2, 1)
        model: Any = self._policy.model
        trunk = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        parts = []
        for part_ids, part_mask in zip(ids.split(64), mask.split(64), strict=True):
            positions = (part_mask.cumsum(1) - 1).clamp(min=0)
            inputs = {"input_ids": part_ids, "attention_mask": part_mask, "position_ids": positions}
            hidden = trunk(**inputs, use_cache=False).last_hidden_state
            share = part_mask.float() / part_mask.sum(1, keepdim=True).clamp(min=1)
            parts.append((hidden.float() * share[:, :, None]).sum(1))
        return torch.cat(parts)[inverse.to(self._policy.device)]
