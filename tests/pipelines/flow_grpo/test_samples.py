# SPDX-License-Identifier: Apache-2.0
"""Grids of the same prompts on the way: in the run folder, the report and the trackers."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from PIL import Image
from safetensors.torch import load_file

from tests.support.forks import in_fork
from tests.support.models.sd3 import tiny_sd3_pipeline
from tests.support.training.processes import in_forks
from visalign.config import load_config
from visalign.evaluation import load_heldout
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, run
from visalign.pipelines.shared.grids import FOLDER, SampleGrids

PROMPTS = ["a red circle", "two circles", "a blue square", "a cross", "three green squares"]
CHANGES = (
    "model.lora.rank=4",
    "rewards.terms={sharpness: {weight: 1.0}}",
    "rollout={prompts_per_iteration: 2, group_size: 2, steps: 2, batch_size: 4}",
    "optimizer={lr: 1e-3, updates_per_iteration: 1, micro_batch: 8, ema_every: 1}",
    "evaluation={seeds: [3, 1], every: 1, prompts_on_the_way: 4, grid: 3, rewards: {shapes_verifier: {}}}",
    "run={iterations: 2, checkpoint_every: 1, device: cpu}",
)


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


@pytest.fixture(scope="module")
def changes(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_sd3_pipeline().save_pretrained(folder / "model")
    what = {"class": "circle", "count": 1, "color": "red"}
    lines = [json.dumps({"prompt": p, "tag": "colors", "include": [what]}) for p in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    files = (f"data.{name}={folder}/prompts.jsonl" for name in ("train", "heldout"))
    return [*CHANGES, f"model.path={folder}/model", *files]


@pytest.fixture(scope="module")
def finished(changes, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "one"
    run(load_config(FlowGRPOConfig, None, changes), output)
    return output


def test_each_evaluation_leaves_a_grid_of_the_same_prompts(finished):
    files = sorted((finished / FOLDER).iterdir())
    assert [file.name for file in files] == ["000000.png", "000001.png", "000002.png"]
    before = load_heldout(finished / "before.npz")
    indices = [before.prompts.index(PROMPTS[i]) for i in (0, 1, 2)]  # three of four, their first seed
    expected = np.concatenate([before.images[index] for index in indices], axis=1)
    np.testing.assert_array_equal(np.asarray(Image.open(files[0])), expected)
    assert not np.array_equal(np.asarray(Image.open(files[2])), expected)
    page = (finished / "report.html").read_text()
    assert "The same prompts over time" in page and page.count('class="over-time"') == 3


def test_trackers_that_take_images_get_them(finished, tmp_path):
    tracker = Shown()
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    accelerator.init_trackers("test")
    records = [{"prompt": prompt} for prompt in PROMPTS]
    grids = SampleGrids(output=tmp_path, accelerator=accelerator, heldout=records, seed=3, columns=2)
    result = load_heldout(finished / "before.npz")
    for iteration in (0, 5, 5):
        grids.keep(iteration, result)
    assert [step for step, _ in tracker.images] == [0, 5]
    height, width = result.images.shape[1:3]
    assert tracker.images[0][1][FOLDER].shape == (1, height, 2 * width, 3)
    assert [number for number, _ in grids.files()] == [0, 5]


def in_two(output: Path, changes: list[str]) -> None:
    """The run in two processes."""
    config = load_config(FlowGRPOConfig, None, changes)
    if not in_forks(output.parent / "forks", 2, partial(run, config, output)):
        sys.exit("a process ended badly")


@pytest.mark.slow
def test_two_processes_that_divide_the_model_evaluate_and_save_as_one(finished, changes, tmp_path):
    in_fork(in_two, tmp_path / "two", [*changes, "run.sharding=true"])
    for name in ("before", "after"):
        one, two = (load_heldout(folder / f"{name}.npz") for folder in (finished, tmp_path / "two"))
        assert one.prompts == two.prompts and one.seeds.tolist() == two.seeds.tolist()
        assert one.correct.tolist() == two.correct.tolist()
        assert one.image_index.tolist() == two.image_index.tolist()
        for label, score in one.scores.items():
            np.testing.assert_allclose(two.scores[label], score, rtol=1e-4, atol=1e-6)
    assert len(list((tmp_path / "two" / FOLDER).iterdir())) == 3
    mine, other = (load_file(run / "lora/pytorch_lora_weights.safetensors") for run in (finished, tmp_path / "two"))
    assert mine.keys() == other.keys()
    difference = torch.cat([(mine[name] - other[name]).flatten() for name in mine])
    moved = torch.cat([mine[name].flatten() for name in mine if "lora_B" in name or "lora.up" in name])
    assert difference.abs().mean() < 1e-3 * moved.abs().mean()
