# SPDX-License-Identifier: Apache-2.0
"""Judges on tiny random models that see, and what the library itself makes of their requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedModel,
)

from tests.support.tiny_vision_language_models import (
    IMAGE,
    TEMPLATE,
    tiny_processor,
    tiny_seeing_model,
    tiny_seeing_tokenizer,
)
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine
from visalign.rewards.vlm.template import Template

ONE = Template(
    name="one",
    messages=[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "shows {prompt}? "}]}],
    answer_prefix="so ",
    words={"yes": ("y",), "no": ("n",)},
)
TWO = Template(
    name="two",
    messages=[
        {"role": "system", "content": "judge"},
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "text", "text": " or "},
                {"type": "image"},
                {"type": "text", "text": "{prompt} {question}"},
            ],
        },
    ],
)
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl")


def tiny_judge(kind: str = "qwen2_vl", seed: int = 0, **options: Any) -> VisionLanguageEngine:
    """A judge with random weights; pictures of 8 × 8 pixels are one token (InternVL: tiles of 4 tokens)."""
    if kind == "internvl":
        return VisionLanguageEngine(tiny_tile_model(seed), tile_processor(), **options)
    model = tiny_seeing_model(kind, seed, max_position_embeddings=512)
    return VisionLanguageEngine(model, tiny_processor(), **options)


def tiny_tile_model(seed: int = 0) -> PreTrainedModel:
    """InternVL with tiles of 16 × 16 pixels."""
    language = {
        "model_type": "qwen2",
        "vocab_size": 80,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    tower = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "image_size": [16, 16],
        "patch_size": [4, 4],
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = InternVLConfig(
            text_config=language, vision_config=tower, image_token_id=IMAGE, image_seq_length=4
        )
        return InternVLForConditionalGeneration(config).eval()


def tile_processor() -> InternVLProcessor:
    """Pictures are cut into at most four tiles and a small copy."""
    tokenizer: Any = tiny_seeing_tokenizer()
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    kinds = ("start_image_token", "end_image_token", "context_image_token", "video_token")
    for kind, name in zip(kinds, names, strict=True):
        setattr(tokenizer, kind, name)
        setattr(tokenizer, f"{kind}_id", tokenizer.convert_tokens_to_ids(name))
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(
            size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4
        ),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size={"height": 16, "width": 16}),
        image_seq_length=4,
        chat_template=TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>"),
    )


def noise(height: int, width: int, seed: int = 0) -> Tensor:
    """A picture [3, H, W] of whole levels in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
    return levels.float() / 255


def own_logits(judge: VisionLanguageEngine, template: Template, ask: Query) -> Tensor:
    """What the library's processor and the whole model say [T, V], one request at a time."""
    fields = {"prompt": ask.prompt, **ask.fields}
    text = judge.processor.apply_chat_template(
        template.filled(fields), tokenize=False, add_generation_prompt=True
    )
    images = [(image * 255).round().to(torch.uint8) for image in ask.images]
    inputs = judge.processor(
        text=[text + template.answer_prefix + ask.continuation],
        images=images,
        return_tensors="pt",
        add_special_tokens=False,
    )
    with torch.no_grad():
        return judge.model(**inputs).logits[0]
