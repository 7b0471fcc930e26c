# SPDX-License-Identifier: Apache-2.0
"""Connected components of many label maps at once, by runs, without loops over images, colors or pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components


@dataclass(frozen=True, kw_only=True)
class Components:
    """N components of B label maps; ordered by image, label, and the first pixel in reading order."""

    image: np.ndarray  # [N], index of the map
    label: np.ndarray  # [N], label
    area: np.ndarray  # [N], pixels
    top: np.ndarray  # [N], first row of the bounding box; `bottom` is the row after its last
    bottom: np.ndarray
    left: np.ndarray
    right: np.ndarray
    name: np.ndarray  # [N], value of its pixels in `owner`
    owner: np.ndarray  # [B, H, W], the component of each pixel; −1 on the ground

    def __len__(self) -> int:
        return len(self.image)

    def centres(self) -> np.ndarray:
        """Compute the centres (x, y) of the bounding boxes, [N, 2]."""
        return np.stack([self.left + self.right, self.top + self.bottom], 1) / 2.0

    def masks(self, side: int) -> np.ndarray:
        """Sample each component's box at `side` × `side` nearest pixels: [N, side·side] float32, 0 or 1."""
        grid = np.arange(side) + 0.5
        rows = self.top[:, None] + (grid * (self.bottom - self.top)[:, None] / side).astype(int)
        columns = self.left[:, None] + (grid * (self.right - self.left)[:, None] / side).astype(int)
        owners = self.owner[self.image[:, None, None], rows[:, :, None], columns[:, None, :]]
        return (owners == self.name[:, None, None]).reshape(len(self), side * side).astype(np.float32)


def find_components(labels: np.ndarray, min_area: int) -> Components:
    """Find components of at least `min_area` pixels of equal labels [B, H, W] (0 is ground) touching along an edge."""
    height, width = labels.shape[1:]
    is_object = labels > 0
    begins = is_object.copy()
    begins[..., 1:] &= labels[..., 1:] != labels[..., :-1]
    run = np.cumsum(begins.reshape(-1), dtype=np.int32).reshape(labels.shape) - 1
    start = np.flatnonzero(begins)
    member = _connect_runs(labels, is_object, begins, run, len(start))
    length = np.bincount(run[is_object], minlength=len(start))

    by_member = np.argsort(member, kind="stable")  # runs of a component side by side, in reading order
    first = np.flatnonzero(np.diff(member[by_member], prepend=-1))
    row, column = start[by_member] // width % height, start[by_member] % width
    head = start[by_member[first]]
    area = _reduce_runs(np.add, length[by_member], first)
    image, label = head // (height * width), labels.reshape(-1)[head]
    valid = np.flatnonzero(area >= min_area)
    valid = valid[np.lexsort((head[valid], label[valid], image[valid]))]
    return Components(
        image=image[valid],
        label=label[valid],
        area=area[valid],
        top=_reduce_runs(np.minimum, row, first)[valid],
        bottom=_reduce_runs(np.maximum, row, first)[valid] + 1,
        left=_reduce_runs(np.minimum, column, first)[valid],
        right=_reduce_runs(np.maximum, column + length[by_member], first)[valid],
        name=member[by_member[first]][valid],
        owner=np.where(is_object, member[run] if len(start) else -1, -1),
    )


def _reduce_runs(reduce: np.ufunc, values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Reduce the runs of each component, which begin at `first`, to one value."""
    return reduce.reduceat(values, first) if len(first) else values[:0]


def _connect_runs(
    labels: np.ndarray, is_object: np.ndarray, begins: np.ndarray, run: np.ndarray, count: int
) -> np.ndarray:
    """Number the component [count] of each run: runs of one label that touch in neighbouring rows connect."""
    touch = is_object[:, 1:] & (labels[:, 1:] == labels[:, :-1])
    new = touch.copy()  # one contact of two runs is enough
    new[..., 1:] &= ~touch[..., :-1] | begins[:, 1:, 1:]
    upper, lower = run[:, :-1][new], run[:, 1:][new]
    graph = coo_array((np.ones(len(upper), np.int8), (upper, lower)), shape=(count, count))
    return connected_components(graph, directed=False)[1] if count else np.empty(0, np.int32)
