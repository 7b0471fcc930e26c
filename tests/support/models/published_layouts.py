# SPDX-License-Identifier: Apache-2.0
"""Keys and shapes of published checkpoints, written down from the references, at any size; random weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Shapes = dict[str, tuple[int, ...]]

HEAD_WIDTHS = (1024, 128, 64, 16, 1)


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _transformers_block(name: str, width: int, inner: int) -> Shapes:
    shapes = _norm(f"{name}.layer_norm1", width) | _norm(f"{name}.layer_norm2", width)
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        shapes |= _linear(f"{name}.self_attn.{part}", width, width)
    return shapes | _linear(f"{name}.mlp.fc1", inner, width) | _linear(f"{name}.mlp.fc2", width, inner)


def transformers_clip(
    *,
    text: tuple[int, int, int],
    vision: tuple[int, int, int],
    embed: int,
    vocabulary: int,
    context: int,
    patch: int,
    image: int,
    position_ids: bool = True,
) -> Shapes:
    """`CLIPModel` as transformers 4 saved it (PickScore, ICT, HP); text, vision: width, inner, layers."""
    (width, inner, layers), (wide, wide_inner, deep) = text, vision
    positions = (image // patch) ** 2 + 1
    shapes: Shapes = {
        "logit_scale": (),
        "text_model.embeddings.token_embedding.weight": (vocabulary, width),
        "text_model.embeddings.position_embedding.weight": (context, width),
        "vision_model.embeddings.class_embedding": (wide,),
        "vision_model.embeddings.patch_embedding.weight": (wide, 3, patch, patch),
        "vision_model.embeddings.position_embedding.weight": (positions, wide),
        "text_projection.weight": (embed, width),
        "visual_projection.weight": (embed, wide),
    }
    if position_ids:
        shapes["text_model.embeddings.position_ids"] = (1, context)
        shapes["vision_model.embeddings.position_ids"] = (1, positions)
    for number in range(layers):
        shapes |= _transformers_block(f"text_model.encoder.layers.{number}", width, inner)
    for number in range(deep):
        shapes |= _transformers_block(f"vision_model.encoder.layers.{number}", wide, wide_inner)
    # The missing letters of pre_layrnorm are the published name.
    return (
        shapes
        | _norm("text_model.final_layer_norm", width)
        | _norm("vision_model.pre_layrnorm", wide)
        | _norm("vision_model.post_layernorm", wide)
    )


def _open_clip_block(name: str, width: int, inner: int) -> Shapes:
    return (
        _norm(f"{name}.ln_1", width)
        | _norm(f"{name}.ln_2", width)
        | {f"{name}.attn.in_proj_weight": (3 * width, width), f"{name}.attn.in_proj_bias": (3 * width,)}
        | _linear(f"{name}.attn.out_proj", width, width)
        | _linear(f"{name}.mlp.c_fc", inner, width)
        | _linear(f"{name}.mlp.c_proj", width, inner)
    )


def open_clip_vit(
    *,
    text: tuple[int, int, int],
    vision: tuple[int, int, int],
    embed: int,
    vocabulary: int,
    context: int,
    patch: int,
    image: int,
) -> Shapes:
    """The `state_dict` of HPS_v2_compressed.pt and HPS_v2.1_compressed.pt: open_clip's CLIP."""
    (width, inner, layers), (wide, wide_inner, deep) = text, vision
    shapes: Shapes = {
        "positional_embedding": (context, width),
        "text_projection": (width, embed),
        "logit_scale": (),
        "visual.class_embedding": (wide,),
        "visual.positional_embedding": ((image // patch) ** 2 + 1, wide),
        "visual.proj": (wide, embed),
        "visual.conv1.weight": (wide, 3, patch, patch),
        "token_embedding.weight": (vocabulary, width),
    }
    for number in range(layers):
        shapes |= _open_clip_block(f"transformer.resblocks.{number}", width, inner)
    for number in range(deep):
        shapes |= _open_clip_block(f"visual.transformer.resblocks.{number}", wide, wide_inner)
    return shapes | _norm("visual.ln_pre", wide) | _norm("visual.ln_post", wide) | _norm("ln_final", width)


def head(width: int, widths: tuple[int, ...] = HEAD_WIDTHS, *, relu: bool = False, prefix: str = "") -> Shapes:
    """The five-layer head of ICTHP, LAION and ImageReward."""
    shapes: Shapes = {}
    inputs = width
    for index, outputs in zip((0, 3, 6, 9, 11) if relu else (0, 2, 4, 6, 7), widths, strict=True):
        shapes |= _linear(f"{prefix}layers.{index}", outputs, inputs)
        inputs = outputs
    return shapes


def image_reward(
    *,
    text: tuple[int, int, int],
    vision: tuple[int, int, int],
    vocabulary: int,
    context: int,
    patch: int,
    image: int,
    widths: tuple[int, ...] = HEAD_WIDTHS,
    projection: int = 256,
) -> Shapes:
    """ImageReward.pt: BLIP's two towers with its unused projections, and the head."""
    (width, inner, layers), (wide, wide_inner, deep) = text, vision
    positions = (image // patch) ** 2 + 1
    eye, reader = "blip.visual_encoder", "blip.text_encoder"
    shapes: Shapes = {
        f"{eye}.cls_token": (1, 1, wide),
        f"{eye}.pos_embed": (1, positions, wide),
        f"{eye}.patch_embed.proj.weight": (wide, 3, patch, patch),
        f"{eye}.patch_embed.proj.bias": (wide,),
        f"{reader}.embeddings.position_ids": (1, context),
        f"{reader}.embeddings.word_embeddings.weight": (vocabulary, width),
        f"{reader}.embeddings.position_embeddings.weight": (context, width),
    }
    shapes |= _norm(f"{eye}.norm", wide) | _norm(f"{reader}.embeddings.LayerNorm", width)
    for number in range(deep):
        block = f"{eye}.blocks.{number}"
        shapes |= _norm(f"{block}.norm1", wide) | _norm(f"{block}.norm2", wide)
        shapes |= _linear(f"{block}.attn.qkv", 3 * wide, wide) | _linear(f"{block}.attn.proj", wide, wide)
        shapes |= _linear(f"{block}.mlp.fc1", wide_inner, wide) | _linear(f"{block}.mlp.fc2", wide, wide_inner)
    for number in range(layers):
        layer = f"{reader}.encoder.layer.{number}"
        for attention, source in (("attention", width), ("crossattention", wide)):
            shapes |= _linear(f"{layer}.{attention}.self.query", width, width)
            shapes |= _linear(f"{layer}.{attention}.self.key", width, source)
            shapes |= _linear(f"{layer}.{attention}.self.value", width, source)
            shapes |= _linear(f"{layer}.{attention}.output.dense", width, width)
            shapes |= _norm(f"{layer}.{attention}.output.LayerNorm", width)
        shapes |= _linear(f"{layer}.intermediate.dense", inner, width)
        shapes |= _linear(f"{layer}.output.dense", width, inner) | _norm(f"{layer}.output.LayerNorm", width)
    shapes |= _linear("blip.vision_proj", projection, wide) | _linear("blip.text_proj", projection, width)
    return shapes | head(width, widths, prefix="mlp.")


CLIP_H14 = {
    "text": (1024, 4096, 24),
    "vision": (1280, 5120, 32),
    "embed": 1024,
    "vocabulary": 49408,
    "context": 77,
    "patch": 14,
    "image": 224,
}
"""laion/CLIP-ViT-H-14-laion2B-s32B-b79K."""

IMAGE_REWARD = {
    "text": (768, 3072, 12),
    "vision": (1024, 4096, 24),
    "vocabulary": 30524,
    "context": 512,
    "patch": 16,
    "image": 224,
}
"""ImageReward-v1.0: BLIP-large's image tower, BERT-base with cross-attention."""


def save_pickled_module(state: dict[str, Tensor], file: Path) -> None:
    """Write a module of a class that nobody can import later, as MPS is published; the rotary frequencies are
    written into the state.
    """
    package = ModuleType("trainer")
    kind = type("CLIPModel", (nn.Module,), {"__module__": package.__name__})
    package.CLIPModel = kind  # type: ignore[attr-defined]
    root: Any = kind()
    for key, tensor in state.items():
        if key.endswith("inv_freq"):
            state[key] = tensor = 1 / 10000 ** (torch.arange(0, 2 * len(tensor), 2).float() / (2 * len(tensor)))
        *parents, name = key.split(".")
        module: Any = root
        for parent in parents:
            if parent not in module._modules:
                module.add_module(parent, kind())
            module = module._modules[parent]
        if tensor.is_floating_point() and not name.endswith(("bias", "inv_freq")):
            module.register_parameter(name, nn.Parameter(tensor))
        else:
            module.register_buffer(name, tensor)
    sys.modules[package.__name__] = package
    try:
        torch.save(root, file)
    finally:
        del sys.modules[package.__name__]


def mps_layers(width: int, head: int, heads: int, *, layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of MPS's cross model under the published names, whose feedforward is four times as wide."""
    inner, query, shapes = 4 * width, head * heads, {}
    for number in range(layers):
        cross, block = (f"cross_model.layers.{number}.{part}.fn." for part in (0, 1))
        for prefix in (cross, block):
            shapes |= {f"{prefix}norm.weight": (width,), f"{prefix}norm.bias": (width,)}
        shapes |= {f"{cross}to_q.weight": (query, width), f"{cross}to_kv.weight": (2 * head, width)}
        shapes |= {f"{cross}to_out.weight": (width, query), f"{cross}ff.0.weight": (2 * inner, width)}
        shapes |= {f"{cross}ff.2.weight": (width, inner), f"{block}rotary_emb.inv_freq": (head // 2,)}
        shapes |= {f"{block}fused_attn_ff_proj.weight": (query + 2 * head + 2 * inner, width)}
        shapes |= {f"{block}attn_out.weight": (width, query), f"{block}ff_out.1.weight": (width, inner)}
    return shapes


def random_state(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Norms near 1, position_ids as they are, the rest N(0, 0.04), from numpy: the same everywhere."""
    random, state = np.random.default_rng(seed), {}
    for key, shape in shapes.items():
        if key.endswith("position_ids"):
            state[key] = torch.arange(shape[1])[None]
            continue
        noise = torch.tensor(random.standard_normal(shape, dtype=np.float32) * np.float32(0.2))
        state[key] = 1 + noise if key.endswith("weight") and len(shape) == 1 else noise
        if key == "logit_scale":
            state[key] = torch.tensor(4.6)
    return state
