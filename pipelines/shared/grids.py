# SPDX-License-Identifier: Apache-2.0
"""Grids of the same prompts and seed at each evaluation: PNG files in the run folder, and in trackers."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from PIL import Image

from visalign.atomic import write_atomic
from visalign.data.sets.prompt_files import record_key
from visalign.evaluation import HeldoutResult

from .parts import Records, evenly_spaced

FOLDER = "samples"  # Folder of the grids in a run folder; one file per evaluation, named by the iterations finished


@dataclass(kw_only=True)
class SampleGrids:
    """Grids of held-out images, one per evaluation; only the first process writes."""

    output: Path  # Run folder
    accelerator: Accelerator
    heldout: Records  # Prompt records of the evaluations on the way
    seed: int
    columns: int  # Images side by side; 0 writes no grid
    keys: list[tuple[str, ...]] = field(default_factory=list)
    """Keys of the prompts from left to right; chosen from the first result's images."""

    def keep(self, iteration: int, result: HeldoutResult) -> None:
        """Write the grid of an evaluation, once per iteration, and hand it to trackers that take images."""
        if not self.accelerator.is_main_process or not self.columns:
            return
        image_of = dict(reversed([*zip(image_samples(result), result.images, strict=True)]))  # the first counts
        if not self.keys:
            sampled = [key for key in map(record_key, self.heldout) if (key, self.seed) in image_of]
            self.keys = list(dict.fromkeys(evenly_spaced(sampled, self.columns)))
        path = self.output / FOLDER / f"{iteration:06d}.png"
        if path.is_file() or not self.keys:
            return
        grid = np.concatenate([image_of[key, self.seed] for key in self.keys], axis=1)
        buffer = io.BytesIO()
        Image.fromarray(grid).save(buffer, "PNG")
        write_atomic(path, buffer.getvalue())
        for tracker in self.accelerator.trackers:
            if hasattr(tracker, "log_images"):
                layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                images = {FOLDER: grid if tracker.name == "aim" else grid[None]}
                tracker.log_images(images, step=iteration, **layout)

    def files(self, limit: int = 12) -> list[tuple[int, Path]]:
        """List (iterations finished, file) of at most `limit` evaluations, evenly spaced, with both ends."""
        files = sorted((self.output / FOLDER).glob("*.png"))
        indices = np.linspace(0, len(files) - 1, min(limit, len(files))).round().astype(int)
        return [(int(files[index].stem), files[index]) for index in indices]


def image_samples(result: HeldoutResult) -> list[tuple[tuple[str, ...], int]]:
    """List (key of the prompt, seed) of each image that a result holds."""
    keys = result.keys
    return [(keys[row], int(result.seeds[row])) for row in result.image_index.tolist()]
