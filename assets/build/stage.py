# SPDX-License-Identifier: Apache-2.0
"""Parts shared by the stages of the build: plan, training scenes, training loop, saved folders."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from visalign.atomic import umask_permissions
from visalign.data.assets import assets_folder
from visalign.data.shapes.prompts import CATEGORIES, Record, train_prompts
from visalign.data.shapes.render import render_many
from visalign.data.shapes.scenes import Scene, sample_scene
from visalign.precision import autocast_dtype


def fast_autocast() -> torch.autocast:
    """Use bfloat16 where the processor multiplies it, which halves a stage's time."""
    dtype = autocast_dtype("auto", torch.device("cpu"))
    return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)


CATEGORY_WEIGHTS = {
    "single_object": 0.08,
    "two_objects": 0.17,
    "counting": 0.2,
    "colors": 0.1,
    "position": 0.25,
    "color_attribution": 0.2,
}
"""Share of each category in the training images."""

STYLE_WEIGHTS = (0.5, 0.2, 0.2, 0.1)
"""Share of flat, outlined, shaded, textured in the training images."""

SURROUNDINGS = 0.7
"""Share of a judge's training images that get other surroundings than the world's own."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Length of each stage."""

    autoencoder_steps: int = 3300
    autoencoder_batch: int = 16
    generator_steps: int = 5000
    generator_batch: int = 192
    composed_steps: int = 2000
    unet_steps: int = 3000
    unet_batch: int = 64
    clip_steps: int = 1000
    clip_ground_steps: int = 400
    clip_batch: int = 192
    language_steps: int = 1200
    language_batch: int = 128
    language_per_task: int = 15
    """Held-out problems of each kind that the language model's card is measured on."""
    judge_vision_steps: int = 900
    judge_steps: int = 1800
    judge_ground_steps: int = 500
    judge_batch: int = 48
    judge_check: int = 1000
    """Held-out images and pairs that the vision-language model's card is measured on."""
    heie_images: int = 3000
    heie_steps: int = 800
    heie_check: int = 600
    """Held-out images that the heatmap heads' card is measured on."""
    seed: int = 1


class SceneFeed:
    """Endless training scenes; scene n depends on (seed, n) alone."""

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


def packaged(name: str) -> Path:
    """Return the folder of a packaged model, whose architecture and tokenizer a new one takes over."""
    return assets_folder() / name


def rendered(scenes: Sequence[Scene]) -> Tensor:
    """Render scenes: images [N, 3, 64, 64] float32 in [−1, 1]."""
    images = torch.from_numpy(render_many(list(scenes)))
    return images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def train(
    module: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_of: Callable[[int], Tensor],
    name: str,
    *,
    steps: int,
    decay: float = 0.999,
    warmup: int = 100,
    cooldown: float = 0.3,
    report_every: int = 500,
    check: Callable[[Any], dict[str, float]] | None = None,
) -> Any:
    """Train a module in place and give it the exponential moving average of its weights."""

    def average(old: Any, now: Any, number: Any) -> None:
        torch._foreach_lerp_(old, now, 1.0 - min(decay, float((1 + number) / (10 + number))))

    averaged = AveragedModel(module, multi_avg_fn=average).eval()
    averaged.n_averaged += 1  # the first update is an average, too
    started, running = time.monotonic(), 0.0
    for step in range(steps):
        share = min(1.0, (step + 1) / warmup, (steps - step) / max(1.0, cooldown * steps))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * share
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        averaged.update_parameters(module)
        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        completed = step + 1
        if completed % report_every == 0 or completed in (100, steps):
            pace = completed / (time.monotonic() - started)
            measures = {"loss": running} | (check(averaged.module) if check else {})
            words = [f"step {completed}/{steps}", *(f"{key} {value:.3f}" for key, value in measures.items())]
            print(f"{name}: {', '.join(words)}, {(steps - completed) / pace / 60:.0f} min left", flush=True)
    module.load_state_dict(averaged.module.state_dict())
    return module.eval()


def muon_and_adam(
    module: nn.Module, matrices: Sequence[nn.Parameter], *, lr: float, **options: Any
) -> list[torch.optim.Optimizer]:
    """Use Muon for the blocks' matrices and AdamW for the rest; `slow` parameters get a fifth of its rate."""
    slow = list(options.pop("slow", ()))
    assigned = {id(parameter) for parameter in (*matrices, *slow)}
    groups: list[dict[str, Any]] = [{"params": [p for p in module.parameters() if id(p) not in assigned]}]
    groups += [{"params": slow, "lr": lr / 5}] if slow else []
    settings = {"lr": lr, "betas": (0.9, 0.98), "weight_decay": 0.0, **options}
    muon = torch.optim.Muon(list(matrices), lr=2e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(groups, **settings)]


def tidy(folder: Path) -> None:
    """Make a saved model readable for everybody, loaded as float32, without the path of its build."""
    umask_permissions(folder)
    for file in (*folder.rglob("*config.json"), *folder.glob("model_index.json")):
        config = json.loads(file.read_text(encoding="utf-8"))
        for entry in ("_name_or_path", "is_local", "local_files_only"):
            config.pop(entry, None)
        if "dtype" in config:  # diffusers widens its own parts by default, transformers follows this entry
            config["dtype"] = "float32"
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def size_of(folder: Path) -> float:
    """Size of a folder in MB (10⁶ bytes)."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def machine() -> str:
    """Processor and library versions, for the cards."""
    threads = torch.get_num_threads()
    number = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{number} of {platform.machine()}, torch {torch.__version__.split('+')[0]}"
