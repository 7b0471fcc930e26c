# SPDX-License-Identifier: Apache-2.0
"""What HEIE's heads learn on a frozen model: views are made once, then only the heads run.

The loss sums the Laplace likelihoods of both maps, the absolute error of their fusion, and the cross-entropy
of the score; cells that are wrong are rare and count more (HEIE uses a focal weight for that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from visalign.core import laplace_loss
from visalign.rewards.vlm.template import Template

from .heads import HeieHeads, View, draw_maps, views


@dataclass(frozen=True, kw_only=True)
class HeieData:
    """N images with their truth."""

    seen: Sequence[View]
    """What the heads read; one grid for all."""
    heat: Tensor
    """[N, h, w] in [0, 1], 1 where the image is wrong."""
    score: Tensor
    """[N] in [0, 1], 1 plausible."""

    def __post_init__(self) -> None:
        size = len(self.seen)
        if self.heat.ndim != 3 or len(self.heat) != size or tuple(self.score.shape) != (size,):
            raise ValueError(
                f"{size} views need heat [{size}, h, w] and score [{size}]; got {tuple(self.heat.shape)} and "
                f"{tuple(self.score.shape)}."
            )
        if len({(view.grid, view.features.shape) for view in self.seen}) > 1:
            raise ValueError("All pictures must have one size in features; resize them alike.")


def heie_data(
    engine: Any, template: Template, queries: Sequence[Any], heat: Tensor, score: Tensor, *, tiles: int = 2
) -> HeieData:
    """Views of images with their truth; images that the model cannot take are left out.

    Args:
        engine: `rewards.vlm.VisionLanguageEngine`.
        template: the question at whose answer the state is read.
        queries: N requests of one image.
        heat: [N, h, w].
        score: [N].
        tiles: n of n × n.

    Raises:
        ValueError: shapes that do not fit, or images of different sizes.
    """
    seen, _ = views(engine, template, queries, tiles)
    kept = [place for place, view in enumerate(seen) if view is not None]
    return HeieData(seen=[view for view in seen if view is not None], heat=heat[kept], score=score[kept])


def heie_loss(
    heads: HeieHeads, seen: Sequence[View], heat: Tensor, score: Tensor, *, wrong_weight: float = 4.0
) -> Tensor:
    """Loss of a batch, a scalar.

    Args:
        heads: trained.
        seen: B views.
        heat: [B, h, w] truth in [0, 1].
        score: [B] truth in [0, 1].
        wrong_weight: how much more a cell with heat 1 counts than one with heat 0.
    """
    found = draw_maps(heads, seen)
    loss = F.binary_cross_entropy_with_logits(found.score, score)
    for logits, log_std in filter(None, (found.whole, found.tiles)):
        target = pooled(heat, logits)
        weight = 1 + wrong_weight * target
        nll = laplace_loss(logits.sigmoid(), target, log_std.exp()) + F.binary_cross_entropy_with_logits(
            logits, target, reduction="none"
        )
        loss = loss + (weight * nll).mean() / 2
    target = pooled(heat, found.heat)
    return loss + ((1 + wrong_weight * target) * (found.heat - target).abs()).mean()


def pooled(truth: Tensor, like: Tensor) -> Tensor:
    """Truth [B, h, w] averaged over the cells of a map [B, h', w']."""
    height, width = int(like.shape[1]), int(like.shape[2])
    return F.adaptive_avg_pool2d(truth[:, None], (height, width))[:, 0]
