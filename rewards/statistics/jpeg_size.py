# SPDX-License-Identifier: Apache-2.0
"""JPEG size: how many kilobytes an image takes, a cheap stand-in for its amount of detail.

flow_grpo's `jpeg_incompressibility` is this value at quality 95; its `jpeg_compressibility` is the negative.
The byte count depends on the JPEG library that PIL was built with, so compare numbers of one machine only.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import PIL
import torch

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import make_scores, read_request, scatter
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import to_pil


class JpegSize:
    """Size of the JPEG file of an image in kilobytes of 1000 bytes.

    The value is always the size; `prefer` says which direction is better.
    """

    name = "jpeg_size"
    unit = "kB"
    range = (0.0, float("inf"))

    def __init__(self, quality: int = 95, prefer: str = "larger") -> None:
        """Choose the encoder's quality and the direction.

        Args:
            quality: JPEG quality, 1 to 95 (above 95 PIL switches quantisation off in parts).
            prefer: "larger" rewards detail, "smaller" rewards simplicity.

        Raises:
            ValueError: quality or prefer is none of the allowed.
        """
        if isinstance(quality, bool) or not isinstance(quality, int) or not 1 <= quality <= 95:
            raise ValueError(f"jpeg_size: quality is {quality!r}; allowed are whole numbers from 1 to 95.")
        if prefer not in ("larger", "smaller"):
            raise ValueError(f"jpeg_size: prefer is {prefer!r}; allowed are 'larger' and 'smaller'.")
        self.quality = quality
        self.higher_is_better = prefer == "larger"
        self.identity = Identity(
            judge=self.name, model="PIL", options={"quality": quality, "pillow": PIL.__version__}
        )

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Encode each image and count its bytes; prompts and metadata are not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, sizes = [], []
        for row, image in request.images.readable():
            try:
                sizes.append(self._kilobytes(image))
            except (OSError, ValueError) as error:
                height, width = image.shape[1:]
                reasons[row] = f"JPEG cannot hold it, {width}×{height} pixels (sides up to 65500): {error}"
            else:
                rows.append(row)
        return make_scores(scatter(sizes, rows, len(request)), reasons, self.unit)

    def _kilobytes(self, image: torch.Tensor) -> float:
        buffer = io.BytesIO()
        to_pil(image).save(buffer, format="JPEG", quality=self.quality)
        return buffer.tell() / 1000
