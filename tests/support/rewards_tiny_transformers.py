# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints in transformers' and ICTHP's published layouts, for tests of CLIP-type judges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.rewards_published_layouts import head, random_state, transformers_clip
from tests.support.rewards_tiny_clip import CONTEXT, WORDS, tiny_tokenizer

SIZES: dict[str, Any] = {
    "text": (32, 64, 2),
    "vision": (32, 64, 2),
    "embed": 16,
    "vocabulary": len(WORDS) + 4,
    "context": CONTEXT,
    "patch": 8,
    "image": 32,
}
END = len(WORDS) + 3


def tiny_clip_config(vocabulary: int = SIZES["vocabulary"], eos_token_id: int = END) -> dict[str, Any]:
    """config.json of a `CLIPModel` that runs in milliseconds."""
    width, inner, layers = SIZES["text"]
    shared = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    shared |= {"num_attention_heads": 2, "hidden_act": "gelu", "projection_dim": SIZES["embed"]}
    text = {"vocab_size": vocabulary, "max_position_embeddings": CONTEXT, "eos_token_id": eos_token_id}
    return {
        "model_type": "clip",
        "projection_dim": SIZES["embed"],
        "text_config": {**shared, **text, "bos_token_id": 2, "pad_token_id": 0},
        "vision_config": {**shared, "patch_size": SIZES["patch"], "image_size": SIZES["image"]},
    }


def tiny_clip_state(seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    """A random state dict with the keys that transformers 4 published."""
    return random_state(transformers_clip(**{**SIZES, **changes}), seed)


def save_tiny_transformers_clip(
    folder: Path,
    *,
    binary: bool = False,
    tokenizer: bool = True,
    seed: int = 0,
    end: int = END,
    **changes: Any,
) -> Path:
    """Write a `CLIPModel` folder: config, weights, and tokenizer if wanted."""
    folder.mkdir(parents=True, exist_ok=True)
    state = tiny_clip_state(seed, **changes)
    config = tiny_clip_config(changes.get("vocabulary", SIZES["vocabulary"]), end)
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        from safetensors.torch import save_file

        save_file(state, folder / "model.safetensors")
    if tokenizer:
        tiny_tokenizer().save_pretrained(str(folder))
    return folder


def save_tiny_hp(folder: Path, seed: int = 3) -> Path:
    """Write the folder of 8y/HP at tiny size."""
    save_tiny_transformers_clip(folder / "hp_backbone", binary=True, seed=seed)
    (folder / "hp_scorer").mkdir()
    state = random_state(head(SIZES["embed"], (24, 12, 8, 4, 1)), seed + 1)
    torch.save(state, folder / "hp_scorer" / "mlp_pytorch_model.bin")
    return folder
