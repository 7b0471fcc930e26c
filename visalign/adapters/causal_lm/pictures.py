# SPDX-License-Identifier: Apache-2.0
"""Pictures cut into patches by the model's image processor, and remembered."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor

from visalign.errors import UserError
from visalign.vision.pictures import Picture, pixel_digest
from visalign.vision.pixels import read_pixels

MEMORY = 1 << 28
"""Bytes of patches that are remembered: pictures are met again at each update of a rollout."""


class PictureProcessor:
    """Cuts pictures into patches, each by itself, so that none depends on its neighbours."""

    def __init__(self, image_processor: Any) -> None:
        self._processor = image_processor
        self._known: OrderedDict[str, Picture] = OrderedDict()
        self._bytes = 0

    def __call__(self, image: Any, where: str) -> Picture:
        """Read a picture: PIL image, uint8 tensor [3, H, W], or float tensor [3, H, W] in [0, 1]; `where`
        says which one it is, for messages.
        """
        pixels = read_pixels(image, where)
        digest = pixel_digest(pixels)
        if digest not in self._known:
            self._remember(self._cut(pixels, digest, where))
        self._known.move_to_end(digest)
        return self._known[digest]

    def _cut(self, pixels: Tensor, digest: str, where: str) -> Picture:
        try:
            cut = self._processor(images=[pixels], return_tensors="pt", input_data_format="channels_first")
        except ValueError as error:
            raise UserError(
                f"The image processor refuses {where} of {pixels.shape[1]} × {pixels.shape[2]} pixels: "
                f"{error}. Crop or resize it."
            ) from error
        frames, rows, columns = (int(n) for n in cut["image_grid_thw"][0])
        return Picture(
            digest=digest,
            grid=(frames, rows, columns),
            tokens=frames * rows * columns // self._processor.merge_size**2,
            patches=cut["pixel_values"].float(),
        )

    def _remember(self, picture: Picture) -> None:
        self._known[picture.digest] = picture
        self._bytes += picture.patches.nbytes
        while self._bytes > MEMORY and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._bytes -= oldest.patches.nbytes
