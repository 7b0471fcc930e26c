# SPDX-License-Identifier: Apache-2.0
"""Train the packaged generator on, half of the scenes for composed prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline

from visalign.data.shapes.composed import composed_prompts
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


class ComposedFeed(SceneFeed):
    """Training scenes of which a share is for composed prompts."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__(seed, category_weights=CATEGORY_WEIGHTS)
        self._share, self._composed = share, composed_prompts(PROMPTS)

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
