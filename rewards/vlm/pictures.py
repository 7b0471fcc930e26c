# SPDX-License-Identifier: Apache-2.0
"""How families of vision-language models take pictures in: their size in tokens, their way to the tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from visalign.vision.patches import PatchCutter
from visalign.vision.pictures import Picture, PictureFeatures, pixel_digest, tower_features

PATCHES = 1 << 16
"""Patches in one pass through the tower."""


@dataclass(frozen=True)
class SeenPicture:
    """A picture that was not cut yet; two are equal if their pixels are."""

    digest: str
    grid: tuple[int, int, int] = field(compare=False)
    """(frames, rows, columns) of patches; (tiles, 1, 1) where a model takes tiles."""
    tokens: int = field(compare=False)
    """Places that it takes in the prompt."""
    pixels: Tensor = field(compare=False, repr=False)
    """uint8 [3, H, W]."""


class PictureEncoder(Protocol):
    """How a family of models takes pictures in."""

    merge: int
    """Patches that become one token, on each side; 0 where positions know no grid."""

    def measure(self, pixels: Tensor) -> SeenPicture:
        """A picture's size in tokens; ValueError with the reason where the model cannot take it."""
        ...

    def features(self, trunk: Any, shown: Sequence[SeenPicture]) -> list[PictureFeatures]:
        """Pictures through the tower, in one pass."""
        ...

    def settings(self) -> dict[str, Any]:
        """All that happens between pixels and tower, for the identity."""
        ...


class PatchEncoder:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: patches of a resized picture; `changes` are fields of `PatchCutter`
    that are to differ, e.g. min_pixels and max_pixels.
    """

    def __init__(self, image_processor: Any, **changes: Any) -> None:
        self.cutter = PatchCutter.of(image_processor, **changes)
        self.merge = self.cutter.merge

    def measure(self, pixels: Tensor) -> SeenPicture:
        grid = self.cutter.grid(pixels.shape[1], pixels.shape[2])
        return SeenPicture(pixel_digest(pixels), grid, self.cutter.tokens(grid), pixels)

    def features(self, trunk: Any, shown: Sequence[SeenPicture]) -> list[PictureFeatures]:
        cut = [Picture(s.digest, s.grid, s.tokens, self.cutter.cut(s.pixels)) for s in shown]
        return tower_features(trunk, cut)

    def settings(self) -> dict[str, Any]:
        return self.cutter.settings()


class TileEncoder:
    """InternVL: tiles of one size, cut by the library's processor; each picture by itself."""

    merge = 0

    def __init__(self, processor: Any) -> None:
        self._images, self._length = processor.image_processor, int(processor.image_seq_length)

    def measure(self, pixels: Tensor) -> SeenPicture:
        tiles = self._images.get_number_of_image_patches(*pixels.shape[1:], {"crop_to_patches": True})
        return SeenPicture(pixel_digest(pixels), (int(tiles), 1, 1), int(tiles) * self._length, pixels)

    def features(self, trunk: Any, shown: Sequence[SeenPicture]) -> list[PictureFeatures]:
        cut = [
            self._images(
                images=[s.pixels],
                crop_to_patches=True,
                return_tensors="pt",
                input_data_format="channels_first",
            )["pixel_values"]
            for s in shown
        ]
        device = trunk.get_input_embeddings().weight.device
        found = trunk.get_image_features(torch.cat(cut).to(device), return_dict=True).pooler_output
        parts = found.split([len(tiles) for tiles in cut])
        return [PictureFeatures(part.flatten(0, 1)) for part in parts]

    def settings(self) -> dict[str, Any]:
        names = ("size", "image_mean", "image_std", "resample", "min_patches", "max_patches")
        return {name: str(getattr(self._images, name, None)) for name in names}


def by_patches(shown: Sequence[SeenPicture]) -> list[list[SeenPicture]]:
    """Parts of at most `PATCHES` patches, one picture at least."""
    parts: list[list[SeenPicture]] = []
    room = 0
    for picture in shown:
        size = picture.grid[0] * picture.grid[1] * picture.grid[2]
        if not parts or size > room:
            parts.append([])
            room = PATCHES
        parts[-1].append(picture)
        room -= size
    return parts
