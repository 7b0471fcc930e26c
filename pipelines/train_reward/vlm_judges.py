# SPDX-License-Identifier: Apache-2.0
"""Judges on a vision-language model to be trained: HPSv3's head, answers and ratings, HEIE's heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visalign.atomic import umask_permissions
from visalign.core.preference.fidelity import rating_distribution
from visalign.rewards.chat.deepseek_grm import META
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
from visalign.rewards.hpsv3.head import HIDDEN, ConditionedHead, RanknetHead
from visalign.rewards.hpsv3.model import REWARD_TOKEN, HPSv3Model
from visalign.rewards.questions.reward_dance import EXPLAIN, PAIR, YES_NO
from visalign.rewards.questions.visual_quality_r1 import RATING
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine
from visalign.rewards.vlm.requests import check_fields
from visalign.rewards.vlm.template import JudgeSettings, Template
from visalign.rewards.vlm.yes_no import NO, YES, token_set
from visalign.training.reward.batch import Outputs, RewardBatch

from .config import TrainRewardConfig
from .examples import Example, Examples, pair_batch, pair_images
from .judges import SeeingJudge, TrainedJudge, base_name, cast, refuse, trainable


class Hpsv3Judge(SeeingJudge):
    """Mean and log-deviation, read by a new head at the reward token, whose embedding trains unless train=head."""

    def __init__(self, config: TrainRewardConfig, device: torch.device) -> None:
        super().__init__(config, device)
        size = self.engine.model.config.get_text_config().hidden_size
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            widths = self.settings.head or HIDDEN
            condition = {} if self.settings.condition is None else {"condition": self.settings.condition}
            head = (ConditionedHead if condition else RanknetHead)(size, hidden=(widths[0], widths[1]), **condition)
            self.judge = HPSv3Model(self.engine, head.to(device))
            self.judge.add_token()
            self.unfreeze()
        for name, parameter in self.judge.head.named_parameters():
            parameter.requires_grad_("pool_attn" not in name)  # it has no effect on single images
        self.module = self.judge
        if self.settings.train == "lora":
            self._train_token()

    @property
    def token(self) -> Any:
        """The reward token's embedding, where it is a parameter of its own."""
        return getattr(self.judge, "reward_token", None)

    def _train_token(self) -> None:
        embedding, token_id = self.engine.model.get_input_embeddings(), self._token_id()
        self.judge.register_parameter("reward_token", nn.Parameter(embedding.weight[token_id].detach().clone()))

        def put(_: nn.Module, arguments: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
            return torch.where((arguments[0] == token_id)[..., None], self.token.to(embedded), embedded)

        embedding.register_forward_hook(put)

    def _token_id(self) -> int:
        return self.engine.processor.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        parameters = [(f"backbone.{name}", p) for name, p in trainable(self.engine.model)]
        parameters += [(f"head.{name}", p) for name, p in trainable(self.judge.head)]
        return parameters if self.token is None else [*parameters, ("reward_token", self.token)]

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        prompts = [example.prompt for example in examples]
        batch = self.judge.encode(pair_images(examples), [*prompts, *prompts])
        refuse(batch.reasons, [*prompts, *prompts])
        batch = replace(batch, iteration=torch.tensor([example.iteration for example in examples] * 2))
        return pair_batch(batch, examples, heldout=heldout)

    def __call__(self, inputs: Any) -> Outputs:
        with self.precision():
            mean, log_std = self.judge(inputs)
        return {"value": mean, "log_std": log_std}

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write what `HPSv3` reads: adapters and head beside the base, or the whole model."""
        cast(self.judge.eval(), self.save_dtype)
        if self.token is not None:
            weight = self.engine.model.get_input_embeddings().weight
            weight[self._token_id()] = self.token.to(weight)
        base = None if self.settings.train == "full" else base_name(self.settings.path, folder)
        self.judge.save_pretrained(folder, base=base)
        umask_permissions(folder)


class AnswerJudge(SeeingJudge):
    """A judge that is read where its answer begins: yes/no on one or two images or on a text, or a rating."""

    def __init__(self, config: TrainRewardConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.kind, self.is_student = config.model.kind, config.objective.task == "rating_distribution"
        default = {"yes_no": YES_NO, "pair": PAIR, "rating": RATING, "critique": META}[self.kind]
        self.template = self.engine.template(META.name if self.kind == "critique" else self.kind, default)
        self._fields = check_fields(self.template)
        if self.kind == "rating":
            words = self.template.words["scores"]
            self.template = replace(self.template, words={"scores": words})  # whole ratings are learnt
            self.scores = torch.tensor([float(str(word)) for word in words])
            self.ids = self.engine.token_ids([str(word) for word in words])
        else:
            self.yes, self.no = yes_and_no(self.engine, self.template)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.unfreeze()

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        """Encode images of pairs one by one, pairs in both orders, rated images, or answers about images."""

        def query(example: Example, *sides: int, prompt: str = "", **fields: str) -> Query:
            images = [example.images[side] for side in sides]
            return Query(images=images, prompt=prompt or example.prompt, fields={**fields, **self._fields})  # as saved

        if self.kind == "rating":
            queries = [query(example, 0, prompt="-") for example in examples]
        elif self.kind == "critique":
            queries = [query(example, 0, critique=example.critique) for example in examples]
        else:
            orders = ((0,), (1,)) if self.kind == "yes_no" else ((1, 0), (0, 1))
            queries = [query(example, *order) for order in orders for example in examples]
        rows, reasons = self.engine.encode(self.template, queries)
        refuse(reasons, [example.prompt for example in examples] * (len(queries) // len(examples)))
        if self.kind == "yes_no" or (self.kind == "pair" and heldout):
            scale = 1.0 if self.kind == "yes_no" else 0.5  # half the difference of both orders
            return pair_batch((rows, scale), examples, heldout=heldout)
        target = torch.tensor([example.label if self.kind == "pair" else example.target for example in examples])
        if self.is_student and not heldout:
            spread = torch.tensor([example.spread for example in examples])
            target = rating_distribution(target, spread, self.scores)
        if self.kind == "pair":
            target = torch.cat([target, 1 - target])
        return RewardBatch(inputs=(rows, 1.0), size=len(examples), target=target)

    def __call__(self, inputs: Any) -> Outputs:
        rows, scale = inputs
        with self.precision():
            states = self.engine.states(rows)
        if self.kind != "rating":
            odds, log_mass = self.odds(states, self.yes, self.no)
            return {"value": scale * odds, "log_mass": log_mass}
        logits, log_mass = self.answers(states, self.ids)
        prob = logits.softmax(-1)
        scores = self.scores.to(prob)
        mean = prob @ scores
        variance = (prob * (scores - mean[:, None]).square()).sum(-1)
        outputs = {"value": mean, "log_std": 0.5 * variance.clamp(min=1e-12).log(), "log_mass": log_mass}
        return {**outputs, "log_prob": logits.log_softmax(-1)}

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        self.write(folder, [self.template])


def yes_and_no(engine: Any, template: Template) -> tuple[list[int], list[int]]:
    """Ids of the first tokens of both answers."""
    words: Any = template.words
    return token_set(engine, words.get("yes"), YES), token_set(engine, words.get("no"), NO)


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
            grid = [views[row] for row in rows]
            grid = [replace(v, hidden=v.hidden.to(self.device), features=v.features.to(self.device)) for v in grid]
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
