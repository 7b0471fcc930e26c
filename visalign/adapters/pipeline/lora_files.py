# SPDX-License-Identifier: Apache-2.0
"""Read LoRA files of a run, a folder or a file, under the keys of diffusers, peft, kohya or ComfyUI."""

from __future__ import annotations

import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from visalign.adapters.lora import check_lora_kind
from visalign.errors import UserError
from visalign.hub import hub_file
from visalign.model_files import open_tensors, read_object, read_tensors, why_unreadable

from .guidance import silent

WEIGHT_FILE = "pytorch_lora_weights.safetensors"  # The file that diffusers' `load_lora_weights` looks for
METADATA = "lora_adapter_metadata"  # Key under which diffusers keeps rank, alpha and target layers in that file
PEFT_FILE = "adapter_model.safetensors"
_INCOMING = "incoming"  # Name of an adapter while diffusers converts its keys
OTHER_KINDS = {
    "DoRA": r"dora_scale|lora_magnitude_vector",
    "LoHa": r"hada_w",
    "LoKr": r"lokr_w",
    "OFT": r"oft_",
    "LoCon with Tucker decomposition": r"lora_mid",
    "Control LoRA": r"lora_controlnet|query_norm|norm_q\.weight",
    "LoRA with biases": r"lora_(A|B|down|up)\..*bias$",
    "LoRA with full-weight differences": r"\.diff(_b)?$",
}
"""Kind of adapter -> pattern of its keys."""

BASES = {
    "FLUX.2": r"single_(transformer_)?blocks.*to_qkv_mlp_proj|double_stream_modulation",
    "FLUX.1": r"single_(transformer_)?blocks|double_blocks",
    "SD3": r"joint_blocks|transformer_blocks\W\d+\Wattn\W(add_k_proj|add_q_proj)",
    "Qwen-Image": r"(img|txt)_(mlp|mod)",
    "SDXL": r"lora_te2_|add_embedding|label_emb|input_blocks_[4-8]_1_transformer_blocks_[2-9]",
    "Wan": r"blocks\W\d+\W(self|cross)_attn",
    "Z-Image or Lumina 2": r"(^|\W|_)layers\W\d+\Watt",
    "Stable Diffusion": r"down_blocks|mid_block|middle_block|input_blocks|output_blocks",
}
"""Base model -> pattern of the keys of its LoRAs; the first that matches."""
_CONTEXT = {768: "SD1.5", 1024: "SD2", 2048: "SDXL"}  # Width of the text that a U-Net attends to -> base model


class Adapter(NamedTuple):
    """Adapter of one layer: scale · up · down is added to the layer's weight."""

    down: Tensor
    up: Tensor
    scale: float


SD3_LAYERS = {
    "attn_qkv": ("attn.to_q attn.to_k attn.to_v", "attn.add_q_proj attn.add_k_proj attn.add_v_proj"),
    "attn_proj": ("attn.to_out.0", "attn.to_add_out"),
    "attn2_qkv": ("attn2.to_q attn2.to_k attn2.to_v", ""),
    "attn2_proj": ("attn2.to_out.0", ""),
    "mlp_fc1": ("ff.net.0.proj", "ff_context.net.0.proj"),
    "mlp_fc2": ("ff.net.2", "ff_context.net.2"),
    "adaLN_modulation_1": ("norm1.linear", "norm1_context.linear"),
}
"""Layer of a joint block in SD3's own code -> layers of diffusers that it joins, on the image and the text side."""

Adapters = dict[str, dict[str, Adapter]]  # Part of the pipeline -> layer -> adapter
Misfit = Callable[[str], UserError]  # Detail -> error of a LoRA that is for another model


def parse_lora(text: str | Path) -> tuple[Path, float]:
    """Split "PATH:WEIGHT"; a path that exists is taken whole, colons and drive letters included.

    >>> parse_lora("style.safetensors:0.8")[1], parse_lora("C:/loras/style.safetensors")[1]
    (0.8, 1.0)
    """
    path, colon, number = str(text).rpartition(":")
    if str(text) and (not colon or Path(text).exists()):
        return Path(text), 1.0
    try:
        weight = float(number)
    except ValueError:
        if path and (not Path(path).exists() or len(path) == 1):
            return Path(text), 1.0
        weight = math.nan
    if not path or not math.isfinite(weight):
        example = f"{path or 'style.safetensors'}:0.8"
        raise UserError(f"The LoRA is {str(text)!r}. Give PATH or PATH:WEIGHT, such as {example}.")
    return Path(path), weight


def parse_loras(loras: str | Path | Sequence[str | Path] | None) -> list[tuple[Path, float]]:
    """Return (path, weight) of each LoRA."""
    return [parse_lora(lora) for lora in ([loras] if isinstance(loras, str | Path) else loras or ())]


def lora_file(path: Path) -> Path:
    """Return the .safetensors file of a run folder, the folder of a LoRA, a file or a hub name."""
    if path.is_file():
        if path.suffix.lower() == ".safetensors":
            return path
        raise UserError(
            f"{path} is no .safetensors file; others may run code when opened. Convert it (safetensors.torch)."
        )
    names_hub = len(path.parts) == 3 or (len(path.parts) == 2 and path.suffix != ".safetensors")
    if names_hub and path.parts[0][0] not in "./~" and not Path(path.parts[0]).is_dir():
        return _from_hub("/".join(path.parts[:2]), *path.parts[2:])
    if not path.is_dir():
        raise FileNotFoundError(
            f"There is no LoRA {path}. Give a run folder, its folder lora, or a .safetensors file, perhaps with "
            ":WEIGHT."
        )
    folder = path / "lora" if (path / "lora").is_dir() else path
    files = sorted(folder.glob("*.safetensors"))
    usual = [folder / name for name in (WEIGHT_FILE, PEFT_FILE) if folder / name in files]
    if usual or len(files) == 1:
        return (usual or files)[0]
    if files:
        raise UserError(f"{folder} holds {', '.join(file.name for file in files[:5])}. Name the file of the LoRA.")
    raise FileNotFoundError(
        f"{folder} holds no {WEIGHT_FILE} or other .safetensors file. A run writes it when it ends, or the whole "
        "model to its folder model (model.path)."
    )


def _from_hub(name: str, *file: str) -> Path:
    """Return the named file of a hub repository in the cache, or the one that diffusers or peft writes."""
    try:
        weights = hub_file(name, "LoRA", *(file or (WEIGHT_FILE, PEFT_FILE)))
        if weights.name == PEFT_FILE:
            hub_file(name, "LoRA", "adapter_config.json")  # has its alpha
        return weights
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} A file of another name is given as owner/name/FILE.safetensors.") from error


def read_lora(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a LoRA file (see `lora_file`), and peft's configuration of it where it has one."""
    file = lora_file(path)
    with open_tensors(file) as opened:
        metadata: dict[str, Any] = dict(opened.metadata() or {})
    state = read_tensors(file)
    try:
        metadata |= json.loads(metadata.pop(METADATA, "{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"The {METADATA} of {file} are not JSON ({why_unreadable(error)}). Copy it again.") from error
    config = file.with_name("adapter_config.json")
    if file.name == PEFT_FILE and config.is_file():
        metadata |= read_object(config)
    check_lora_kind(file, metadata)
    for kind, pattern in OTHER_KINDS.items():
        if example := next((name for name in state if re.search(pattern, name)), None):
            raise UserError(
                f"{file} is a {kind} (keys such as {example}), and LoRA is what is read. Merge it into its model, and "
                "give that."
            )
    if not any("lora" in name for name in state):
        names = ", ".join(list(state)[:3]) or "none"
        raise UserError(f"{file} is no LoRA: no key has 'lora' in its name (keys: {names}). Give the file of a LoRA.")
    _check_damage(file, state)
    return state, metadata


def _check_damage(file: Path, state: Mapping[str, Tensor]) -> None:
    """Refuse a layer without its up or down matrix, matrices of unlike ranks, and values that are not finite."""
    other_side = {"A": "B", "B": "A", "down": "up", "up": "down"}
    for key, weight in state.items():
        match = re.fullmatch(r"(.+lora(?:_linear_layer)?[._])(A|B|down|up)(\..*weight)", key)
        partner = f"{match[1]}{other_side[match[2]]}{match[3]}" if match else key
        other = state.get(partner)
        problem = ""
        if not weight.float().isfinite().all():
            problem = f"{key} has values that are not finite"
        elif key.endswith(".alpha") and weight.numel() != 1:
            problem = f"{key} has {weight.numel()} values instead of 1"
        elif other is None:
            problem = f"{key} is there without {partner}"
        elif match and match[2] in ("A", "down") and (weight.ndim < 2 or weight.shape[:1] != other.shape[1:2]):
            problem = f"the shapes {tuple(weight.shape)} of {key} and {tuple(other.shape)} of {partner} share no rank"
        if problem:
            raise UserError(f"{file} is damaged: {problem}. Copy it again, or take another file of this LoRA.")


def base_of(state: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """Name the base model of a LoRA by its metadata, its keys, and the width of text that it attends to."""
    for key in ("modelspec.architecture", "ss_base_model_version"):
        if metadata.get(key):
            return str(metadata[key]).removesuffix("/lora")
    for name, weight in state.items():
        if re.search(r"attn2\W?(processor\W)?_?to_k.*(lora_A|down)\.", name) and weight.shape[1] in _CONTEXT:
            return _CONTEXT[weight.shape[1]]
    names = "\n".join(state)
    return next((base for base, pattern in BASES.items() if re.search(pattern, names, re.MULTILINE)), "another model")


def read_adapters(pipe: Any, networks: Sequence[str], path: Path) -> Adapters:
    """Read the LoRA of a pipeline into its denoising `networks`; keys of other layouts by diffusers' loader."""
    state, metadata = read_lora(path)
    file, parts = lora_file(path), _modules(pipe)
    for part in networks[1:]:  # Wan 2.2: the second network's are a file of their own, under the first one's name
        if (second := file.parent / part / WEIGHT_FILE).is_file():
            more, entries = read_lora(second)
            state |= {name.replace(networks[0], part, 1): weight for name, weight in more.items()}
            metadata |= {name.replace(networks[0], part, 1): value for name, value in entries.items()}

    def misfit(detail: str) -> UserError:
        return UserError(
            f"{file} does not fit this {type(pipe).__name__}: it is a LoRA of {base_of(state, metadata)}, {detail}. "
            "Use it with the model that it was made for, or take a LoRA of this one."
        )

    is_sd3 = type(pipe).__name__.startswith("StableDiffusion3") and any("joint_blocks" in name for name in state)
    adapters = _by_layer_names(_split_sd3(state) if is_sd3 else state, metadata, parts, networks[0])
    if adapters is None:
        adapters = _by_diffusers(pipe, file, state, misfit)
    if not adapters:
        raise misfit("and none of its layers has a place here")
    for part, layers in adapters.items():
        for name, adapter in layers.items():
            _check_shape(f"{part}.{name}", parts[part].get_submodule(name), adapter, misfit)
    return adapters


def _modules(pipe: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def _check_shape(name: str, layer: Any, adapter: Adapter, misfit: Misfit) -> None:
    """Refuse an adapter of another size than its layer; quantized weights have no shape of their own."""
    convolution = isinstance(layer, nn.Conv2d)
    sides = ("in_channels", "out_channels") if convolution else ("in_features", "out_features")
    expected = tuple(getattr(layer, side, 0) for side in sides), tuple(layer.kernel_size) if convolution else ()
    stored = (adapter.down.shape[1], adapter.up.shape[0]), tuple(adapter.down.shape[2:])
    if stored != expected:
        sizes = [f"{inputs} to {outputs}" for inputs, outputs in (stored[0], expected[0])]
        raise misfit(f"whose {name} takes {sizes[0]}, and here it takes {sizes[1]}")


def _split_sd3(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the layers of SD3's own code, which kohya's and ComfyUI's keys have, to those of diffusers."""
    renamed, last = {}, max(map(int, re.findall(r"joint_blocks\W?_?(\d+)", "\n".join(state))))
    for key, weight in state.items():
        match = re.fullmatch(
            r"\w+joint_blocks_(\d+)_(x|context)_block_(\w+?)_(lora_A|lora_B|lora_down|lora_up|alpha)(_weight)?",
            key.replace(".", "_"),
        )
        if match is None or match[3] not in SD3_LAYERS:
            renamed[key] = weight
            continue
        layers, is_up = SD3_LAYERS[match[3]][match[2] == "context"].split(), match[4] in ("lora_B", "lora_up")
        if is_up and match[3].startswith("adaLN") and match[2] == "context" and int(match[1]) == last:
            weight = torch.cat(weight.chunk(2)[::-1])  # the last block's scale and shift change places in diffusers
        weights = weight.chunk(len(layers)) if is_up else [weight] * len(layers)
        end = match[4] if match[4] == "alpha" else f"{match[4]}.weight"
        for layer, part in zip(layers, weights, strict=True):
            renamed[f"transformer.transformer_blocks.{match[1]}.{layer}.{end}"] = part
    return renamed


def _by_layer_names(
    state: Mapping[str, Tensor], metadata: Mapping[str, Any], parts: Mapping[str, nn.Module], first: str
) -> Adapters | None:
    """Read adapters whose keys name layers of the pipeline, with dots or kohya's underscores; None: others do."""
    names, adapters, alphas, absent = _layer_names(parts, first), {}, {}, 0
    for key in state:
        split = re.fullmatch(r"(.+)\.(?:lora_(A|B|down|up)(?:\.default)?\.weight|(alpha))", key)
        if split is None or split[1] not in names:
            if _encoder_of(key) in (None, *parts):
                return None
            absent += 1
            continue
        if split[3]:
            alphas[names[split[1]]] = float(state[key])
        else:
            adapters.setdefault(names[split[1]], {})["down" if split[2] in ("A", "down") else "up"] = state[key]
    if absent:
        warnings.warn(f"{absent} tensors for text encoders that this pipeline lacks are left out.", stacklevel=4)
    result: Adapters = {}
    for (part, layer), pair in adapters.items():
        scale = _scale(part, layer, len(pair["down"]), alphas.get((part, layer)), metadata)
        result.setdefault(part, {})[layer] = Adapter(pair["down"], pair["up"], scale)
    return result


def _scale(part: str, layer: str, rank: int, layer_alpha: float | None, metadata: Mapping[str, Any]) -> float:
    """Return a layer's scale by its alpha in the file, or by peft's settings (of diffusers: with the part's name)."""
    if layer_alpha is not None:
        return layer_alpha / rank
    names = ("lora_alpha", "alpha_pattern", "use_rslora")
    alpha, pattern, is_rank_stabilized = (metadata.get(f"{part}.{name}", metadata.get(name)) for name in names)
    if pattern:
        alpha = pattern.get(get_pattern_key(list(pattern), layer), alpha)
    alpha = rank if alpha is None else float(alpha)  # without one diffusers takes the rank
    return alpha / (math.sqrt(rank) if is_rank_stabilized else rank)


def has_encoder_layers(path: Path) -> bool:
    """Return True for a LoRA with layers of a text encoder."""
    with open_tensors(lora_file(path)) as opened:
        return any(_encoder_of(key) is not None for key in opened.keys())


def _encoder_of(key: str) -> str | None:
    """Return the text encoder that a key is for; None: for a network."""
    if (match := re.match(r"lora_te(\d?)_|(text_encoder(?:_\d)?)\.", key)) is None:
        return None
    return match[2] or ("text_encoder" if match[1] in ("", "1") else f"text_encoder_{match[1]}")


def _layer_names(parts: Mapping[str, nn.Module], first: str) -> dict[str, tuple[str, str]]:
    """Return the names under which a LoRA may have a layer -> (part, layer)."""
    names: dict[str, tuple[str, str]] = {}
    encoders = [part for part in parts if part.startswith("text_encoder")]
    for part, network in parts.items():
        if part == first:
            dotted = ["", "base_model.model.", "diffusion_model.", f"{part}.", f"{part}.base_model.model."]
            flat = ["lora_unet_", "lora_transformer_", "lycoris_"]
        elif part in encoders:
            number = encoders.index(part) + 1
            dotted, flat = [f"{part}."], [f"lora_te{number}_", *(["lora_te_"] if number == 1 else [])]
            if type(network).__name__.startswith("T5"):
                flat.append("lora_te3_")  # kohya counts CLIP-L, CLIP-G, T5, whether all are there or not
        else:
            dotted, flat = [f"{part}."], []
        for layer, module in network.named_modules():
            if not hasattr(module, "weight"):
                continue
            # a CLIP without projection lost its prefix in transformers 5; files have it
            aliases = [layer, *([f"text_model.{layer}"] if part in encoders else [])]
            for alias in aliases:
                names |= {f"{prefix}{alias}": (part, layer) for prefix in dotted}
                names |= {f"{prefix}{alias.replace('.', '_')}": (part, layer) for prefix in flat}
    return names


def _by_diffusers(pipe: Any, file: Path, state: Mapping[str, Tensor], misfit: Misfit) -> Adapters:
    """Read adapters by diffusers' loader of the pipeline, which is bare again afterwards."""
    if not hasattr(pipe, "load_lora_weights"):
        raise misfit(f"whose keys such as {next(iter(state))} are none of its layers")
    source: Any = str(file.parent)
    options = {"weight_name": file.name, "adapter_name": _INCOMING}
    own_names = all(name.startswith("diffusion_model.") for name in state)
    if own_names and type(pipe).__name__.startswith(("StableDiffusion", "FluxP", "FluxK")):
        source = {_as_kohya(name): weight for name, weight in state.items()}  # diffusers reads these names so alone
    if type(pipe).__name__ == "StableDiffusionPipeline":
        options["unet_config"] = pipe.unet.config  # by which blocks of Stability's own code are numbered
    try:
        with silent(level=logging.CRITICAL):  # it lists the keys that have no place, which are counted below
            pipe.load_lora_weights(source, **options)
    except (ValueError, RuntimeError, KeyError, AttributeError, TypeError, IndexError) as error:
        size = r"Size\((\[.*?\])\)"
        sizes = re.search(rf"size mismatch for (.+?)\.lora_\w.*?{size}.*?{size}", str(error), re.DOTALL)
        where = f"whose {sizes[1]} has {sizes[2]}, and here it has {sizes[3]}" if sizes else ""
        raise misfit(where or f"with keys such as {next(iter(state))}") from error
    adapters: Adapters = {}
    for part, network in _modules(pipe).items():
        for name, layer in network.named_modules():
            if isinstance(layer, LoraLayer) and _INCOMING in layer.lora_A:
                pair: Any = layer.lora_A[_INCOMING].weight, layer.lora_B[_INCOMING].weight
                down, up = (weight.detach().clone() for weight in pair)
                adapters.setdefault(part, {})[name] = Adapter(down, up, layer.scaling[_INCOMING])
    pipe.unload_lora_weights()
    stored = sum(_encoder_of(name) is None and bool(re.search(r"lora_A|lora[._]down", name)) for name in state)
    placed = sum(len(layers) for part, layers in adapters.items() if not part.startswith("text_encoder"))
    if placed < stored:
        raise misfit(f"and {stored - placed} of its {stored} layers have no place here")
    return adapters


def _as_kohya(name: str) -> str:
    """Write ComfyUI's "diffusion_model.LAYER.lora_A.weight" as kohya does."""
    layer, kind, end = re.fullmatch(r"diffusion_model\.(.+)\.(lora_\w+|alpha)(\.weight)?", name).groups()  # type: ignore[union-attr]
    letters = {"lora_A": "lora_down", "lora_B": "lora_up"}
    return f"lora_unet_{layer.replace('.', '_')}.{letters.get(kind, kind)}{end or ''}"
