# SPDX-License-Identifier: Apache-2.0
"""Grids of the same prompts on the way, in the folder and the trackers; by a run: test_edits.py."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from tests.support.evaluation_samples import make_result
from visalign.pipelines.shared.grids import FOLDER, SampleGrids

PROMPTS = [f"prompt {n}" for n in range(5)]


class Shown(GeneralTracker):
    """A tracker that takes images."""

    name, requires_logging_directory = "shown", False

    def __init__(self) -> None:
        self.images: list[tuple[int, dict[str, Any]]] = []
        super().__init__()

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        del values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        del values, step, kwargs

    def log_images(self, values: dict[str, Any], step: int) -> None:
        self.images.append((step, values))


def test_trackers_that_take_images_get_them(tmp_path):
    shown = Shown()
    accelerator = Accelerator(cpu=True, log_with=[shown])
    accelerator.init_trackers("test")
    records = [{"prompt": prompt} for prompt in PROMPTS]
    grids = SampleGrids(output=tmp_path, accelerator=accelerator, heldout=records, seed=0, columns=2)
    result = make_result(0.5, prompts=len(PROMPTS), seeds=1)
    for iteration in (0, 5, 5):
        grids.keep(iteration, result)
    assert [step for step, _ in shown.images] == [0, 5]
    height, width = result.images.shape[1:3]
    assert shown.images[0][1][FOLDER].shape == (1, height, 2 * width, 3)
    assert [number for number, _ in grids.files()] == [0, 5]
