# SPDX-License-Identifier: Apache-2.0
"""The reference of full fine-tuning: a second set of weights, put in place for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def swapped_weights(parameters: Sequence[nn.Parameter], stored: Sequence[Tensor]) -> Iterator[None]:
    """Let the parameters hold the stored values inside the block; nothing is copied.

    A graph built before the block is still good after it; a backward *inside* would use the stored weights.

    Args:
        parameters: of the model, wrapped or not (DDP keeps the parameter objects).
        stored: one tensor per parameter, same shapes, device and dtype.
    """
    current = [parameter.data for parameter in parameters]
    try:
        for parameter, other in zip(parameters, stored, strict=True):
            parameter.data = other
        yield
    finally:
        for parameter, own in zip(parameters, current, strict=True):
            parameter.data = own
