# SPDX-License-Identifier: Apache-2.0
"""Heads to test on, the formulas as written, and a watch on what is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

N, H, V = 7, 5, 11
VARIANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"soft_cap": 1.5},
    {"head_bias": True},
    {"head_bias": True, "temperature": 1.7, "soft_cap": 2.0},
]


def problem(
    n: int = N, h: int = H, v: int = V, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden, head weight, head bias, target), the first three as leaves."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((n, h), (v, h), (v,))]
    hidden, weight, bias = ((x * s).to(dtype).requires_grad_() for x, s in zip(draw, (1, 0.7, 1), strict=True))
    return hidden, weight, bias, torch.randint(v, (n,), generator=generator)


def options(variant: dict[str, Any], bias: Tensor) -> dict[str, Any]:
    return variant | ({"head_bias": bias} if "head_bias" in variant else {})


def dense(hidden: Tensor, weight: Tensor, target: Tensor, **o: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The formulas as written, in float64: (log p, H, Σ p²)."""
    z = hidden.double() @ weight.double().T
    if "head_bias" in o:
        z = z + o["head_bias"].double()
    if "soft_cap" in o:
        z = o["soft_cap"] * torch.tanh(z / o["soft_cap"])
    z = z / o.get("temperature", 1.0)
    p = z.exp() / z.exp().sum(-1, keepdim=True)
    chosen = nn.functional.one_hot(target, z.shape[-1])
    return (p.log() * chosen).sum(-1), -(p * p.log()).sum(-1), (p * p).sum(-1)


def gradients(result: Any, inputs: list[Tensor], seed: int = 1) -> tuple[Tensor, ...]:
    """Of a random combination of log-prob and entropy."""
    log_prob, entropy = result[:2] if isinstance(result, tuple) else (result.log_prob, result.entropy)
    a, b = torch.randn(2, *log_prob.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.autograd.grad((a * log_prob).sum() + (b * entropy).sum(), inputs)


class Watch(TorchDispatchMode):
    """Counts multiplications of matrix products and notes the size of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.sizes = 0, set[tuple[int, torch.dtype]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = [x for x in args if isinstance(x, Tensor)][-2:]
            self.products += left.shape[0] * left.shape[1] * right.shape[1]
        outputs = out if isinstance(out, tuple) else (out,)
        self.sizes |= {(value.numel(), value.dtype) for value in outputs if isinstance(value, Tensor)}
        return out
