# SPDX-License-Identifier: Apache-2.0
"""LoRA (arXiv 2106.09685) on a transformers language model: add, save as peft does, load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from visalign.adapters.lora import (
    ADAPTER,
    LoraSettings,
    adapter_config,
    check_bare,
    check_lora_kind,
    check_same_kind,
    insert_adapters,
)
from visalign.errors import UserError
from visalign.model_files import read_object, read_tensors

ALL_LINEAR = "all-linear"  # as a target: every linear layer but the output head, peft's name for it
WEIGHT_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"  # as peft writes and looks for them


def text_lora(
    *, rank: int = 16, alpha: float = 32, target_modules: tuple[str, ...] = (ALL_LINEAR,), seed: int = 0
) -> LoraSettings:
    """Return `LoraSettings` with the defaults of a language model: all linear layers, rank 16, α 32, peft's start."""
    return LoraSettings(rank=rank, alpha=alpha, target_modules=target_modules, init="kaiming", seed=seed)


def add_text_lora(
    model: PreTrainedModel, settings: LoraSettings, language: nn.Module | None = None
) -> list[LoraLayer]:
    """Freeze the model and put float32 adapters into it, or its part `language`, in place; return their layers."""
    check_bare(model, "peft: PeftModel.from_pretrained(...).merge_and_unload()")
    targets = _targets(model, settings.target_modules or (ALL_LINEAR,), language)
    return insert_adapters(model, settings, targets, task="CAUSAL_LM")


def settings_of(folder: str | Path, seed: int = 0) -> LoraSettings:
    """Return the settings of saved adapters, so that training can continue from them."""
    _, state, config = _read(folder)
    layers = {name.partition(".lora_")[0] for name in state}
    return text_lora(rank=config["r"], alpha=config["lora_alpha"], target_modules=tuple(sorted(layers)), seed=seed)


def load_text_lora(model: PreTrainedModel, folder: str | Path) -> None:
    """Read adapters that `model.save_pretrained` or peft wrote into the model's; rank, alpha and places must agree."""
    source, state, config = _read(folder)
    current = get_peft_model_state_dict(model, adapter_name=ADAPTER)
    check_same_kind(source, state, current, config["lora_alpha"], adapter_config(model).lora_alpha, config)
    set_peft_model_state_dict(model, state, adapter_name=ADAPTER)


def _read(folder: str | Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """Read the folder, weights and settings of saved adapters, refusing other kinds than LoRA."""
    path = Path(folder) / WEIGHT_FILE
    if not path.is_file() and not (path := Path(folder) / "lora" / WEIGHT_FILE).is_file():
        raise FileNotFoundError(f"{folder} holds no {WEIGHT_FILE}. Give a run folder, or one that peft wrote.")
    state = {name.removeprefix("base_model.model."): weight for name, weight in read_tensors(path).items()}
    config = {"r": LoraConfig.r, "lora_alpha": LoraConfig.lora_alpha, **read_object(path.with_name(CONFIG_FILE))}
    check_lora_kind(path.parent, config)
    return path.parent, state, config


def _targets(model: PreTrainedModel, suffixes: tuple[str, ...], language: nn.Module | None) -> list[str]:
    """Return peft's target names; each must be a linear layer."""
    head = model.get_output_embeddings()
    within = set((language or model).modules())
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head and m in within]
    if ALL_LINEAR in suffixes and linear:
        return linear
    matches = {t: [n for n in linear if n == t or n.endswith("." + t)] for t in suffixes}
    if unknown := [t for t, names in matches.items() if not names]:
        ends = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise UserError(
            f"The LoRA targets {unknown} name no linear layer of {type(model).__name__}'s language part. Allowed: "
            f'"{ALL_LINEAR}" or ends of layer names: {", ".join(ends) or "none"}.'
        )
    # ends of names would also fit layers of the vision part
    return list(suffixes) if language is None else [name for names in matches.values() for name in names]
