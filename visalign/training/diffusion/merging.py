# SPDX-License-Identifier: Apache-2.0
"""Sample with merged LoRA adapters, or at another guidance scale, than a policy is trained with.

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
from visalign.interfaces import DiffusionPolicy
from visalign.swapping import lora_disabled


def mergeable_adapters(network: nn.Module) -> list[Any]:
    """List the layers of a network for `merged_adapters`; refuse others than LoRA on plain linear layers."""
    layers: dict[str, Any] = {n: part for n, part in network.named_modules() if isinstance(part, LoraLayer)}
    bases: list[Any] = [layer.get_base_layer() for layer in layers.values()]
    uses = Counter(id(getattr(base, "weight", base)) for base in bases)
    reason = None if layers else "the network has none"
    for (name, layer), base in zip(layers.items(), bases, strict=True):
        if type(base) is not nn.Linear:
            reason = f"{name} is on a {type(base).__name__}"
        elif type(base.weight.data) is not Tensor:
            reason = f"the weights under {name} are a {type(base.weight.data).__name__}"
        elif uses[id(base.weight)] > 1:
            reason = f"the weights under {name} are shared with another layer"
        elif getattr(layer, "lora_variant", None):
            reason = f"{name} is a {type(next(iter(layer.lora_variant.values()))).__name__}"
    if reason:
        raise UserError(
            "rollout.merge_adapters needs LoRA on linear layers of floating-point weights of their own, and "
            f"{reason}. Set rollout.merge_adapters=false."
        )
    return list(layers.values())


@contextmanager
def merged_adapters(layers: list[Any]) -> Iterator[None]:
    """Merge adapters into their layers inside the block, W + (α / r) B A; afterwards W again, bit for bit.

    For sampling without gradient; it needs the memory of those weights once more. The sum is rounded to their
    dtype, where unmerged products are rounded and then added, so outputs differ by rounding. Inside the block
    there is no reference.
    """
    weights: list[Tensor] = [layer.get_base_layer().weight.data for layer in layers]
    before = [weight.clone() for weight in weights]
    try:
        with torch.no_grad():  # in place, so that captured passes find them
            for layer, weight in zip(layers, weights, strict=True):
                weight.copy_(weight.float() + sum(map(layer.get_delta_weight, layer.active_adapters)))
        with lora_disabled(layers):
            yield
    finally:
        for weight, value in zip(weights, before, strict=True):
            weight.copy_(value)


@contextmanager
def guidance_scale(policy: DiffusionPolicy, scale: float | None) -> Iterator[None]:
    """Set the policy's guidance scale inside the block; None leaves its own."""
    if scale is None:
        yield
        return
    changed: Any = policy
    before = getattr(policy, "guidance", None)
    if not isinstance(before, int | float):
        raise UserError(
            f"{type(policy).__name__} has no attribute guidance that can be set, so rollout.guidance, "
            "evaluation.guidance and reference_guidance must be null."
        )
    try:
        changed.guidance = float(scale)
        yield
    finally:
        changed.guidance = before
