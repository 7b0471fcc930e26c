# SPDX-License-Identifier: Apache-2.0
"""The same network faster: compiled blocks, another kernel of attention, convolutions with channels last."""

from __future__ import annotations

import torch
from torch import nn

from visalign.errors import UserError


def speed_up(
    module: nn.Module, *, compiled: bool = False, attention: str | None = None, channels_last: bool = False
) -> None:
    """Change how a policy's network is computed, in place; the function that it computes stays.

    Args:
        module: diffusers' network with its adapters, or an `nn.ModuleDict` of several.
        compiled: `torch.compile` each of its repeated blocks (`_repeated_blocks`, or `_no_split_modules`),
            so that one compilation serves all of them.
        attention: a backend of diffusers' attention dispatch: native, flash, sage, xformers, ...
        channels_last: keep the weights of 2D convolutions with their channels last; others stay.

    Raises:
        UserError: a network with no such blocks or without layers that take a backend, or a backend that is
            unknown or cannot be used here.
    """
    for network in module.values() if isinstance(module, nn.ModuleDict) else [module]:
        if channels_last:
            for weight in (parameter for parameter in network.parameters() if parameter.ndim == 4):
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        if attention is not None:
            _attend_by(network, attention)
        if compiled:
            _compile_blocks(network)


def _compile_blocks(network: nn.Module) -> None:
    names = getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or ()
    blocks = [part for part in network.modules() if type(part).__name__ in names]
    if not blocks:
        raise UserError(
            f"model.compile is set, and {type(network).__name__} names no block that repeats. Leave it out."
        )
    for block in blocks:
        block.compile()


def _attend_by(network: nn.Module, backend: str) -> None:
    processors = [getattr(part, "processor", None) for part in network.modules()]
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        raise UserError(
            f"model.attention is {backend!r}, and no layer of this {type(network).__name__} takes a backend. "
            "Leave it out (the fast adapter of SD3 has its own attention)."
        )
    from diffusers.models.attention_dispatch import attention_backend

    try:
        with attention_backend():  # whose end gives the other networks of the process theirs back
            network.set_attention_backend(backend)  # type: ignore[operator]  # of diffusers' ModelMixin
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"model.attention is {backend!r}: {error}") from error
