# SPDX-License-Identifier: Apache-2.0
"""Write saved LoRAs under the keys that ComfyUI, A1111 and diffusers' own loaders read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from diffusers.utils import convert_state_dict_to_kohya
from safetensors.torch import save_file
from torch import Tensor

from visalign.adapters.lora import other_scales
from visalign.atomic import umask_permissions
from visalign.errors import UserError

from .lora_files import WEIGHT_FILE, lora_file, read_lora

FLUX = {"transformer_blocks": 19, "single_transformer_blocks": 38}  # FLUX.1's blocks, all of width 3072
WIDTH = 3072
_LAYERS = {
    "double_blocks_{}_img_attn_qkv": "transformer_blocks.{}.attn. to_q to_k to_v",
    "double_blocks_{}_txt_attn_qkv": "transformer_blocks.{}.attn. add_q_proj add_k_proj add_v_proj",
    "double_blocks_{}_img_attn_proj": "transformer_blocks.{}.attn. to_out.0",
    "double_blocks_{}_img_mlp_0": "transformer_blocks.{}.ff. net.0.proj",
    "double_blocks_{}_img_mlp_2": "transformer_blocks.{}.ff. net.2",
    "double_blocks_{}_img_mod_lin": "transformer_blocks.{}.norm1. linear",
    "double_blocks_{}_txt_attn_proj": "transformer_blocks.{}.attn. to_add_out",
    "double_blocks_{}_txt_mlp_0": "transformer_blocks.{}.ff_context. net.0.proj",
    "double_blocks_{}_txt_mlp_2": "transformer_blocks.{}.ff_context. net.2",
    "double_blocks_{}_txt_mod_lin": "transformer_blocks.{}.norm1_context. linear",
    "single_blocks_{}_linear1": "single_transformer_blocks.{}. attn.to_q attn.to_k attn.to_v proj_mlp",
    "single_blocks_{}_linear2": "single_transformer_blocks.{}. proj_out",
    "single_blocks_{}_modulation_lin": "single_transformer_blocks.{}. norm.linear",
}
"""kohya's layer -> prefix and names of diffusers' layers that it joins."""
KOHYA = ("sd15", "sdxl", "flux", "flux_kontext")
DIFFUSERS_NAMES = (
    *("sd3", "auraflow", "pixart", "hidream", "qwen_image", "qwen_image_edit", "qwen_image_edit_plus", "krea2"),
    *("z_image", "kandinsky5", "kandinsky5_image", "chroma", *KOHYA[2:]),
)
"""Families whose layers ComfyUI finds by diffusers' names, with "transformer." in front."""
RENAMED: dict[str, dict[str, str]] = {
    "ltx": {},
    "wan": {
        **{"attn1.to_": "self_attn.", "attn2.to_": "cross_attn.", "out.0": "o"},
        **{"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"},
    },
    "flux3": {
        **{"single_transformer_blocks.": "single_blocks.", "mode_blocks.": "content_mode_blocks."},
        **{"attn.to_out.0": "attn_out", "attn.to_q": "q_proj", "attn.to_k": "k_proj", "attn.to_v": "v_proj"},
        **{"ff.linear_": "mlp_"},
    },
    "flux2": {
        **{"single_transformer_blocks.": "single_blocks.", "transformer_blocks.": "double_blocks."},
        **{"attn.to_qkv_mlp_proj": "linear1", "attn.to_out.0": "img_attn.proj", "attn.to_out": "linear2"},
        **{"attn.to_add_out": "txt_attn.proj"},
    },
}
"""Family -> part of diffusers' layer name -> the same in the model's own code, behind "diffusion_model."."""
RENAMED["flux2_klein"] = RENAMED["flux2"]
_JOINED = {
    "attn.to_q attn.to_k attn.to_v": "img_attn.qkv",
    "attn.add_q_proj attn.add_k_proj attn.add_v_proj": "txt_attn.qkv",
}
"""Layers of FLUX.2's double blocks that are one layer in its own code."""


def export_lora(folder: Path, file: Path, family: str | None) -> dict[Path, int]:
    """Write a run's LoRA to a .safetensors file that ComfyUI reads, for U-Nets and FLUX.1 A1111 and Forge too; return
    file -> number of layers. A second network (Wan 2.2) has a file of its own. `family` None: by its layers.
    """
    first = lora_file(folder)
    sources = {file: first}
    if first.name == WEIGHT_FILE:
        for second in sorted(first.parent.glob(f"transformer_*/{WEIGHT_FILE}")):
            sources[file.with_stem(f"{file.stem}_{second.parent.name}")] = second
    if present := [str(path) for path in sources if path.exists()]:
        raise UserError(f"{', '.join(present)} exists, and nothing is overwritten. Give another name or remove it.")
    outputs = {path: _convert(source, family) for path, source in sources.items()}
    for path, converted in outputs.items():
        save_file({name: weight.contiguous() for name, weight in converted.items()}, path, {"format": "pt"})
        umask_permissions(path)
    ends = (".lora_down.weight", ".lora_A.weight")
    return {path: sum(name.endswith(ends) for name in converted) for path, converted in outputs.items()}


def _convert(file: Path, family: str | None) -> dict[str, Tensor]:
    """Return the tensors of a LoRA under the keys of its family in ComfyUI."""
    saved, metadata = read_lora(file)
    part = next((name.partition(".")[0] for name in saved if name.startswith(("unet.", "transformer."))), "")
    alphas = {name.removesuffix(".lora_alpha"): float(α) for name, α in metadata.items() if "lora_alpha" in name}
    if scales := [*other_scales(metadata), *[name for name in saved if name.endswith(".alpha")][:1]]:
        raise UserError(f"The LoRA {file} has {', '.join(scales)}, and export scales by one α / r for each network.")
    # transformers 5 dropped the prefix of a CLIP without projection; ComfyUI's keys have it
    clip = partial(re.sub, r"^text_encoder\.encoder\.layers", "text_encoder.text_model.encoder.layers")
    saved = {clip(name): weight for name, weight in saved.items()}
    if part == "unet":
        return _unet_to_kohya(saved, alphas)
    if _is_flux(saved) and family in (None, *KOHYA):
        return flux_to_kohya(saved, alphas.get(part))
    if part and family in DIFFUSERS_NAMES:  # of T5 ComfyUI knows kohya's names alone
        t5 = re.compile(r"text_encoder_?(\d?)\.(encoder\.block\..+)(?=\.lora_)")
        short = partial(t5.sub, lambda match: f"lora_te{match[1] or 1}_{match[2].replace('.', '_')}")
        return {short(name): weight for name, weight in _scaled(saved, alphas).items()}
    if part and family in RENAMED:
        names = {name.removeprefix(f"{part}."): weight for name, weight in _scaled(saved, alphas).items()}
        return {f"diffusion_model.{name}": weight for name, weight in _renamed(names, RENAMED[family]).items()}
    families = ", ".join(dict.fromkeys([*KOHYA, *DIFFUSERS_NAMES, *RENAMED]))
    unknown = "of a model that its keys do not name. Name it with --model. ComfyUI's keys"
    raise UserError(
        f"The LoRA {file} is {f'of {family}, and keys of ComfyUI' if family else unknown} are written for "
        f"{families}. Diffusers loads {WEIGHT_FILE}."
    )


def _unet_to_kohya(saved: Mapping[str, Tensor], alphas: Mapping[str, float]) -> dict[str, Tensor]:
    converted, prefixes = convert_state_dict_to_kohya(dict(saved)), {"lora_unet": "unet", "lora_te1": "text_encoder"}
    for name in [name for name in converted if name.endswith(".alpha")]:
        alpha = alphas.get(prefixes.get("_".join(name.split("_")[:2]), "text_encoder_2"))
        if alpha is not None:  # diffusers writes the rank in its place
            converted[name] = torch.tensor(alpha)
    return converted


def _scaled(saved: Mapping[str, Tensor], alphas: Mapping[str, float]) -> dict[str, Tensor]:
    """Multiply α / r into the adapters: these keys have no place for α."""
    ranks = {name.replace("lora_B", "lora_A"): name for name in saved if name.endswith("lora_B.weight")}
    scales = {
        up: alphas[name.partition(".")[0]] / len(saved[name]) if name.partition(".")[0] in alphas else 1.0
        for name, up in ranks.items()
    }
    return {name: scales.get(name, 1.0) * weight for name, weight in saved.items()}


def _renamed(names: Mapping[str, Tensor], changes: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename layers, and join those of FLUX.2's attention that its own code has as one."""
    left, renamed = dict(names), {}
    if "transformer_blocks." in changes:
        for block in sorted({name.split(".attn.")[0] for name in names if name.startswith("transformer_blocks.")}):
            for layers, name in _JOINED.items():
                ends = [f"{block}.{layer}.lora_" for layer in layers.split()]
                if all(f"{end}A.weight" in left for end in ends):
                    renamed[f"{block}.{name}.lora_A.weight"] = torch.cat([left.pop(f"{end}A.weight") for end in ends])
                    ups = [left.pop(f"{end}B.weight") for end in ends]
                    renamed[f"{block}.{name}.lora_B.weight"] = torch.block_diag(*ups)
    result = {}
    for name, weight in {**renamed, **left}.items():
        for old, new in changes.items():
            name = name.replace(old, new)
        result[name] = weight
    return result


def _is_flux(saved: Mapping[str, Tensor]) -> bool:
    """Recognize FLUX.1 by names and width, which no other family shares; its queries are layers of their own."""
    matches = [re.match(r"transformer\.(\w+)\.(\d+)\.", name) for name in saved]
    inside = all(match and int(match[2]) < FLUX.get(match[1], 0) for match in matches)
    both = {match[1] for match in matches if match} == set(FLUX)
    widths = {len(w) for name, w in saved.items() if name.endswith("attn.to_q.lora_B.weight")}
    return inside and both and widths == {WIDTH}


def flux_to_kohya(saved: Mapping[str, Tensor], alpha: float | None) -> dict[str, Tensor]:
    """Convert FLUX.1's adapters to kohya's network, in which queries, keys and values are one layer.

    With n layers of rank r in one, A is theirs one above the other and B block-diagonal: rank n r, alpha n α.
    `alpha` None is the rank.
    """
    left = {
        name.removeprefix("transformer.").removesuffix(".lora_A.weight"): (w, saved[name.replace("lora_A", "lora_B")])
        for name, w in saved.items()
        if name.endswith(".lora_A.weight")
    }
    converted: dict[str, Tensor] = {}
    for i in range(max(FLUX.values())):
        for key, layers in _LAYERS.items():
            prefix, *names = layers.format(i).split()
            pairs = [left.pop(prefix + name, None) for name in names]
            example = next((pair for pair in pairs if pair), None)
            if example is None:
                continue
            rank, inputs = example[0].shape
            outputs = [WIDTH * (4 if name == "proj_mlp" else 1) for name in names]
            complete = [  # a layer without an adapter is one of zeros in the joined layer
                pair or (example[0].new_zeros(rank, inputs), example[1].new_zeros(n, rank))
                for pair, n in zip(pairs, outputs, strict=True)
            ]
            name, down = f"lora_unet_{key.format(i)}", torch.cat([pair[0] for pair in complete])
            converted[f"{name}.lora_down.weight"] = down
            ratios = [1.0 if alpha is None else len(pair[0]) / rank for pair in complete]  # α / r of each layer
            ups = [pair[1] / ratio for pair, ratio in zip(complete, ratios, strict=True)]
            converted[f"{name}.lora_up.weight"] = torch.block_diag(*ups)
            converted[f"{name}.alpha"] = torch.tensor((1.0 if alpha is None else alpha / rank) * len(down))
    if left:
        raise UserError(f"The LoRA has adapters that kohya's keys of FLUX.1 have no name for: {', '.join(left)}.")
    return converted
