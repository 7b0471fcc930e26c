# SPDX-License-Identifier: Apache-2.0
"""HPSv3's head: mean and log-deviation of the reward from the hidden state at one position.

The position is selected before the head runs, on [B, D] instead of [B, L, D].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from visalign.rewards.base.contract import RewardError
from visalign.rewards.weights.checkpoint_files import load_strict

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
        widths: dict[str, Any] = {"hidden": (first[0], second[0]), "outputs": third[0]}
        condition = state.get("cond_encoder.0.weight")
        if condition is None:
            head = cls(first[1], **widths)
        else:
            head = ConditionedHead(first[1], condition=len(condition), **widths)
        load_strict(head, {key: value.float() for key, value in state.items()}, "the head")
        return head.eval()

    def forward(self, hidden: Tensor, iteration: Tensor | float = 0.0) -> Tensor:
        """Compute outputs [*, 2] of hidden states [*, D] of any dtype in the head's own, float32."""
        dtype: Any = self.rm_head[0].weight.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            # a head that was cast to half fails here, rather than to score coarsely
            return self.rm_head(hidden.to(torch.promote_types(dtype, torch.float32)))


class ConditionedHead(RanknetHead):
    """HPSv3++'s head: h ← h (1 + γ) + β first, (γ, β) of the generator's capability and its RL iteration.

    Both are in [0, 1]. The capability is read from each image's own h, without gradient into it. `condition` is the
    width of the layers between; 256 is published. At first γ = β = 0.

    Liu et al., HPSv3++, arXiv 2606.14657; keys of the released code.
    """

    def __init__(self, input_dim: int, *, condition: int = 256, **options: Any) -> None:
        super().__init__(input_dim, **options)
        names = {"proj": input_dim, "pool_attn": condition, "out_proj": condition}
        outputs = {"proj": condition, "pool_attn": 1, "out_proj": 1}
        self.cap_encoder = nn.ModuleDict({name: nn.Linear(size, outputs[name]) for name, size in names.items()})
        self.cond_encoder = nn.Sequential(nn.Linear(2, condition), nn.GELU(), nn.Linear(condition, condition))
        last = nn.Linear(input_dim, 2 * input_dim)
        self.film_gen = nn.Sequential(nn.Linear(condition, input_dim), nn.ReLU(), last)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor, iteration: Tensor | float = 0.0) -> Tensor:
        """Compute outputs [N, 2] of hidden states [N, D] at an RL iteration, of all or of each [N]."""
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.float()
            capability = self.cap_encoder["out_proj"](self.cap_encoder["proj"](hidden.detach())).sigmoid()
            condition = torch.stack(
                [capability[:, 0], torch.as_tensor(iteration).to(capability).expand(len(hidden))], 1
            )
            gamma, beta = self.film_gen(self.cond_encoder(condition)).chunk(2, -1)
        return super().forward(hidden * (1 + gamma) + beta)
