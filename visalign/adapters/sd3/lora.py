# SPDX-License-Identifier: Apache-2.0
"""LoRA on the transformer of SD3: add, save as diffusers does, load.

Source: LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

from pathlib import Path

from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import Linear
from torch import nn

from visalign.adapters.lora import (
    ADAPTER,
    LoraSettings,
    adapter_config,
    check_bare,
    check_same_kind,
    insert_adapters,
)
from visalign.errors import UserError

WEIGHT_FILE = "pytorch_lora_weights.safetensors"
"""The file that diffusers' `load_lora_weights` looks for."""


def add_lora(transformer: SD3Transformer2DModel, settings: LoraSettings) -> list[Linear]:
    """Freeze the transformer and put trainable float32 adapters into it, in place.

    Args:
        transformer: a diffusers transformer without adapters.
        settings: what to add.

    Returns:
        The layers that carry adapters.

    Raises:
        UserError: if a target names no linear layer, or the transformer has adapters already.
    """
    check_bare(transformer, "pipe.fuse_lora(); pipe.unload_lora_weights()")
    _check_targets(transformer, settings.target_modules)
    return insert_adapters(transformer, settings, list(settings.target_modules))


def save_lora(transformer: SD3Transformer2DModel, folder: Path) -> None:
    """Write the adapters so that `pipe.load_lora_weights(folder)` restores them with their rank and alpha.

    Args:
        transformer: the model, not wrapped.
        folder: gets `pytorch_lora_weights.safetensors`; made if need be.
    """
    metadata = adapter_config(transformer).to_dict()
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
    config = adapter_config(transformer)
    alpha = (metadata or {}).get("transformer.lora_alpha", config.lora_alpha)
    check_same_kind(folder, state, own, alpha, config.lora_alpha)
    set_peft_model_state_dict(transformer, state, adapter_name=ADAPTER)


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
