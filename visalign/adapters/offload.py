# SPDX-License-Identifier: Apache-2.0
"""Text encoders and autoencoder in CPU memory, copied to the device of the network while they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from visalign.swapping import swapped_weights

ENCODERS = ("text_encoder", "image_encoder", "prompt_upsampler")
"""Beginnings of the names of a pipeline's encoders of texts and images."""
AUTOENCODER = ("vae",)


def is_offloaded(name: str) -> bool:
    """Return True if a part of a pipeline is one that can stay in CPU memory."""
    return name.startswith((*ENCODERS, *AUTOENCODER))


def place(pipe: Any, device: torch.device | str, *, offload: bool) -> Any:
    """Move a pipeline to a device, with `offload` without the parts that stay in CPU memory."""
    if not offload:
        return pipe.to(device)
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and not is_offloaded(name):
            part.to(device)
    return pipe


@contextmanager
def on_device(pipe: Any, names: tuple[str, ...], device: torch.device) -> Iterator[None]:
    """Copy frozen parts of a pipeline whose names begin with `names` to a device inside the block; nestable."""
    parts = [part for name, part in pipe.components.items() if name.startswith(names) and isinstance(part, nn.Module)]
    tensors = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    elsewhere = [tensor for tensor in tensors if tensor.device != device and not tensor.is_meta]
    with swapped_weights(elsewhere, [tensor.data.to(device) for tensor in elsewhere]):
        yield
