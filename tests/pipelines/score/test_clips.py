# SPDX-License-Identifier: Apache-2.0
"""Clips on the command line: animations and folders of numbered frames, beside images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from visalign.pipelines.cli.app import app
from visalign.pipelines.score.image_rows import find_images, image_rows, numbered_frames
from visalign.pipelines.score.log import score_key
from visalign.pipelines.score.parts import ScoringOptions, find_parts, read_part
from visalign.pipelines.score.report import load_shown_images
from visalign.pipelines.score.score import score_rows
from visalign.rewards import load_reward

LEVELS = [30, 60, 90, 120, 150, 180, 210, 240, 250, 10, 20]


def grey(level: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.new("RGB", size, (level, level, level))


@pytest.fixture
def clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "clips" / "roll").mkdir(parents=True)
    for number, level in enumerate(LEVELS, 1):
        grey(level).save(tmp_path / f"clips/roll/f_{number}.png")  # f_10 stands behind f_9
    (tmp_path / "clips/roll.txt").write_text("a circle rolls\n")
    frames = [grey(level) for level in LEVELS]
    for ending in ("gif", "webp", "png"):
        frames[0].save(tmp_path / f"clips/move.{ending}", save_all=True, append_images=frames[1:], lossless=True)
    grey(LEVELS[5]).save(tmp_path / "clips/still.png")
    (tmp_path / "light.py").write_text(
        "def light(images, prompts, metadata=None):\n    return [float(i.mean()) for i in images]\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "clips"


def scored(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    ran = CliRunner().invoke(app, ["score", *arguments, "-f", "json"])
    assert ran.exit_code in (0, 1), ran.output
    return ran.exit_code, json.loads(ran.stdout)


def test_an_animation_and_a_folder_of_frames_are_one_clip_each(clips: Path) -> None:
    code, rows = scored("clips", "-p", "x", "-rframes", "--option", "reward=light.py:light", "--option", "frames=3")
    assert code == 0
    values = {Path(row["image"]).name: row["value"] for row in rows}
    middles = (LEVELS[1] + LEVELS[5] + LEVELS[9]) / 3 / 255
    moving = dict.fromkeys(("move.gif", "move.png", "move.webp", "roll"), pytest.approx(middles, abs=2e-3))
    assert values == {**moving, "still.png": pytest.approx(LEVELS[5] / 255)}
    assert {row["parts"]["frames"] for row in rows} == {1.0, 3.0}
    [row] = image_rows([Path("clips/roll")], clips=True)
    assert (row.image, row.prompt) == ("clips/roll", "a circle rolls")


def test_a_judge_of_images_names_what_judges_clips(clips: Path) -> None:
    code, rows = scored("clips/move.gif", "clips/still.png", "-r", "sharpness")
    assert code == 1 and [row["value"] is None for row in rows] == [True, False]
    message = "'clips/move.gif' is a clip of 11 frames, and sharpness judges images. Let the reward 'frames'"
    assert rows[0]["reason"].startswith(message)
    code, rows = scored("clips/roll", "-r", "sharpness")
    assert code == 0 and len(rows) == len(LEVELS), "images of one folder, where nothing judges clips"
    both = ["-r", "frames", "-r", "saturation", "--option", "frames.reward=saturation"]
    code, rows = scored("clips/roll", *both)
    assert code == 1 and [row["value"] for row in rows] == [0.0, None]
    assert "'clips/roll' is a clip of 11 frames, and saturation judges images" in rows[1]["reason"]


@pytest.mark.parametrize("command", ["rank", "compare"])
def test_first_frames_are_not_compared_in_silence(clips: Path, command: str) -> None:
    arguments = [command, "clips/still.png", "clips/move.webp", "-p", "x", "-r", "sharpness"]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 2 and "'clips/move.webp' is a clip of 11 frames, and images" in ran.stderr


def test_a_folder_is_a_clip_where_it_holds_numbered_frames_alone(clips: Path) -> None:
    assert [path.name for path in numbered_frames(clips / "roll")][8:] == ["f_9.png", "f_10.png", "f_11.png"]
    assert find_images([Path("clips")], clips=True)[-1] == Path("clips/roll")
    assert len(find_images([Path("clips")])) == 4 + len(LEVELS)
    (clips / "roll/.DS_Store").touch()
    assert numbered_frames(clips / "roll")
    for other in ("f_3.txt", "other_1.png", "f_12.jpg", "cover.png"):
        (clips / "roll" / other).touch()
        assert not numbered_frames(clips / "roll"), other
        (clips / "roll" / other).unlink()
    samples = clips / "00000" / "samples"
    samples.mkdir(parents=True)
    for number in range(2):
        grey(9).save(samples / f"{number:04}.png")
    assert numbered_frames(samples)
    (clips / "00000/metadata.jsonl").write_text('{"prompt": "a bench"}\n')
    assert not numbered_frames(samples), "GenEval's samples are images of one prompt"
    assert not numbered_frames("a\0b") and not numbered_frames(clips / "move.gif")


def test_pixels_are_bounded_over_all_frames(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["clips", "-p", "x", "-r", "frames", "--option", "reward=light.py:light"]
    monkeypatch.setenv("VISALIGN_MAX_PIXELS", str(64 * 8))
    _, rows = scored(*arguments)
    reasons = {Path(row["image"]).name: row["reason"] for row in rows}
    for name in ("move.gif", "move.png", "move.webp"):
        message = f"clips/{name} has more than 512 pixels in its 11 frames and may be a decompression bomb"
        assert reasons[name].startswith(message)
    assert reasons["roll"] is None and reasons["still.png"] is None, "8 frames of 64 pixels each are read"
    _, rows = scored(*arguments, "--option", "frames=9")
    reasons = {Path(row["image"]).name: row["reason"] for row in rows}
    assert reasons["roll"].startswith("the 9 frames to be judged have more than 512 pixels together")
    monkeypatch.setenv("VISALIGN_MAX_PIXELS", str(64 * 11))
    code, rows = scored(*arguments)
    assert code == 0, "what is together too much is judged one after the other"


def test_a_damaged_animation_costs_its_row_alone(clips: Path) -> None:
    content = (clips / "move.png").read_bytes()
    (clips / "move.png").write_bytes(content[: len(content) // 2])
    code, rows = scored("clips", "-p", "x", "-r", "frames", "--option", "reward=light.py:light")
    reasons = {Path(row["image"]).name: row["reason"] for row in rows}
    assert code == 1 and [name for name, reason in reasons.items() if reason] == ["move.png"], reasons
    assert reasons["move.png"].startswith("clips/move.png cannot be decoded")


def test_another_frame_is_another_score(clips: Path) -> None:
    before = score_key(["clips/roll"], "p", None)
    grey(77, (9, 9)).save(clips / "roll/f_4.png")
    assert score_key(["clips/roll"], "p", None) != before
    images = load_shown_images(["clips/roll", "clips/still.png"])
    assert images["clips/roll"] is not None and images["clips/roll"] == images["clips/still.png"]
    edit = ["clips/move.png"], "p", {"source": ["clips/still.png"]}
    before = score_key(*edit)
    grey(77, (9, 9)).save(clips / "still.png")
    assert score_key(*edit) != before


def test_files_of_scores_take_clips_alike(clips: Path) -> None:
    judge = {"frames": load_reward("frames", reward="saturation")}
    asking = ScoringOptions(rewards=["frames"], needs_prompt=False, clips=True)
    [part] = find_parts([clips], clips=True)
    part_rows = score_rows(list(read_part(part, asking)), judge)
    assert part_rows == score_rows(image_rows([clips], needs_prompt=False, clips=True), judge) and len(part_rows) == 5
    content = (clips / "move.gif").read_bytes()
    [row] = image_rows([clips / "move.gif"], needs_prompt=False)
    [sent] = score_rows([replace(row, content=content)], judge)
    assert sent.parts["frames"] == 8
