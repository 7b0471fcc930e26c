# SPDX-License-Identifier: Apache-2.0
"""The five-layer head on a CLIP or BLIP embedding that HP, the LAION aesthetic and ImageReward publish.

D → 1024 → 128 → 64 → 16 → 1 with dropout and, in the usual layout, nothing between the layers: one affine
map in evaluation mode. It is kept layered for training and for the published keys, collapsed for scoring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Activation = Literal["none", "relu"]

PLACES: Mapping[Activation, tuple[int, ...]] = {"none": (0, 2, 4, 6, 7), "relu": (0, 3, 6, 9, 11)}
"""Where the five linear layers stand in the published `layers`; the rest are ReLU and dropout."""
WIDTHS = (1024, 128, 64, 16, 1)
"""Output widths of the five layers."""
DROPOUT = (0.2, 0.2, 0.1, 0.0, 0.0)
"""After each layer, as published."""
IMAGEREWARD_MEAN, IMAGEREWARD_STD = 0.16717362830052426, 1.0333394966054072
"""ImageReward's constants: the mean and standard deviation of its raw scores on its own training set."""


class AffineHead(nn.Module):
    """Five linear layers under the published keys `layers.{0,2,4,6,7}` (or `{0,3,6,9,11}` with ReLU between).

    Args:
        input_dim: width of the embedding; 1024 for HP, 768 for the LAION aesthetic and ImageReward.
        widths: output widths of the five layers.
        activation: "none" (affine in evaluation mode), or "relu" (LAION's `reluMSE` file).

    Raises:
        ValueError: an activation or a number of layers that is not published.

    ICT-HP, arXiv 2507.19002; ImageReward 2304.05977; LAION's improved-aesthetic-predictor.
    """

    def __init__(
        self, input_dim: int, *, widths: Sequence[int] = WIDTHS, activation: Activation = "none"
    ) -> None:
        super().__init__()
        if activation not in PLACES:
            raise ValueError(f'activation must be "none" or "relu"; got {activation!r}.')
        if len(widths) != len(DROPOUT):
            raise ValueError(f"widths needs {len(DROPOUT)} numbers, one per layer; got {tuple(widths)}.")
        self.activation: Activation = activation
        modules: list[nn.Module] = []
        sizes = (input_dim, *widths)
        for place in range(len(widths)):
            modules.append(nn.Linear(sizes[place], sizes[place + 1]))
            last = place == len(widths) - 1
            if activation == "relu" and not last:
                modules.append(nn.ReLU())
            if DROPOUT[place]:
                modules.append(nn.Dropout(DROPOUT[place]))
        self.layers = nn.Sequential(*modules)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> AffineHead:
        """The head whose layout and widths the keys `layers.<n>.{weight,bias}` of a published file tell, in
        evaluation mode, float32; ValueError names missing and unexpected keys, or shapes that do not
        follow one another.
        """
        given = set(state)
        activation = min(PLACES, key=lambda name: len(_keys(PLACES[name]) ^ given))
        wanted = _keys(PLACES[activation])
        if given != wanted:
            raise ValueError(
                f"The file is no five-layer head ({', '.join(sorted(wanted))}): missing "
                f"{sorted(wanted - given)}, unexpected {sorted(given - wanted)}."
            )
        weights = [state[f"layers.{place}.weight"] for place in PLACES[activation]]
        input_dim, widths = weights[0].shape[1], [weight.shape[0] for weight in weights]
        head = cls(input_dim, widths=widths, activation=activation)
        try:
            head.load_state_dict({key: value.float() for key, value in state.items()}, strict=True)
        except RuntimeError as error:
            raise ValueError(f"The layers of the head do not fit one another: {error}") from error
        return head.eval()

    def forward(self, embedding: Tensor) -> Tensor:
        """Raw scores [*] of embeddings [*, D] in the dtype of the head, float32 or better; embeddings are
        L2-normalised for the LAION aesthetic, not for HP and ImageReward.
        """
        dtype = self.layers[0].weight.dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"The head must stay in float32; it is {dtype}. Move the tower alone.")
        with torch.autocast(embedding.device.type, enabled=False):
            return self.layers(embedding.to(dtype)).squeeze(-1)

    def collapse(self) -> nn.Linear:
        """The one affine map `nn.Linear(D, 1)` float32 that the layers are in evaluation mode, multiplied out
        in float64; the ReLU layout is none.
        """
        if self.activation != "none":
            raise ValueError("A head with ReLU between its layers is no affine map; score with the layers.")
        linear = [module for module in self.layers if isinstance(module, nn.Linear)]
        weight = torch.eye(linear[0].in_features, dtype=torch.float64, device=linear[0].weight.device)
        bias = weight.new_zeros(linear[0].in_features)
        for layer in linear:
            one = layer.weight.detach().double()
            weight, bias = one @ weight, one @ bias + layer.bias.detach().double()
        result = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device).requires_grad_(False)
        result.weight.copy_(weight)
        result.bias.copy_(bias)
        return result


def standardise(score: Tensor) -> Tensor:
    """Move ImageReward's raw scores [*] to the unit in which they are published: (r − mean)/std.

    ImageReward, arXiv 2304.05977, released code.
    """
    return (score - IMAGEREWARD_MEAN) / IMAGEREWARD_STD


def _keys(places: Sequence[int]) -> set[str]:
    return {f"layers.{place}.{part}" for place in places for part in ("weight", "bias")}
