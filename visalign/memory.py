# SPDX-License-Identifier: Apache-2.0
"""Batch sizes `auto`: the largest that leave 15 % of a GPU's free memory, measured on small batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from .errors import UserError
from .settings import Count

AutoCount = Count | Literal["auto"]
SHARE = 0.85  # Share of the free memory that a batch may take
LESS_MEMORY = (
    "Set model.gradient_checkpointing=true, optimizer.name=adamw_8bit, for images model.offload=true, or "
    "model.dtype=bfloat16; train a LoRA; take smaller images (model.image_size, rollout.image_sizes), or a larger "
    "device. `visalign plan` shows the memory of each."
)


def largest_batch(peak: Callable[[int], float], free: float, limit: int) -> int:
    """Double a batch, up to `limit`, while it takes at most `SHARE` of the free bytes; 0 where not even one fits.

    `peak` measures the bytes that a batch takes, ∞ where memory ran out. A line through batches of one and two
    predicts larger ones. The batch that it leads to is measured, and halved while it takes more.
    """
    allowed, first, size = SHARE * free, peak(1), 1
    if first > free:
        return 0
    slope = peak(2) - first if limit > 1 else 0.0
    while size < limit and first + (min(2 * size, limit) - 1) * slope <= allowed:
        size = min(2 * size, limit)
    while size > 1 and peak(size) > allowed:
        size //= 2
    return size


def fit_batch(work: Callable[[int], Tensor], limit: int, *, reserved: float = 0.0, share: float = 1.0) -> int | None:
    """Measure the `largest_batch` of `work`: 0 where not even one fits, None where there is no GPU.

    `work` runs a batch of some size, and its result is on the device. Of the free bytes `reserved` are left for what
    comes later, and a `share` of the rest may be used.
    """
    try:
        with torch.compiler.set_stance("force_eager"):  # each size would compile anew
            device = work(1).device  # kernels' workspaces, which it allocates, are free no more
    except torch.OutOfMemoryError:
        return 0
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached - reserved
    size = largest_batch(partial(_peak_bytes, work, device), free * share, limit)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)  # a run's peak is its own
    return size


def _peak_bytes(work: Callable[[int], Tensor], device: torch.device, size: int) -> float:
    """Measure the bytes that a batch takes besides those in use."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        with torch.compiler.set_stance("force_eager"):
            work(size)
    except torch.OutOfMemoryError:
        return math.inf
    return torch.cuda.max_memory_allocated(device) - before


class BatchSize:
    """Size of a judge's batches: a number, or with "auto" measured when it is first read.

    Args:
        size: number of inputs or of their tokens, or "auto".
        trial: runs a batch of some number of inputs, to measure its memory.
        default: size without a GPU.
        unit: tokens of an input of `trial`, where the size counts tokens.
    """

    largest = 1024

    def __init__(self, size: int | str, trial: Callable[[int], Tensor], *, default: int, unit: int = 1) -> None:
        self.is_auto, self.number = size == "auto", None if size == "auto" else int(size)
        self.trial, self.default, self.unit = trial, default, unit

    def read(self) -> int:
        """Return the size."""
        if self.number is None:
            self.number = self.measure()
        if not self.number:
            raise UserError("A judge's batch is auto, and not even one input fits the GPU. Take a larger device.")
        return self.number

    def measure(self, *, reserved: float = 0.0, share: float = 1.0) -> int:
        """Measure the size within `fit_batch`'s limits; 0 where not even one input fits."""
        size = fit_batch(self.trial, self.largest, reserved=reserved, share=share)
        return self.default if size is None else size * self.unit
