# SPDX-License-Identifier: Apache-2.0
"""Scores in short and their page: spread, best and worst by the reward's direction, failures by reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.support.judges.brightness import Brightness
from visalign.pipelines.cli.app import app
from visalign.pipelines.score.image_rows import ImageRow
from visalign.pipelines.score.report import MOST_BINS, histogram, score_summary, write_score_page
from visalign.pipelines.score.score import score_rows


@pytest.fixture
def table(tmp_path: Path) -> list[ImageRow]:
    """Six images from black to white, two that are broken, one that is missing."""
    folder = tmp_path / "images"
    folder.mkdir()
    for level in range(6):
        Image.new("RGB", (8, 8), (51 * level,) * 3).save(folder / f"{level}.png")
    for name in ("bad1.png", "bad2.png"):
        (folder / name).write_bytes(b"no image")
    names = [f"{level}.png" for level in range(6)] + ["bad1.png", "bad2.png", "gone.png"]
    return [ImageRow(image=str(folder / name), prompt="x") for name in names]


def summary(table: list[ImageRow], **rewards: Any) -> dict[str, Any]:
    return score_summary(score_rows(table, rewards), rewards, seconds=1.0)


def test_the_numbers_by_hand(table: list[ImageRow]) -> None:
    found = summary(table, up=Brightness(std=0.25), down=Brightness(higher_is_better=False))
    json.dumps(found, allow_nan=False)
    up, down = found["rewards"]
    assert found["images"] == 9 and found["prompts"] == 1 and up["judged"] == 6 and up["failed"] == 3
    assert up["mean"] == pytest.approx(0.5) and up["mean_std"] == pytest.approx(0.25)
    assert up["spread"] == pytest.approx(np.std([0, 0.2, 0.4, 0.6, 0.8, 1])) and down["mean_std"] is None
    assert up["quantiles"]["50"] == pytest.approx(0.5) and up["quantiles"]["100"] == pytest.approx(1)
    assert [Path(row["image"]).stem for row in up["best"]] == ["5", "4", "3"]
    assert [Path(row["image"]).stem for row in up["worst"]] == ["0", "1", "2"]
    assert [Path(row["image"]).stem for row in down["best"]] == ["0", "1", "2"]
    assert sum(up["histogram"]["counts"]) == 6 and up["histogram"]["edges"][0] == pytest.approx(0)


def test_failures_are_counted_by_reason_without_the_name(table: list[ImageRow]) -> None:
    decoded, missing = summary(table, up=Brightness())["rewards"][0]["failures"]
    assert decoded["count"] == 2 and [Path(n).name for n in decoded["images"]] == ["bad1.png", "bad2.png"]
    assert "cannot be decoded" in decoded["reason"] and "bad1" not in decoded["reason"]
    assert missing["count"] == 1 and "no such image file" in missing["reason"]


def test_a_far_outlier_costs_no_memory_and_equal_values_one_bin() -> None:
    values = np.append(np.random.default_rng(0).normal(size=1000), 1e9)
    assert len(histogram(values)["counts"]) == 32 and sum(histogram(values)["counts"]) == 1001
    assert len(histogram(np.arange(1e4))["counts"]) == MOST_BINS
    assert histogram(np.full(5, 3.0)) == {"edges": [2.7, 3.3], "counts": [5.0]}
    assert histogram(np.zeros(2))["edges"] == [-0.5, 0.5]
    assert histogram(np.array([7.0]))["counts"] == [1.0]


def test_the_page_says_what_is_odd(table: list[ImageRow], tmp_path: Path) -> None:
    found = summary(table, up=Brightness())
    os.remove(table[5].image)
    page = write_score_page(tmp_path / "s.html", found).read_text()
    assert "up could not score 3 of 9 images" in page and "not readable" in page
    assert page.count('src="data:image/png') == 5 and "Histogram of 6 scores from 0 to 1" in page
    flat = summary(table[:1] * 3, up=Brightness())
    page = write_score_page(tmp_path / "flat.html", flat).read_text()
    assert "gives all 3 images the same score" in page
    assert 'class="banner"' not in page
    flat["rewards"][0]["warning"] = "these numbers mean nothing"
    page = write_score_page(tmp_path / "banner.html", flat).read_text()
    assert page.index("up: these numbers mean nothing") < page.index("Median score of")
    none = write_score_page(tmp_path / "none.html", summary(table[6:], up=Brightness())).read_text()
    assert "It could score no image." in none


def test_the_command_writes_the_page_beside_its_output(table: list[ImageRow], tmp_path: Path) -> None:
    folder = str(Path(table[0].image).parent)
    base = ["score", folder, "-p", "a wall", "-r", "brightness"]
    csv, page = tmp_path / "s.csv", tmp_path / "s.html"
    done = CliRunner().invoke(app, [*base, "-f", "csv", "-o", str(csv), "--page", str(page)])
    assert done.exit_code == 1 and "2 of 8 scores failed" in done.output, done.output
    assert csv.read_text().count("\n") == 9 and "Prompt: a wall" in page.read_text()
    assert not list(tmp_path.glob("*.part"))
    shown = CliRunner().invoke(app, base)
    assert "! bad1.png: " in shown.output and "│ 0.png " in shown.output
    for arguments, message in (
        (["--page", str(page)], "exists, and nothing is overwritten"),
        (["--page", str(tmp_path / "p.txt")], "ends in '.txt'; what is written there ends in .html"),
        (["--resume"], "--resume goes on with the scoring of a file"),
    ):
        refused = CliRunner().invoke(app, [*base, *arguments])
        assert refused.exit_code == 2 and message in " ".join(refused.output.split()), refused.output
