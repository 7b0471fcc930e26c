# SPDX-License-Identifier: Apache-2.0
"""A tiny random open_clip model folder with its own tokenizer, as tests of the CLIP score need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from visalign.rewards.clip.open_clip_folder import save_open_clip

WORDS = ("a", "red", "green", "blue", "circle", "square", "triangle", "two", "circles", "left", "of")
CONTEXT = 12


def tiny_tokenizer(*, end_token: bool = True, end_last: bool = True) -> PreTrainedTokenizerFast:
    """A word tokenizer; it may lack the post-processor, or have its end token at a low id."""
    special = (
        ["<pad>", "<unk>", "<start>", *WORDS, "<end>"]
        if end_last
        else ["<pad>", "<end>", "<unk>", "<start>", *WORDS]
    )
    vocabulary = {word: index for index, word in enumerate(special)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if end_token:
        pairs = [(token, vocabulary[token]) for token in ("<start>", "<end>")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<start> $A <end>", special_tokens=pairs
        )  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<start>",
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


def tiny_config() -> dict[str, Any]:
    """embed_dim, vision_cfg and text_cfg of a model that runs in milliseconds."""
    return {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {
            "context_length": CONTEXT,
            "vocab_size": len(WORDS) + 4,
            "width": 32,
            "heads": 2,
            "layers": 1,
        },
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
