# SPDX-License-Identifier: Apache-2.0
"""HEIE-type reward: plausibility of an image, a heatmap of what is wrong, and reasons in words.

Source: Yang et al., "HEIE: MLLM-Based Hierarchical Explainable AIGC Image Implausibility Evaluator", CVPR
2025, arXiv 2411.17261. Its weights and code are not released, so this is its form on a model of one's own: a
frozen vision-language model, small heads trained on its hidden states and features, maps of the whole image
and of its tiles fused by their Laplace deviations, a score from a hidden state and the map, and reasons that
the model writes. Differences: one hidden state, read where the answer begins, replaces the added [MAP] and
[SCORE] tokens, and tiles are asked about one by one, their maps computed with the state of the whole image in
addition to their own, instead of inside one conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.data.assets import resolve_model
from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, check_counts, make_scores, read_request
from visalign.rewards.base.identity import Identity, fingerprint
from visalign.rewards.questions.reward_dance import EXPLAIN
from visalign.rewards.vlm.engine import engine_of
from visalign.rewards.vlm.requests import check_fields, requests
from visalign.rewards.vlm.template import Template
from visalign.rewards.weights.fingerprints import weights_of

from .heads import HeieHeads, View, compute_views, draw_maps, resize_maps

HEADS = "heie_heads.safetensors"
"""Name of the heads' file in a model's folder."""
_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class HeatmapExplanation:
    """Scores of B images, maps of what is wrong, and reasons in words."""

    scores: Scores
    heatmap: Tensor
    """[B, h, w] float32 in [0, 1], 1 where it is surely wrong; NaN in rows that could not be judged."""
    heatmap_std: Tensor
    """[B, h, w] float32 standard deviation of each cell; NaN as `heatmap`."""
    text: Sequence[str]
    """Reasons in words; "" where none were written."""


class Heie:
    """Plausibility in [0, 1] of an image for a prompt; `explain` adds the heatmap and the reasons.

    The maps have `size` × `size` cells whatever the image's shape: a cell is a share of its height and width.

    Args:
        model: folder, hub id or packaged name of a Qwen-VL model, or of heads whose `judge.json` names it as
            "base"; or a loaded `rewards.vlm.VisionLanguageEngine`.
        heads: trained heads or their file; `heie_heads.safetensors` in the model's folder when None.
        tiles: n of n × n tiles in addition to the whole image, 1 for none; as in the heads' training if None.
        size: cells of a returned map on each side.
        template: question that is answered with reasons, and whose answer's first state is read; replaces the
            folder's "explain", or ours.
        write_reasons: let `explain` write them.
        max_new_tokens: of the reasons.
        **loading: of `engine_of`, as are device and precision; the heads are always float32.
    """

    name = "heie"
    unit = "plausibility"
    range = (0.0, 1.0)
    higher_is_better = True

    def __init__(
        self,
        model: Any = "shapes-heie",
        *,
        heads: HeieHeads | str | Path | None = None,
        tiles: int | None = None,
        size: int = 64,
        template: Template | None = None,
        write_reasons: bool = True,
        max_new_tokens: int = 128,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        **loading: Any,
    ) -> None:
        check_counts(self.name, tiles=tiles, size=size)
        if isinstance(model, str | Path):
            loading = {"window": 0, **loading}  # a map is of the whole image
        self.engine = engine_of(model, self.name, device=device, precision=precision, **loading)
        if window := self.engine.network.images.settings().get("window", 0):
            raise ValueError(
                f"{self.name}: the model crops plain borders ({window} pixels), so load it with window=0."
            )
        if heads is None:
            folder = resolve_model(model) if isinstance(model, str | Path) else None
            if not isinstance(folder, Path):
                raise RewardError("heie: a loaded model and a hub id bring no heads; give heads=.")
            heads = folder / HEADS
        if isinstance(heads, HeieHeads):
            self.heads, weights = heads, weights_of(heads)
        else:
            self.heads, weights = HeieHeads.load(heads), fingerprint(Path(heads))
        sizes, width = self.heads.settings, self.engine.model.config.get_text_config().hidden_size
        if (sizes.hidden, sizes.features) != (width, width):  # an image's features are its tokens
            raise ValueError(
                f"{self.name}: the heads read {sizes.hidden} and {sizes.features} numbers, this model has {width}."
            )
        self.template = template or self.engine.template("explain", EXPLAIN)
        self._fields = check_fields(self.template)
        self.tiles, self.size = tiles or sizes.tiles, size
        self._reason_tokens = max_new_tokens if write_reasons else 0
        fields = self.engine.identity_fields(self.template, tiles=self.tiles, size=self.size)
        fields["weights"] = f"{fields['weights']}+{weights}"
        self.identity = Identity(judge=self.name, **fields)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images for their prompts; parts are the map's "mean_heat", "max_heat" and "mean_std"."""
        return self._judge(images, prompts, metadata, 0).scores

    def explain(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> HeatmapExplanation:
        """Return plausibility, heatmap and reasons of B images for their prompts."""
        return self._judge(images, prompts, metadata, self._reason_tokens)

    @torch.no_grad()
    def _judge(
        self, images: Any, prompts: Sequence[str], metadata: Metadata | None, reason_tokens: int
    ) -> HeatmapExplanation:
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.template, reasons, self._fields)
        views, view_reasons = compute_views(self.engine, self.template, queries, self.tiles)
        size, shape = len(request), (self.size, self.size)
        heat, std = (torch.full((size, *shape), torch.nan) for _ in range(2))
        value = torch.full((size,), torch.nan)
        by_grid: dict[tuple[int, int], list[tuple[int, View]]] = {}
        for row, view, reason in zip(rows, views, view_reasons, strict=True):
            reasons[row] = reason
            if view is not None:
                by_grid.setdefault(view.grid, []).append((row, view))
        for group in by_grid.values():
            for start in range(0, len(group), _BATCH):
                batch_rows, batch = zip(*group[start : start + _BATCH], strict=True)
                maps, index = draw_maps(self.heads, batch), torch.tensor(batch_rows)
                heat[index], std[index] = resize_maps(maps.heat, shape), resize_maps(maps.std, shape)
                value[index] = maps.score.sigmoid()
        parts = {"mean_heat": heat.mean((1, 2)), "max_heat": heat.amax((1, 2)), "mean_std": std.mean((1, 2))}
        text = [""] * size
        if reason_tokens and queries:
            drawing = {"answers": 1, "temperature": 0.0, "max_new_tokens": reason_tokens}
            answers = self.engine.generate(self.template, queries, **drawing)
            for row, texts in zip(rows, answers.texts, strict=True):
                text[row] = texts[0] if texts else ""
        scores = make_scores(value, reasons, self.unit, parts=parts, text=text if any(text) else None)
        return HeatmapExplanation(scores=scores, heatmap=heat, heatmap_std=std, text=text)
