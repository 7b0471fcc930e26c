# SPDX-License-Identifier: Apache-2.0
"""Inputs of the vision-language model: tokens, patches of images, packed questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from visalign.data.shapes.scenes import SIZE

from .judge_data import Question
from .stage import packaged

PATCH, MERGE = 8, 2
TOKENS = (SIZE // PATCH // MERGE) ** 2
"""Tokens of one image."""
GRID = SIZE // PATCH

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|Reward|>",
)


@cache
def judge_tokenizer() -> Any:
    """Load the tokenizer: a byte-level BPE with a token for each word of the prompts and questions."""
    return AutoTokenizer.from_pretrained(packaged("shapes-vlm"))


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Map each special token to its id."""
    return {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Questions of b samples, each sample's behind its images; S tokens a row."""

    ids: Tensor
    """[b, S]."""
    is_image: Tensor
    """bool [b, S], tokens that stand for images."""
    positions: Tensor
    """[3, b, S], as if each question stood alone behind the images."""
    attention: Tensor
    """float [b, 1, S, S], 0 where a token may look and −∞ elsewhere."""
    labels: Tensor
    """[b, S], the next token where it belongs to an answer, else −100."""
    weights: Tensor
    """[b, S], of each label."""


def pack_questions(tokenizer: Any, samples: Sequence[Sequence[Question]], images: int, tokens: int) -> Packed:
    """Put the questions of each sample behind its images; a question sees the images and itself."""
    ids = special_ids(tokenizer)
    head = _encode(tokenizer, "<|im_start|>user\n")
    before = list(head)
    for _ in range(images):
        before += [ids["<|vision_start|>"], *[ids["<|image_pad|>"]] * tokens, ids["<|vision_end|>"]]
    start, prefix = _prefix_positions(len(head), images, tokens)
    rows = [[_question_ids(tokenizer, question) for question in questions] for questions in samples]
    length = len(before) + max(sum(len(text) + len(answer) for text, answer in row) for row in rows)
    pad, size = ids["<|endoftext|>"], len(rows)
    packed = torch.full((size, length), pad)
    labels, weights = torch.full((size, length), -100), torch.zeros(size, length)
    positions, block = torch.zeros(3, size, length, dtype=torch.int64), torch.full((size, length), -1)
    packed[:, : len(before)] = torch.tensor(before)
    positions[:, :, : len(before)] = prefix[:, None]
    block[:, : len(before)] = 0
    for row, questions in enumerate(rows):
        at = len(before)
        for number, (text, answer) in enumerate(questions, 1):
            full = [*text, *answer]
            span = slice(at, at + len(full))
            packed[row, span] = torch.tensor(full)
            positions[:, row, span] = torch.arange(len(full)) + start
            block[row, span] = number
            answered = slice(at + len(text) - 1, at + len(full) - 1)
            labels[row, answered] = torch.tensor(answer)
            weights[row, answered] = samples[row][number - 1].weight
            at += len(full)
    order = torch.arange(length)
    own = (block[:, :, None] == block[:, None, :]) | (block[:, None, :] == 0)
    allowed = own & (order[:, None] >= order[None, :])
    attention = torch.zeros(size, 1, length, length).masked_fill_(~allowed[:, None], float("-inf"))
    return Packed(
        ids=packed,
        is_image=packed == ids["<|image_pad|>"],
        positions=positions,
        attention=attention,
        labels=labels,
        weights=weights,
    )


def _prefix_positions(head: int, images: int, tokens: int) -> tuple[int, Tensor]:
    """(position behind the images, [3, S0] positions): M-RoPE, arXiv 2409.12191, section 2.1."""
    side = round(tokens**0.5)
    parts, at = [torch.arange(head).expand(3, -1)], head
    for _ in range(images):
        parts.append(torch.full((3, 1), at))
        grid = torch.cartesian_prod(torch.arange(1), torch.arange(side), torch.arange(side)).T
        parts.append(grid + at + 1)
        at += 1 + side
        parts.append(torch.full((3, 1), at))
        at += 1
    return at, torch.cat(parts, 1)


def _question_ids(tokenizer: Any, question: Question) -> tuple[tuple[int, ...], tuple[int, ...]]:
    text = _encode(tokenizer, question.text + "<|im_end|>\n<|im_start|>assistant\n")
    return text, _encode(tokenizer, question.answer + "<|im_end|>")


@cache
def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def patches_of(images: np.ndarray) -> Tensor:
    """What the model's image processor makes of uint8 [N, 64, 64, 3]: [N · 64, 384] float32 in [−1, 1].

    Patches are ordered by merged token, then row and column inside it; an image is two equal frames.
    """
    cells = GRID // MERGE
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
    split = pixels.reshape(len(images), 3, cells, MERGE, PATCH, cells, MERGE, PATCH)
    ordered = split.permute(0, 2, 5, 3, 6, 1, 4, 7)[:, :, :, :, :, :, None]
    return ordered.expand(-1, -1, -1, -1, -1, -1, 2, -1, -1).reshape(len(images) * GRID**2, -1)


def see(model: Any, images: np.ndarray) -> Tensor:
    """Features [N, TOKENS, H] of images."""
    grid = torch.tensor([[1, GRID, GRID]]).expand(len(images), 3)
    return model.model.visual(patches_of(images), grid).pooler_output.view(len(images), TOKENS, -1)


def answer_states(model: Any, packed: Packed, features: Tensor) -> Tensor:
    """Compute the hidden states [b, S, H] of packed questions behind images with `features`."""
    embeds = model.get_input_embeddings()(packed.ids)
    embeds = embeds.masked_scatter(packed.is_image[..., None], features.to(embeds.dtype))
    return model.model.language_model(
        inputs_embeds=embeds, attention_mask=packed.attention, position_ids=packed.positions, use_cache=False
    ).last_hidden_state
