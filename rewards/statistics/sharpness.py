# SPDX-License-Identifier: Apache-2.0
"""Sharpness: the variance of the Laplacian, to show that pictures did not blur while another reward rose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import make_scores, read_request, scatter
from visalign.rewards.base.identity import Identity

LUMA = (0.299, 0.587, 0.114)
"""ITU-R BT.601 weights of red, green and blue."""


def laplacian_variance(image: Tensor) -> Tensor:
    """Var(∇²Y) of the luma Y on the 0-255 scale, with the 4-neighbour Laplacian, borders left out.

    Args:
        image: [3, H, W] in [0, 1], H and W at least 3.

    Returns:
        Scalar float64, population variance in squared 8-bit levels.

    Source: Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000 (LAPV).
    """
    weights = torch.tensor(LUMA, dtype=torch.float64, device=image.device)
    luma = torch.einsum("c,chw->hw", weights, image.double() * 255)
    kernel = luma.new_tensor([[0, 1, 0], [1, -4, 1], [0, 1, 0]])
    return F.conv2d(luma[None, None], kernel[None, None]).var(correction=0)


class Sharpness:
    """Variance of the Laplacian; higher means more and harder edges (noise counts as edges, too)."""

    name = "sharpness"
    unit = "8-bit levels²"
    range = (0.0, 1020.0**2)
    """The upper end is a checkerboard of single black and white pixels: ∇²Y = ±4·255."""
    higher_is_better = True
    identity = Identity(judge="sharpness", model="variance of the Laplacian")

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Measure each image; prompts and metadata are not looked at. Images below 3×3 are invalid."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, values = [], []
        for row, image in request.images.readable():
            height, width = image.shape[1:]
            if min(height, width) < 3:
                reasons[row] = (
                    f"sharpness needs an image of at least 3×3 pixels, this one has {width}×{height}"
                )
                continue
            rows.append(row)
            values.append(laplacian_variance(image).item())
        return make_scores(scatter(values, rows, len(request)), reasons, self.unit)
