# SPDX-License-Identifier: Apache-2.0
"""LoRA on any model: settings, seeded initialization, switching off, checks of saved adapters.

LoRA, arXiv 2106.09685: W x + (α / r) B A x, with A random and B = 0, so that training starts at the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear, LoraLayer
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear

from visalign.errors import UserError
from visalign.settings import Count, settings

ADAPTER = "default"  # Name of our adapter inside the model
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")  # peft's starts that take their product from the base
MORE_THAN_LORA = {
    "use_dora": "DoRA",
    **dict.fromkeys(("bias", "lora_bias"), "LoRA with biases"),
    "modules_to_save": "LoRA with whole layers",
    "layer_replication": "LoRA with repeated layers",
    "trainable_token_indices": "LoRA with embeddings of tokens",
    "alora_invocation_tokens": "activated LoRA",
}
"""Setting of peft -> kind of adapter that it makes."""


@settings("lora")
class LoraSettings:
    """LoRA settings; the defaults are Flow-GRPO's for SD3.5 (arXiv 2505.05470)."""

    rank: Count = 32
    """Rank r of each adapter."""
    alpha: Annotated[int | float, Field(gt=0, lt=math.inf)] = 64
    """Scale α; an adapter's output is multiplied by α / r."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Name suffixes of the linear layers to adapt; None: the model's attention projections."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of an adapter's input in training mode. Above 0 the first ratio is not 1, since replay draws again."""
    init: Literal["gaussian", "kaiming"] = "gaussian"
    """Initialization of A: normal with std 1 / r, as in diffusers' trainers, or uniform within ±1/√(inputs),
    peft's default (std 0.031 against 0.0147 at width 1536 and rank 32). B starts at 0."""
    seed: int = 0
    """Seed of A; the global generator is not used."""


class CastLinear(Linear):
    """LoRA layer whose float32 A and B are multiplied in the input's dtype, where peft casts the input to float32.

    Those products miss the tensor cores and store activations of twice the size.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged or self.active_adapters != [ADAPTER]:
            return super().forward(x, *args, **kwargs)
        weights: Any = self.lora_A[ADAPTER], self.lora_B[ADAPTER]
        a, b = weights[0].weight, weights[1].weight * self.scaling[ADAPTER]
        hidden: Tensor = linear(self.lora_dropout[ADAPTER](x), a.to(x.dtype))
        return self.base_layer(x, *args, **kwargs) + linear(hidden, b.to(hidden.dtype))  # W x + (α / r) B A x


def check_bare(model: Any, merging: str) -> None:
    """Raise if a model already has adapters; `merging` is the code that merges them, for the message."""
    if present := sorted(getattr(model, "peft_config", {})):
        raise UserError(
            f"The {type(model).__name__} already has the adapters {present}. Merge them first ({merging})."
        )


def insert_adapters(model: Any, lora: LoraSettings, targets: list[str], *, task: str | None = None) -> list[LoraLayer]:
    """Freeze a model, put trainable float32 adapters into linear layers named by suffix; return these layers."""
    model.requires_grad_(False)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides, so a float is as good
        target_modules=targets,
        lora_dropout=lora.dropout,
        task_type=task,
    )
    with torch.random.fork_rng(devices=[]):
        if hasattr(model, "add_adapter"):
            model.add_adapter(config, adapter_name=ADAPTER)
        else:  # the model's library has no adapters
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
            model.peft_config = {ADAPTER: config}
    generator = torch.Generator().manual_seed(lora.seed)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        weight.data = weight.data.float()
        if ".lora_A." in name:
            initial, bound = torch.empty(weight.shape), 1 / math.sqrt(weight[0].numel())
            if lora.init == "gaussian":
                initial.normal_(std=1 / lora.rank, generator=generator)
            else:
                initial.uniform_(-bound, bound, generator=generator)
            weight.data.copy_(initial)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        if type(layer) is Linear and type(layer.base_layer) is nn.Linear:  # quantized ones have products of their own
            layer.__class__ = CastLinear
    return layers


def adapter_config(model: Any) -> LoraConfig:
    """Return peft's configuration of our adapter."""
    return model.peft_config[ADAPTER]


def check_same_kind(
    folder: Path,
    state: Mapping[str, Tensor],
    current: Mapping[str, Tensor],
    alpha: float,
    current_alpha: float,
    metadata: Mapping[str, Any],
) -> None:
    """Raise if saved adapters, with the settings `metadata`, differ from the model's in rank, scale or layers."""
    saved, expected = ({n: tuple(w.shape) for n, w in weights.items()} for weights in (state, current))
    if saved != expected or alpha != current_alpha:
        differing = sorted(n for n in {*saved, *expected} if saved.get(n) != expected.get(n))
        example = "".join(f"; {n} {saved.get(n)} there, {expected.get(n)} here" for n in differing[:1])
        raise UserError(
            f"The LoRA in {folder} does not fit this model: alpha {alpha} there, {current_alpha} here{example}. Build "
            "the policy with the model and the LoraSettings that it was trained with."
        )
    if scales := other_scales(metadata):
        raise UserError(f"The LoRA in {folder} has {', '.join(scales)}, and this policy scales by α / r alone.")


def check_lora_kind(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raise if peft's settings make more of saved adapters than B A, or their start changed the base model."""
    for name, value in metadata.items():
        setting = name.rpartition(".")[2]
        if setting == "init_lora_weights" and isinstance(value, str) and value.lower().startswith(CHANGED_BASES):
            raise UserError(
                f"The LoRA in {path} began as {value!r}, which changed the base model too, and only B A is read. "
                "Convert it by peft's save_pretrained(..., path_initial_model_for_weight_conversion=START), or merge "
                "it into its model and give that."
            )
        kind = value if setting == "peft_type" else MORE_THAN_LORA.get(setting)
        if kind is not None and value and value not in ("none", "LORA"):
            raise UserError(
                f"{path} holds adapters of the kind {kind} (peft's {setting} is {value!r}), and LoRA is what is read. "
                "Merge them into their model, and give that."
            )


def other_scales(metadata: Mapping[str, Any]) -> list[str]:
    """Return the settings that scale saved adapters otherwise than by α / r, with the r of each layer."""
    names = ("use_rslora", "use_dora", "alpha_pattern")
    return [name for name, value in metadata.items() if value and name.rpartition(".")[2] in names]
