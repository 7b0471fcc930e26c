# SPDX-License-Identifier: Apache-2.0
"""Faster execution of a network: compiled blocks, attention backends, channels-last convolutions."""

from __future__ import annotations

import torch
from torch import nn

from visalign.errors import UserError


def speed_up(
    module: nn.Module, *, compiled: bool = False, attention: str | None = None, channels_last: bool = False
) -> None:
    """Change how a network is executed, in place; its function stays the same.

    Args:
        module: Network of diffusers with its adapters, or an `nn.ModuleDict` of several.
        compiled: `torch.compile` each repeated block (`_repeated_blocks`, or `_no_split_modules`), so that
            one compilation serves all.
        attention: Backend of diffusers' attention dispatch: native, flash, sage, xformers, ...
        channels_last: Store 2D convolution weights channels last.

    Raises:
        UserError: No repeated blocks, no layers that take a backend, or a backend unavailable here.
    """
    for network in module.values() if isinstance(module, nn.ModuleDict) else [module]:
        if channels_last:
            for weight in (parameter for parameter in network.parameters() if parameter.ndim == 4):
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        if attention is not None:
            _set_attention(network, attention)
        if compiled:
            _compile_blocks(network)


def _compile_blocks(network: nn.Module) -> None:
    names = getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or ()
    blocks = [part for part in network.modules() if type(part).__name__ in names]
    if not blocks:
        raise UserError(
            f"model.compile is set, but {type(network).__name__} declares no repeated blocks. Leave it out."
        )
    for block in blocks:
        block.compile()


def _set_attention(network: nn.Module, backend: str) -> None:
    processors = [getattr(part, "processor", None) for part in network.modules()]
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        raise UserError(
            f"model.attention is {backend!r}, but no layer of this {type(network).__name__} takes a backend. "
            "Leave it out (the fast adapter of SD3 has its own attention)."
        )
    from diffusers.models.attention_dispatch import attention_backend

    try:
        with attention_backend():  # restores the process-wide default for other networks
            network.set_attention_backend(backend)  # type: ignore[operator]  # of diffusers' ModelMixin
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"model.attention is {backend!r}: {error}") from error
