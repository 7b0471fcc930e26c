# SPDX-License-Identifier: Apache-2.0
"""Outputs and caches that cannot be written, full disks, hubs out of reach, prompts that are no text."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from visalign.pipelines.cli.app import app
from visalign.pipelines.score.log import ScoreLog

IMAGE = ("score", "image.png", "-r", "sharpness", "-p", "x")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8), "red").save("image.png")
    Path("file").write_text("a file")
    return tmp_path


def visalign(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize(
    "arguments",
    [
        (*IMAGE, "-o", "file/x.json"),
        (*IMAGE, "--page", "file/x.html"),
        (*IMAGE, "--cache", "file/x"),
        ("compare", "image.png", "image.png", "-r", "sharpness", "-p", "x", "-o", "file/x.html"),
        ("rank", "image.png", "image.png", "-r", "sharpness", "-p", "x", "-o", "file/x.html"),
        ("agree", ".", "-r", "sharpness", "-r", "jpeg_size", "-p", "x", "-o", "file/x"),
        ("evaluate", "shapes:pairs", "-r", "sharpness", "-o", "file/x"),
        ("probe-reward", "sharpness", "-o", "file/x"),
        ("sample", "shapes:heldout", "-o", "file/x"),
        ("train", "text_grpo", "-o", "file/x"),
        ("train", "text_sample", "-o", "file/x"),
        ("train-reward", "shapes_hpsv3", "-o", "file/x"),
    ],
    ids=" ".join,
)
def test_a_place_below_a_file_is_refused_before_any_work(arguments: tuple[str, ...], here: Path) -> None:
    result = visalign(*arguments)
    assert result.exit_code == 2
    assert "Error: Nothing can be written to 'file/x" in result.stderr
    assert f"'{here / 'file'}': Not a directory. Give another folder." in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_place_that_no_file_can_be_made_in_is_refused_before_any_work() -> None:
    """Permissions do not tell: root may write /proc."""
    result = visalign(*IMAGE, "-o", "/proc/x.json")
    assert result.exit_code == 2
    assert "'/proc': No such file or directory. Give another folder." in result.stderr


def test_a_cache_that_is_a_file_is_refused() -> None:
    result = visalign(*IMAGE, "--cache", "file")
    assert result.exit_code == 2 and "The cache 'file' is a file. Give a folder with --cache." in result.stderr


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(here: Path) -> None:
    (here / "closed").mkdir(mode=0o500)
    result = visalign(*IMAGE, "-o", "closed/x.json")
    assert result.exit_code == 2 and "cannot be written (Permission" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("probe-reward", "sharpness", "--seed", "99999999999999999999"), "4294967295"),
        (("train", "shapes_hp", "seed=99999999999999999999", "-o", "x"), "less than or equal to 4294967295"),
    ],
    ids=["option", "setting"],
)
def test_a_number_of_more_than_64_bits_is_refused(arguments: tuple[str, ...], message: str) -> None:
    result = visalign(*arguments)
    assert result.exit_code == 2 and message in result.stderr and not Path("x").exists()


def test_a_full_disk_in_score_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, entries: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ScoreLog, "add", full)
        patch.setattr(sys, "argv", ["visalign", *IMAGE, "-o", "x.json"])
        result = visalign(*IMAGE, "-o", "x.json")
    assert result.exit_code == 2
    assert "No space left on device. Free some space, then continue with:" in result.stderr
    assert "visalign score image.png -r sharpness -p x -o x.json --resume" in result.stderr
    assert visalign(*IMAGE, "-o", "x.json", "-f", "json", "--resume").exit_code == 0
    assert len(json.loads(Path("x.json").read_text())) == 1


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_prompts_that_are_no_text_are_written_so_that_json_reads_them(form: str) -> None:
    odd = "caf\udce9"  # Latin-1 bytes of a command line, as Python reads them
    arguments = ("score", "image.png", "-r", "sharpness", "-p", odd)
    assert visalign(*arguments, "-f", form, "-o", "out").exit_code == 0
    raw = Path("out").read_bytes().decode("utf-8")  # valid UTF-8
    if form == "jsonl":
        assert json.loads(raw)["prompt"] == odd
        assert visalign(*arguments, "--page", "page.html").exit_code == 0


def test_names_with_control_characters_move_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that clears the screen, and one that turns the line round."""
    for name in ("a\x1b[2Jb.png", "c\u202egnp.png"):
        Image.new("RGB", (8, 8), "red").save(name)
    Path("d\x1b]0;x\x07.png").write_text("no image")
    result = visalign("score", ".", "-r", "sharpness", "-p", "x")
    assert result.exit_code == 1
    assert "a\\x1b[2Jb.png" in result.stdout and "c\\u202egnp.png" in result.stdout
    result_of_error = visalign("score", "image.png", "-r", "no\x1b[2Jreward", "-p", "x")
    assert "no\\x1b[2Jreward" in result_of_error.stderr or "'no\\x1b[2Jreward'" in result_of_error.stderr
    for text in (result.stdout, result.stderr, result_of_error.stderr):
        assert not set(text) & {"\x1b", "\x07", "\u202e"}
