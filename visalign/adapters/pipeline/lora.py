# SPDX-License-Identifier: Apache-2.0
"""LoRA on the networks of a diffusers pipeline: add, save as its library does, load, start from another's."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import pad

from visalign.adapters.lora import ADAPTER, LoraSettings, adapter_config, check_bare, check_same_kind, insert_adapters
from visalign.errors import UserError
from visalign.model_files import open_tensors, read_tensors

from .families import Family
from .lora_files import METADATA, WEIGHT_FILE, Adapter, Adapters, parse_loras, read_adapters, read_lora
from .quantization import keep_rounded

PEFT = "peft"  # Folder beside that file, for peft, where diffusers has no loader
LoraPaths = str | Path | Sequence[str | Path]  # LoRAs to start from, each PATH or PATH:WEIGHT


def make_trainable(pipe: Any, family: Family, lora: LoraSettings | None, *, checkpointing: bool) -> list[Any]:
    """Freeze a pipeline except its LoRA, or without `lora` train its networks in float32; return adapted layers."""
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
    """Freeze a network of diffusers and put trainable float32 adapters into it, in place; return the adapted layers.

    Where the settings name no targets, these end in a name of `usual`, without `unused` ones (see `Family`).
    """
    check_bare(network, "pipe.fuse_lora(); pipe.unload_lora_weights()")
    kinds = nn.Linear if settings.target_modules is None else (nn.Linear, nn.Conv2d)
    linear = [name for name, module in network.named_modules() if isinstance(module, kinds)]

    def ends(target: str) -> list[str]:
        return [name for name in linear if name == target or name.endswith("." + target)]

    requested = settings.target_modules
    unknown = [target for target in requested or () if not ends(target)]
    if unknown:
        inner = sorted({".".join(name.split(".")[2:]) for name in linear if re.match(r"\w+\.\d+\.", name)})
        raise UserError(
            f"The LoRA targets {unknown} name no linear layer of this {type(network).__name__}. Allowed are ends of "
            f"layer names, in its blocks: {', '.join(inner)}."
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


def save_lora(pipeline: Any, networks: Mapping[str, Any], folder: Path, start: LoraStart | None = None) -> None:
    """Write the adapters, text encoders' too, so that `loading_code` restores them with rank and alpha.

    Where the class `pipeline` has no loader a folder `peft` is added; a second network's have a folder of its name.
    """
    fused = {} if start is None else start.encoders
    encoders = _encoder_arguments(pipeline, fused)
    for part, (name, subfolder) in _places(networks, folder).items():
        config = adapter_config(networks[part]).to_dict()
        weights = {**get_peft_model_state_dict(networks[part], adapter_name=ADAPTER)}
        entry = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        if has_loader(pipeline, name):
            more: Any = {f"{name}_lora_layers": weights, f"{name}_lora_adapter_metadata": entry}
            more |= encoders if part == name else {}
            pipeline.save_lora_weights(save_directory=subfolder, **more)
            continue
        subfolder.mkdir(parents=True, exist_ok=True)
        flat = {f"{name}.{key}": weight.contiguous() for key, weight in weights.items()}
        entries = json.dumps({f"{name}.{key}": value for key, value in entry.items()}, default=str)
        save_file(flat, subfolder / WEIGHT_FILE, {"format": "pt", METADATA: entries})
        adapter_config(networks[part]).save_pretrained(str(subfolder / PEFT))
        wrapped = {f"base_model.model.{key}": weight.contiguous() for key, weight in weights.items()}
        save_file(wrapped, subfolder / PEFT / SAFETENSORS_WEIGHTS_NAME)
    takes_encoders = has_loader(pipeline, next(iter(networks)))
    unsaved = {part: fused[part] for part in fused if not (takes_encoders and has_loader(pipeline, part))}
    if unsaved:
        _add_encoders(folder / WEIGHT_FILE, unsaved)


def _add_encoders(file: Path, encoders: Adapters) -> None:
    """Add layers of text encoders that diffusers does not save (SD3's T5) to its file; `read_adapters` reads them."""
    with open_tensors(file) as opened:
        metadata = opened.metadata()
    state = read_tensors(file)
    for part, layers in encoders.items():
        for name, (down, up, _) in layers.items():  # of scale 1
            state[f"{part}.{name}.lora_A.weight"], state[f"{part}.{name}.lora_B.weight"] = down, up
    save_file({name: weight.clone().contiguous() for name, weight in state.items()}, file, metadata)


def _encoder_arguments(pipeline: Any, encoders: Adapters) -> dict[str, Any]:
    """Return what `save_lora_weights` takes for layers of text encoders, which it has no rank per layer for."""
    arguments: dict[str, Any] = {}
    for part, layers in encoders.items():
        if has_loader(pipeline, part):
            rank = max(len(adapter.down) for adapter in layers.values())
            config = {"r": rank, "lora_alpha": rank, "target_modules": sorted(layers)}
            weights: dict[str, Tensor] = {}
            for name, (down, up, _) in layers.items():
                missing = rank - len(down)
                weights[f"{name}.lora_A.weight"] = pad(down, (0, 0, 0, missing))
                weights[f"{name}.lora_B.weight"] = pad(up, (0, missing))
            arguments |= {f"{part}_lora_layers": weights, f"{part}_lora_adapter_metadata": config}
    return arguments


def loading_code(kind: str, parts: Sequence[str], folder: str | Path) -> str:
    """Return the Python that loads `save_lora`'s files into a `pipe` of the class `kind`, by peft where diffusers has
    no loader (PixArt, PRX, HunyuanImage).
    """
    lines = []
    for part, (first, subfolder) in _places(dict.fromkeys(parts), Path(folder)).items():
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


@dataclass(frozen=True)
class LoraStart:
    """Start of a policy: adapters of one rank for its networks, layers fused into its text encoders."""

    settings: LoraSettings
    networks: Adapters
    encoders: Adapters

    def fill(self, networks: Mapping[str, Any]) -> None:
        """Copy the adapters into networks that have some of these settings; what the rank leaves over starts at 0."""
        with torch.no_grad():
            for part, layers in self.networks.items():
                for name, adapter in layers.items():
                    layer, rank = networks[part].get_submodule(name), len(adapter.down)
                    layer.lora_A[ADAPTER].weight[:rank] = adapter.down.to(layer.lora_A[ADAPTER].weight)
                    layer.lora_B[ADAPTER].weight[:, :rank] = adapter.up.to(layer.lora_B[ADAPTER].weight)


def start_from_loras(pipe: Any, networks: Sequence[str], loras: LoraPaths, settings: LoraSettings | None) -> LoraStart:
    """Read LoRAs (PATH or PATH:WEIGHT), fuse their layers of text encoders, and join those of the networks.

    One keeps its rank and weights; several become one whose rank is the largest sum, with scale 1.
    """
    pairs = parse_loras(loras)
    joined: dict[str, dict[str, list[Adapter]]] = {}
    for path, weight in pairs:
        for part, layers in read_adapters(pipe, networks, path).items():
            for name, adapter in layers.items():
                joined.setdefault(part, {}).setdefault(name, []).append(adapter._replace(scale=weight * adapter.scale))
    encoders = {part: _join(layers) for part, layers in joined.items() if part not in networks}
    with torch.no_grad():
        for part, layers in encoders.items():
            for name, adapter in layers.items():
                weight = getattr(pipe, part).get_submodule(name).weight
                change = adapter.scale * adapter.up.float().flatten(1) @ adapter.down.float().flatten(1)
                weight += change.view(weight.shape).to(weight)
    inner = {part: layers for part, layers in joined.items() if part in networks}
    settings = settings or LoraSettings(rank=1)
    if not inner:
        return LoraStart(settings, {}, encoders)
    every = [adapter for layers in inner.values() for adapters in layers.values() for adapter in adapters]
    if len(pairs) == 1 and len({(len(adapter.down), adapter.scale) for adapter in every}) == 1 and every[0].scale > 0:
        start = {part: {name: adapters[0] for name, adapters in layers.items()} for part, layers in inner.items()}
        rank, alpha = len(every[0].down), every[0].scale * len(every[0].down)
    else:
        start = {part: _join(layers) for part, layers in inner.items()}
        rank = alpha = max(len(adapter.down) for layers in start.values() for adapter in layers.values())
    targets = tuple(sorted({name for layers in start.values() for name in layers}))
    return LoraStart(replace(settings, rank=rank, alpha=alpha, target_modules=targets), start, encoders)


def _join(layers: Mapping[str, Sequence[Adapter]]) -> dict[str, Adapter]:
    """Sum the adapters of each layer as one of scale 1, whose rank is the sum of theirs."""
    return {
        name: Adapter(
            torch.cat([adapter.down.float() for adapter in adapters]),
            torch.cat([adapter.scale * adapter.up.float() for adapter in adapters], 1),
            1.0,
        )
        for name, adapters in layers.items()
    }
