# SPDX-License-Identifier: Apache-2.0
"""Judges on tiny random vision models, the library's own logits for their requests, and a scripted judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedModel,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)
from transformers.models.smolvlm import processing_smolvlm

from tests.support.models.vision_language import (
    IMAGE,
    TEMPLATE,
    tiny_processor,
    tiny_seeing_model,
    tiny_seeing_tokenizer,
)
from visalign.rewards.base.contract import RewardError
from visalign.rewards.vlm.engine import AnswerLogits, JudgeAnswers, Query, VisionLanguageEngine
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
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "internvl3_5", "smolvlm")


def tiny_judge(kind: str = "qwen2_vl", seed: int = 0, **options: Any) -> VisionLanguageEngine:
    """A judge with random weights; images of 8 × 8 pixels are one token (InternVL: tiles of 4 tokens)."""
    if kind in TILED:
        return VisionLanguageEngine(TILED[kind][0](seed), TILED[kind][1](), **options)
    model = tiny_seeing_model(kind, seed, max_position_embeddings=512)
    return VisionLanguageEngine(model, tiny_processor(), **options)


def tiny_tile_model(seed: int = 0, language: str = "qwen2") -> PreTrainedModel:
    """InternVL, or SmolVLM on a llama, with tiles of 16 × 16 pixels."""
    text = {
        "model_type": language, "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 512, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 2,
        "pad_token_id": 0, "head_dim": 16,
    }  # fmt: skip
    tower: dict[str, Any] = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
        "image_size": [16, 16], "patch_size": [4, 4], "initializer_range": 0.3,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if language == "llama":
            tower |= {"image_size": 16, "patch_size": 4}
            parts: Any = {"text_config": text, "vision_config": tower, "pad_token_id": 0}
            split = SmolVLMConfig(**parts, image_token_id=IMAGE, scale_factor=2)
            return SmolVLMForConditionalGeneration(split).eval()
        config = InternVLConfig(text_config=text, vision_config=tower, image_token_id=IMAGE, image_seq_length=4)
        return InternVLForConditionalGeneration(config).eval()


def tile_processor() -> InternVLProcessor:
    """Images are cut into at most four tiles and a small copy."""
    tokenizer: Any = tiny_seeing_tokenizer()
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    kinds = ("start_image_token", "end_image_token", "context_image_token", "video_token")
    for kind, name in zip(kinds, names, strict=True):
        setattr(tokenizer, kind, name)
        setattr(tokenizer, f"{kind}_id", tokenizer.convert_tokens_to_ids(name))
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size={"height": 16, "width": 16}),
        image_seq_length=4,
        chat_template=TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>"),
    )


def split_processor() -> SmolVLMProcessor:
    """Images of up to 32 pixels a side, cut into tiles of 16 and a small copy."""
    tokenizer: Any = tiny_seeing_tokenizer()
    marks = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer.add_tokens([*marks, "<global-img>", "<fake_token_around_image>"], special_tokens=True)
    tokenizer.image_token, tokenizer.video_token = "<|image_pad|>", "<|video_pad|>"
    images = SmolVLMImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    with patch.object(processing_smolvlm, "num2words", str):  # numbers of frames in words, of videos
        return SmolVLMProcessor(
            image_processor=images,
            tokenizer=tokenizer,
            video_processor=SmolVLMVideoProcessor(),
            image_seq_len=4,
            chat_template=TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>"),
        )


TILED: dict[str, tuple[Callable[[int], Any], Callable[[], Any]]] = {
    "internvl": (tiny_tile_model, tile_processor),
    "internvl3_5": (partial(tiny_tile_model, language="qwen3"), tile_processor),
    "smolvlm": (partial(tiny_tile_model, language="llama"), split_processor),
}


def noise(height: int, width: int, seed: int = 0) -> Tensor:
    """An image [3, H, W] of whole levels in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
    return levels.float() / 255


def own_logits(judge: VisionLanguageEngine, template: Template, ask: Query) -> Tensor:
    """Logits [T, V] by the library's processor and the whole model, one request at a time."""
    fields = {"prompt": ask.prompt, **ask.fields}
    text = judge.processor.apply_chat_template(template.filled(fields), tokenize=False, add_generation_prompt=True)
    images = [(image * 255).round().to(torch.uint8) for image in ask.images]
    inputs = judge.processor(
        text=[text + template.answer_prefix + ask.continuation],
        images=images,
        return_tensors="pt",
        add_special_tokens=False,
    )
    with torch.no_grad():
        return judge.model(**inputs).logits[0]


T = TypeVar("T")
PROMPTS = ["a red circle", "a blue square", "two green triangles", "a white cross"]


def images(count: int = 4, size: int = 16, seed: int = 0) -> Tensor:
    """Noise on the 8-bit grid, [count, 3, size, size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), generator=generator).float() / 255


def tiny_engine(kind: str = "qwen2_vl", **options: Any) -> VisionLanguageEngine:
    """A random model, whose tokens are single letters."""
    if kind in TILED:
        return VisionLanguageEngine(TILED[kind][0](0), TILED[kind][1](), name="tiny", **options)
    longer = {"max_position_embeddings": 1024, "initializer_range": 0.2}
    return VisionLanguageEngine(tiny_seeing_model(kind, **longer), tiny_processor(), name="tiny", **options)


def ask_text(*texts: str, images: int = 1, **more: Any) -> Template:
    """A template of some images and a text."""
    content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": "".join(texts)}]
    return Template(name="test", messages=[{"role": "user", "content": content}], **more)


class _Words:
    """A tokenizer in which every known word is one token."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[token] for token in ids)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.words[token] for token in ids]


class ScriptedEngine:
    """An engine whose next-word probabilities and answers are functions of the request."""

    def __init__(
        self,
        probability: Callable[[Template, Query], Mapping[str, float] | None] | None = None,
        answers: Callable[[Template, Query], list[str]] | None = None,
        words: Sequence[str] = ("yes", "Yes", " yes", "no", "No", *"0123456789"),
        templates: Mapping[str, Template] | None = None,
    ) -> None:
        self._probability, self._answers = probability, answers
        self._words, self._templates = list(words), dict(templates or {})
        self.processor = type("Processor", (), {"tokenizer": _Words(words)})()
        self.asked: list[Query] = []
        self.generated: list[Query] = []

    def template(self, kind: str, default: Template) -> Template:
        return self._templates.get(kind, default)

    def token_ids(self, words: Sequence[str], *, skip_missing: bool = False) -> list[int]:
        missing = [word for word in words if word not in self._words]
        ids = [self._words.index(word) for word in words if word in self._words]
        if (missing and not skip_missing) or not ids:
            raise RewardError(f"The word {missing[0]!r} is several tokens of this model.")
        return list(dict.fromkeys(ids))

    def identity_fields(self, template: Template, **options: Any) -> dict[str, Any]:
        return {"model": "scripted", "template": template.text, "options": options}

    def answer_logits(
        self,
        template: Template,
        asks: Sequence[Query],
        ids: Sequence[int],
        *,
        left_over: bool = False,
        gradient: bool = False,
    ) -> AnswerLogits:
        assert self._probability is not None
        self.asked += asks
        logits = torch.full((len(asks), len(ids)), math.nan)
        reasons: list[str | None] = []
        for row, ask in enumerate(asks):
            probabilities = self._probability(template, ask)
            reasons.append("too long" if probabilities is None else None)
            if probabilities is not None:
                shift = 3.0  # logits are log-probabilities up to a constant
                values = [probabilities.get(self._words[token], 0.0) for token in ids]
                logits[row] = torch.tensor(values, dtype=torch.float64).log().float() + shift
        total = torch.full((len(asks),), 3.0) if left_over else None
        return AnswerLogits(logits, total, reasons)

    def generate(self, template: Template, asks: Sequence[Query], **options: Any) -> JudgeAnswers:
        assert self._answers is not None
        self.generated += asks
        texts = [self._answers(template, ask) for ask in asks]
        return JudgeAnswers(texts, [[True] * len(row) for row in texts], [None] * len(asks))


def given(value: T | None) -> T:
    """The value, which must be there."""
    assert value is not None
    return value


def why(scores: Any, row: int) -> str:
    """The reason of a row of scores or preferences, which must have one."""
    return given(given(scores.reason)[row])
