# SPDX-License-Identifier: Apache-2.0
"""Tiny random folders of CLIP-type judges: open_clip's, transformers' and HP's published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.support.models.published_layouts import head, random_state, transformers_clip
from visalign.rewards.clip.open_clip_folder import save_open_clip

WORDS = ("a", "red", "green", "blue", "circle", "square", "triangle", "two", "circles", "left", "of")
CONTEXT = 12


def tiny_tokenizer(*, end_token: bool = True, end_last: bool = True) -> PreTrainedTokenizerFast:
    """A word tokenizer; it may lack the post-processor, or have its end token at a low id."""
    special = (
        ["<pad>", "<unk>", "<start>", *WORDS, "<end>"] if end_last else ["<pad>", "<end>", "<unk>", "<start>", *WORDS]
    )
    vocabulary = {word: index for index, word in enumerate(special)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if end_token:
        pairs = [(token, vocabulary[token]) for token in ("<start>", "<end>")]
        tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A <end>", special_tokens=pairs)  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<start>", eos_token="<end>", pad_token="<pad>",
        unk_token="<unk>",
    )  # fmt: skip


def tiny_config() -> dict[str, Any]:
    """embed_dim, vision_cfg and text_cfg of a model that runs in milliseconds."""
    return {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": CONTEXT, "vocab_size": len(WORDS) + 4, "width": 32, "heads": 2, "layers": 1},
    }


def save_tiny_clip(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """Write the model into `folder` and return it."""
    config = tiny_config()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = open_clip.CLIP(config["embed_dim"], config["vision_cfg"], config["text_cfg"])
    preprocess = {
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.25, 0.3],
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }
    save_open_clip(folder, model, config, tokenizer or tiny_tokenizer(), preprocess_cfg=preprocess)
    return folder


SIZES: dict[str, Any] = {
    "text": (32, 64, 2), "vision": (32, 64, 2), "embed": 16, "vocabulary": len(WORDS) + 4,
    "context": CONTEXT, "patch": 8, "image": 32,
}  # fmt: skip
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
    folder: Path, *, binary: bool = False, tokenizer: bool = True, seed: int = 0, end: int = END, **changes: Any
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
