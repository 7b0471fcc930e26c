# SPDX-License-Identifier: Apache-2.0
"""What HEIE's heads read of a frozen model: hidden states and features of a picture whole and in tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from visalign.core import fuse_heatmaps
from visalign.rewards.base.contract import RewardError
from visalign.rewards.vlm.template import Template
from visalign.rewards.weights.resize import resize_smoothly

from .heads import HeieHeads


@dataclass(frozen=True)
class View:
    """A picture as the heads see it: whole first, then its tiles row by row."""

    hidden: Tensor
    """[1 + n², hidden] float32."""
    features: Tensor
    """[1 + n², rows · columns, features] float32."""
    grid: tuple[int, int]
    """(rows, columns) of features."""


@dataclass(frozen=True)
class Maps:
    """Maps of B pictures of one grid."""

    whole: tuple[Tensor, Tensor]
    """(heat logits, log-deviations) [B, h, w] each."""
    tiles: tuple[Tensor, Tensor] | None
    """The same of the tiles, side by side, [B, n·h, n·w]; None without tiles."""
    heat: Tensor
    """[B, n·h, n·w] fused, in [0, 1]."""
    std: Tensor
    """[B, n·h, n·w] fused."""
    score: Tensor
    """[B] logits of plausibility."""


@torch.no_grad()
def views(
    engine: Any, template: Template, queries: Sequence[Any], tiles: int
) -> tuple[list[View | None], list[str | None]]:
    """Hidden states and features of B pictures and their tiles.

    Each tile is enlarged to the size of the picture and asked about with the same prompt.

    Args:
        engine: `rewards.vlm.VisionLanguageEngine` of a Qwen-VL family.
        template: its last position is the map's token.
        queries: B requests of one image each.
        tiles: n of n × n; 1 sees the whole picture alone.

    Returns:
        (views or None, reasons or None).

    Raises:
        RewardError: a model whose features have no grid.
    """
    if not queries:
        return [], []
    if not engine.network.pictures.merge:
        raise RewardError(
            "heie needs features on a grid, as the Qwen-VL families have them; this model cuts tiles."
        )
    parts = [[query.images[0], *cut_tiles(query.images[0], tiles)] for query in queries]
    every = [replace(ask, images=[part]) for ask, cut in zip(queries, parts, strict=True) for part in cut]
    count = len(parts[0])
    said = engine.hidden(template, every)
    found: list[View | None] = []
    reasons: list[str | None] = []
    for number, cut in enumerate(parts):
        here = slice(number * count, (number + 1) * count)
        reason = next(filter(None, said.reasons[here]), None)
        reasons.append(reason)
        if reason is not None:
            found.append(None)
            continue
        shown = [engine.network.pictures.measure(_levels(part)) for part in cut]
        features = engine.network.features(shown)
        merge = engine.network.pictures.merge
        grid = shown[0].grid[1] // merge, shown[0].grid[2] // merge
        stacked = torch.stack([features[one].embeds.float().cpu() for one in shown])
        found.append(View(said.states[here].float().cpu(), stacked, grid))
    return found, reasons


def cut_tiles(image: Tensor, tiles: int) -> list[Tensor]:
    """n × n tiles of a picture, each enlarged to its size; none for n = 1.

    Args:
        image: [3, H, W] in [0, 1].
        tiles: n.
    """
    if tiles == 1:
        return []
    height, width = image.shape[1:]
    rows, columns = ([round(k * size / tiles) for k in range(tiles + 1)] for size in (height, width))
    if min(height, width) < tiles:
        return [image] * tiles**2  # smaller than the grid: nothing to enlarge
    cut = [
        image[:, rows[i] : rows[i + 1], columns[j] : columns[j + 1]]
        for i in range(tiles)
        for j in range(tiles)
    ]
    return [resize_smoothly(part[None].float(), (height, width))[0].clamp(0, 1) for part in cut]


def draw_maps(heads: HeieHeads, seen: Sequence[View]) -> Maps:
    """Maps and scores of pictures of one grid; differentiable in the heads.

    Args:
        heads: mapper and scorer.
        seen: B views with the same grid and number of tiles.
    """
    hidden = torch.stack([view.hidden for view in seen])
    features = torch.stack([view.features for view in seen])
    batch, parts = hidden.shape[:2]
    context = hidden[:, :1].expand_as(hidden)
    own, around = hidden.flatten(0, 1), context.flatten(0, 1)
    logits, log_std = heads.mapper(own, around, features.flatten(0, 1), seen[0].grid)
    logits, log_std = (part.view(batch, parts, *part.shape[1:]) for part in (logits, log_std))
    whole = logits[:, 0], log_std[:, 0]
    if parts == 1:
        heat, std = whole[0].sigmoid(), whole[1].exp()
        return Maps(whole, None, heat, std, heads.scorer(hidden[:, 0], heat))
    side = round((parts - 1) ** 0.5)
    tiled = splice_tiles(logits[:, 1:], side, side), splice_tiles(log_std[:, 1:], side, side)
    wide = [enlarged(part, (tiled[0].shape[1], tiled[0].shape[2])) for part in whole]
    std = torch.stack([wide[1].exp(), tiled[1].exp()])
    heat, weight = fuse_heatmaps(torch.stack([wide[0].sigmoid(), tiled[0].sigmoid()]), std)
    # Maps of one picture share their errors, so the mean deviation is what an average of them has at most.
    return Maps(whole, tiled, heat, (weight * std).sum(0), heads.scorer(hidden[:, 0], heat))


def splice_tiles(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Put maps of tiles [B, rows · columns, h, w] side by side, row by row: [B, rows · h, columns · w].

    Args:
        tiles: maps of the tiles.
        rows: of tiles.
        columns: of tiles.

    Raises:
        ValueError: another number of tiles.
    """
    if tiles.ndim != 4 or tiles.shape[1] != rows * columns:
        raise ValueError(f"tiles must be [B, {rows * columns}, h, w]; got {tuple(tiles.shape)}.")
    batch, _, height, width = tiles.shape
    split = tiles.view(batch, rows, columns, height, width)
    return split.transpose(2, 3).reshape(batch, rows * height, columns * width)


def enlarged(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps [B, h, w] at another size, bilinear."""
    return interpolate(maps[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


def _levels(image: Tensor) -> Tensor:
    return image.detach().cpu().float().mul(255).round().clamp(0, 255).byte()
