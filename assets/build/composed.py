# SPDX-License-Identifier: Apache-2.0
"""Train the packaged generator on, half of the scenes for prompts that combine sizes with colors or a relation.

"a big red circle and a small cross" or "a small circle above a blue cross" is no prompt of the world's own lists,
but what it says of pairs is what the generator fails at most.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline

from visalign.data.shapes import prompts as language
from visalign.data.shapes.scenes import Scene, sample_scene

from .generator import CATEGORY_WEIGHTS, Generator, train_denoiser
from .stage import Plan, SceneFeed

PROMPTS = 6000
"""Composed prompts that are drawn."""

POOL = 40_000
"""Scenes that are rendered and encoded once."""

SHARE = 0.5
"""Share of the scenes that are for composed prompts."""

RATE = 0.6
"""Share of the first training's learning rates."""


def contained_prompts(first: language.Noun, relation: str | None, second: language.Noun) -> list[str]:
    """List the prompts of the world's own lists that a composed prompt contains."""
    (size_a, color_a, a), (size_b, color_b, b) = first, second
    pairs: list[tuple[language.Noun, str, language.Noun]] = [((size_a, None, a), "and", (size_b, None, b))]
    if color_a and color_b and color_a != color_b:
        pairs.append(((None, color_a, a), "and", (None, color_b, b)))
    if relation:
        pairs.append(((None, None, a), relation, (None, None, b)))
    if relation and color_a and color_b:
        pairs.append(((None, color_a, a), relation, (None, color_b, b)))
    colored = [language.phrase(noun) for noun in (first, second) if noun[1]]
    return colored + [f"{language.phrase(one)} {word} {language.phrase(other)}" for one, word, other in pairs]


def composed_prompts(count: int = PROMPTS, seed: int = 1) -> list[language.Record]:
    """Draw prompts with a size and also a color or a relation; no pair, relation, colored noun is held out."""
    draw, records = random.Random(seed), dict[str, language.Record]()
    sizes, colors = (None, *language.SIZES), (None, *language.COLORS)
    while len(records) < count:
        first, second = (
            (draw.choice(sizes), draw.choice(colors) if draw.random() < 0.6 else None, shape)
            for shape in draw.sample(language.SHAPES, 2)
        )
        relation = draw.choice(language.RELATIONS) if draw.random() < 0.5 else None
        if not (first[0] or second[0]) or not (relation or first[1] or second[1]):
            continue
        contained = map(language.parse_prompt, contained_prompts(first, relation, second))
        if not any(map(language.is_heldout, contained)):
            prompt = f"{language.phrase(first)} {relation or 'and'} {language.phrase(second)}"
            records[prompt] = language.parse_prompt(prompt)
    return list(records.values())


class ComposedFeed(SceneFeed):
    """Training scenes of which a share is for composed prompts."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__(seed, category_weights=CATEGORY_WEIGHTS)
        self._share, self._composed = share, composed_prompts()

    def scene(self, number: int) -> Scene:
        """Draw scene `number`."""
        draw = np.random.default_rng([self._seed, number, 1])
        if draw.random() >= self._share:
            return super().scene(number)
        record = self._composed[int(draw.integers(len(self._composed)))]
        return sample_scene(record, draw, style_weights=self._style_weights)


class FurtherGenerator(Generator):
    """A trained generator that is trained on, at lower rates."""

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        self.transformer.load_state_dict(pipe.transformer.state_dict())
        self.text.first.load_state_dict(pipe.text_encoder.state_dict())
        self.text.second.load_state_dict(pipe.text_encoder_2.state_dict())

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Use the first training's optimizers, at a share of their rates."""
        optimizers = super().optimizers()
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] *= RATE
        return optimizers


def train_composed(base: Path, plan: Plan, share: float = SHARE) -> StableDiffusion3Pipeline:
    """Train a saved generator on and return its pipeline with averaged weights; `share` 0 is the control."""
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(base, dtype=torch.float32)
    autoencoder: AutoencoderKL = pipe.vae.eval()
    generator = FurtherGenerator(pipe)
    generator.compile_transformer()
    trained = train_denoiser(
        generator,
        autoencoder,
        ComposedFeed(plan.seed + 8, share),
        "composed",
        pool=POOL,
        batch=plan.generator_batch,
        steps=plan.composed_steps,
        seed=plan.seed + 8,
        decay=0.998,
    )
    return trained.pipeline(autoencoder)
