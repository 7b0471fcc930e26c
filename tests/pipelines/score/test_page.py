# SPDX-License-Identifier: Apache-2.0
"""Scores in short and their page: spread, best and worst, failures by reason; whose numbers they are."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.support.hub import COMMIT, hub
from tests.support.judges.brightness import Brightness
from tests.support.models.clip import save_tiny_transformers_clip
from visalign.pipelines.cli.app import app
from visalign.pipelines.score.image_rows import ImageRow
from visalign.pipelines.score.provenance import domain_note, provenance, reward_identity
from visalign.pipelines.score.report import MOST_BINS, histogram, score_summary, write_score_page
from visalign.pipelines.score.score import score_rows
from visalign.rewards import load_reward
from visalign.rewards.serve.worker import judge_card


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
    numbers = summary(table, up=Brightness(std=0.25), down=Brightness(higher_is_better=False))
    json.dumps(numbers, allow_nan=False)
    up, down = numbers["rewards"]
    assert numbers["images"] == 9 and numbers["prompts"] == 1 and up["judged"] == 6 and up["failed"] == 3
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
    numbers = summary(table, up=Brightness())
    os.remove(table[5].image)
    page = write_score_page(tmp_path / "s.html", numbers).read_text()
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
    result = CliRunner().invoke(app, [*base, "-f", "csv", "-o", str(csv), "--page", str(page)])
    assert result.exit_code == 1 and "2 of 8 scores failed" in result.output, result.output
    assert csv.read_text().count("\n") == 9 and "Prompt: a wall" in page.read_text()
    assert not list(tmp_path.glob("*.part"))
    printed = CliRunner().invoke(app, base)
    assert "! bad1.png: " in printed.output and "│ 0.png " in printed.output
    for arguments, message in (
        (["--page", str(page)], "exists, and nothing is overwritten"),
        (["-o", str(csv)], "s.csv' exists, and nothing is overwritten"),
        (["--page", str(tmp_path / "p.txt")], "ends in '.txt'; what is written there ends in .html"),
        (["--resume"], "--resume goes on with the scoring of a file"),
    ):
        refused = CliRunner().invoke(app, [*base, *arguments])
        assert refused.exit_code == 2 and message in " ".join(refused.output.split()), refused.output


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    return str(tmp_path / "a.png")


@pytest.mark.parametrize("command", ["score", "compare", "rank"])
def test_a_packaged_judge_says_where_it_does_not_belong(command, image, tmp_path):
    Image.new("RGB", (64, 64), "blue").save(tmp_path / "b.png")
    images = [image] if command == "score" else [image, str(tmp_path / "b.png")]
    options = ["-r", "clip_score", "--option", "model=shapes-clip"]
    options += ["--format", "jsonl", "--page"] if command == "score" else ["--output"]
    options.append(str(tmp_path / "p.html"))
    result = CliRunner().invoke(app, [command, *images, "-p", "a cat on a mat", *options])
    assert result.exit_code == 0, result.output
    identity = reward_identity(load_reward("clip_score", model="shapes-clip"))
    caution = "was trained on: 1 of 1 prompts, such as 'a cat on a mat'. These numbers mean nothing."
    page = (tmp_path / "p.html").read_text()
    assert identity.line in result.stderr and caution in result.stderr and "(packaged: " in result.stderr
    assert "Not of the world of shapes" in page
    assert identity.digest[:12] in page
    if command == "score":
        assert json.loads(result.stdout)["judge"] == identity.line


def test_a_reward_without_an_identity_is_known_by_its_options(tmp_path):
    code = """
    from visalign.interfaces import Scores
    class Channel:
        name, unit, range, higher_is_better = "channel", "level", (0.0, 1.0), True
        def __init__(self, channel=0, device="cpu"):
            self.channel = channel
        def score(self, images, prompts, metadata=None):
            return Scores(value=images[:, self.channel].mean((1, 2)))
    """
    (tmp_path / "my.py").write_text(textwrap.dedent(code))
    options: Any = ({"channel": 0}, {"channel": 0, "device": "cpu"}, {"channel": 2})
    rewards = [load_reward(f"{tmp_path}/my.py:Channel", **chosen) for chosen in options]
    first, again, other = (reward_identity(reward).digest for reward in rewards)
    assert first == again != other
    corrected = {"reward": "sharpness", "quality": f"{tmp_path}/light.py:light", "quality_options": {"range": (1, 5)}}
    (tmp_path / "light.py").write_text("def light(images): return [1.0] * len(images)\n")
    before = reward_identity(load_reward("corrected", **corrected)).digest
    frames = {"reward": f"{tmp_path}/light.py:light"}
    prints = {reward_identity(load_reward("frames", frames=n, **frames)).digest for n in (1, 2)}
    (tmp_path / "light.py").write_text("def light(images): return [2.0] * len(images)\n")
    assert len({*prints, reward_identity(load_reward("frames", frames=1, **frames)).digest}) == 3
    assert reward_identity(load_reward("corrected", **corrected)).digest != before
    slots = "class Channel:\n    __slots__ = 'channel'\n    identity, capabilities = None, RewardCapabilities()"
    code = textwrap.dedent(code).replace("class Channel:", slots).replace("Scores", "RewardCapabilities, Scores", 1)
    (tmp_path / "slots.py").write_text(code)
    with_slots: Any = load_reward(f"{tmp_path}/slots.py:Channel", channel=1)
    assert with_slots.identity is None


def test_it_keeps_quiet_at_home_and_of_other_models(tmp_path):
    packaged = load_reward("clip_score", model="shapes-clip")
    assert domain_note(packaged, ["two red circles", "", "a blue square left of a green triangle"]) is None
    other = load_reward("clip_score", model=save_tiny_transformers_clip(tmp_path / "clip"))
    assert domain_note(other, ["a cat on a mat"]) is None and "packaged" not in provenance(other)


def test_the_revision_of_a_hub_model_is_told_and_is_no_part_of_the_digest(tmp_path, monkeypatch):
    folder = save_tiny_transformers_clip(tmp_path / "clip")
    hub(monkeypatch, {"a/b": folder})
    fetched: Any = load_reward("clip_score", model="a/b")
    assert f"a/b, revision {COMMIT[:12]}, identity {fetched.identity.digest[:12]}" in provenance(fetched)
    assert fetched.identity.differences(reward_identity(load_reward("clip_score", model=folder)))[:1] == ["model"]
    card = judge_card(fetched)
    assert (card["model"], card["revision"]) == ("a/b", COMMIT)
