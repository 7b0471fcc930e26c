# SPDX-License-Identifier: Apache-2.0
"""The embedded vision-language model: a small Qwen2-VL that answers, rates and compares shapes images.

First the vision part alone learns to say what is in each cell of the image (objectness, shape, color,
size), its style and its distortion; then the whole model learns to answer questions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from visalign.data.shapes.prompts import COLORS, SHAPES
from visalign.data.shapes.render import render_many
from visalign.data.shapes.scenes import DISTORTIONS, SIZE, STYLES, Scene, size_word

from .judge_data import Questions
from .judge_inputs import GRID, MERGE, PATCH, TOKENS, Packed, answer_states, judge_tokenizer, pack_questions, see
from .judge_measures import answer_accuracy, judge_engine
from .stage import SURROUNDINGS, Plan, fast_autocast, muon_and_adam, packaged, train

_SIZES = ("small", "medium", "big")
_CELL = 1 + len(SHAPES) + len(COLORS) + len(_SIZES)


def new_judge() -> Qwen2VLForConditionalGeneration:
    """Create the untrained model: vision 4 layers of width 128, language 4 of width 160, 2.3 M parameters."""
    folder = packaged("shapes-vlm")
    config = Qwen2VLConfig.from_pretrained(folder, dtype=torch.float32)
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def cell_targets(scenes: list[Scene]) -> Tensor:
    """[N, TOKENS, MERGE², 4] int64: is a centre in this cell, its shape, color, size (−100 where none is)."""
    target = torch.full((len(scenes), GRID, GRID, 4), -100)
    target[..., 0] = 0
    for n, scene in enumerate(scenes):
        for item in scene.objects:
            left, top, side = scene.canvas.box() if scene.canvas else (0, 0, SIZE)
            row = int(top + item.y * side / SIZE) // PATCH
            column = int(left + item.x * side / SIZE) // PATCH
            names = SHAPES.index(item.shape), COLORS.index(item.color), _SIZES.index(size_word(item.radius))
            target[n, row, column] = torch.tensor((1, *names))
    cells = GRID // MERGE
    split = target.view(len(scenes), cells, MERGE, cells, MERGE, 4).permute(0, 1, 3, 2, 4, 5)
    return split.reshape(len(scenes), TOKENS, MERGE**2, 4)


class CellHead(nn.Module):
    """Head that predicts cells, style and distortion from the features; dropped after training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.Linear(width, MERGE**2 * _CELL)
        self.whole = nn.Linear(width, len(STYLES) + len(DISTORTIONS) + 1)

    def forward(self, features: Tensor, scenes: list[Scene]) -> Tensor:
        """Sum of the losses, a scalar."""
        target = cell_targets(scenes)
        objectness, shape, color, size = (
            self.cells(features)
            .view(*target.shape[:3], _CELL)
            .float()
            .split((1, len(SHAPES), len(COLORS), len(_SIZES)), -1)
        )
        weight = torch.tensor(4.0)
        loss = F.binary_cross_entropy_with_logits(objectness[..., 0], target[..., 0].float(), pos_weight=weight)
        for logits, column in ((shape, 1), (color, 2), (size, 3)):
            loss = loss + 0.3 * F.cross_entropy(logits.flatten(0, 2), target[..., column].flatten())
        style, kind, severity = self.whole(features.mean(1)).float().split((len(STYLES), len(DISTORTIONS), 1), -1)
        loss = loss + 0.2 * F.cross_entropy(style, torch.tensor([STYLES.index(s.style) for s in scenes]))
        kinds = torch.tensor([DISTORTIONS.index(s.distortion.kind) for s in scenes])
        strength = torch.tensor([s.distortion.severity for s in scenes])
        return loss + 0.2 * F.cross_entropy(kind, kinds) + 2.0 * F.mse_loss(severity[:, 0], strength)


class Learner(nn.Module):
    """The model with the head of its first part."""

    def __init__(self, model: Qwen2VLForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        self.cells = CellHead(model.config.text_config.hidden_size)


def answer_loss(model: Any, packed: Packed, features: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the weighted negative log-likelihood of the answers' tokens.

    Returns:
        (sum of weight · loss, sum of weight), scalars, for `features` [b, P · TOKENS, H] of the images.
    """
    hidden = answer_states(model, packed, features)
    chosen = packed.labels != -100
    loss = F.cross_entropy(model.lm_head(hidden[chosen]).float(), packed.labels[chosen], reduction="none")
    weight = packed.weights[chosen]
    return (loss * weight).sum(), weight.sum()


def train_judge(plan: Plan, *, questions: int = 8) -> Qwen2VLForConditionalGeneration:
    """Train the vision part (three times the batch), then the whole with `questions` per image and pairs."""
    seed, batch = plan.seed + 4, plan.judge_batch
    torch.manual_seed(seed)
    tokenizer = judge_tokenizer()
    learner, world = Learner(new_judge()), Questions(seed)

    def sight_loss(step: int) -> Tensor:
        scenes = [world.scene(n) for n in range(3 * step * batch, 3 * (step + 1) * batch)]
        with fast_autocast():
            return learner.cells(see(learner.model, render_many(scenes)), scenes)

    vision = nn.ModuleList([learner.model.model.visual, learner.cells])
    adam = torch.optim.AdamW(vision.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.02)
    train(vision, [adam], sight_loss, "judge_vision", steps=plan.judge_vision_steps, decay=0.99)
    learner.train()
    matrices = [p for p in learner.model.model.language_model.layers.parameters() if p.ndim == 2]
    return train(
        learner,
        muon_and_adam(learner, matrices, lr=3e-3, weight_decay=0.01, slow=vision.parameters()),
        lambda step: question_loss(learner, tokenizer, world, step, batch, questions),
        "judge",
        steps=plan.judge_steps,
        decay=0.998,
        check=lambda module: answer_accuracy(judge_engine(module.model), images=100, pairs=100),
    ).model


def widen_judge(base: Path, plan: Plan, *, questions: int = 8) -> Qwen2VLForConditionalGeneration:
    """Continue training the model in `base` on other backgrounds, with specks and on canvases."""
    seed = plan.seed + 6
    torch.manual_seed(seed)
    tokenizer, world = judge_tokenizer(), Questions(seed, surroundings=SURROUNDINGS)
    model = Qwen2VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    learner = Learner(model).train()
    matrices = [p for p in model.model.language_model.layers.parameters() if p.ndim == 2]
    return train(
        learner,
        muon_and_adam(learner, matrices, lr=1.5e-3, weight_decay=0.01),
        lambda step: question_loss(learner, tokenizer, world, step, plan.judge_batch, questions, cells=0.3),
        "judge_grounds",
        steps=plan.judge_ground_steps,
        decay=0.99,
        cooldown=0.5,
    ).model


def question_loss(
    learner: Learner, tokenizer: Any, world: Questions, step: int, batch: int, questions: int, cells: float = 0.1
) -> Tensor:
    """Loss of step n: questions on images, votes on pairs, and the cells at a tenth."""
    numbers = range(step * batch, (step + 1) * batch)
    scenes = [world.scene(number) for number in numbers]
    texts = [world.about(scene, number, questions) for scene, number in zip(scenes, numbers, strict=True)]
    pairs = [world.pair(number) for number in numbers]
    images = [*scenes, *(scene for pair in pairs for scene in pair[:2])]
    with fast_autocast():
        features = see(learner.model, render_many(images))
        single = answer_loss(learner.model, pack_questions(tokenizer, texts, 1, TOKENS), features[:batch])
        both = features[batch:].reshape(len(pairs), 2 * TOKENS, -1)
        double = answer_loss(learner.model, pack_questions(tokenizer, [pair[2] for pair in pairs], 2, TOKENS), both)
        cell_loss = learner.cells(features[:batch], scenes)
    return single[0] / single[1] + double[0] / double[1] + cells * cell_loss
