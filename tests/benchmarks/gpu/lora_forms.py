# SPDX-License-Identifier: Apache-2.0
"""Ways to compute a LoRA whose weights are float32 on a frozen bfloat16 layer, and blocks that share one graph.

`CastLora`: y = W x + s B(A x) with A and B cast to the dtype of x for the products, s folded into B; their
gradients arrive in the float32 weights. `CastLoraInPlace` lets the second product add into the first's
result.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear, LoraLayer


class CastLora(Linear):
    def forward(self, x, *args, **kwargs):
        result = self.base_layer(x)
        if self.disable_adapters or self.merged:
            return result
        a = self.lora_A["default"].weight.to(x.dtype)
        b = (self.lora_B["default"].weight * self.scaling["default"]).to(x.dtype)
        return result + F.linear(F.linear(x, a), b)


class CastLoraInPlace(Linear):
    def forward(self, x, *args, **kwargs):
        result = self.base_layer(x)
        if self.disable_adapters or self.merged:
            return result
        a = self.lora_A["default"].weight.to(x.dtype)
        b = (self.lora_B["default"].weight * self.scaling["default"]).to(x.dtype)
        h = F.linear(x, a).flatten(0, -2)
        return result.flatten(0, -2).addmm_(h, b.t()).view(result.shape)


def use_form(module, form):
    """Give every LoRA layer on a linear layer this forward, in place; `Linear` is peft's own."""
    for layer in module.modules():
        if isinstance(layer, LoraLayer) and isinstance(layer, Linear):
            layer.__class__ = form


def compile_blocks(network, **options):
    """Compile diffusers' repeated blocks; the list of them."""
    blocks = [m for m in network.modules() if type(m).__name__ in (network._no_split_modules or ())]
    for block in blocks:
        block.compile(**options)
    return blocks


def _cut(_, __, output):
    """Outputs that forget how they were made, and ask for a gradient where they did."""
    return tuple(None if o is None else o.detach().requires_grad_(o.requires_grad) for o in output)


@contextmanager
def one_graph(policy, blocks=None):
    """Inside, velocities without gradient come from the graph that training runs; with `blocks`, what a block
    stored is freed behind it."""
    own = policy.velocity

    def velocity(*args, **kwargs):
        if torch.is_grad_enabled():
            return own(*args, **kwargs)
        hooks = [b.register_forward_hook(_cut) for b in blocks or ()]
        count = policy.forward_count
        with_backward = count.forward_backward
        try:
            with torch.enable_grad():
                return own(*args, **kwargs).detach()
        finally:
            count.forward += count.forward_backward - with_backward  # no backward follows
            count.forward_backward = with_backward
            for hook in hooks:
                hook.remove()

    policy.velocity = velocity
    try:
        yield
    finally:
        del policy.velocity
