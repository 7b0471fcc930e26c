# SPDX-License-Identifier: Apache-2.0
"""HEIE-type judge: how plausible an image is, where it is not, and why.

Source: Yang et al., "HEIE: MLLM-Based Hierarchical Explainable AIGC Image Implausibility Evaluator", CVPR
2025, arXiv 2411.17261. Its weights and code are not released, so this is its form on a model of one's own: a
frozen vision-language model, small heads trained on its hidden states and features (`training`), maps of
the whole image and of its tiles fused by their Laplace deviations, a score from a hidden state and the map,
and reasons that the model writes. Differences: one hidden state, read where the answer begins, stands for the
added [MAP] and [SCORE] tokens, and tiles are asked about one by one, their maps made with the state of the
whole image beside their own, instead of inside one conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, make_scores, read_request
from visalign.rewards.base.identity import Identity, fingerprint
from visalign.rewards.questions.reward_dance import EXPLAIN
from visalign.rewards.vlm.engine import engine_of
from visalign.rewards.vlm.requests import check_fields, requests
from visalign.rewards.vlm.template import Template
from visalign.rewards.weights.fingerprints import weights_of

from .heads import HeieHeads, draw_maps, enlarged, views

HEADS = "heie_heads.safetensors"
"""Name of the heads in a model's folder."""

_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class HeatmapExplanation:
    """What a judge that explains itself returns: scores of B images, maps of what is wrong, and words."""

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


class Heie:
    """Plausibility in [0, 1] of an image for a prompt; `explain` adds the heatmap and the reasons.

    The maps have `size` × `size` cells whatever the image's shape: a cell is a share of its height and
    width.
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
        """Load the model and its heads.

        Args:
            model: folder, hub id or packaged name of a Qwen-VL model, or of heads whose `judge.json` names it
                as "base"; or a loaded `rewards.vlm.VisionLanguageEngine`.
            heads: trained heads or their file; `heie_heads.safetensors` in the model's folder when None.
            tiles: n of n × n tiles beside the whole image, 1 for none; as the heads were trained when None.
            size: cells of a returned map on each side.
            template: the question at whose answer the state is read, and that is answered with reasons;
                instead of the folder's "explain", or ours.
            write_reasons: let `explain` write them.
            max_new_tokens: of the reasons.
            device: where the model runs.
            precision: of its weights, as in `engine_of`; heads are float32 always.
            **loading: of `engine_of`: attention, device_map, quantization, max_tokens_per_batch, ...

        Raises:
            ValueError: options that are not allowed, heads of other sizes than the model's, or a loaded
                engine that reads a part of an image (`window`).
            FileNotFoundError: there are no heads.
            RewardError: model or heads cannot be used.
        """
        if (tiles is not None and tiles < 1) or size < 1:
            raise ValueError(
                f"{self.name}: tiles is {tiles} and size {size}; allowed are whole numbers from 1."
            )
        if isinstance(model, str | Path):
            loading = {"window": 0, **loading}  # a map is of the whole image
        self.engine = engine_of(model, self.name, device=device, precision=precision, **loading)
        _check_whole(self.engine, self.name)
        self.heads = heads if isinstance(heads, HeieHeads) else HeieHeads.load(_find(heads, model))
        sizes, width = self.heads.settings, self.engine.model.config.get_text_config().hidden_size
        if (sizes.hidden, sizes.features) != (width, width):  # an image's features are its tokens
            raise ValueError(
                f"{self.name}: the heads read hidden states of {sizes.hidden} numbers and features of "
                f"{sizes.features}, this model has {width} of both; give heads that were trained on it."
            )
        self.template = template or self.engine.template("explain", EXPLAIN)
        self._fields = check_fields(self.template)
        self.tiles, self.size = tiles or sizes.tiles, size
        self._tokens = max_new_tokens if write_reasons else 0
        given = "" if isinstance(heads, HeieHeads) else fingerprint(_find(heads, model))
        options = {"tiles": self.tiles, "heads": given or weights_of(self.heads)}
        self.identity = Identity(judge=self.name, **self.engine.identity_fields(self.template, **options))

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Plausibility per (image, prompt), with the map's "mean_heat", "max_heat" and "mean_std"."""
        return self._judge(images, prompts, metadata, 0).scores

    def explain(
        self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> HeatmapExplanation:
        """Plausibility, heatmap and reasons per (image, prompt)."""
        return self._judge(images, prompts, metadata, self._tokens)

    @torch.no_grad()
    def _judge(
        self, images: Any, prompts: Sequence[str], metadata: Metadata | None, tokens: int
    ) -> HeatmapExplanation:
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.template, reasons, self._fields)
        seen, said = views(self.engine, self.template, queries, self.tiles)
        for row, reason in zip(rows, said, strict=True):
            reasons[row] = reason
        size, shape = len(request), (self.size, self.size)
        heat, std = (torch.full((size, *shape), torch.nan) for _ in range(2))
        value = torch.full((size,), torch.nan)
        by_grid: dict[tuple[int, int], list[int]] = {}
        for place, view in enumerate(seen):
            if view is not None:
                by_grid.setdefault(view.grid, []).append(place)
        for places in by_grid.values():
            for start in range(0, len(places), _BATCH):
                part = places[start : start + _BATCH]
                found = draw_maps(self.heads, [v for v in (seen[p] for p in part) if v is not None])
                at = torch.tensor([rows[place] for place in part])
                heat[at], std[at] = (enlarged(maps, shape) for maps in (found.heat, found.std))
                value[at] = found.score.sigmoid()
        parts = {"mean_heat": heat.mean((1, 2)), "max_heat": heat.amax((1, 2)), "mean_std": std.mean((1, 2))}
        text = [""] * size
        if tokens and queries:
            reply = self.engine.generate(
                self.template, queries, answers=1, temperature=0.0, max_new_tokens=tokens
            )
            for row, answers in zip(rows, reply.texts, strict=True):
                text[row] = answers[0] if answers else ""
        scores = make_scores(value, reasons, self.unit, parts=parts, text=text if any(text) else None)
        return HeatmapExplanation(scores=scores, heatmap=heat, heatmap_std=std, text=text)


def _find(heads: str | Path | None, model: Any) -> Path:
    """The file of the heads."""
    if isinstance(heads, str | Path):
        return Path(heads)
    if heads is None and isinstance(model, str | Path):
        from visalign.data.assets import resolve_model

        place = resolve_model(model)
        if isinstance(place, Path):
            return place / HEADS
    raise RewardError(
        "heie: a loaded model and a hub id bring no heads; give heads=, the HeieHeads or the file that "
        "`train_heads` made."
    )


def _check_whole(engine: Any, name: str) -> None:
    """Refuse a model that reads a part of an image: a map is of all that was given."""
    if window := engine.network.images.settings().get("window", 0):
        raise ValueError(
            f"{name}: the model reads {window} pixels of a picture with a plain border, and a map is of the "
            "whole picture. Load it by VisionLanguageEngine.from_pretrained(..., window=0)."
        )
