# SPDX-License-Identifier: Apache-2.0
"""Weights in memory: fingerprints, detection of changes, evaluation mode."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor, nn

_BLOCK = 1 << 18
"""8-byte words per sum; the factors take 2 MB per device."""


def weight_state(module: nn.Module) -> int:
    """Return a number that changes when a weight is modified in place, replaced, added or moved.

    It uses the version counters of tensors. Tensors created in inference mode have none, and changes through
    `.data` are not counted.
    """
    parts = module.modules()  # asked directly: `parameters` takes three times as long, and each call of a judge asks
    tensors = (tensor for part in parts for tensor in chain(part._parameters.values(), part._buffers.values()))
    return hash(tuple(_version(tensor) for tensor in tensors if tensor is not None))


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, and back for every part that was in training."""
    if in_training := [part for part in module.modules() if part.training]:
        module.eval()
    try:
        yield
    finally:
        for part in in_training:
            part.training = True


def weights_of(module: nn.Module) -> str:
    """Fingerprint a module by names, shapes, dtypes and bits: 32 hex digits, equal on every device."""
    return str(WeightPrint(module, None))


def tensor_print(tensor: Tensor) -> str:
    """Fingerprint a tensor by shape, dtype and bits on its own device: 32 hex digits.

    Each block of 8-byte words x is summed as Σ w_i x_i modulo 2^64 with fixed odd factors w, so that one
    changed word always changes the sum, and swapped words all but surely do. The sums are hashed.
    """
    digest = hashlib.sha256(f"{tuple(tensor.shape)}:{tensor.dtype}".encode())
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        for number in _sums(flat.contiguous()):
            digest.update(number)
    return digest.hexdigest()[:32]


def _sums(flat: Tensor) -> Iterator[bytes]:
    """Yield the sums of a contiguous tensor's blocks, and the remaining bytes."""
    raw = flat.view(torch.uint8)
    aligned = len(raw) // 8 * 8
    words = raw[:aligned]
    if words.data_ptr() % 8 or words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    factors = _factors(words.device)
    sums = [(block * factors[: len(block)]).sum() for block in words.split(_BLOCK) if len(block)]
    if sums:
        yield torch.stack(sums).cpu().numpy().tobytes()
    yield raw[aligned:].cpu().numpy().tobytes()


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    """Return fixed odd factors, int64 [_BLOCK]."""
    generator = torch.Generator().manual_seed(0x5EED)
    with torch.inference_mode(False):
        return (torch.randint(-(2**62), 2**62, (_BLOCK,), generator=generator) * 2 + 1).to(device)


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


class WeightPrint:
    """Fingerprint of a module: that of its files (None without) until its weights change, then that of its memory.

    Unchanged tensors are not read again, so the frozen part of a model in training costs nothing.
    """

    def __init__(self, module: nn.Module, files: str | None) -> None:
        self._module = module
        self._loaded = {} if files is None else {weight_state(module): files}
        self._current: tuple[int, str] | None = None
        self._tensors: dict[str, tuple[tuple[int, int], str]] = {}

    def __str__(self) -> str:
        state = weight_state(self._module)
        if state in self._loaded:
            return self._loaded[state]
        if self._current is None or self._current[0] != state:
            previous, self._tensors = self._tensors, {}
            for name, tensor in chain(self._module.named_parameters(), self._module.named_buffers()):
                version, entry = _version(tensor), previous.get(name)
                if entry is None or entry[0] != version or tensor.is_inference():
                    entry = version, tensor_print(tensor)
                self._tensors[name] = entry
            listed = "".join(f"{name}:{digest};" for name, (_, digest) in self._tensors.items())
            self._current = state, hashlib.sha256(listed.encode()).hexdigest()[:32]
        return self._current[1]
