# SPDX-License-Identifier: Apache-2.0
"""AdamW whose moments are stored in eight bits, by torchao, for gradients of any size.

Source: 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from visalign.errors import UserError

SCALE = 1e8
"""Factor of the gradients. torchao takes a block's largest v as 1e-12 at least: of gradients of 5e-9, as adapters have
in published runs, every v would round to 0."""
FLOOR = 0.01
"""Least ε of a tensor in shares of its root mean square √v̂. A v that rounds to 0 would divide m by the ε of float32,
1e-15: steps of 1e5 learning rates were seen."""
BLOCK, SMALLEST = 256, 4096
"""Numbers per scale; tensors with fewer numbers than SMALLEST, or no whole blocks, stay in float32."""


class AdamW8bit:
    """torchao's AdamW8bit on scaled gradients, each parameter with an ε of its own."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, eps: float, **options: Any) -> None:
        if find_spec("torchao") is None:
            raise UserError(
                "optimizer.name is adamw_8bit, which needs torchao: pip install 'visalign[quantization]'. "
                "Or set optimizer.name=adamw."
            )
        from torchao.optim import AdamW8bit as TorchAdamW8bit  # type: ignore[import-not-found]  # optional

        single = [{**group, "params": [weight]} for group in groups for weight in group["params"]]
        self._optimizer: Any = TorchAdamW8bit(single, eps=eps * SCALE, block_size=BLOCK, **options)
        self.param_groups, self.state = self._optimizer.param_groups, self._optimizer.state
        self.defaults = {"eps": eps, "fused": False}

    @torch.no_grad()
    def step(self) -> None:
        """Take a step with the gradients, which are scaled in place."""
        groups = [group for group in self.param_groups if group["params"][0].grad is not None]
        floors = torch.stack([self._floor(group) for group in groups]).tolist() if groups else []
        for group, floor in zip(groups, floors, strict=True):
            group["params"][0].grad.mul_(SCALE)
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)  # torchao refuses a float
            group["eps"] = max(self.defaults["eps"], floor) * SCALE
        with torch.compiler.set_stance("force_eager"):  # compiled, each shape and ε would take seconds
            self._optimizer.step()

    def second_moment(self, weight: Tensor) -> Tensor:
        """Return v of a weight."""
        return read_moment(split_state("v", self.state[weight]["exp_avg_sq"]), "v", 2)

    def _floor(self, group: Mapping[str, Any]) -> Tensor:
        weight = group["params"][0]
        state = self.state.get(weight)
        if not state or not is_traceable_wrapper_subclass(state["exp_avg_sq"]):
            return torch.zeros((), device=weight.device)
        unbiased = 1 - group["betas"][1] ** float(state["step"])
        return FLOOR * (self.second_moment(weight).mean() / unbiased).sqrt()


def split_state(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return a moment as plain tensors by name, for a file: codes, scale and table of one in eight bits."""
    if not is_traceable_wrapper_subclass(value) or isinstance(value, DTensor):
        return {name: value}
    return {f"{name}.{part}": getattr(value, part) for part in value.__tensor_flatten__()[0]}


def join_state(name: str, tensors: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """Return the moment that `split_state` took apart, on the device of its weight."""
    if name in tensors:
        return tensors[name]
    from torchao.optim.subclass_8bit import OptimState8bit  # type: ignore[import-not-found]  # optional

    parts = (tensors[f"{name}.{part}"].to(weight.device) for part in ("codes", "scale", "qmap"))
    return OptimState8bit(*parts, name.endswith(".exp_avg"), weight.dtype)


def read_moment(tensors: Mapping[str, Tensor], name: str, power: int) -> Tensor:
    """Return the first (`power` 1) or second moment that `split_state` took apart, of the gradients before scaling."""
    if name in tensors:
        return tensors[name] / SCALE**power
    codes, scale, table = (tensors[f"{name}.{part}"] for part in ("codes", "scale", "qmap"))
    return (table[codes.long()].view(-1, BLOCK) * (scale / SCALE**power)[:, None]).view(codes.shape)


def moment_bytes(weights: Sequence[Tensor], name: str) -> int:
    """Compute the bytes of both moments of all weights under an optimizer's name."""
    numbers = [weight.numel() for weight in weights]
    low = [n for n in numbers if name == "adamw_8bit" and n >= SMALLEST and n % BLOCK == 0]
    per_table = 4 * 256
    return 8 * (sum(numbers) - sum(low)) + sum(2 * (n + 4 * n // BLOCK + per_table) for n in low)
