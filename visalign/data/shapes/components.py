# SPDX-License-Identifier: Apache-2.0
"""Connected components of many label maps at once, by runs: no loop over images, colors or pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components


@dataclass(frozen=True, kw_only=True)
class Components:
    """N components of B label maps; ordered by image, label, and the first pixel in reading order."""

    image: np.ndarray
    """[N], which of the B maps."""
    label: np.ndarray
    """[N], its label there."""
    area: np.ndarray
    """[N], pixels."""
    top: np.ndarray
    """[N], first row of the bounding box ..."""
    bottom: np.ndarray
    """... and the row after its last."""
    left: np.ndarray
    """[N], first column ..."""
    right: np.ndarray
    """... and the column after its last."""
    name: np.ndarray
    """[N], what stands in `owner` at its pixels."""
    owner: np.ndarray
    """[B, H, W], the component of each pixel; −1 on the ground."""

    def __len__(self) -> int:
        return len(self.image)

    def masks(self, side: int) -> np.ndarray:
        """[N, side·side] float32, 0 or 1: each component's bounding box at `side` × `side` nearest pixels."""
        grid = np.arange(side) + 0.5
        rows = self.top[:, None] + (grid * (self.bottom - self.top)[:, None] / side).astype(int)
        columns = self.left[:, None] + (grid * (self.right - self.left)[:, None] / side).astype(int)
        seen = self.owner[self.image[:, None, None], rows[:, :, None], columns[:, None, :]]
        return (seen == self.name[:, None, None]).reshape(len(self), side * side).astype(np.float32)


def find_components(labels: np.ndarray, min_area: int) -> Components:
    """Pixels of one label that touch along an edge belong together; neighbours of different labels do not.

    Args:
        labels: [B, H, W] unsigned, 0 is ground.
        min_area: smaller components are left out.
    """
    height, width = labels.shape[1:]
    seen = labels > 0
    begins = seen.copy()
    begins[..., 1:] &= labels[..., 1:] != labels[..., :-1]
    run = np.cumsum(begins.reshape(-1), dtype=np.int32).reshape(labels.shape) - 1
    start = np.flatnonzero(begins)
    member = _joined(labels, seen, begins, run, len(start))
    length = np.bincount(run[seen], minlength=len(start))

    by_member = np.argsort(member, kind="stable")  # runs of a component side by side, in reading order
    first = np.flatnonzero(np.diff(member[by_member], prepend=-1))
    row, column = start[by_member] // width % height, start[by_member] % width
    head = start[by_member[first]]
    area = _reduced(np.add, length[by_member], first)
    image, label = head // (height * width), labels.reshape(-1)[head]
    kept = np.flatnonzero(area >= min_area)
    kept = kept[np.lexsort((head[kept], label[kept], image[kept]))]
    return Components(
        image=image[kept],
        label=label[kept],
        area=area[kept],
        top=_reduced(np.minimum, row, first)[kept],
        bottom=_reduced(np.maximum, row, first)[kept] + 1,
        left=_reduced(np.minimum, column, first)[kept],
        right=_reduced(np.maximum, column + length[by_member], first)[kept],
        name=member[by_member[first]][kept],
        owner=np.where(seen, member[run] if len(start) else -1, -1),
    )


def _reduced(how: np.ufunc, values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """One value per component: `how` over its runs, which begin at `first`."""
    return how.reduceat(values, first) if len(first) else values[:0]


def _joined(
    labels: np.ndarray, seen: np.ndarray, begins: np.ndarray, run: np.ndarray, count: int
) -> np.ndarray:
    """[count] the component of each run: runs of one label that touch in neighbouring rows are joined."""
    touch = seen[:, 1:] & (labels[:, 1:] == labels[:, :-1])
    new = touch.copy()  # one contact of two runs is enough
    new[..., 1:] &= ~touch[..., :-1] | begins[:, 1:, 1:]
    upper, lower = run[:, :-1][new], run[:, 1:][new]
    graph = coo_array((np.ones(len(upper), np.int8), (upper, lower)), shape=(count, count))
    return connected_components(graph, directed=False)[1] if count else np.empty(0, np.int32)
