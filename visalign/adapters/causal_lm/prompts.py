# SPDX-License-Identifier: Apache-2.0
"""Prompts as a network takes them: token ids, and the images that stand among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.text import Prompt
from visalign.vision.images import PatchedImage

from .chat import PromptEncoder, image_parts


@dataclass(frozen=True)
class EncodedPrompt:
    """Encoded prompt; equal prompts are encoded once."""

    ids: tuple[int, ...]
    """Tokens, with as many image tokens as the images take."""
    encoded_images: tuple[PatchedImage, ...] = ()
    """In the order of their tokens."""


@dataclass(frozen=True)
class EncodedPrompts:
    """P encoded prompts."""

    ids: Sequence[Sequence[int]]
    """P lists of tokens."""
    encoded_images: Sequence[Sequence[PatchedImage]] | None = None
    """P lists; None where no prompt has any."""
    images: Sequence[Sequence[Any]] | None = None
    """The images as they were given."""

    def prompt(self, index: int, more: Sequence[int] = ()) -> EncodedPrompt:
        """Return one prompt, with more tokens behind it."""
        images = () if self.encoded_images is None else tuple(self.encoded_images[index])
        return EncodedPrompt((*self.ids[index], *more), images)


class Encoder(Protocol):
    """Turns prompts into what a network reads."""

    def encode(self, prompts: Sequence[Prompt], images: Sequence[Sequence[Any]] | None) -> EncodedPrompts:
        """Encode P prompts with P lists of images, or none."""
        ...

    def encoded_images(
        self, images: Sequence[Sequence[Any]], ids: Sequence[Sequence[int]], samples: Sequence[int]
    ) -> list[list[PatchedImage]]:
        """Encode the images (`EncodedPrompts.images`) of b prompts whose tokens are known; `samples` are
        their numbers, for messages.
        """
        ...


class TextPrompts:
    """Prompts of a model that reads text alone; `instead` says what to do instead of giving images."""

    def __init__(self, prompts: PromptEncoder, name: str, instead: str) -> None:
        self._prompts, self._name, self._instead = prompts, name, instead

    def encode(self, prompts: Sequence[Prompt], images: Sequence[Sequence[Any]] | None) -> EncodedPrompts:
        """See `Encoder`."""
        if images is not None or any(image_parts(prompt) for prompt in prompts):
            raise UserError(f"{self._name} is used as a text policy and reads no images. {self._instead}")
        return EncodedPrompts(self._prompts.encode(prompts))

    def encoded_images(
        self, images: Sequence[Sequence[Any]], ids: Sequence[Sequence[int]], samples: Sequence[int]
    ) -> list[list[PatchedImage]]:
        """See `Encoder`."""
        return [[] for _ in images]


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Stack prompts of different lengths: ids [b, L] int64, filled up on the left, and their mask."""
    width = max(len(ids) for ids in prompts)
    ids = torch.full((len(prompts), width), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt), dtype=torch.int64)
        mask[row, width - len(prompt) :] = 1
    return ids, mask
