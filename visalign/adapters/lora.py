# SPDX-License-Identifier: Apache-2.0
"""LoRA on a diffusers transformer: settings, a start that depends on its seed alone, on and off, save and
load.

Source: LoRA, arXiv 2106.09685: W x + (α / r) B A x, with A random and B = 0, so that training starts at the
    model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import Linear
from torch import nn

from visalign.errors import UserError

ATTENTION_PROJECTIONS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""The joint attention of SD3, image and text side; the second attention of SD3.5 is left out, as in
Flow-GRPO."""

ADAPTER = "default"
"""Name of our adapter inside the transformer."""
WEIGHT_FILE = "pytorch_lora_weights.safetensors"
"""The file that diffusers' `load_lora_weights` looks for."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Size, place and start of the adapters; the defaults are Flow-GRPO's for SD3.5 (arXiv 2505.05470)."""

    rank: int = 32
    """r, the inner width of each adapter."""
    alpha: float = 64
    """α; the adapter's output is scaled by α / r."""
    target_modules: tuple[str, ...] = ATTENTION_PROJECTIONS
    """Ends of the names of the linear layers that get an adapter."""
    dropout: float = 0.0
    """Of the adapter's input, in training mode only. Above 0 the first ratio is no longer 1: replay draws
    anew."""
    seed: int = 0
    """Of the random A; the global generator is neither read nor moved."""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1 or not self.target_modules:
            raise UserError(
                f"LoRA with rank {self.rank}, alpha {self.alpha}, dropout {self.dropout} and "
                f"target_modules {self.target_modules} is impossible. Give rank ≥ 1, alpha > 0, 0 ≤ dropout "
                "< 1 and at least one target module (names as in transformer.named_modules())."
            )


def add_lora(transformer: SD3Transformer2DModel, settings: LoraSettings) -> None:
    """Freeze the transformer and put trainable float32 adapters into it, in place.

    Args:
        transformer: a diffusers transformer without adapters.
        settings: what to add.

    Raises:
        UserError: if a target names no linear layer, or the transformer has adapters already.
    """
    present = sorted(getattr(transformer, "peft_config", {}))
    if present:
        raise UserError(
            f"The transformer already carries the adapters {present}, and the reference would lose them. "
            "Merge them into the model first: pipe.fuse_lora(); pipe.unload_lora_weights()."
        )
    _check_targets(transformer, settings.target_modules)
    transformer.requires_grad_(False)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides, so a float is as good
        target_modules=list(settings.target_modules),
        lora_dropout=settings.dropout,
    )
    with torch.random.fork_rng(devices=[]):
        transformer.add_adapter(config, adapter_name=ADAPTER)
    generator = torch.Generator().manual_seed(settings.seed)
    for name, weight in transformer.named_parameters():
        if not weight.requires_grad:
            continue
        weight.data = weight.data.float()
        if ".lora_A." in name:
            bound = 1 / math.sqrt(weight[0].numel())
            weight.data.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))


def lora_layers(transformer: SD3Transformer2DModel) -> list[Linear]:
    """The layers of the transformer that carry adapters.

    Args:
        transformer: the model, not wrapped.
    """
    return [module for module in transformer.modules() if isinstance(module, Linear)]


@contextmanager
def lora_disabled(layers: list[Linear]) -> Iterator[None]:
    """Switch adapters off inside the block; which weights are trainable is the same before and after.

    Args:
        layers: from `lora_layers`; they are inside the wrapped model too, so this works under DDP.
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


def save_lora(transformer: SD3Transformer2DModel, folder: Path) -> None:
    """Write the adapters so that `pipe.load_lora_weights(folder)` restores them with their rank and alpha.

    Args:
        transformer: the model, not wrapped.
        folder: gets `pytorch_lora_weights.safetensors`; made if need be.
    """
    metadata = _config(transformer).to_dict()
    StableDiffusion3Pipeline.save_lora_weights(
        save_directory=folder,
        transformer_lora_layers={**get_peft_model_state_dict(transformer, adapter_name=ADAPTER)},
        transformer_lora_adapter_metadata={
            key: sorted(value) if isinstance(value, set) else value for key, value in metadata.items()
        },
    )


def load_lora(transformer: SD3Transformer2DModel, folder: Path) -> None:
    """Read adapters that `save_lora` (or diffusers) wrote into the ones that the transformer has.

    Args:
        transformer: the model with adapters of the same rank, alpha and places.
        folder: with `pytorch_lora_weights.safetensors`.

    Raises:
        FileNotFoundError: without that file.
        UserError: if rank, alpha or places differ.
    """
    if not (Path(folder) / WEIGHT_FILE).is_file():
        raise FileNotFoundError(f"{folder} holds no {WEIGHT_FILE}. Give a folder that policy.save() wrote.")
    state, metadata = StableDiffusion3Pipeline.lora_state_dict(str(folder), return_lora_metadata=True)
    state = {name.removeprefix("transformer."): weight for name, weight in state.items()}
    own = get_peft_model_state_dict(transformer, adapter_name=ADAPTER)
    config = _config(transformer)
    alpha = (metadata or {}).get("transformer.lora_alpha", config.lora_alpha)
    shapes, own_shapes = ({n: tuple(w.shape) for n, w in weights.items()} for weights in (state, own))
    if shapes != own_shapes or alpha != config.lora_alpha:
        differing = sorted(n for n in {*shapes, *own_shapes} if shapes.get(n) != own_shapes.get(n))
        example = "".join(f"; {n} {shapes.get(n)} there, {own_shapes.get(n)} here" for n in differing[:1])
        raise UserError(
            f"The LoRA in {folder} is not of this model's kind: alpha {alpha} there, {config.lora_alpha} "
            f"here{example}. Build the policy with the LoraSettings it was trained with."
        )
    set_peft_model_state_dict(transformer, state, adapter_name=ADAPTER)


def _config(transformer: SD3Transformer2DModel) -> LoraConfig:
    """The settings of our adapter as peft holds them."""
    configs: Any = transformer.peft_config
    return configs[ADAPTER]


def _check_targets(transformer: SD3Transformer2DModel, targets: tuple[str, ...]) -> None:
    """Each target must name at least one linear layer."""
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    unknown = [t for t in targets if not any(n == t or n.endswith("." + t) for n in linear)]
    if unknown:
        ends = sorted({".".join(n.split(".")[2:]) for n in linear if n.startswith("transformer_blocks.")})
        raise UserError(
            f"The LoRA targets {unknown} name no linear layer of this transformer. Allowed are ends of layer "
            f"names, in its blocks: {', '.join(ends)}."
        )
