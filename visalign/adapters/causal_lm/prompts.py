# SPDX-License-Identifier: Apache-2.0
"""Prompts as a network takes them: token ids, and the images that stand among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.vision.images import PatchedImage


@dataclass(frozen=True)
class EncodedPrompt:
    """Encoded prompt; equal prompts are encoded once."""

    ids: tuple[int, ...]  # Tokens, with as many image tokens as the images take
    encoded_images: tuple[PatchedImage, ...] = ()  # In the order of their tokens


@dataclass(frozen=True)
class EncodedPrompts:
    ids: Sequence[Sequence[int]]  # P lists of tokens
    encoded_images: Sequence[Sequence[PatchedImage]] | None = None  # P lists; None where no prompt has any
    images: Sequence[Sequence[Any]] | None = None  # The images as they were given

    def prompt(self, index: int, more: Sequence[int] = ()) -> EncodedPrompt:
        """Return one prompt, with more tokens behind it."""
        images = () if self.encoded_images is None else tuple(self.encoded_images[index])
        return EncodedPrompt((*self.ids[index], *more), images)


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Stack prompts of different lengths: ids [b, L] int64, filled up on the left, and their mask."""
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.int64)
