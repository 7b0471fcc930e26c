# SPDX-License-Identifier: Apache-2.0
"""Weights as they are in memory: whether they changed, and a fingerprint where no file has them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn

_BLOCK = 1 << 18
"""Words of 8 bytes that one sum covers; their factors are kept, 2 MB for a device."""


def weight_state(module: nn.Module) -> int:
    """A number that is another one after a weight was changed in place, replaced, added or moved.

    Every change in place, an optimizer's step too, counts up the version of its tensor. Tensors that were
    made in inference mode have none, and a change that `.data` hides is not seen either.
    """
    return hash(tuple(_version(tensor) for _, tensor in _tensors(module)))


def weights_of(module: nn.Module) -> str:
    """A fingerprint of a module in memory: 32 hex digits over names, shapes, dtypes and every bit.

    Equal weights have equal fingerprints wherever they lie.
    """
    return _joined({name: tensor_print(tensor) for name, tensor in _tensors(module)})


def tensor_print(tensor: Tensor) -> str:
    """32 hex digits over shape, dtype and bits, computed where the tensor lies.

    Of each block of words x of 8 bytes the sum Σ w_i x_i modulo 2^64, with fixed odd factors w: one changed
    word always changes it, and so do, but for one chance in 2^60 or so, swapped words. The sums are hashed.
    """
    digest = hashlib.sha256(f"{tuple(tensor.shape)}:{tensor.dtype}".encode())
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        for number in _sums(flat.contiguous()):
            digest.update(number)
    return digest.hexdigest()[:32]


def _sums(flat: Tensor) -> Iterator[bytes]:
    """The sums of a contiguous tensor's blocks, and the bytes that fill no word."""
    raw = flat.view(torch.uint8)
    whole = len(raw) // 8 * 8
    words = raw[:whole]
    if words.data_ptr() % 8 or words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    factors = _factors(words.device)
    sums = [(block * factors[: len(block)]).sum() for block in words.split(_BLOCK) if len(block)]
    if sums:
        yield torch.stack(sums).cpu().numpy().tobytes()
    yield raw[whole:].cpu().numpy().tobytes()


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    """[_BLOCK] odd int64, always the same."""
    generator = torch.Generator().manual_seed(0x5EED)
    with torch.inference_mode(False):
        return (torch.randint(-(2**62), 2**62, (_BLOCK,), generator=generator) * 2 + 1).to(device)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _joined(prints: dict[str, str]) -> str:
    digest = hashlib.sha256()
    for name, one in prints.items():
        digest.update(f"{name}:{one};".encode())
    return digest.hexdigest()[:32]


class WeightPrint:
    """The fingerprint of a module: that of its files until its weights change, then that of the memory.

    Tensors that did not change since the last time are not read again, so that in the training of a LoRA or
    a head the frozen model costs nothing.

    Args:
        module: as it was loaded.
        files: fingerprint of the files that it was loaded from; None where there are none.
    """

    def __init__(self, module: nn.Module, files: str | None) -> None:
        self._module = module
        self._loaded = {} if files is None else {weight_state(module): files}
        self._now: tuple[int, str] | None = None
        self._read: dict[str, tuple[tuple[int, int], str]] = {}

    def __str__(self) -> str:
        state = weight_state(self._module)
        if state in self._loaded:
            return self._loaded[state]
        if self._now is None or self._now[0] != state:
            self._now = (state, self._of_memory())
        return self._now[1]

    def _of_memory(self) -> str:
        seen, self._read = self._read, {}
        for name, tensor in _tensors(self._module):
            version = _version(tensor)
            known = seen.get(name)
            same = known is not None and known[0] == version and not tensor.is_inference()
            self._read[name] = known if known is not None and same else (version, tensor_print(tensor))
        return _joined({name: one for name, (_, one) in self._read.items()})
