# SPDX-License-Identifier: Apache-2.0
"""The weights of a judge that is trained: loaded, partly frozen, given adapters, computed with, saved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from visalign.errors import UserError, suggestion
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.template import SETTINGS

from .config import SeeingModel, TrainedModel

LANGUAGE = r"(.*\.)?language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""Where adapters go when none are named: the language part; the tower's features are then computed once."""
_TOKENS = 1 << 16
"""Tokens of one pass while training; data.micro_batch is what limits memory."""


def load_engine(model: SeeingModel, device: torch.device) -> VisionLanguageEngine:
    """The vision-language model, nothing of it trainable yet."""
    return VisionLanguageEngine.from_pretrained(
        model.path, device=device, dtype=getattr(torch, model.dtype), max_tokens_per_batch=_TOKENS
    )


def add_lora(network: Any, model: SeeingModel) -> None:
    """Put new adapters into a network; their start comes from torch's global generator.

    Raises:
        UserError: model.lora does not fit the network.
    """
    from peft import LoraConfig

    lora = model.lora
    targets = LANGUAGE if lora.target_modules is None else list(lora.target_modules)
    alpha: Any = lora.alpha  # peft divides by the rank; fractions are fine
    given = LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    try:
        network.add_adapter(given)
    except ValueError as error:
        raise UserError(
            f"model.lora cannot be added to {model.path!r}: {error} Name linear layers of this model in "
            "model.lora.target_modules, or leave it out."
        ) from error


def freeze(model: nn.Module, beginnings: Sequence[str]) -> None:
    """Keep parameters as they are.

    Args:
        model: whose parameters are frozen.
        beginnings: of their names.

    Raises:
        UserError: no name of a parameter that would move begins so.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for beginning in beginnings:
        if not any(name.startswith(beginning) for name in names):
            first = sorted({".".join(name.split(".")[:2]) for name in names})
            raise UserError(
                f"model.frozen has {beginning!r}, and no name of a parameter that would move begins so. "
                f"{suggestion(beginning, first)}They begin with {', '.join(first)}."
            )
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(beginnings)):
            parameter.requires_grad_(False)


def moving(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that are trained."""
    return [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]


def precision(device: torch.device, name: str | None) -> Any:
    """Autocast to the dtype of that name, or nothing."""
    dtype = torch.float32 if name is None else getattr(torch, name)
    return torch.autocast(device.type, dtype, enabled=name is not None)


def compute_dtype(model: TrainedModel) -> torch.dtype:
    """Of the network's products while training: that of autocast, else of the weights."""
    name: str = model.autocast or getattr(model, "dtype", "float32")
    return getattr(torch, name)


def base_name(path: str, folder: Path) -> str:
    """What a folder calls the model it was trained from: a packaged name or hub id as it is, another folder
    or file by the way to it."""
    return os.path.relpath(path, folder) if Path(path).exists() else path


def shrink(folder: Path, dtype: torch.dtype) -> None:
    """Rewrite the adapters and the head of a folder in another dtype."""
    from safetensors.torch import load_file, save_file

    for name in ("adapter_model.safetensors", "reward_head.safetensors"):
        file = folder / name
        if file.is_file():
            save_file({key: value.to(dtype) for key, value in load_file(file).items()}, file)
    readable(folder)


def readable(folder: Path) -> None:
    """Give weights the mode of the settings beside them: safetensors makes its files readable by one
    alone."""
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / SETTINGS).stat().st_mode)
