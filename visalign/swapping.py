# SPDX-License-Identifier: Apache-2.0
"""Weights that are swapped, and LoRA layers that are switched off, inside a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@contextmanager
def swapped_weights(parameters: Sequence[Tensor], stored: Sequence[Tensor]) -> Iterator[None]:
    """Swap in stored values (of the same shapes), without copying; graphs built before stay valid after it."""

    def swap(values: Sequence[Tensor]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            if isinstance(parameter, DTensor):  # FSDP2 gathers from memory of its own
                with torch.no_grad():
                    parameter.copy_(distribute_like(value, parameter))
            else:
                parameter.data = value

    current = [p.detach().clone() if isinstance(p, DTensor) else p.data for p in parameters]
    try:
        swap(stored)
        yield
    finally:
        swap(current)


def distribute_like(value: Tensor, other: Tensor) -> Tensor:
    """Move a tensor, whole or divided, to the other's device and divide it as the other is."""
    value = value.to(other.device)
    if not isinstance(other, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value, other.device_mesh, other.placements, src_data_rank=None)


@contextmanager
def lora_disabled(layers: Sequence[Any]) -> Iterator[None]:
    """Switch adapters off inside the block; `requires_grad` stays (peft's own switch takes 6 ms for SD3.5's)."""
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
