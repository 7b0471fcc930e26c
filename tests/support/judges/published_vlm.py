# SPDX-License-Identifier: Apache-2.0
"""HPSv3, EditReward and VideoAlign: random checkpoints in their published layouts and patch sizes.

Config, processor and tokenizer have the form in which Qwen published them; weights have the names that the released
code loads strictly. So that code (`vlm_official.py`) and ours read the same folder, and resize images as published:
to 200,704 pixels, frames to 100,352 at least.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.models.published_layouts import random_state
from tests.support.models.vision_language import SPECIAL
from visalign.rewards.vlm.published import published_prompt

VLM_PROMPTS = ["a red circle", "Tom &amp; Jerry, don't stop 42", "two  blue {squares}\n" * 8, "é 日本 🙂"]
COLUMNS = {
    "hpsv3": ("value", "log_std"),
    "edit_reward": ("value", "log_std"),
    "video_align": ("value", "VQ", "MQ", "TA"),
}
"""What is frozen of each image or clip."""
FROZEN = Path(__file__).parents[2] / "golden" / "official" / "judges.json"
RATE = 4.0
"""Frames a second that the clips show."""
_CHAT = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are a helpful "
    "assistant.<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LANGUAGE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "hidden_act": "silu",
}  # fmt: skip
_TOWER: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "in_chans": 3}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 112,
        "fullatt_block_indexes": [1], "tokens_per_second": 2,
    },
}  # fmt: skip


def pictures() -> list[Image.Image]:
    """Noise: small, large, tiny and wide."""
    random, shapes = np.random.default_rng(9), ((41, 44), (700, 1000), (9, 13), (30, 470))
    return [Image.fromarray(random.integers(0, 256, (*shape, 3), dtype=np.uint8)) for shape in shapes]


def films() -> list[np.ndarray]:
    """Noise of 5, 9, 14 and 20 frames, uint8 [F, H, W, 3] each."""
    random, shapes = np.random.default_rng(10), ((5, 41, 44), (9, 240, 426), (14, 320, 180), (20, 12, 90))
    return [random.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes]


def vlm_inputs(judge: str) -> tuple[list[Any], list[str], list[dict[str, Any]]]:
    """Images or clips, prompts and records; the source of an edit is the image before it."""
    samples: list[Any] = films() if judge == "video_align" else pictures()
    return samples, VLM_PROMPTS, [{"source": source} for source in (samples[-1], *samples[:-1])]


def hpsv3(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """`HPSv3RewardInferencer` of the package hpsv3."""
    from visalign.rewards.hpsv3.judge import HPSv3

    state = _old_names(_write_base(folder / "base", "qwen2_vl", ["<|Reward|>"], 10))
    save_file(state | _ranknet_head("rm_head.", 11), folder / "HPSv3.safetensors")
    _write_pictures(folder)
    return HPSv3(folder / "HPSv3.safetensors", base=folder / "base"), lambda: _released("hpsv3", folder)


def edit_reward(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """`EditRewardInferencer` with two heads and their mean."""
    from visalign.rewards.hpsv3.edit_reward import EditReward

    state = _write_base(folder / "base", "qwen2_5_vl", ["<|Reward|>"], 13)
    heads = {**_ranknet_head("rm_heads.head_0.", 14), **_ranknet_head("rm_heads.head_1.", 15)}
    save_file(state | heads, folder / "model.safetensors")
    _write_pictures(folder)
    judge = EditReward(folder / "model.safetensors", base=folder / "base")
    return judge, lambda: _released("edit_reward", folder)


def video_align(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """`VideoVLMRewardInference`, with peft's LoRA in the language model."""
    from visalign.rewards.hpsv3.video_align import TOKENS, VideoAlign

    checkpoint = folder / "VideoReward" / "checkpoint-20"
    checkpoint.mkdir(parents=True)
    state = _old_names(_write_base(folder / "base", "qwen2_vl", list(TOKENS), 16))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    lora: dict[str, Any] = {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "use_rslora": False}
    peft: dict[str, Tensor] = {
        "base_model.model.rm_head.weight": random_state({"rm_head.weight": (1, 32)}, 18).popitem()[1]
    }
    for key, value in state.items():
        name, _, kind = f"base_model.model.{key}".rpartition(".")
        if not (key.startswith("model.layers.") and "_proj." in key):
            peft[f"{name}.{kind}"] = value
            continue
        peft[f"{name}.base_layer.{kind}"] = value
        if kind == "weight":
            shapes = {"A": (lora["lora_r"], value.shape[1]), "B": (len(value), lora["lora_r"])}
            halves = random_state(
                {f"{name}.lora_{half}.default.weight": shape for half, shape in shapes.items()}, len(peft)
            )
            peft |= {half: 0.2 * matrix for half, matrix in halves.items()}
    torch.save({key: value.clone() for key, value in peft.items()}, checkpoint / "model.pth")
    data = {"eval_dim": ["VQ", "MQ", "TA"], "prompt_template_type": "detailed_special", "sample_type": "uniform"}
    config = {
        "data_config": data | {"fps": 2.0, "max_frame_pixels": 200704, "meta_data": "", "data_dir": ""},
        "model_config": {"use_special_tokens": True, "output_dim": 1, "reward_token": "special"},
        "peft_lora_config": lora | {"lora_namespan_exclude": ["lm_head", "rm_head", "embed_tokens", "visual"]},
        "inference_config": {
            "VQ_mean": 3.7, "VQ_std": 2.2, "MQ_mean": 1.2, "MQ_std": 1.4, "TA_mean": 2.8, "TA_std": 2.5
        },
    }  # fmt: skip
    config["model_config"]["model_name_or_path"] = str(folder / "base")
    (folder / "VideoReward" / "model_config.json").write_text(json.dumps(config))
    judge = VideoAlign(folder / "VideoReward", base=folder / "base", clip_fps=RATE)
    return judge, lambda: _released("video_align", folder)


def _released(judge: str, folder: Path) -> Tensor:
    """Columns by the released code in the folder that e.g. HPSV3_CODE names, run by the Python that HPSV3_PYTHON
    names; without them the frozen numbers.
    """
    name = judge.upper()
    if f"{name}_CODE" not in os.environ:
        return torch.tensor(json.loads(FROZEN.read_text())[judge])
    if judge == "video_align":
        for number, film in enumerate(films()):
            np.save(folder / f"{number}.npy", film)
    (folder / "prompts.json").write_text(json.dumps(VLM_PROMPTS))
    script = Path(__file__).with_name("vlm_official.py")
    command = [os.environ[f"{name}_PYTHON"], script, judge, os.environ[f"{name}_CODE"], folder]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return torch.tensor(json.loads(printed.splitlines()[-1]))


def _write_pictures(folder: Path) -> None:
    for number, picture in enumerate(pictures()):
        picture.save(folder / f"{number}.png")


def _write_base(base: Path, kind: str, tokens: list[str], seed: int) -> dict[str, Tensor]:
    """Write a base without weights; return those of the model whose vocabulary ends with the tokens."""
    base.mkdir()
    tokenizer = _tokenizer()
    tokenizer.save(str(base / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    size = tokenizer.get_vocab_size()
    config = {
        "model_type": kind, "architectures": [_ARCHITECTURES[kind]], **_LANGUAGE, "vocab_size": size + 20,
        "vision_config": {"model_type": kind, **_TOWER, **_TOWERS[kind]}, "tie_word_embeddings": len(tokens) > 1,
        "eos_token_id": ids["<|im_end|>"], "bos_token_id": ids["<|endoftext|>"],
        **{f"{name}_token_id": ids[f"<|{name}|>"] for name in ("vision_start", "vision_end")},
        **{f"{name}_token_id": ids[f"<|{name}_pad|>"] for name in ("image", "video")},
    }  # fmt: skip
    processor = {
        "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor" if kind == "qwen2_vl" else "Qwen2_5_VLProcessor",
    }  # fmt: skip
    names = {"tokenizer_class": "Qwen2Tokenizer", "pad_token": SPECIAL[0], "eos_token": "<|im_end|>"}
    files = {"config": config, "preprocessor_config": processor, "tokenizer_config": names | {"chat_template": _CHAT}}
    for name, content in (files | {"chat_template": {"chat_template": _CHAT}}).items():
        (base / f"{name}.json").write_text(json.dumps(content))
    read: Any = AutoConfig.from_pretrained(base)
    read.text_config.vocab_size = size + len(tokens)
    with torch.device("meta"):
        shapes = AutoModelForImageTextToText.from_config(read).state_dict()
    return random_state({key: tuple(shapes[key].shape) for key in sorted(shapes)}, seed)


_ARCHITECTURES = {"qwen2_vl": "Qwen2VLForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration"}


def _tokenizer() -> Tokenizer:
    """Qwen's tokenizer, of which each beginning of a word in the published questions is a token."""
    texts = map(published_prompt, ("hpsv3", "edit_reward_following", "edit_reward_quality", "video_align"))
    words = [word.replace(" ", "Ġ") for text in texts for word in re.findall(" ?[A-Za-z]+", text)]
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *dict.fromkeys("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    setup: Any = tokenizer
    setup.normalizer, setup.decoder = normalizers.NFC(), decoders.ByteLevel()
    setup.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def _old_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename to transformers 4.45."""
    return {
        key.removeprefix("model.") if "visual" in key else key.replace("model.language_model.", "model."): value
        for key, value in state.items()
    }


def _ranknet_head(prefix: str, seed: int) -> dict[str, Tensor]:
    layers = {0: nn.Linear(32, 1024), 3: nn.Linear(1024, 16), 5: nn.Linear(16, 2)}
    shapes = {f"{prefix}{n}.{k}": tuple(v.shape) for n, layer in layers.items() for k, v in layer.state_dict().items()}
    return random_state(shapes, seed)
