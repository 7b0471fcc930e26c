# SPDX-License-Identifier: Apache-2.0
"""Adapters in the weights while a policy samples.

Source: LoRA, arXiv 2106.09685, section 4.1: W + (α / r) B A costs no more than W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from visalign.errors import UserError


def mergeable_adapters(network: nn.Module) -> list[Any]:
    """The layers of a network that `merged_adapters` takes.

    Raises:
        UserError: no adapters, variants of LoRA, or other layers than linear ones of floating-point weights.
    """
    layers: dict[str, Any] = {n: part for n, part in network.named_modules() if isinstance(part, LoraLayer)}
    bases: list[Any] = [layer.get_base_layer() for layer in layers.values()]
    uses = Counter(id(getattr(base, "weight", base)) for base in bases)
    why = None if layers else "the network has none"
    for (name, layer), base in zip(layers.items(), bases, strict=True):
        if type(base) is not nn.Linear:
            why = f"{name} lies on a {type(base).__name__}"
        elif type(base.weight.data) is not Tensor:
            why = f"the weights under {name} are a {type(base.weight.data).__name__}"
        elif uses[id(base.weight)] > 1:
            why = f"the weights under {name} are another layer's too"
        elif getattr(layer, "lora_variant", None):
            why = f"{name} is a {type(next(iter(layer.lora_variant.values()))).__name__}"
    if why:
        raise UserError(
            "rollout.merge_adapters needs LoRA on linear layers of floating-point weights of their own, and "
            f"{why}. Set rollout.merge_adapters=false."
        )
    return list(layers.values())


@contextmanager
def merged_adapters(layers: list[Any]) -> Iterator[None]:
    """Let the layers under adapters hold W + (α / r) B A inside the block, so that a forward costs what it
    costs without adapters; afterwards W again, bit for bit. For sampling without gradient.

    It takes the memory of those weights once more, and rounds the sum to their dtype, where the products were
    rounded and then added: what is computed differs by that. Inside, there is no reference.

    Args:
        layers: of `mergeable_adapters`.
    """
    bases: list[Any] = [layer.get_base_layer() for layer in layers]
    own: list[Tensor] = [base.weight.data for base in bases]
    flags = [(weight, weight.requires_grad) for layer in layers for weight in layer.parameters()]
    try:
        for layer, base in zip(layers, bases, strict=True):
            with torch.no_grad():
                merged = base.weight.data.float() + sum(map(layer.get_delta_weight, layer.active_adapters))
            base.weight.data = merged.to(base.weight.dtype)
            layer.enable_adapters(False)
        del merged
        yield
    finally:
        for layer, base, weight in zip(layers, bases, own, strict=True):
            layer.enable_adapters(True)
            base.weight.data = weight
        for weight, trainable in flags:
            weight.requires_grad_(trainable)
