# SPDX-License-Identifier: Apache-2.0
"""HEIE's heads on a frozen vision-language model: heatmaps of the image and of its tiles, fused, and a score.

Source: Yang et al., "HEIE", CVPR 2025, arXiv 2411.17261: two cross-attentions, of the map token to the
features and back, give the map; the score comes from a token's hidden state together with the map. The
released repository holds only data, so sizes and layers are ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, binary_cross_entropy_with_logits, interpolate, pixel_shuffle

from visalign.atomic import umask_permissions
from visalign.core import fuse_heatmaps, laplace_loss, soft_clamp
from visalign.model_files import LOADING_ERRORS, open_tensors
from visalign.rewards.base.contract import RewardError
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import Template
from visalign.rewards.weights.checkpoint_files import load_strict
from visalign.vision.pixels import to_levels
from visalign.vision.resize import resize_smoothly

FORMAT = "visalign-heie-2"
LOG_STD = (-4.0, 1.0)
"""Bounds of the maps' log-deviation: heat is in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class HeieSettings:
    hidden: int  # Width of the language part's hidden states
    features: int  # Width of an image's features
    width: int = 96  # Width of the heads; divisible by 4 and by `attention_heads`
    attention_heads: int = 4
    queries: int = 4  # Number of query vectors made from a hidden state
    cells: int = 8  # Cells of the map on each side of a feature
    tiles: int = 2  # n of the n × n tiles that the heads were trained with


class MapHead(nn.Module):
    """Heat in [0, 1] and its log-deviation, `cells` × `cells` of them for each feature."""

    def __init__(self, settings: HeieSettings) -> None:
        super().__init__()
        width, cells = settings.width, settings.cells
        self.cells, self.queries = cells, settings.queries
        self.token, self.context = (nn.Linear(settings.hidden, settings.queries * width) for _ in range(2))
        # the names of the layers are the keys of saved heads
        self.picture = nn.Linear(settings.features, width)
        self.norm_token, self.norm_picture, self.norm_out = (nn.LayerNorm(width) for _ in range(3))
        self.to_picture = nn.MultiheadAttention(width, settings.attention_heads, batch_first=True)
        self.to_token = nn.MultiheadAttention(width, settings.attention_heads, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.out = nn.Linear(width, 2 * cells * cells)

    def forward(
        self, hidden: Tensor, context: Tensor, features: Tensor, grid: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Compute maps [B, rows · cells, columns · cells]: (heat logits, log-deviations).

        `hidden` [B, hidden] are states of the map's token, `context` those of the whole image, since the
        object that a tile lacks may be in another tile; `features` are [B, rows · columns, features].
        """
        positions = _position_embedding(*grid, self.norm_token.normalized_shape[0]).to(features)
        tokens = torch.cat([self.token(hidden), self.context(context)], 1)
        tokens = self.norm_token(tokens.view(len(hidden), 2 * self.queries, -1))
        image = self.norm_picture(self.picture(features) + positions)
        tokens = tokens + self.to_picture(tokens, image, image, need_weights=False)[0]
        attended = self.to_token(image, tokens, tokens, need_weights=False)[0]
        mixed = self.norm_out(image + attended + self.mix(torch.cat([image, attended * image], -1)))
        maps = pixel_shuffle(self.out(mixed).mT.unflatten(2, grid), self.cells)
        return maps[:, 0], soft_clamp(maps[:, 1] - 1.5, *LOG_STD)


class ScoreHead(nn.Module):
    """Logit from a hidden state and a heatmap of any size."""

    def __init__(self, settings: HeieSettings) -> None:
        super().__init__()
        width = settings.width
        self.token = nn.Sequential(nn.Linear(settings.hidden, width), nn.GELU(), nn.Linear(width, width))
        self.heat = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GELU()
        )
        self.pooled = nn.Linear(32, width)
        self.out = nn.Sequential(nn.GELU(), nn.Linear(width, 1))

    def forward(self, hidden: Tensor, heat: Tensor) -> Tensor:
        """Compute logits [B] of plausibility from hidden states [B, hidden] and heat [B, h, w] in [0, 1]."""
        features = self.heat(heat[:, None])
        pooled = torch.cat([features.mean((2, 3)), features.amax((2, 3))], 1)
        return self.out(self.token(hidden) + self.pooled(pooled))[:, 0]


class HeieHeads(nn.Module):
    """Both heads, with a file format."""

    def __init__(self, settings: HeieSettings) -> None:
        super().__init__()
        self.settings = settings
        self.mapper, self.scorer = MapHead(settings), ScoreHead(settings)

    def save(self, file: str | Path, *, half: bool = False) -> None:
        """Write weights and sizes as safetensors; with `half` in float16, read as float32 again."""
        from safetensors.torch import save_file

        metadata = {"format": FORMAT, "settings": json.dumps(asdict(self.settings))}
        dtype = torch.float16 if half else torch.float32
        state = {key: value.detach().to("cpu", dtype).contiguous() for key, value in self.state_dict().items()}
        save_file(state, str(file), metadata=metadata)
        umask_permissions(Path(file))

    @classmethod
    def load(cls, file: str | Path) -> HeieHeads:
        """Read a file of `save` as float32."""
        if not Path(file).is_file():
            raise FileNotFoundError(
                f"There are no HEIE heads at {file}; take 'shapes-heie', or train some: python -m assets.build.heie."
            )
        try:
            with open_tensors(Path(file)) as opened:
                metadata = opened.metadata() or {}
                state = {key: opened.get_tensor(key).float() for key in opened.keys()}  # no mapping
            if metadata["format"] != FORMAT:
                raise ValueError(f"the format is {metadata['format']}")
            heads = cls(HeieSettings(**json.loads(metadata["settings"])))
        except LOADING_ERRORS as error:
            raise RewardError(f"{file} is no file of HEIE heads, {FORMAT}: {error!r}.") from error
        load_strict(heads, state, str(file))
        return heads.eval()


def _position_embedding(rows: int, columns: int, width: int) -> Tensor:
    """Compute sines and cosines of row and column, as shares of the image: [rows · columns, width]."""
    step = torch.exp(torch.arange(width // 4) * (-math.log(50.0) / max(width // 4 - 1, 1))) * math.pi * 25
    down, across = (((torch.arange(n) + 0.5) / n)[:, None] * step for n in (rows, columns))
    y = torch.cat([down.sin(), down.cos()], 1)[:, None].expand(-1, columns, -1)
    x = torch.cat([across.sin(), across.cos()], 1)[None].expand(rows, -1, -1)
    return torch.cat([y, x], -1).reshape(rows * columns, width)


@dataclass(frozen=True)
class View:
    """Inputs of the heads for one image: the whole first, then its tiles row by row."""

    hidden: Tensor  # [1 + n², hidden] float32
    features: Tensor  # [1 + n², rows · columns, features] float32
    grid: tuple[int, int]  # (rows, columns) of features


@dataclass(frozen=True)
class Maps:
    """Maps of B images of one grid."""

    whole: tuple[Tensor, Tensor]  # (heat logits, log-deviations) [B, h, w] each
    tiles: tuple[Tensor, Tensor] | None  # the same of the tiles, side by side, [B, n·h, n·w]
    heat: Tensor  # [B, n·h, n·w] fused, in [0, 1]
    std: Tensor  # [B, n·h, n·w] fused
    score: Tensor  # [B] logits of plausibility


@torch.no_grad()
def compute_views(
    engine: Any, template: Template, queries: Sequence[Query], tiles: int
) -> tuple[list[View | None], list[str | None]]:
    """Compute hidden states and features of B images and their n × n tiles (n = 1: only of the whole).

    Each tile is enlarged to the image's size and asked about with the same prompt; the template's last
    position is the map's token. A request has a view or a reason.
    """
    if not queries:
        return [], []
    images = engine.network.images
    if not images.merge:
        raise RewardError("heie needs features on a grid, as Qwen-VL models have them; this one cuts tiles.")
    parts = [[query.images[0], *cut_tiles(query.images[0], tiles)] for query in queries]
    part_queries = [replace(query, images=[part]) for query, cut in zip(queries, parts, strict=True) for part in cut]
    hidden = engine.hidden(template, part_queries)
    result: list[View | None] = []
    reasons: list[str | None] = []
    for number, cut in enumerate(parts):
        rows = slice(number * len(cut), (number + 1) * len(cut))
        reasons.append(next(filter(None, hidden.reasons[rows]), None))
        if reasons[-1] is not None:
            result.append(None)
            continue
        measured = [images.measure(to_levels(part)) for part in cut]
        features = engine.network.features(measured)
        grid = measured[0].grid[1] // images.merge, measured[0].grid[2] // images.merge
        stacked = torch.stack([features[image].embeds.float().cpu() for image in measured])
        result.append(View(hidden.states[rows].float().cpu(), stacked, grid))
    return result, reasons


def cut_tiles(image: Tensor, tiles: int) -> list[Tensor]:
    """Cut an image [3, H, W] in [0, 1] into n × n tiles, each enlarged to its size; none for n = 1."""
    if tiles == 1:
        return []
    height, width = image.shape[1:]
    if min(height, width) < tiles:
        return [image] * tiles**2  # smaller than the grid: nothing to enlarge
    y, x = ([round(k * size / tiles) for k in range(tiles + 1)] for size in (height, width))
    cut = [image[:, y[i] : y[i + 1], x[j] : x[j + 1]] for i in range(tiles) for j in range(tiles)]
    return [resize_smoothly(part[None].float(), (height, width))[0].clamp(0, 1) for part in cut]


def draw_maps(heads: HeieHeads, views: Sequence[View]) -> Maps:
    """Compute maps and scores of images with one grid and number of tiles; differentiable in the heads."""
    hidden = torch.stack([view.hidden for view in views])
    features = torch.stack([view.features for view in views])
    batch, parts = hidden.shape[:2]
    context = hidden[:, :1].expand_as(hidden)
    logits, log_std = heads.mapper(hidden.flatten(0, 1), context.flatten(0, 1), features.flatten(0, 1), views[0].grid)
    logits, log_std = (part.view(batch, parts, *part.shape[1:]) for part in (logits, log_std))
    whole = logits[:, 0], log_std[:, 0]
    if parts == 1:
        heat, std = whole[0].sigmoid(), whole[1].exp()
        return Maps(whole, None, heat, std, heads.scorer(hidden[:, 0], heat))
    side = math.isqrt(parts - 1)
    tiled = splice_tiles(logits[:, 1:], side, side), splice_tiles(log_std[:, 1:], side, side)
    enlarged = [resize_maps(part, (tiled[0].shape[1], tiled[0].shape[2])) for part in whole]
    std = torch.stack([enlarged[1].exp(), tiled[1].exp()])
    heat, weight = fuse_heatmaps(torch.stack([enlarged[0].sigmoid(), tiled[0].sigmoid()]), std)
    # Maps of one image share their errors, so the mean deviation is what an average of them has at most.
    return Maps(whole, tiled, heat, (weight * std).sum(0), heads.scorer(hidden[:, 0], heat))


def map_losses(maps: Maps, heat: Tensor, *, wrong_weight: float = 4.0) -> Tensor:
    """[B] Laplace likelihoods of the maps of image and tiles plus the absolute error of their fusion.

    `heat` is the truth [B, h, w] in [0, 1]. Wrong cells are rare: one with heat 1 counts 1 + `wrong_weight` times as
    much as one with heat 0 (HEIE uses a focal weight for that).
    """
    target = pooled(heat, maps.heat)
    loss = ((1 + wrong_weight * target) * (maps.heat - target).abs()).mean((1, 2))
    for logits, log_std in filter(None, (maps.whole, maps.tiles)):
        target = pooled(heat, logits)
        nll = laplace_loss(logits.sigmoid(), target, log_std.exp())
        nll = nll + binary_cross_entropy_with_logits(logits, target, reduction="none")
        loss = loss + ((1 + wrong_weight * target) * nll).mean((1, 2)) / 2
    return loss


def pooled(truth: Tensor, like: Tensor) -> Tensor:
    """Average the truth [B, h, w] over the cells of a map [B, h', w']."""
    return adaptive_avg_pool2d(truth[:, None], (int(like.shape[1]), int(like.shape[2])))[:, 0]


def splice_tiles(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Put maps of tiles [B, rows · columns, h, w] side by side, row by row: [B, rows · h, columns · w]."""
    batch, _, height, width = tiles.shape
    split = tiles.view(batch, rows, columns, height, width)
    return split.transpose(2, 3).reshape(batch, rows * height, columns * width)


def resize_maps(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize maps [B, h, w], bilinear."""
    return interpolate(maps[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]
