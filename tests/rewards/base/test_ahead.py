# SPDX-License-Identifier: Apache-2.0
"""Images decoded ahead in processes: the same scores, failures by row, and no process left."""

from __future__ import annotations

import io
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from visalign.data.sets.records import QualityRecord, QualitySet
from visalign.interfaces import RewardCapabilities, Scores
from visalign.pipelines.evaluate.scores import score_quality
from visalign.pipelines.score.image_rows import ImageRow
from visalign.pipelines.score.score import score_rows
from visalign.rewards import load_reward
from visalign.rewards.base import ahead
from visalign.rewards.base.images import load_images

DECODED = ["plain.png", "wide.jpg", "alpha.png", "turned.jpg", "content"]


class Detail:
    """Mean difference of neighbouring pixels; keeps the names of the types it received."""

    name, unit, range, higher_is_better, identity = "detail", "level", (0.0, 1.0), True, None
    capabilities = RewardCapabilities(takes_gpu_images=True)

    def __init__(self, stop_after: int = 1000) -> None:
        self.types: list[str] = []
        self.stop_after = stop_after

    def score(self, images: Any, prompts: Sequence[str], metadata: Any = None) -> Scores:
        self.types += [type(image).__name__ for image in images]
        if len(self.types) > self.stop_after:
            raise KeyboardInterrupt
        batch = load_images(images)
        value = [torch.nan if image is None else float(image.double().diff().abs().mean()) for image in batch.images]
        return Scores(value=torch.tensor(value), valid=batch.valid, unit=self.unit, reason=batch.reasons)


@pytest.fixture
def rows(tmp_path: Path) -> list[ImageRow]:
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    noise.save(tmp_path / "plain.png")
    noise.resize((50, 20)).save(tmp_path / "wide.jpg")
    noise.convert("RGBA").save(tmp_path / "alpha.png")
    noise.save(tmp_path / "turned.jpg", exif=exif)
    noise.resize((3, 20)).save(tmp_path / "thin.png")
    noise.resize((300, 200)).save(tmp_path / "large.png")
    Image.fromarray(rng.integers(0, 60000, (9, 9), dtype=np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "plain.png").read_bytes()[:300])
    names = [*DECODED[:4], "thin.png", "large.png", "deep.png", "broken.png", "gone.png"]
    content = io.BytesIO()
    noise.rotate(90).save(content, "PNG")
    inside = ImageRow(image="content", prompt="a", content=content.getvalue())
    return [inside, *(ImageRow(image=str(tmp_path / name), prompt=name) for name in names)]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "worker_count", lambda images: 2)
    monkeypatch.setattr(ahead, "LARGEST", 10_000)


def test_scores_and_reasons_are_those_without_processes(rows: list[ImageRow], request: Any) -> None:
    serial, parallel = Detail(), Detail()
    expected = score_rows(rows, {"detail": serial}, batch_size=4)
    request.getfixturevalue("processes")
    assert score_rows(rows, {"detail": parallel}, batch_size=4) == expected
    assert [row.reason is None for row in expected] == [True] * 8 + [False] * 2
    assert serial.types.count("Tensor") == 0 and parallel.types.count("Tensor") == len(DECODED)


def test_an_evaluation_reads_the_same_images(rows: list[ImageRow], request: Any) -> None:
    files = [row for row in rows if row.content is None]
    records = tuple(QualityRecord(prompt=row.prompt, image=row.image, mos=0.0) for row in files)
    expected = score_quality(QualitySet(name="x", records=records), Detail())
    request.getfixturevalue("processes")
    ours = score_quality(QualitySet(name="x", records=records), reward := Detail())
    np.testing.assert_array_equal(ours.value, expected.value)
    assert reward.types.count("Tensor") == len(DECODED) - 1


@pytest.mark.usefixtures("processes")
def test_an_interrupted_scoring_leaves_no_process(rows: list[ImageRow]) -> None:
    with pytest.raises(KeyboardInterrupt):
        score_rows(rows * 20, {"detail": Detail(stop_after=20)}, batch_size=4)
    end = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < end:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


def test_processes_are_for_judges_on_a_gpu(rows: list[ImageRow], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ahead.worker_count(10**6) == 0 or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for cores, beside, workers in ((1, 1, 0), (2, 1, 0), (8, 1, 6), (8, 2, 2)):
        monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        monkeypatch.setattr(ahead.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(beside))
        assert ahead.worker_count(10**6) == workers
    monkeypatch.undo()
    assert not ahead.takes_decoded(load_reward("clip_score", run_device="cpu"))
    assert list(ahead.decode_ahead(rows, str, [load_reward("jpeg_size")])) == [None] * len(rows)
