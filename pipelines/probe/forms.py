# SPDX-License-Identifier: Apache-2.0
"""The same picture handed over in other ways: other containers and dtypes, other neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visalign.rewards.base.images import to_pil, to_uint8

ALONE = 16
"""Pictures that are asked for one by one in the probe of the neighbours."""

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "uint8, channels first": lambda image: image.mul(255).round().to(torch.uint8),
    "uint8, channels last": lambda image: to_uint8(image),
    "PIL": to_pil,
    "float64": lambda image: image.mul(255).round().double().div(255),
    "float16": lambda image: image.half(),
}
"""Label of a level of the probe "form" -> one picture [3, H, W] in that form."""


def among_white(image: Tensor, batch_size: int) -> list[Tensor]:
    """A batch of the picture first and white pictures of the same size behind it.

    Args:
        image: [3, H, W].
        batch_size: At most 8 are made, at least 2.
    """
    return [image, *(torch.ones_like(image) for _ in range(min(max(batch_size, 2), 8) - 1))]
