# SPDX-License-Identifier: Apache-2.0
"""Adapters in the weights while a policy samples.

Source: LoRA, arXiv 2106.09685, section 4.1: W + (α / r) B A costs no more than W.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from visalign.errors import UserError
from visalign.interfaces import DiffusionPolicy


def mergeable_adapters(network: nn.Module) -> list[LoraLayer]:
    """The layers of a network that `merged_adapters` takes.

    Raises:
        UserError: no adapters, or adapters on other layers than linear ones of floating-point weights.
    """
    layers = [module for module in network.modules() if isinstance(module, LoraLayer)]
    bases = [layer.get_base_layer() for layer in layers]
    if not layers or not all(type(base) is nn.Linear and type(base.weight.data) is Tensor for base in bases):
        raise UserError(
            "rollout.merge_adapters needs LoRA on linear layers of floating-point weights. Set "
            "rollout.merge_adapters=false for a model that is trained whole, quantised or divided."
        )
    return layers


@contextmanager
def merged_adapters(policy: DiffusionPolicy, layers: list[LoraLayer]) -> Iterator[None]:
    """Let the layers under a policy's adapters hold W + (α / r) B A inside the block, so that a forward costs
    what it costs without adapters; afterwards W again, bit for bit. For sampling without gradient.

    It takes the memory of those weights once more, and rounds the sum to their dtype, where the products were
    rounded and then added: what is computed differs by that. Inside, the reference is the policy.

    Args:
        policy: whose reference is its network without adapters.
        layers: of `mergeable_adapters`.
    """
    bases = [layer.get_base_layer() for layer in layers]
    own = [base.weight.data for base in bases]
    merged = [
        weight.float() + sum(layer.get_delta_weight(name) for name in layer.active_adapters)
        for layer, weight in zip(layers, own, strict=True)
    ]
    try:
        for base, weight in zip(bases, merged, strict=True):
            base.weight.data = weight.to(base.weight.dtype)
        with policy.reference():
            yield
    finally:
        for base, weight in zip(bases, own, strict=True):
            base.weight.data = weight
