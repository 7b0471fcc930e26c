# SPDX-License-Identifier: Apache-2.0
"""LoRA on the networks of a diffusers pipeline: add, save as its library does, load, start from another's.

Source: LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn

from visalign.adapters.lora import (
    ADAPTER,
    LoraSettings,
    adapter_config,
    check_bare,
    check_same_kind,
    insert_adapters,
    other_scales,
)
from visalign.errors import UserError
from visalign.model_files import open_tensors, read_tensors, why_unreadable

from .families import Family
from .quantization import keep_rounded

WEIGHT_FILE = "pytorch_lora_weights.safetensors"
"""The file that diffusers' `load_lora_weights` looks for."""
PEFT = "peft"
"""Folder beside that file, for peft, where diffusers has no loader."""
METADATA = "lora_adapter_metadata"
"""Under which diffusers keeps rank, alpha and places in that file."""


def make_trainable(pipe: Any, family: Family, lora: LoraSettings | None, *, checkpointing: bool) -> list[Any]:
    """Freeze a pipeline except what is trained, in place, and return the layers that carry adapters.

    Without `lora` the networks are trained whole, in float32, except what the velocity does not depend on.
    """
    layers: list[Any] = []
    for name, part in pipe.components.items():
        if not isinstance(part, nn.Module):
            continue
        network: Any = part.eval()
        if name not in family.networks:
            network.requires_grad_(False)
        elif lora is None:
            network.float().requires_grad_(True)
            for path in _unused(dict(network.named_parameters()), family.unused):
                network.get_parameter(path).requires_grad_(False)
        else:
            layers += add_lora(network, lora, family.lora, family.unused)
        if checkpointing and name in family.networks:
            network.enable_gradient_checkpointing()
    return layers


def add_lora(network: Any, settings: LoraSettings, usual: Sequence[str], unused: str | None = None) -> list[LoraLayer]:
    """Freeze a network of diffusers and put trainable float32 adapters into it, in place; return the layers
    that carry them.

    Where the settings name no targets, the layers are those that end in a name of `usual`, without `unused`
    ones (see `Family`).
    """
    check_bare(network, "pipe.fuse_lora(); pipe.unload_lora_weights()")
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]

    def ends(target: str) -> list[str]:
        return [name for name in linear if name == target or name.endswith("." + target)]

    requested = settings.target_modules
    unknown = [target for target in requested or () if not ends(target)]
    if unknown:
        inner = sorted({".".join(name.split(".")[2:]) for name in linear if re.match(r"\w+\.\d+\.", name)})
        raise UserError(
            f"The LoRA targets {unknown} name no linear layer of this {type(network).__name__}. Allowed are "
            f"ends of layer names, in its blocks: {', '.join(inner)}."
        )
    targets = sorted({name for target in requested or usual for name in ends(target)})
    if requested is None:
        targets = sorted({*targets} - _unused(linear, unused))
    keep_rounded(network)
    return insert_adapters(network, settings, targets)


def _unused(names: Iterable[str], pattern: str | None) -> set[str]:
    """Return the names of a network that match a `Family`'s pattern."""
    if pattern is None:
        return set()
    blocks = [int(n) for name in names for n in re.findall(r"^transformer_blocks\.(\d+)", name)]
    matcher = re.compile(pattern.format(last=max(blocks, default=0)))
    return {name for name in names if matcher.search(name)}


def save_lora(pipeline: Any, networks: Mapping[str, Any], folder: Path) -> None:
    """Write the adapters so that `loading_code` restores them with their rank and alpha.

    Args:
        pipeline: the diffusers class.
        networks: part of the pipeline -> network with adapters, not wrapped.
        folder: gets `pytorch_lora_weights.safetensors`, and where the class has no loader a folder `peft`
            with the same in peft's format; a second network's go into a folder of its name in there.
    """
    for part, (name, subfolder) in _places(networks, folder).items():
        config = adapter_config(networks[part]).to_dict()
        weights = {**get_peft_model_state_dict(networks[part], adapter_name=ADAPTER)}
        entry = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        if has_loader(pipeline, name):
            more: Any = {f"{name}_lora_layers": weights, f"{name}_lora_adapter_metadata": entry}
            pipeline.save_lora_weights(save_directory=subfolder, **more)
            continue
        subfolder.mkdir(parents=True, exist_ok=True)
        flat = {f"{name}.{key}": weight.contiguous() for key, weight in weights.items()}
        entries = json.dumps({f"{name}.{key}": value for key, value in entry.items()}, default=str)
        save_file(flat, subfolder / WEIGHT_FILE, {"format": "pt", METADATA: entries})
        adapter_config(networks[part]).save_pretrained(str(subfolder / PEFT))
        wrapped = {f"base_model.model.{key}": weight.contiguous() for key, weight in weights.items()}
        save_file(wrapped, subfolder / PEFT / SAFETENSORS_WEIGHTS_NAME)


def loading_code(kind: str, parts: Sequence[str], folder: str | Path) -> str:
    """Return the Python that loads what `save_lora` wrote into a diffusers pipeline `pipe` (a class name), a
    line per part.

    diffusers has no loader for PixArt and PRX, and one for HunyuanImage's network only: peft reads their
    adapters, by `from peft import PeftModel`.
    """
    parts_by_folder, lines = _places(dict.fromkeys(parts), Path(folder)), []
    for part, (first, subfolder) in parts_by_folder.items():
        if has_loader(getattr(diffusers, kind), first):
            more = "" if part == first else f", load_into_{part}=True"
            lines.append(f"pipe.load_lora_weights({json.dumps(str(subfolder))}{more})")
        else:
            saved = json.dumps(str(subfolder / PEFT))
            lines.append(f"pipe.{part} = PeftModel.from_pretrained(pipe.{part}, {saved})")
    return "\n".join(lines)


def has_loader(pipeline: Any, part: str) -> bool:
    """Return True if a diffusers class saves and loads adapters of that component (PRX only for a U-Net)."""
    saves = getattr(pipeline, "save_lora_weights", None)
    return saves is not None and f"{part}_lora_layers" in inspect.signature(saves).parameters


def load_lora(networks: Mapping[str, Any], folder: Path) -> None:
    """Read adapters that `save_lora` (or diffusers) wrote into the networks'; rank, alpha and places must agree."""
    for part, (name, subfolder) in _places(networks, folder).items():
        saved, metadata = read_lora(subfolder)
        state = {n.removeprefix(name + "."): w for n, w in saved.items() if n.startswith(name + ".")}
        current = get_peft_model_state_dict(networks[part], adapter_name=ADAPTER)
        config = adapter_config(networks[part])
        alpha = metadata.get(f"{name}.lora_alpha", config.r)  # diffusers, too, takes the rank where a file has no α
        check_same_kind(subfolder, state, current, alpha, config.lora_alpha, metadata)
        set_peft_model_state_dict(networks[part], state, adapter_name=ADAPTER)


def _places(networks: Mapping[str, Any], folder: Path) -> dict[str, tuple[str, Path]]:
    """Return part -> (its name in the file, its folder)."""
    first = next(iter(networks))
    return {part: (first, Path(folder) if part == first else Path(folder) / part) for part in networks}


def read_lora(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the adapters and metadata of a file that diffusers or `save_lora` wrote; the names of both begin
    with the part of the pipeline.
    """
    file = Path(folder) / WEIGHT_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no {WEIGHT_FILE}. Give a folder that policy.save() wrote.")
    with open_tensors(file) as opened:
        text = (opened.metadata() or {}).get(METADATA, "{}")
    try:
        return read_tensors(file), json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"The {METADATA} of {file} are not JSON ({why_unreadable(error)}). Copy it again.") from error


def settings_of(folder: Path, seed: int = 0) -> LoraSettings:
    """Return the settings that saved adapters were made with, so that training can go on from them; `seed` is
    of what the settings draw.
    """
    saved, metadata = read_lora(folder)
    ranks = {name: len(weight) for name, weight in saved.items() if name.endswith("lora_A.weight")}
    scales = other_scales(metadata)
    if len(set(ranks.values())) != 1 or scales:
        raise UserError(
            f"{Path(folder) / WEIGHT_FILE} holds no adapters of one rank and one α in diffusers' format "
            f"(names that end in lora_A.weight){' but ' if scales else ''}{', '.join(scales)}. "
            "Fuse it into the model (pipe.fuse_lora(); pipe.save_pretrained) and add a new one."
        )
    rank = next(iter(ranks.values()))
    alpha = next((v for k, v in metadata.items() if k.endswith(".lora_alpha")), rank)
    targets = tuple(sorted({name.split(".", 1)[1].removesuffix(".lora_A.weight") for name in ranks}))
    return replace(LoraSettings(seed=seed), rank=rank, alpha=float(alpha), target_modules=targets)
