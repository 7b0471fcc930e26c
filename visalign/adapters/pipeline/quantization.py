# SPDX-License-Identifier: Apache-2.0
"""A frozen network in 8 or 4 bits under LoRA: which kinds there are, what each needs, and its backward.

Source: QLoRA, arXiv 2305.14314: gradients pass through frozen quantized weights into adapters of full
    precision.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import BitsAndBytesConfig, PipelineQuantizationConfig, TorchAoConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from visalign.settings import refuse

QUANTIZATIONS = {"torchao_int8": "torchao", "bitsandbytes_4bit": "bitsandbytes"}
"""name -> package. int8 weights alone, a scale for each output; NF4, a scale for each 64 weights. LLM.int8 is
not among them: the whole batch decides which of its columns are rounded, so that a sample's velocity would
depend on its neighbours."""

BY_SHAPES = ContextVar("by_shapes", default=False)  # True inside of `by_shapes_alone`


@dataclass(frozen=True)
class FourBits:
    """NF4 of a network of which only the shapes are known; `dtype` is of the matrix products."""

    dtype: torch.dtype


@contextmanager
def by_shapes_alone() -> Iterator[None]:
    """Read no weights inside the block: 4 bits need neither their package nor a GPU."""
    token = BY_SHAPES.set(True)
    try:
        yield
    finally:
        BY_SHAPES.reset(token)


def quantization_of(
    name: str | None, networks: Iterable[str], dtype: torch.dtype, *, adapters: bool
) -> dict[str, Any]:
    """Return the argument of a pipeline's `from_pretrained` that quantizes its networks while they are read;
    `dtype` is of the matrix products, `adapters` says that a LoRA is trained.
    """
    if name is None:
        return {}
    package = QUANTIZATIONS.get(name, "")
    by_shapes = package == "bitsandbytes" and BY_SHAPES.get()
    problems = {
        f"allowed are {', '.join(QUANTIZATIONS)}, or none": not package,
        "rounded weights cannot be trained. Set model.lora, or leave model.quantization out": not adapters,
        f"it needs {package}: pip install {package}. Or leave it out": (
            not by_shapes and package and find_spec(package) is None
        ),
        "DistributedDataParallel cannot share weights that torchao rounded. Train in one process, or take "
        "'bitsandbytes_4bit'": package == "torchao" and int(os.environ.get("WORLD_SIZE", "1")) > 1,
        "diffusers reads it only on a GPU. On a CPU take 'torchao_int8'": (
            package == "bitsandbytes" and not by_shapes and not torch.cuda.is_available()
        ),
    }
    refuse(f"quantization is {name!r}; {problem}." for problem, is_broken in problems.items() if is_broken)
    if by_shapes:
        return {"quantization_config": SimpleNamespace(quant_mapping=dict.fromkeys(networks, FourBits(dtype)))}
    chosen: Any
    if package == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig  # type: ignore[import-not-found]  # optional

        chosen = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    else:
        chosen = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    mapping: Any = dict.fromkeys(networks, chosen)
    return {"quantization_config": PipelineQuantizationConfig(quant_mapping=mapping)}


def dtype_of(network: Any) -> torch.dtype:
    """Return the dtype of a network's numbers; of weights in 4 bits, which are bytes, that of their products."""
    config: Any = getattr(getattr(network, "hf_quantizer", None), "quantization_config", None)
    return config.bnb_4bit_compute_dtype if getattr(config, "load_in_4bit", False) else network.dtype


def keep_rounded(network: Any) -> None:
    """Let frozen layers of torchao keep rounded weights for the backward, not copies in the input's dtype."""
    for module in network.modules():
        if isinstance(module, nn.Linear) and is_traceable_wrapper_subclass(module.weight):
            module.__dict__["forward"] = partial(_Frozen.of, module)


class _Frozen(torch.autograd.Function):
    """x W^T + b; of the backward only dL/dx = dL/dy W."""

    @staticmethod
    def of(layer: nn.Linear, x: Tensor) -> Any:
        return _Frozen.apply(x, layer)

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        return nn.Linear.forward(layer, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ ctx.layer.weight.dequantize().to(grad.dtype), None
