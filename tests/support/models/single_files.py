# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of one file in the layouts that CivitAI has: diffusers' own conversion reversed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3"}
RESNET |= {"time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection"}
TOP = {"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2", "conv_out": "out.2"}
TOP |= {"conv_in": "input_blocks.0.0", "conv_norm_out": "out.0"}
TOP |= {"add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2"}
ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
BLOCK = {"attn.to_out.0": "x_block.attn.proj", "attn.to_add_out": "context_block.attn.proj"}
BLOCK |= {"norm1.linear": "x_block.adaLN_modulation.1", "norm1_context.linear": "context_block.adaLN_modulation.1"}
BLOCK |= {f"ff{side}.net.{i}": f"{name}.mlp.fc{n}" for side, name in (("", "x_block"), ("_context", "context_block"))
          for i, n in (("0.proj", 1), ("2", 2))}  # fmt: skip
SD3 = {"pos_embed.pos_embed": "pos_embed", "pos_embed.proj": "x_embedder.proj", "proj_out": "final_layer.linear"}
SD3 |= {"context_embedder": "context_embedder", "norm_out.linear": "final_layer.adaLN_modulation.1"}
SD3 |= {f"time_text_embed.{a}_embedder.linear_{n}": f"{b}_embedder.mlp.{2 * n - 2}"
        for a, b in (("timestep", "t"), ("text", "y")) for n in (1, 2)}  # fmt: skip


def save_single_file(pipe: Any, file: Path, *, network_only: bool = False, dtype: Any = None) -> Path:
    """Write a pipeline as one file; the network of FLUX keeps its keys, which diffusers knows as well."""
    convert = {"FluxPipeline": lambda network: network.state_dict(), "StableDiffusion3Pipeline": _sd3}
    network = convert.get(type(pipe).__name__, _unet)(getattr(pipe, "transformer", None) or pipe.unet)
    prefix = "" if type(pipe).__name__ == "FluxPipeline" else "model.diffusion_model."
    state = {prefix + key: value for key, value in network.items()}
    if not network_only:
        state |= {f"first_stage_model.{key}": value for key, value in _autoencoder(pipe.vae).items()}
        state |= _text_encoders(pipe)
    save_file({key: value.to(dtype or value.dtype).contiguous().clone() for key, value in state.items()}, file)
    return file


def _renamed(key: str, names: dict[str, str]) -> str:
    layer, _, end = key.rpartition(".")
    return names[key] if key in names else f"{names[layer]}.{end}"


def _unet(unet: Any) -> dict[str, torch.Tensor]:
    per_block, state = unet.config.layers_per_block + 1, {}
    for key, value in unet.state_dict().items():
        if not (match := re.match(r"(down|up|mid)_blocks?\.(?:(\d+)\.)?(\w+)\.(\d+)\.(.*)", key)):
            state[_renamed(key, TOP)] = value
            continue
        side, block, kind, layer, rest = match.groups()
        inner = (
            _renamed(rest, RESNET) if kind == "resnets" else rest.replace("conv.", "op.") if side == "down" else rest
        )
        inner = rest if kind == "attentions" else inner
        index = int(block or 0) * per_block + int(layer)
        if side == "mid":
            state[f"middle_block.{2 * int(layer) + (kind == 'attentions')}.{inner}"] = value
        elif side == "down":
            index = int(block or 0) * per_block + per_block if kind == "downsamplers" else index + 1
            state[f"input_blocks.{index}.{int(kind == 'attentions')}.{inner}"] = value
        else:
            attends = hasattr(unet.up_blocks[int(block)], "attentions")
            index = (int(block) + 1) * per_block - 1 if kind == "upsamplers" else index
            slot = {"resnets": 0, "attentions": 1, "upsamplers": 1 + attends}[kind]
            state[f"output_blocks.{index}.{slot}.{inner}"] = value
    return state


def _autoencoder(vae: Any) -> dict[str, torch.Tensor]:
    last, state = len(vae.config.block_out_channels) - 1, {}
    for key, value in vae.state_dict().items():
        key = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", key)
        if "mid_block.attentions.0" in key:
            prefix, _, name = key.partition("mid_block.attentions.0.")
            key = f"{prefix}mid.attn_1.{_renamed(name, ATTENTION)}"
            value = value[:, :, None, None] if value.ndim == 2 else value
        key = re.sub(r"down_blocks\.(\d)\.resnets", r"down.\1.block", key)
        key = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", key)
        key = re.sub(r"up_blocks\.(\d)\.resnets", lambda m: f"up.{last - int(m[1])}.block", key)
        key = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"up.{last - int(m[1])}.upsample", key)
        state[key.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")] = value
    return state


def _text_encoders(pipe: Any) -> dict[str, torch.Tensor]:
    first = {f"text_model.{k.removeprefix('text_model.')}": v for k, v in pipe.text_encoder.state_dict().items()}
    if hasattr(pipe, "transformer"):
        parts = (("clip_g", "text_encoder_2"), ("t5xxl", "text_encoder_3"))
        parts = parts if hasattr(pipe, "text_encoder_3") else (("t5xxl", "text_encoder_2"),)
        first = {k.replace("text_model.text_projection", "text_projection"): v for k, v in first.items()}
        encoders = {"clip_l": first, **{name: getattr(pipe, part).state_dict() for name, part in parts}}
        return {f"text_encoders.{n}.transformer.{k}": v for n, weights in encoders.items() for k, v in weights.items()}
    if not hasattr(pipe, "text_encoder_2"):
        return {f"cond_stage_model.transformer.{key}": value for key, value in first.items()}
    state = {f"conditioner.embedders.0.transformer.{k}": v for k, v in first.items() if "projection" not in k}
    return state | {f"conditioner.embedders.1.model.{k}": v for k, v in _open_clip(pipe.text_encoder_2).items()}


def _open_clip(encoder: Any) -> dict[str, torch.Tensor]:
    names = {"embeddings.position_embedding.weight": "positional_embedding", "final_layer_norm": "ln_final"}
    names |= {"embeddings.token_embedding": "token_embedding"}
    inner = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    inner |= {"self_attn.out_proj": "attn.out_proj"}
    weights, state = {k.removeprefix("text_model."): v for k, v in encoder.state_dict().items()}, {}
    for key, value in weights.items():
        if key == "text_projection.weight":
            state["text_projection"] = value.T
        elif not (match := re.match(r"encoder\.layers\.(\d+)\.(.*)", key)):
            state[_renamed(key, names)] = value
        elif match[2].startswith("self_attn.q_proj"):
            end = match[2].rpartition(".")[2]
            joined = torch.cat([weights[key.replace("q_proj", f"{name}_proj")] for name in "qkv"])
            state[f"transformer.resblocks.{match[1]}.attn.in_proj_{end}"] = joined
        elif "self_attn.k_proj" not in key and "self_attn.v_proj" not in key:
            state[f"transformer.resblocks.{match[1]}.{_renamed(match[2], inner)}"] = value
    return state


def _sd3(transformer: Any) -> dict[str, torch.Tensor]:
    weights, state = transformer.state_dict(), {}
    last = len(transformer.transformer_blocks) - 1
    for key, value in weights.items():
        swapped = torch.cat(value.chunk(2)[::-1]) if value.shape[0] % 2 == 0 else value
        if not (match := re.match(r"transformer_blocks\.(\d+)\.(.*)", key)):
            state[_renamed(key, SD3)] = swapped if key.startswith("norm_out") else value
            continue
        block, rest = match.groups()
        prefix, end = f"joint_blocks.{block}.", rest.rpartition(".")[2]
        qkv = {"attn.to_q": ("x_block", "to_{}"), "attn.add_q_proj": ("context_block", "add_{}_proj")}
        if (name := rest.rpartition(".")[0]) in qkv:
            side, names = qkv[name]
            parts = [weights[f"transformer_blocks.{block}.attn.{names.format(n)}.{end}"] for n in "qkv"]
            state[f"{prefix}{side}.attn.qkv.{end}"] = torch.cat(parts)
        elif norm := re.match(r"attn\.norm_(added_)?([qk])\.weight", rest):
            state[f"{prefix}{'context' if norm[1] else 'x'}_block.attn.ln_{norm[2]}.weight"] = value
        elif name in BLOCK:
            is_last = int(block) == last and name == "norm1_context.linear"
            state[prefix + _renamed(rest, BLOCK)] = swapped if is_last else value
    return state
