# SPDX-License-Identifier: Apache-2.0
"""LoRA on any model: settings, a start that depends on its seed alone, on and off, a check of saved ones.

Source: LoRA, arXiv 2106.09685: W x + (α / r) B A x, with A random and B = 0, so that training starts at the
    model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor

from visalign.errors import UserError

ADAPTER = "default"
"""Name of our adapter inside the model."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Size, place and start of the adapters; the defaults are Flow-GRPO's for SD3.5 (arXiv 2505.05470)."""

    rank: int = 32
    """r, the inner width of each adapter."""
    alpha: float = 64
    """α; the adapter's output is scaled by α / r."""
    target_modules: tuple[str, ...] | None = None
    """Ends of the names of the linear layers that get an adapter; None: the model's attention projections."""
    dropout: float = 0.0
    """Of the adapter's input, in training mode only. Above 0 the first ratio is no longer 1: replay draws
    anew."""
    init: Literal["gaussian", "kaiming"] = "gaussian"
    """How A starts, in peft's words: normal with std 1 / r, as diffusers' trainers have it, or uniform within
    ±1/√(inputs), peft's own default (std 0.031 against 0.0147 at width 1536 and rank 32). B starts at 0."""
    seed: int = 0
    """Of the random A; the global generator is neither read nor moved."""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1 or self.target_modules == ():
            raise UserError(
                f"LoRA with rank {self.rank}, alpha {self.alpha}, dropout {self.dropout} and "
                f"target_modules {self.target_modules} is impossible. Give rank ≥ 1, alpha > 0, 0 ≤ dropout "
                "< 1 and at least one target module (names as in transformer.named_modules())."
            )
        if self.init not in ("gaussian", "kaiming"):
            raise UserError(f"LoRA's init is {self.init!r}; it must be gaussian or kaiming.")


def check_bare(model: Any, merging: str) -> None:
    """Refuse a model that carries adapters: the reference would lose them. `merging` is the code that merges
    those of its library into the weights, for the message.
    """
    present = sorted(getattr(model, "peft_config", {}))
    if present:
        raise UserError(
            f"The {type(model).__name__} already carries the adapters {present}, and the reference would "
            f"lose them. Merge them into the weights first ({merging}) and use the result."
        )


def insert_adapters(
    model: Any, settings: LoraSettings, targets: list[str], *, task: str | None = None
) -> list[LoraLayer]:
    """Freeze a model and put trainable float32 adapters into the linear layers of these names or ends of
    names, in place; the layers that carry them come back, for `lora_disabled`.
    """
    model.requires_grad_(False)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides, so a float is as good
        target_modules=targets,
        lora_dropout=settings.dropout,
        task_type=task,
    )
    with torch.random.fork_rng(devices=[]):
        if hasattr(model, "add_adapter"):
            model.add_adapter(config, adapter_name=ADAPTER)
        else:  # a model whose library knows no adapters
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
            model.peft_config = {ADAPTER: config}
    generator = torch.Generator().manual_seed(settings.seed)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        weight.data = weight.data.float()
        if ".lora_A." in name:
            start, bound = torch.empty(weight.shape), 1 / math.sqrt(weight[0].numel())
            if settings.init == "gaussian":
                start.normal_(std=1 / settings.rank, generator=generator)
            else:
                start.uniform_(-bound, bound, generator=generator)
            weight.data.copy_(start)
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def adapter_config(model: Any) -> LoraConfig:
    """The settings of our adapter as peft holds them."""
    return model.peft_config[ADAPTER]


def check_same_kind(
    folder: Path,
    state: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    alpha: float,
    own_alpha: float,
) -> None:
    """Refuse saved adapters of another rank, scale or place than the model's own, naming the first
    difference.
    """
    shapes, own_shapes = ({n: tuple(w.shape) for n, w in weights.items()} for weights in (state, own))
    if shapes != own_shapes or alpha != own_alpha:
        differing = sorted(n for n in {*shapes, *own_shapes} if shapes.get(n) != own_shapes.get(n))
        example = "".join(f"; {n} {shapes.get(n)} there, {own_shapes.get(n)} here" for n in differing[:1])
        raise UserError(
            f"The LoRA in {folder} is not of this model's kind: alpha {alpha} there, {own_alpha} "
            f"here{example}. Build the policy of the model and the LoraSettings that it was trained with."
        )


@contextmanager
def lora_disabled(layers: list[Any]) -> Iterator[None]:
    """Switch adapters off inside the block; which weights are trainable is the same before and after. The
    layers are inside the wrapped model too, so this works under DDP.
    """
    flags = [(weight, weight.requires_grad) for layer in layers for weight in layer.parameters()]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for weight, trainable in flags:
            weight.requires_grad_(trainable)


def leave_casts_to_autocast(layers: list[LoraLayer]) -> None:
    """Have adapters take their inputs as they come, in place: under autocast the products cast them anyway,
    and peft's own cast to float32 before them changes no number. For float32 weights, which take float32
    outside of autocast too."""
    for layer in layers:
        layer.cast_input_dtype_enabled = False
