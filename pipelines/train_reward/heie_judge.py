# SPDX-License-Identifier: Apache-2.0
"""HEIE's heads to be trained on boxes around faults: maps of a frozen vision-language model and their score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from visalign.rewards.heie.heads import (
    HeieHeads,
    HeieSettings,
    View,
    compute_views,
    draw_maps,
    map_losses,
    resize_maps,
)
from visalign.rewards.heie.judge import HEADS
from visalign.rewards.questions.reward_dance import EXPLAIN
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine
from visalign.rewards.vlm.requests import check_fields
from visalign.rewards.vlm.template import JudgeSettings
from visalign.training.reward.batch import Outputs, RewardBatch

from .config import TrainRewardConfig
from .examples import Example, Examples
from .judges import TrainedJudge, base_name, refuse


class HeieJudge(TrainedJudge):
    """New heads on the features of a frozen model, each image of which is read once and stays in memory."""

    def __init__(self, config: TrainRewardConfig, device: torch.device) -> None:
        model: Any = config.model
        self.engine = VisionLanguageEngine.from_pretrained(model.path, device=device, window=0)
        self.template = self.engine.template("explain", EXPLAIN)
        self._fields = check_fields(self.template)
        width = self.engine.model.config.get_text_config().hidden_size
        sizes = {"width": model.width, "cells": model.cells, "tiles": model.tiles}
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            heads = HeieHeads(HeieSettings(hidden=width, features=width, **sizes)).to(device)
        super().__init__(config, heads, device)
        self.wrong_weight: float = config.objective.wrong_weight  # type: ignore[union-attr]  # heie's task alone

    def remember(self, examples: Examples) -> Examples:
        """Put the features in the images' stead."""

        @cache
        def viewed(number: int) -> Example:
            example = examples[number]
            return replace(example, images=(), view=self._view(example))

        return replace(examples, example=viewed)

    def _view(self, example: Example) -> View:
        queries = [Query(images=[example.images[0]], prompt=example.prompt, fields=self._fields)]
        (view,), reasons = compute_views(self.engine, self.template, queries, self.module.settings.tiles)
        self.engine.clear_features()
        refuse(reasons, [example.prompt])
        assert view is not None  # it has no reason
        return view

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        views = [example.view or self._view(example) for example in examples]
        heat = torch.stack([example.heat for example in examples if example.heat is not None])
        target = torch.tensor([example.target for example in examples])
        return RewardBatch(inputs=(views, heat), size=len(examples), target=target)

    def __call__(self, inputs: Any) -> Outputs:
        """Compute "value" (logits of plausibility), "map_loss" and the maps "heat" next to their truth."""
        views, truth = inputs
        by_grid: dict[tuple[int, int], list[int]] = {}
        for row, view in enumerate(views):
            by_grid.setdefault(view.grid, []).append(row)
        value, loss, heat = [], [], []
        for rows in by_grid.values():  # maps of one grid are drawn together
            grid = [
                replace(views[row], **{n: getattr(views[row], n).to(self.device) for n in ("hidden", "features")})
                for row in rows
            ]
            maps = draw_maps(self.module, grid)
            value.append(maps.score)
            loss.append(map_losses(maps, truth[rows].to(self.device), wrong_weight=self.wrong_weight))
            heat.append(resize_maps(maps.heat, (truth.shape[1], truth.shape[2])))
        order = torch.tensor([row for rows in by_grid.values() for row in rows], device=self.device).argsort()
        outputs = {"value": value, "map_loss": loss, "heat": heat}
        return {name: torch.cat(part)[order] for name, part in outputs.items()} | {"truth": truth}

    def save(self, folder: Path) -> None:
        """Write the heads (float32) and a `judge.json` that names their base, which `Heie` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        self.module.eval().save(folder / HEADS)
        rest = {"base": base_name(self.settings.path, folder)}
        templates = {"explain": self.template}
        JudgeSettings(templates=templates, positions=self.engine.positions, rest=rest).write(folder)
