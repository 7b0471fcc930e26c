# SPDX-License-Identifier: Apache-2.0
"""Pictures as the packaged judge's patches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from visalign.data.shapes.scenes import SIZE

PATCH, MERGE = 8, 2


TOKENS = (SIZE // PATCH // MERGE) ** 2
"""Tokens of one picture."""


_GRID = SIZE // PATCH


def patches_of(pictures: np.ndarray) -> Tensor:
    """What the model's image processor makes of uint8 [N, 64, 64, 3]: [N · 64, 384] float32 in [−1, 1].

    Patches are ordered by merged token, then row and column inside it; a picture is two equal frames.
    """
    cells = _GRID // MERGE
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
    split = pixels.reshape(len(pictures), 3, cells, MERGE, PATCH, cells, MERGE, PATCH)
    ordered = split.permute(0, 2, 5, 3, 6, 1, 4, 7)[:, :, :, :, :, :, None]
    return ordered.expand(-1, -1, -1, -1, -1, -1, 2, -1, -1).reshape(len(pictures) * _GRID**2, -1)


def see(model: Any, pictures: np.ndarray) -> Tensor:
    """Features [N, TOKENS, H] of pictures."""
    grid = torch.tensor([[1, _GRID, _GRID]]).expand(len(pictures), 3)
    return model.model.visual(patches_of(pictures), grid).pooler_output.view(len(pictures), TOKENS, -1)
