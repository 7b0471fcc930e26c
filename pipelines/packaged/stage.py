# SPDX-License-Identifier: Apache-2.0
"""What the training stages of `visalign build-assets` share: resumable loop, averaged weights, scenes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from visalign.data.shapes.prompts import CATEGORIES, Record, train_prompts
from visalign.data.shapes.render import render_many
from visalign.data.shapes.scenes import Scene, sample_scene

CATEGORY_WEIGHTS = {
    "single_object": 0.08,
    "two_objects": 0.17,
    "counting": 0.2,
    "colors": 0.1,
    "position": 0.25,
    "color_attribution": 0.2,
}
"""Share of each category in the training pictures."""

STYLE_WEIGHTS = (0.5, 0.2, 0.2, 0.1)
"""Share of flat, outlined, shaded, textured in the training pictures."""

_console = Console(stderr=True)


class SceneFeed:
    """Endless training scenes; number n is a function of (seed, n) alone, so a resumed run sees the same."""

    def __init__(
        self,
        seed: int,
        style_weights: tuple[float, ...] = STYLE_WEIGHTS,
        category_weights: dict[str, float] = CATEGORY_WEIGHTS,
    ) -> None:
        records = train_prompts()
        self._by_category = [[r for r in records if r["tag"] == name] for name in CATEGORIES]
        self._weights = np.array([category_weights[name] for name in CATEGORIES])
        self._seed, self._style_weights = seed, style_weights

    def scene(self, number: int) -> Scene:
        """Scene `number`."""
        rng = np.random.default_rng([self._seed, number])
        group = self._by_category[int(rng.choice(len(CATEGORIES), p=self._weights))]
        record: Record = group[int(rng.integers(len(group)))]
        return sample_scene(record, rng, style_weights=self._style_weights)

    def scenes(self, start: int, count: int) -> list[Scene]:
        """Scenes start .. start + count − 1."""
        return [self.scene(number) for number in range(start, start + count)]


def to_tensor(pictures: np.ndarray) -> Tensor:
    """uint8 [N, H, W, 3] -> float32 [N, 3, H, W] in [−1, 1]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def picture_batches(
    feed: SceneFeed, start_step: int, batch: int, chunk: int = 64
) -> Iterator[tuple[list[Scene], Tensor]]:
    """Batches of fresh scenes with their pictures from `start_step` on, `chunk` batches at a time."""
    step = start_step
    while True:
        scenes = feed.scenes(step * batch, batch * chunk)
        pictures = render_many(scenes)
        for i in range(chunk):
            part = slice(i * batch, (i + 1) * batch)
            yield scenes[part], to_tensor(pictures[part])
        step += chunk


class Average:
    """Exponential moving average of the weights, with the usual warm-up of its decay."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.count = decay, 0
        self.values = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move towards the module's present weights."""
        self.count += 1
        decay = min(self.decay, (1 + self.count) / (10 + self.count))
        now = dict(module.named_parameters(remove_duplicate=False))  # tied weights have two names
        torch._foreach_lerp_([self.values[name] for name in now], list(now.values()), 1.0 - decay)
        for name, value in module.named_buffers():
            if name in self.values:
                self.values[name].copy_(value)


@dataclass(kw_only=True)
class Stage:
    """One training loop: module, optimizers, schedule, saved state."""

    name: str
    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    steps: int
    state_file: Path
    decay: float = 0.999
    warmup: int = 100
    cooldown: float = 0.3
    """Share of the steps at the end over which the learning rate falls linearly to zero."""
    save_every: int = 500
    after: Callable[[int, Average], None] | None = None
    """Called every `save_every` steps with the step and the averaged weights."""

    def run(self, loss_of: Callable[[int], Tensor], resume: bool) -> Average:
        """Train to the last step and return the averaged weights.

        Args:
            loss_of: the loss of step n, a scalar.
            resume: go on from the saved state if there is one.
        """
        average, first = Average(self.module, self.decay), 0
        base = [[group["lr"] for group in opt.param_groups] for opt in self.optimizers]
        if resume and self.state_file.exists():
            first = self._load(average)
        started, running = time.monotonic(), 0.0
        for step in range(first, self.steps):
            for opt, rates in zip(self.optimizers, base, strict=True):
                for group, rate in zip(opt.param_groups, rates, strict=True):
                    group["lr"] = rate * self.schedule(step)
            loss = loss_of(step)
            loss.backward()
            nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            for opt in self.optimizers:
                opt.step()
                opt.zero_grad(set_to_none=True)
            average.update(self.module)
            running = loss.item() if step == first else 0.98 * running + 0.02 * loss.item()
            if (step + 1) % self.save_every == 0 or step + 1 in (first + 100, self.steps):
                self._save(step + 1, average)
                self._report(step + 1, first, running, time.monotonic() - started)
                if self.after is not None:
                    self.after(step + 1, average)
        return average

    def schedule(self, step: int) -> float:
        """Warm-up, constant, linear cool-down: the factor of the learning rate at a step."""
        tail = max(1.0, self.cooldown * self.steps)
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / tail)

    def _report(self, step: int, first: int, loss: float, seconds: float) -> None:
        rate = (step - first) / seconds
        _console.print(
            f"{self.name}: step {step}/{self.steps}, loss {loss:.4f}, {rate:.2f} steps/s, "
            f"{(self.steps - step) / rate / 60:.0f} min left"
        )

    def _save(self, step: int, average: Average) -> None:
        self.state_file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": step,
            "module": self.module.state_dict(),
            "average": average.values,
            "count": average.count,
            "optimizers": [opt.state_dict() for opt in self.optimizers],
        }
        partial = self.state_file.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.state_file)

    def _load(self, average: Average) -> int:
        state = torch.load(self.state_file, weights_only=True)
        self.module.load_state_dict(state["module"])
        average.values, average.count = state["average"], state["count"]
        for opt, saved in zip(self.optimizers, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        _console.print(f"{self.name}: going on from step {state['step']}")
        return int(state["step"])
