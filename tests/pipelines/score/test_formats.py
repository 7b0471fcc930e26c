# SPDX-License-Identifier: Apache-2.0
"""How results come out: by the ending of a file, whole beside rewards that print."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pandas
import pytest
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

from visalign.data.sets.columns import Columns
from visalign.data.sets.records import PreferenceSet
from visalign.data.sets.sources import from_dataframe, shapes_pairs, to_dataframe
from visalign.pipelines.cli.app import app
from visalign.rewards.questions.q_align import QAlign
from visalign.rewards.questions.vqa import SoftTifa
from visalign.rewards.scorers.iqa import Iqa
from visalign.rewards.verifiers.geneval import GenEval

pytestmark = pytest.mark.filterwarnings("ignore:.*with other endings are not read")


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, level in (("a", 90), ("b", 180), ("c", 240)):
        Image.new("RGB", (8, 8), (level, 30, 30)).save(tmp_path / f"{name}.png")
    (tmp_path / "loud.py").write_text(
        "print('loading weights')\n"
        "def loud(images, prompts, metadata=None):\n"
        "    print('judging')\n    return [float(i.mean()) for i in images]\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def visalign(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_ending_of_a_file_says_its_format(images: Path) -> None:
    for name in ("x.json", "x.jsonl", "x.csv", "x.txt"):
        assert visalign("score", "a.png", "-r", "saturation", "-o", name).exit_code == 0
    assert json.loads(Path("x.json").read_text())[0]["reward"] == "saturation"
    assert json.loads(Path("x.jsonl").read_text())["reward"] == "saturation"
    assert Path("x.csv").read_text().startswith("image,reward,value") and "┃" in Path("x.txt").read_text()
    assert visalign("score", "a.png", "-r", "saturation", "-f", "csv", "-o", "y.json").exit_code == 0
    assert Path("y.json").read_text().startswith("image,")


def test_what_should_not_be_opened_in_a_folder_is_a_row_with_its_reason(images: Path) -> None:
    Image.new("1", (9400, 9400)).save("bomb.png")  # 11 KB on the disk, 88 million pixels
    os.mkfifo("fifo.png")
    Path("device.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as line:
        line.bind("socket.png")
        result = visalign("score", ".", "-r", "saturation", "-o", "x.json", "--page", "x.html")
    assert result.exit_code == 1 and "4 of 7 scores failed" in result.output
    rows = {Path(row["image"]).stem: row for row in json.loads(Path("x.json").read_text())}
    odd = [(name, "it is not a regular file") for name in ("device", "fifo", "socket")]
    for name, reason in [*odd, ("bomb", "pixels and may be a decompression bomb")]:
        assert rows[name]["value"] is None and reason in rows[name]["reason"]
    assert all(rows[name]["value"] is not None for name in "abc") and Path("x.html").is_file()


@pytest.mark.parametrize(
    "command",
    [
        ("score", "a.png", "-f", "json"),
        ("compare", "a.png", "b.png", "--json"),
        ("rank", "a.png", "b.png", "--json"),
        ("agree", ".", "-r", "saturation", "--json"),
    ],
)
def test_a_reward_that_prints_leaves_the_json_whole(images: Path, command: tuple[str, ...]) -> None:
    result = visalign(*command, "-p", "x", "-r", "loud.py:loud")
    assert result.exit_code == 0, result.output
    json.loads(result.stdout)
    assert "judging" in result.stderr


def test_a_reward_that_looks_at_no_prompt_needs_none(images: Path) -> None:
    for command in (("score", "a.png"), ("compare", "a.png", "b.png"), ("rank", "a.png", "b.png")):
        assert visalign(*command, "-r", "sharpness").exit_code == 0
        refused = visalign(*command, "-r", "loud.py:loud")
        assert refused.exit_code == 2 and "--prompt" in refused.output
    assert not any(reward.capabilities.needs_prompt for reward in (QAlign, SoftTifa, GenEval, Iqa))


def test_agree_reads_scores_from_columns(images: Path) -> None:
    rows = "".join(f"{k},{k % 5},{(k * 7) % 5},p{k // 4}\n" for k in range(20))
    Path("s.csv").write_text("id,up,other,prompt\n" + rows)
    result = visalign("agree", "s.csv", "-s", "up", "-s", "other", "--json")
    assert result.exit_code == 0, result.output
    (pair,) = json.loads(result.stdout)["pairs"]
    assert pair["images"] == 20 and pair["overall"]["estimate"] == pytest.approx(
        stats.spearmanr([k % 5 for k in range(20)], [(k * 7) % 5 for k in range(20)])[0]
    )
    rows = "".join(f"{name}.png,{k}\n" for k, name in enumerate("abc"))
    Path("i.csv").write_text("file,known\n" + rows)
    mixed = visalign("agree", "i.csv", "-s", "known", "-r", "saturation", "--map", "image=file", "--json")
    assert mixed.exit_code == 0, mixed.output
    assert json.loads(mixed.stdout)["pairs"][0]["overall"]["estimate"] == pytest.approx(1.0)


def test_a_data_frame_is_a_set_and_back() -> None:
    pairs = shapes_pairs(6)
    preferences = from_dataframe(to_dataframe(pairs), name="shapes-pairs")
    assert isinstance(preferences, PreferenceSet) and preferences.pairs == pairs.pairs
    frame = pandas.DataFrame({"file": ["a.png", "b.png"], "score": [1.5, float("nan")], "mos": [1, 2]})
    rated = from_dataframe(frame, folder="there", columns=Columns(names={"image": "file"}))
    assert [r.image for r in rated.records] == ["there/a.png", "there/b.png"]  # type: ignore[union-attr]
    assert [dict(r.extra) for r in rated.records] == [{"score": 1.5}, {}]  # type: ignore[union-attr]
