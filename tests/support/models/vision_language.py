# SPDX-License-Identifier: Apache-2.0
"""Random vision models of the Qwen-VL family, of some ten thousand numbers, with their processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.support.models.language import LETTERS
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.text import Sampling, StoppingCriteria, TextRollout

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
IMAGE = SPECIAL.index("<|image_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_LANGUAGE: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 100.0},
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TOKENS: dict[str, Any] = {
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "image_token_id": IMAGE,
    "video_token_id": 6,
}
_TOWER: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "initializer_range": 0.3}


def tiny_seeing_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter, and the special ones of Qwen-VL."""
    vocab = {token: number for number, token in enumerate((*SPECIAL, *LETTERS, "<unk>"))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[attr-defined]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[attr-defined]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token=SPECIAL[0], eos_token="<|im_end|>"
    )


def tiny_processor(template: str | None = TEMPLATE, **sizes: Any) -> Qwen2VLProcessor:
    """Images of 8 × 8 pixels are one token; none has more than 64 of them."""
    size = {"shortest_edge": 64, "longest_edge": 4096, **sizes}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=4, size=size),
        tokenizer=tiny_seeing_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(patch_size=4),
        chat_template=template,
    )


def tiny_seeing_model(kind: str = "qwen2_vl", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model with random weights."""
    language = {**_LANGUAGE, **changes}
    tower: dict[str, Any]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "qwen2_vl":
            tower = {**_TOWER, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
            config = Qwen2VLConfig(text_config=language, vision_config=tower, tie_word_embeddings=True, **_TOKENS)
            return Qwen2VLForConditionalGeneration(config).eval()
        tower = {**_TOWER, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
        if kind == "qwen2_5_vl":
            tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
            config = Qwen2_5_VLConfig(text_config=language, vision_config=tower, tie_word_embeddings=True, **_TOKENS)
            return Qwen2_5_VLForConditionalGeneration(config).eval()
        tower |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
        config = Qwen3VLConfig(
            text_config={**language, "head_dim": 16}, vision_config=tower, tie_word_embeddings=True, **_TOKENS
        )
        return Qwen3VLForConditionalGeneration(config).eval()


def save_tiny_seeing_model(folder: Path, kind: str = "qwen2_vl") -> Path:
    """Model and processor in a folder, as any published one."""
    tiny_seeing_model(kind).save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    return folder


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def user(*content: str | dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation of one message."""
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return [{"role": "user", "content": parts}]


SLOT = {"type": "image"}
PROMPTS = [
    user(SLOT, "what?", SLOT, "and now"),
    "hello",
    user("a", SLOT),
    [{"role": "user", "content": "no image, but more of text"}],
]
IMAGES = [[make_image(24, 16, 1), make_image(8, 40, 2)], [], [make_image(40, 40, 3)], []]
STOP = StoppingCriteria(max_new_tokens=12)
NUCLEUS = Sampling(temperature=0.7, top_p=0.9)


def policy(kind: str = "qwen2_vl", **options: Any) -> CausalLMPolicy:
    return CausalLMPolicy(tiny_seeing_model(kind), tiny_processor(), **options)


def sampled(actor: CausalLMPolicy, sampling: Sampling = NUCLEUS, **options: Any) -> TextRollout:
    options = {"images": IMAGES, "seeds": 4, "num_generations": 3, "stopping": STOP, **options}
    return actor.generate(options.pop("prompts", PROMPTS), sampling=sampling, **options)


def own_inputs(actor: CausalLMPolicy, row: int) -> dict[str, Any]:
    """The library processor's inputs for a prompt."""
    prompt, images = PROMPTS[row], IMAGES[row]
    processor: Any = actor.processor
    text = prompt
    if not isinstance(prompt, str):
        text = processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return {**processor(text=[text], images=images or None, return_tensors="pt")}


def own_logits(actor: CausalLMPolicy, row: int, answer: Tensor) -> Tensor:
    """The model's own logits [T, V] of a completion: the whole model, its own positions, nothing cached."""
    inputs = own_inputs(actor, row)
    length = inputs["input_ids"].shape[1]
    added = {"input_ids": answer, "mm_token_type_ids": torch.zeros_like(answer)}
    for name, more in added.items():
        inputs[name] = torch.cat((inputs[name], more[None].to(inputs[name].dtype)), 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return actor.model(**inputs).logits[0, length - 1 : -1]


def drawn(rollout: TextRollout, row: int) -> Tensor:
    return rollout.completion_ids[row, rollout.loss_mask[row] > 0]


def perturb(actor: CausalLMPolicy, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for _, parameter in actor.trainable_parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
