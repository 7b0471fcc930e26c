# SPDX-License-Identifier: Apache-2.0
"""HPSv3's head: mean and log-deviation of the reward from the hidden state at one position.

The position is selected before the head runs, on [B, D] instead of [B, L, D].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visalign.rewards.base.contract import RewardError
from visalign.rewards.weights.checkpoint_files import load_strict

Pooling = Literal["special", "last", "mean"]
HIDDEN = (1024, 16)
DROPOUT = 0.05
LAYERS = (0, 3, 5)
"""Indices of the three linear layers under `rm_head`."""


class RanknetHead(nn.Module):
    """Linear, ReLU, dropout, Linear, ReLU, Linear under the published keys `rm_head.{0,3,5}.{weight,bias}`.

    The 7B model's `input_dim` is 3584; 2 outputs are (mean, log-deviation), 1 is a mean alone. Ma et al., HPSv3, arXiv
    2508.03789, released code.
    """

    def __init__(self, input_dim: int, *, hidden: tuple[int, int] = HIDDEN, outputs: int = 2) -> None:
        super().__init__()
        self.rm_head = nn.Sequential(
            nn.Linear(input_dim, hidden[0]),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(hidden[0], hidden[1]),
            nn.ReLU(),
            nn.Linear(hidden[1], outputs),
        )

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> RanknetHead:
        """Build the float32 head of the tensors `rm_head.{0,3,5}.{weight,bias}`, in evaluation mode."""
        shapes = [state[key].shape for layer in LAYERS if (key := f"rm_head.{layer}.weight") in state]
        if len(shapes) < len(LAYERS):
            raise RewardError(f"The weights are no HPSv3 head, which has rm_head.{LAYERS}.weight.")
        first, second, third = shapes
        head = cls(first[1], hidden=(first[0], second[0]), outputs=third[0])
        load_strict(head, {key: value.float() for key, value in state.items()}, "the head")
        return head.eval()

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute outputs [*, 2] of hidden states [*, D] of any dtype in the head's own, float32."""
        dtype: Any = self.rm_head[0].weight.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            # a head that was cast to half fails here, rather than to score coarsely
            return self.rm_head(hidden.to(torch.promote_types(dtype, torch.float32)))

    def pooled(
        self, hidden: Tensor, input_ids: Tensor, *, pooling: Pooling, special_token_id: int, pad_token_id: int
    ) -> Tensor:
        """Compute outputs [B, outputs] of rows of hidden states [B, L, D] and tokens [B, L], padded behind.

        "special": at the reward token, which occurs exactly once in each row. "last": at the last token that is no
        padding. "mean": the outputs averaged over all tokens that are no padding; the released code leaves the last of
        them out.
        """
        rows = torch.arange(len(hidden), device=hidden.device)
        if pooling == "special":
            is_special = input_ids == special_token_id
            if not (is_special.sum(1) == 1).all():
                raise ValueError(f"The reward token {special_token_id} must occur once in each row.")
            return self(hidden[rows, is_special.int().argmax(1)])
        valid = (input_ids == pad_token_id).cumsum(1) == 0
        if pooling == "last":
            return self(hidden[rows, valid.sum(1) - 1])
        outputs = self(hidden)
        weight = valid.to(outputs.dtype)[..., None]
        return (outputs * weight).sum(1) / weight.sum(1)
