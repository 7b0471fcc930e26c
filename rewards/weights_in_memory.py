# SPDX-License-Identifier: Apache-2.0
"""Weights as they are in memory: whether they changed, and a fingerprint where no file has them."""

from __future__ import annotations

import hashlib

from torch import nn


def weight_state(module: nn.Module) -> int:
    """A number that is another one after a weight was changed in place, replaced, added or moved.

    Every change in place, an optimiser's step too, counts up the version of its tensor. Tensors that were
    made in inference mode have none, and a change that `.data` hides is not seen either.

    Args:
        module: whose parameters and buffers count.
    """
    tensors = (*module.parameters(), *module.buffers())
    return hash(tuple((one.data_ptr(), 0 if one.is_inference() else one._version) for one in tensors))


def weights_of(module: nn.Module) -> str:
    """A fingerprint of a module in memory: 32 hex digits over names and sums of its parameters.

    Args:
        module: any.
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        sums = parameter.detach().double()
        digest.update(
            f"{name}:{tuple(sums.shape)}:{sums.sum().item()!r}:{sums.abs().sum().item()!r}".encode()
        )
    return digest.hexdigest()[:32]


class WeightPrint:
    """The fingerprint of a module: that of its files until its weights change, then that of the memory.

    Args:
        module: as it was loaded.
        files: fingerprint of the files that it was loaded from; None where there are none.
    """

    def __init__(self, module: nn.Module, files: str | None) -> None:
        self._module = module
        self._loaded = {} if files is None else {weight_state(module): files}
        self._now: tuple[int, str] | None = None

    def __str__(self) -> str:
        state = weight_state(self._module)
        if state in self._loaded:
            return self._loaded[state]
        if self._now is None or self._now[0] != state:
            self._now = (state, weights_of(self._module))
        return self._now[1]
