# SPDX-License-Identifier: Apache-2.0
"""LoRA on a transformers language model: add, switch off, save as peft does, load.

Source: LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import Linear
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from visalign.errors import UserError

from .lora import ADAPTER, LoraSettings

ALL_LINEAR = "all-linear"
"""As a target: every linear layer but the output head, peft's name for it."""
WEIGHT_FILE = "adapter_model.safetensors"
"""The file that peft writes and looks for."""


def text_lora(
    *,
    rank: int = 16,
    alpha: float = 32,
    target_modules: tuple[str, ...] = (ALL_LINEAR,),
    dropout: float = 0.0,
    seed: int = 0,
) -> LoraSettings:
    """`LoraSettings` with the defaults of a language model: all linear layers, rank 16, α 32.

    Args:
        rank: r, the inner width.
        alpha: α; the adapter's output is scaled by α / r.
        target_modules: ends of the names of linear layers, or "all-linear".
        dropout: of the adapter's input; the policy never switches it on, since the ratio would move.
        seed: of the random A.
    """
    return LoraSettings(rank=rank, alpha=alpha, target_modules=target_modules, dropout=dropout, seed=seed)


def add_text_lora(model: PreTrainedModel, settings: LoraSettings) -> list[Linear]:
    """Freeze the model and put trainable float32 adapters into it, in place.

    Args:
        model: without adapters.
        settings: what to add.

    Returns:
        The layers that carry adapters, for `lora.lora_disabled`.

    Raises:
        UserError: if a target names no linear layer, or the model has adapters already.
    """
    if getattr(model, "peft_config", None):
        raise UserError(
            "The language model already carries an adapter, and the reference would lose it. Merge it into "
            "the weights first (peft: PeftModel.from_pretrained(...).merge_and_unload()) and load the result."
        )
    targets = _targets(model, settings.target_modules)
    model.requires_grad_(False)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides, so a float is as good
        target_modules=targets,
        lora_dropout=settings.dropout,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        model.add_adapter(config, adapter_name=ADAPTER)
    generator = torch.Generator().manual_seed(settings.seed)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        weight.data = weight.data.float()
        if ".lora_A." in name:
            bound = 1 / math.sqrt(weight[0].numel())
            weight.data.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))
    return [module for module in model.modules() if isinstance(module, Linear)]


def load_text_lora(model: PreTrainedModel, folder: Path) -> None:
    """Read adapters that `model.save_pretrained` or peft wrote into the ones that the model has.

    Args:
        model: with adapters of the same rank and places.
        folder: with `adapter_model.safetensors` and `adapter_config.json`.

    Raises:
        FileNotFoundError: without that file.
        UserError: if rank, alpha or places differ.
    """
    path = Path(folder) / WEIGHT_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {WEIGHT_FILE}. Give a folder that policy.save() wrote.")
    prefix = "base_model.model."
    state = {name.removeprefix(prefix): weight for name, weight in load_file(path).items()}
    own = get_peft_model_state_dict(model, adapter_name=ADAPTER)
    shapes, own_shapes = ({n: tuple(w.shape) for n, w in weights.items()} for weights in (state, own))
    configs: Any = model.peft_config
    saved: Any = LoraConfig.from_pretrained(str(folder))
    alpha, own_alpha = saved.lora_alpha, configs[ADAPTER].lora_alpha
    if shapes != own_shapes or alpha != own_alpha:
        differing = sorted(n for n in {*shapes, *own_shapes} if shapes.get(n) != own_shapes.get(n))
        example = "".join(f"; {n} {shapes.get(n)} there, {own_shapes.get(n)} here" for n in differing[:1])
        raise UserError(
            f"The LoRA in {folder} is not of this model's kind: alpha {alpha} there, {own_alpha} "
            f"here{example}. Build the policy with the LoraSettings it was trained with."
        )
    set_peft_model_state_dict(model, state, adapter_name=ADAPTER)


def _targets(model: PreTrainedModel, wanted: tuple[str, ...]) -> list[str]:
    """Names for peft; each wanted one must be a linear layer."""
    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    if ALL_LINEAR in wanted and linear:
        return linear
    unknown = [t for t in wanted if not any(n == t or n.endswith("." + t) for n in linear)]
    if unknown:
        ends = sorted({name.rsplit(".", 1)[-1] for name in linear})
        shown = ", ".join(ends) if ends else "none, since it has no torch.nn.Linear layers"
        raise UserError(
            f"The LoRA targets {unknown} name no linear layer of this {type(model).__name__} (the output "
            f'head takes none). Allowed are "{ALL_LINEAR}" or ends of layer names: {shown}.'
        )
    return list(wanted)
