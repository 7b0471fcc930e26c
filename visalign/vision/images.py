# SPDX-License-Identifier: Apache-2.0
"""An image cut into patches, and what the vision tower of a model makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PatchedImage:
    """An image cut into patches; two are equal if their pixels are."""

    digest: str  # Digest of the pixels before resizing
    grid: tuple[int, int, int] = field(compare=False)  # (frames, rows, columns) of patches
    tokens: int = field(compare=False)  # Tokens that it takes in the prompt
    patches: Tensor = field(compare=False, repr=False)  # [rows · columns, numbers of a patch] float32, on the CPU


@dataclass(frozen=True)
class ImageFeatures:
    """Vision tower features of one image."""

    embeds: Tensor  # [tokens, H], in place of the embeddings of the image tokens
    deeper: tuple[Tensor, ...] = ()  # [tokens, H] each, added behind the first layers of the language part (DeepStack)

    @property
    def nbytes(self) -> int:
        return self.embeds.nbytes + sum(layer.nbytes for layer in self.deeper)

    def clone(self) -> ImageFeatures:
        """Copy the tensors."""
        return ImageFeatures(self.embeds.clone(), tuple(layer.clone() for layer in self.deeper))


def pixel_digest(pixels: Tensor) -> str:
    """Return 32 hex digits that tell images uint8 [3, H, W] apart; on a GPU they are others than on the CPU."""
    digest = hashlib.blake2b(f"{tuple(pixels.shape)}".encode(), digest_size=16)
    content = level_sums(pixels) if pixels.is_cuda else pixels.contiguous()
    digest.update(content.cpu().numpy().data)
    return digest.hexdigest()


def level_sums(pixels: Tensor) -> Tensor:
    """Compute two sums Σ w_i x_i modulo 2^64 of each block of levels x on their device, int64 [blocks, 2].

    The factors w are fixed random numbers. Two blocks have the same sums with a probability below 2^−100: levels
    differ by less than 2^8. A host takes milliseconds to hash an image that a GPU scores in ten.
    """
    factors = _factors(pixels.device)
    blocks = pixels.flatten().split(factors.shape[1])
    return torch.stack([(block.long() * factors[:, : len(block)]).sum(1) for block in blocks])


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    """Return fixed factors, int64 [2, 2^18]."""
    generator = torch.Generator().manual_seed(0x5EED)
    with torch.inference_mode(False):
        return torch.randint(-(2**63), 2**63 - 1, (2, 1 << 18), generator=generator).to(device)


def tower_features(trunk: Any, images: Sequence[PatchedImage]) -> list[ImageFeatures]:
    """Pass images through a Qwen-VL's vision tower at once (DeepStack's deeper features: arXiv 2406.04334)."""
    device = trunk.get_input_embeddings().weight.device
    sizes = "cpu" if device.type == "meta" else device  # its values are read, even for a model without weights
    output = trunk.get_image_features(
        torch.cat([image.patches for image in images]).to(device),
        torch.tensor([image.grid for image in images], device=sizes),
        return_dict=True,
    )
    layers = getattr(output, "deepstack_features", None) or ()
    rows = [len(embeds) for embeds in output.pooler_output]
    layers = [
        layer.split(rows) if isinstance(layer, Tensor) else layer for layer in layers
    ]  # by transformers' version
    return [
        ImageFeatures(embeds, tuple(layer[index] for layer in layers))
        for index, embeds in enumerate(output.pooler_output)
    ]


def insert_features(embeds: Tensor, image_mask: Tensor, features: Sequence[ImageFeatures]) -> dict[str, Any]:
    """Return the input of a language part: `inputs_embeds` [b, S, H] with images at their tokens, where `image_mask`
    [b, S] is True, row by row, and for DeepStack `visual_pos_masks` and `deepstack_visual_embeds`.
    """
    if not features:
        return {"inputs_embeds": embeds}
    inserted = torch.cat([image.embeds for image in features]).to(embeds.device, embeds.dtype)
    inputs: dict[str, Any] = {"inputs_embeds": embeds.masked_scatter(image_mask[..., None], inserted)}
    layers = [torch.cat(layer) for layer in zip(*(image.deeper for image in features), strict=True)]
    if layers:
        inputs |= {"visual_pos_masks": image_mask, "deepstack_visual_embeds": layers}
    return inputs
