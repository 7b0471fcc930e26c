# SPDX-License-Identifier: Apache-2.0
"""transformers' `CLIPModel` folders: strict loading, tokenizers that keep the end token, preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.model_files import read_object
from visalign.rewards.base.contract import RewardError
from visalign.rewards.weights.checkpoint_files import drop_suffixes, dtype_of, load_strict, read_folder
from visalign.rewards.weights.hub import META

from .encoder import ClipEncoder, ClipParts
from .open_clip_folder import check_pooling

OPENAI_MEAN = [0.48145466, 0.4578275, 0.40821073]
OPENAI_STD = [0.26862954, 0.26130258, 0.27577711]

POSITION_IDS = ("position_ids",)
"""Buffers 0, 1, 2, ... that transformers before 4.31 wrote into the file; nothing learned."""

CLIP_VIT_H_14: dict[str, Any] = {
    "projection_dim": 1024,
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "projection_dim": 1024,
    },
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "patch_size": 14,
        "hidden_act": "gelu",
        "projection_dim": 1024,
    },
}
"""laion/CLIP-ViT-H-14-laion2B-s32B-b79K, on which PickScore, HPSv2, ICT and HP are fine-tuned."""

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Where image processors are described, by transformers before and from 5.0."""

_RESAMPLING = {2: "bilinear", 3: "bicubic"}
"""PIL's numbers of the filters that are offered."""


class TextTokenizer:
    """A transformers tokenizer with open_clip's face: texts -> ids [N, L], the end token kept when cut."""

    def __init__(self, tokenizer: Any, context_length: int) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length

    def __call__(self, texts: list[str], context_length: int | None = None) -> Tensor:
        """Tokenize, padded to the context length behind the end token."""
        return self.tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=context_length or self.context_length,
            return_tensors="pt",
        )["input_ids"]


def load_transformers_clip(
    folder: str | Path,
    *,
    state: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
    precision: str = "fp32",
    tokenizer: str = "transformers",
) -> ClipParts:
    """Load a `CLIPModel` folder, strictly: config.json (or `config`), weights (or `state`), preprocessing.

    Without a tokenizer a vocabulary of 49408 gets CLIP's own, as `tokenizer` reads texts: "transformers" or
    "open_clip", which also undoes HTML ("&amp;").
    """
    from transformers import CLIPConfig, CLIPModel
    from transformers.initialization import no_init_weights

    folder = Path(folder)
    settings = _read_config(folder, config)
    hollow = str(device) == META
    with no_init_weights(), torch.device(META) if hollow else nullcontext():
        model: Any = CLIPModel(CLIPConfig.from_dict(dict(settings)))
    if not hollow:
        weights = read_folder(folder) if state is None else state
        load_strict(model, drop_suffixes(weights, POSITION_IDS), str(folder))
    model.to(device=torch.device(device), dtype=dtype_of(precision)).eval().requires_grad_(False)
    text = model.config.text_config
    text_tokenizer = _tokenizer(folder, text, tokenizer)
    return ClipParts(
        encoder=ClipEncoder(model).eval(),
        preprocess=_preprocessing(folder, int(model.config.vision_config.image_size)),
        tokenizer=text_tokenizer,
        # An eos_token_id of 2 stands in old configs, and transformers then pools at the largest id.
        end=check_pooling(
            text_tokenizer, None if text.eos_token_id == 2 else text.eos_token_id, text.max_position_embeddings
        ),
        folder=folder,
    )


def _read_config(folder: Path, config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        if config is None:
            raise FileNotFoundError(f"The folder {folder} lacks config.json; download it again.")
        return config
    settings = read_object(file)
    if settings.get("model_type") != "clip":
        raise RewardError(f"{file} describes a model of type {settings.get('model_type')!r}; needed is 'clip'.")
    return settings


def _tokenizer(folder: Path, text: Any, otherwise: str) -> Callable[..., Tensor]:
    length = int(text.max_position_embeddings)
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        from transformers import AutoTokenizer

        return TextTokenizer(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), length)
    if text.vocab_size != 49408:
        raise RewardError(
            f"{folder} holds no tokenizer.json, and {text.vocab_size} tokens are not CLIP's 49408; copy it there."
        )
    from open_clip import SimpleTokenizer

    words = SimpleTokenizer(context_length=length)
    if otherwise == "open_clip":
        return words
    from transformers import CLIPTokenizer

    marks = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {marks.get(word, word): index for word, index in words.encoder.items()}
    merges: Any = list(words.bpe_ranks)
    return TextTokenizer(CLIPTokenizer(vocab=vocabulary, merges=merges), length)


def _preprocessing(folder: Path, image_size: int) -> dict[str, Any]:
    """Return open_clip's preprocess_cfg for what the folder says of it; CLIP's own where it says nothing."""
    file = next((folder / name for name in PROCESSORS if (folder / name).is_file()), None)
    settings = read_object(file) if file is not None else {}
    settings = settings.get("image_processor", settings)
    size, crop = settings.get("size", image_size), settings.get("crop_size", image_size)
    short = size.get("shortest_edge") if isinstance(size, Mapping) else size
    cropped = (crop["height"], crop["width"]) if isinstance(crop, Mapping) else (crop, crop)
    squash = isinstance(size, Mapping) and "height" in size
    edges = (size["height"], size["width"]) if squash else (short, short)
    is_square = edges == cropped == (image_size, image_size)
    if not is_square or settings.get("resample", 3) not in _RESAMPLING:
        raise RewardError(
            f"{file}: size {size}, crop_size {crop} and resample {settings.get('resample', 3)}; allowed are "
            f"resize (resample 2 or 3) and crop to the model's {image_size} pixels."
        )
    return {
        "size": image_size,
        "mean": list(settings.get("image_mean", OPENAI_MEAN)),
        "std": list(settings.get("image_std", OPENAI_STD)),
        "interpolation": _RESAMPLING[settings.get("resample", 3)],
        "resize_mode": "squash" if squash else "shortest",
        "crop_rounding": "down",
    }
