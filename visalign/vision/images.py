# SPDX-License-Identifier: Apache-2.0
"""An image cut into patches, and what the vision tower of a model makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """Return 32 hex digits that tell images uint8 [3, H, W] apart."""
    digest = hashlib.blake2b(f"{tuple(pixels.shape)}".encode(), digest_size=16)
    digest.update(pixels.cpu().contiguous().numpy().data)
    return digest.hexdigest()


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
