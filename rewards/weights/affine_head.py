# SPDX-License-Identifier: Apache-2.0
"""Five-layer head on a CLIP or BLIP embedding, as published by HP, the LAION aesthetic and ImageReward.

D → 1024 → 128 → 64 → 16 → 1 with dropout and usually no activation, so one affine map in evaluation mode. The
layers are kept for training and the published keys, and collapsed for scoring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visalign.rewards.base.contract import RewardError

from .checkpoint_files import load_strict

Activation = Literal["none", "relu"]

LAYER_INDICES: Mapping[Activation, tuple[int, ...]] = {"none": (0, 2, 4, 6, 7), "relu": (0, 3, 6, 9, 11)}
"""Indices of the linear layers in the published `layers`; the others are ReLU and dropout."""
WIDTHS = (1024, 128, 64, 16, 1)
"""Output widths of the five layers."""
DROPOUT = (0.2, 0.2, 0.1, 0.0, 0.0)
"""Dropout after each layer, as published."""
IMAGEREWARD_MEAN, IMAGEREWARD_STD = 0.16717362830052426, 1.0333394966054072
"""Mean and standard deviation of ImageReward's raw scores on its training set."""


class AffineHead(nn.Module):
    """Five linear layers with the published keys `layers.{0,2,4,6,7}` (`{0,3,6,9,11}` with ReLU).

    Its `input_dim` is 1024 for HP, 768 for the LAION aesthetic and ImageReward; `activation` is "none" (affine in
    evaluation mode) or "relu" (LAION's `reluMSE` file). ICT-HP, arXiv 2507.19002; ImageReward, arXiv 2304.05977;
    LAION's improved-aesthetic-predictor.
    """

    def __init__(self, input_dim: int, *, widths: Sequence[int] = WIDTHS, activation: Activation = "none") -> None:
        super().__init__()
        self.activation: Activation = activation
        modules: list[nn.Module] = []
        for layer, (inputs, outputs) in enumerate(pairwise((input_dim, *widths))):
            modules.append(nn.Linear(inputs, outputs))
            if activation == "relu" and layer < len(widths) - 1:
                modules.append(nn.ReLU())
            if DROPOUT[layer]:
                modules.append(nn.Dropout(DROPOUT[layer]))
        self.layers = nn.Sequential(*modules)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], where: str = "the head") -> AffineHead:
        """Build a float32 head in evaluation mode from `layers.<n>.{weight,bias}`; `where` is for messages."""
        activation: Activation = "relu" if "layers.9.weight" in state else "none"
        indices = LAYER_INDICES[activation]
        weights = [state[key] for index in indices if (key := f"layers.{index}.weight") in state]
        if len(weights) < len(indices):
            raise RewardError(f"{where} is no five-layer head: it needs layers.{indices}.weight.")
        head = cls(weights[0].shape[1], widths=[len(weight) for weight in weights], activation=activation)
        load_strict(head, {key: value.float() for key, value in state.items()}, where)
        return head.eval()

    def forward(self, embedding: Tensor) -> Tensor:
        """Compute raw scores [*] of embeddings [*, D], float32 or better.

        The LAION aesthetic needs L2-normalized embeddings, HP and ImageReward do not.
        """
        dtype: Any = self.layers[0].weight.dtype
        with torch.autocast(embedding.device.type, enabled=False):
            # a head that was cast to half fails here, rather than to score coarsely
            return self.layers(embedding.to(torch.promote_types(dtype, torch.float32))).squeeze(-1)

    def collapse(self) -> nn.Linear:
        """Multiply the layers out in float64 to one `nn.Linear(D, 1)` in float32; not for the ReLU layout."""
        if self.activation != "none":
            raise ValueError("A head with ReLU between its layers is no affine map; score with the layers.")
        linear = [module for module in self.layers if isinstance(module, nn.Linear)]
        weight = torch.eye(linear[0].in_features, dtype=torch.float64, device=linear[0].weight.device)
        bias = weight.new_zeros(linear[0].in_features)
        for layer in linear:
            matrix = layer.weight.detach().double()
            weight, bias = matrix @ weight, matrix @ bias + layer.bias.detach().double()
        result = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device).requires_grad_(False)
        result.weight.copy_(weight)
        result.bias.copy_(bias)
        return result


def standardise(score: Tensor) -> Tensor:
    """Standardize ImageReward's raw scores [*] as its released code does, (r − mean)/std."""
    return (score - IMAGEREWARD_MEAN) / IMAGEREWARD_STD
