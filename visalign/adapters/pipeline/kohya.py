# SPDX-License-Identifier: Apache-2.0
"""Saved adapters under kohya's keys, which ComfyUI, A1111 and diffusers' own loaders read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers.utils import convert_state_dict_to_kohya
from safetensors.torch import save_file
from torch import Tensor

from visalign.atomic import umask_permissions
from visalign.errors import UserError

from .lora import WEIGHT_FILE, read_lora

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


def export_kohya(folder: Path, file: Path) -> int:
    """Write saved adapters of a U-Net or of FLUX.1 (a folder with `pytorch_lora_weights.safetensors`) under
    kohya's keys to a .safetensors file; return the number of layers.
    """
    saved, metadata = read_lora(folder)
    part = next(iter(saved), "").partition(".")[0]
    alpha = metadata.get(f"{part}.lora_alpha")
    if part == "unet":
        converted = convert_state_dict_to_kohya(saved)
        if alpha is not None:  # diffusers writes the rank in its place
            converted |= {name: torch.tensor(float(alpha)) for name in converted if name.endswith(".alpha")}
    elif part == "transformer" and _is_flux(saved):
        converted = flux_to_kohya(saved, None if alpha is None else float(alpha))
    else:
        raise UserError(
            f"The LoRA in {folder} is of a {part or 'model'}, and kohya's keys are written for U-Nets (sd15, "
            "sdxl) and for FLUX.1 (19 double and 38 single blocks of width 3072, adapters in both) alone. "
            f"Load {WEIGHT_FILE} as it is, by diffusers or a program that reads its keys."
        )
    save_file({name: weight.contiguous() for name, weight in converted.items()}, file, {"format": "pt"})
    umask_permissions(Path(file))
    return sum(name.endswith(".alpha") for name in converted)


def _is_flux(saved: Mapping[str, Tensor]) -> bool:
    """Recognize FLUX.1 by names and width, which no other family shares; its queries are layers of their own."""
    matches = [re.match(r"transformer\.(\w+)\.(\d+)\.", name) for name in saved]
    inside = all(match and int(match[2]) < FLUX.get(match[1], 0) for match in matches)
    both = {match[1] for match in matches if match} == set(FLUX)
    widths = {len(w) for name, w in saved.items() if name.endswith("attn.to_q.lora_B.weight")}
    return inside and both and widths == {WIDTH}


def flux_to_kohya(saved: Mapping[str, Tensor], alpha: float | None) -> dict[str, Tensor]:
    """Convert FLUX.1's adapters ("transformer.….lora_A.weight" and lora_B) to kohya's network, in which
    queries, keys and values are one layer.

    With n layers of rank r in one, A is theirs one above the other and B block-diagonal: rank n r, alpha n α.
    `alpha` None is the rank.
    """
    left = {
        name.removeprefix("transformer.").removesuffix(".lora_A.weight"): (
            weight,
            saved[name.replace("lora_A", "lora_B")],
        )
        for name, weight in saved.items()
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
            converted[f"{name}.lora_up.weight"] = torch.block_diag(*(pair[1] for pair in complete))
            converted[f"{name}.alpha"] = torch.tensor((1.0 if alpha is None else alpha / rank) * len(down))
    if left:
        raise UserError(f"The LoRA has adapters that kohya's keys of FLUX.1 have no name for: {', '.join(left)}.")
    return converted
