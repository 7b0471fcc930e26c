# SPDX-License-Identifier: Apache-2.0
"""What a judge that explains itself returns: scores, a heatmap of what is wrong, and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from visalign.interfaces import Scores


@dataclass(frozen=True, kw_only=True)
class HeatmapExplanation:
    """Scores of B images with maps of the same rows."""

    scores: Scores
    heatmap: Tensor
    """[B, h, w] float32 in [0, 1], 1 where it is surely wrong; NaN in rows that could not be judged."""
    heatmap_std: Tensor
    """[B, h, w] float32 standard deviation of each cell; NaN as `heatmap`."""
    text: Sequence[str]
    """Reasons in words; "" where none were written."""

    def __post_init__(self) -> None:
        size = len(self.scores)
        shapes = tuple(self.heatmap.shape), tuple(self.heatmap_std.shape)
        if self.heatmap.ndim != 3 or shapes[0] != shapes[1] or shapes[0][0] != size or len(self.text) != size:
            raise ValueError(
                f"An explanation of {size} images has maps [{size}, h, w] and {size} texts; got maps "
                f"{shapes[0]} and {shapes[1]}, and {len(self.text)} texts."
            )

    def __len__(self) -> int:
        return len(self.scores)
