# SPDX-License-Identifier: Apache-2.0
"""`visalign score` on tables and nested folders: prompts, records, cache, options, stops without loss."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from visalign.errors import UserError
from visalign.interfaces import RewardCapabilities, Scores
from visalign.pipelines.cli.app import app
from visalign.pipelines.score.image_rows import ImageRow, find_images, image_rows
from visalign.pipelines.score.log import ScoreLog, partial_path
from visalign.pipelines.score.parts import ScoringOptions, find_parts
from visalign.pipelines.score.parts import read_part as rows_of_part
from visalign.pipelines.score.score import ScoreRow, score_rows
from visalign.pipelines.shared.reward_options import reward_options
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import load_images


class Light:
    """Mean level; counts what it sees, and can be interrupted or be of another version."""

    name, unit, range, higher_is_better = "light", "level", (0.0, 1.0), True
    stop_after: int | None = None
    capabilities = RewardCapabilities()
    seen: Sequence[str] = ()

    def __init__(self, version: int = 1) -> None:
        self.identity = Identity(judge=self.name, model="mean", options={"version": version})
        self.asked: list[str] = []
        self.records: list[Any] = []

    def score(self, images: Any, prompts: Sequence[str], metadata: Any = None) -> Scores:
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += prompts
        self.records += metadata or [None] * len(prompts)
        batch = load_images(images)
        value = torch.tensor([torch.nan if image is None else float(image.mean()) for image in batch.images])
        return Scores(value=value, valid=batch.valid, unit=self.unit, reason=batch.reasons, parts={"half": value / 2})


@pytest.fixture
def light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Light:
    """Six images in two levels of folders, with `light` as the only reward."""
    for level in range(6):
        folder = tmp_path / "images" / ("deep/er" if level % 2 else "")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (51 * level,) * 3).save(folder / f"{level}.png")
    judge = Light()

    def load(name: str, **options: Any) -> Light:
        assert name == "light"
        if options:
            judge.identity = Identity(judge="light", model="mean", options=options)
        return judge

    monkeypatch.setattr("visalign.rewards.text.completions.load_any_reward", load)
    monkeypatch.chdir(tmp_path)
    return judge


def visalign(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["score", *arguments])


def read_part(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write(name: str, *rows: dict[str, Any]) -> str:
    path = Path(name)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        path.write_text("".join(",".join(row) + "\n" for row in (rows[0], *(r.values() for r in rows))))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_tables_bring_their_prompts(light: Light, name: str) -> None:
    write(name, *({"image": f"images/{k}.png", "prompt": k} for k in ("2", "deep/er/5")))
    result = visalign(name, "-r", "light", "-f", "json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["prompt"] for row in rows] == ["2", "deep/er/5"] == light.asked
    assert [row["value"] for row in rows] == pytest.approx([0.4, 1.0])
    assert rows[0]["parts"] == {"half": pytest.approx(0.2)}


def test_images_inside_a_parquet_table(light: Light) -> None:
    content = Path("images/2.png").read_bytes()
    write("t.parquet", {"image": {"bytes": content, "path": "x.png"}, "prompt": "two"})
    rows = json.loads(visalign("t.parquet", "-r", "light", "-f", "json").stdout)
    assert rows[0]["value"] == pytest.approx(0.4) and rows[0]["image"] == "parquet://t.parquet#image#0"


@pytest.mark.parametrize("needs", [RewardCapabilities(needs_batch=True), RewardCapabilities(needs_group=True)])
def test_a_reward_that_compares_images_sees_all_of_them(
    light: Light, needs: RewardCapabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    light.capabilities = needs
    write("t.jsonl", *({"image": f"images/{k}.png", "prompt": str(k)} for k in (0, 2, 4)))
    output = " ".join(visalign("t.jsonl", "-r", "light", "--batch-size", "2").output.split())
    assert "3 are more than one batch of 2. Set --batch-size 3" in output
    assert visalign("t.jsonl", "-r", "light", "--batch-size", "3").exit_code == 0
    rows = image_rows([Path("t.jsonl")])
    with closing(ScoreLog(Path("log"), {"light": light}, ScoreRow)) as log:
        score_rows(rows[:2], {"light": light}, store=log)
        light.asked.clear()
        score_rows(rows, {"light": light}, store=log)
    assert light.asked == ["0", "2", "4"], "stored scores would be of another batch"
    monkeypatch.setenv("VISALIGN_MAX_PIXELS", "100")
    with pytest.raises(UserError, match="these have more than 100 pixels together"):
        score_rows(rows, {"light": light})


def test_records_reach_the_reward(light: Light) -> None:
    record = {"include": [{"class": "circle", "count": 1}]}
    first = {"image": "images/0.png", "prompt": "a", "metadata": record}
    write("t.jsonl", first, {"image": "images/2.png", "prompt": "b"})
    assert visalign("t.jsonl", "-r", "light").exit_code == 0
    assert light.records == [record, None]
    [row] = image_rows([Path(write("u.jsonl", {"image": "x.png", "prompt": "a", "metadata": json.dumps(record)}))])
    assert row.metadata == record


def test_a_folder_of_samples_brings_prompts_and_records(light: Light) -> None:
    record = {"tag": "counting"}
    Path("images/made").mkdir()
    for name in ("0.png", "0.webp", "2.png", "2.webp"):
        shutil.copy("images/4.png", f"images/made/{name}")
    rows = [{"image": f"{k}.png", "clip": f"{k}.webp", "prompt": f"prompt {k}", "metadata": record} for k in (0, 2)]
    write("images/made/images.jsonl", *rows)
    assert visalign("images/made", "-r", "light").exit_code == 0
    assert (light.asked, light.records) == (["prompt 0", "prompt 2"], [record, record])
    videos = image_rows([Path("images/made")], clips=True)
    assert [row.image for row in videos] == ["images/made/0.webp", "images/made/2.webp"]
    own = image_rows([Path("images/made")], "mine")
    assert {(row.prompt, row.metadata) for row in own} == {("mine", None)}
    write("images/made/images.jsonl", rows[1])
    with pytest.warns(UserWarning, match=r"1 images are left out, .* does not list: images/made/0\.png\."):
        assert [row.prompt for row in image_rows([Path("images/made")])] == ["prompt 2"]


def test_folders_and_results_of_geneval_bring_prompts_and_records(light: Light) -> None:
    record = {"tag": "colors", "include": [{"class": "cup", "count": 1, "color": "red"}], "prompt": "a red cup"}
    folder = Path("out/00000/samples")
    folder.mkdir(parents=True)
    (folder.parent / "metadata.jsonl").write_text(json.dumps(record))
    for name in ("samples/00000.png", "samples/00001.png", "grid.png"):
        shutil.copy("images/2.png", folder.parent / name)
    rows = image_rows([Path("out")])
    assert [(row.image, row.prompt, row.metadata) for row in rows] == [
        (f"out/00000/samples/0000{k}.png", "a red cup", record) for k in (0, 1)
    ], "and not the grid"
    assert {row.prompt for row in image_rows([Path("out")], "mine")} == {"mine"}
    shutil.copy("images/2.png", "images/deep/grid.png")
    write("images/deep/images.jsonl", {"image": "0.png"})
    assert not any(path.name == "grid.png" for path in find_images([Path("images")])), "as sample writes it"
    line = {"filename": "out/00000/samples/00000.png", "tag": "colors", "prompt": "a red cup", "correct": True}
    write("results.jsonl", line | {"reason": "", "metadata": json.dumps(record), "details": "{}"})
    assert visalign("results.jsonl", "--map", "image=filename", "-r", "light").exit_code == 0
    assert (light.asked, light.records) == (["a red cup"], [record])


def test_folders_are_read_to_the_bottom_and_prompts_may_lie_beside(light: Light) -> None:
    Path("images/.hidden").mkdir()
    Image.new("RGB", (4, 4)).save("images/.hidden/x.png")
    Path("images/notes.md").write_text("not an image")
    paths = [path.as_posix() for path in find_images([Path("images")])]
    assert paths == [*(f"images/{k}.png" for k in (0, 2, 4)), *(f"images/deep/er/{k}.png" for k in (1, 3, 5))]
    for path in paths:
        Path(path).with_suffix(".txt").write_text(f"prompt of {Path(path).stem}\n")
    assert [row.prompt for row in image_rows([Path("images")])][:2] == ["prompt of 0", "prompt of 2"]
    assert {row.prompt for row in image_rows([Path("images")], "mine")} == {"mine"}


def test_endings_that_a_folder_passes_over_are_counted(light: Light) -> None:
    """JPEG's and JPEG 2000's other endings and AVIF are read; other images are one line, tables and captions none."""
    for ending, kind in ((".jfif", "JPEG"), (".jpe", "JPEG"), (".jp2", "JPEG2000"), (".AVIF", "AVIF")):
        Image.new("RGB", (8, 8)).save(f"images/deep/new{ending}", kind)
    for name in ("a.heic", "b.HEIC", "c.mp4", "a.txt", "t.csv", "._0.png"):
        Path("images", name).touch()
    with pytest.warns(UserWarning, match=r"^3 files with other endings are not read: \.heic \(2\), \.mp4 \(1\)\."):
        assert len(find_images([Path("images")])) == 6 + 4
    Path("none").mkdir()
    Path("none/a.heic").touch()
    with pytest.raises(UserError, match=r"holds no image\. 1 files with other endings are not read: \.heic \(1\)"):
        find_images([Path("none")])


def test_the_mark_of_an_editor_is_no_part_of_a_caption(light: Light) -> None:
    Path("images/0.txt").write_bytes(b"\xef\xbb\xbfa red wall\r\n")
    with tarfile.open("a.tar", "w") as tar:
        for name in ("0.png", "0.txt"):
            tar.add(f"images/{name}", name)
    (member,) = rows_of_part(find_parts([Path("a.tar")])[0], ScoringOptions(rewards=("light",)))
    assert image_rows([Path("images/0.png")])[0].prompt == member.prompt == "a red wall"


def test_a_name_that_is_no_text_is_refused_before_anything_is_judged(light: Light) -> None:
    path = os.fsdecode(b"images/caf\xe9.png")
    try:
        shutil.copy("images/0.png", path)
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    for command in (
        ("score", "images", "-p", "x", "-r", "light", "-o", "out.jsonl"),
        ("rank", "images", "-p", "x", "-r", "light", "-o", "out.html"),
        ("compare", path, "images/0.png", "-p", "x", "-r", "light", "-o", "out.html"),
    ):
        result = CliRunner().invoke(app, list(command))
        assert result.exit_code == 2, result.output
        assert r"b'images/caf\xe9.png' is not UTF-8. Rename it." in result.output
    assert not light.asked


def test_ctrl_c_loses_nothing_and_resume_asks_for_the_rest_alone(light: Light) -> None:
    light.stop_after = 4
    base = ("images", "-p", "x", "-r", "light", "-o", "out.jsonl", "-f", "jsonl", "--batch-size", "2")
    stopped = visalign(*base)
    assert stopped.exit_code == 130 and "--resume" in stopped.output
    assert not Path("out.jsonl").exists() and len(read_part("out.jsonl.part")) == 1 + 4
    again = visalign(*base)
    assert again.exit_code == 2 and "'out.jsonl.part' holds the scores of a run that was stopped." in again.output
    with Path("out.jsonl.part").open("a") as file:
        file.write('{"key": "cut of')
    light.stop_after, light.asked = None, []
    result = visalign(*base, "--resume")
    assert result.exit_code == 0, result.output
    assert len(light.asked) == 2 and not Path("out.jsonl.part").exists()
    assert [row["value"] for row in read_part("out.jsonl")] == pytest.approx([0.0, 0.4, 0.8, 0.2, 0.6, 1.0])
    uncut = visalign("images", "-p", "x", "-r", "light", "-f", "jsonl")
    assert uncut.stdout.splitlines() == Path("out.jsonl").read_text().splitlines(), "equal to a run without a stop"


def test_a_working_file_that_is_none_of_ours(light: Light, tmp_path: Path) -> None:
    path = partial_path(tmp_path / "out.json")
    path.write_text('{"other": 1}\n')
    with pytest.raises(UserError, match="holds no scores of ours"):
        ScoreLog(path, {"light": light}, ScoreRow)
    path.unlink()
    with closing(ScoreLog(path, {"light": light}, ScoreRow, resume=False)):
        pass
    with pytest.raises(UserError, match=r"holds scores of light, not of this 'dark'"):
        ScoreLog(path, {"dark": light}, ScoreRow)
    path.write_text(path.read_text() + '{"key": 3}\n')
    with pytest.raises(UserError, match=r"Line 2 of .* is no score. Remove the line"):
        ScoreLog(path, {"light": light}, ScoreRow)


def test_failed_rows_are_tried_again(light: Light, tmp_path: Path) -> None:
    table = [ImageRow(image="images/0.png", prompt="a"), ImageRow(image="gone.png", prompt="b")]
    with closing(ScoreLog(tmp_path / "x.part", {"light": light}, ScoreRow, resume=False)) as log:
        first = score_rows(table, {"light": light}, store=log)
        assert len(read_part(str(tmp_path / "x.part"))) == 1 + 2, "on disk before it is closed"
    assert first[1].reason == "no such image file: gone.png"
    Image.new("RGB", (4, 4), "white").save("gone.png")
    light.asked = []
    with closing(ScoreLog(tmp_path / "x.part", {"light": light}, ScoreRow, resume=True)) as log:
        second = score_rows(table, {"light": light}, store=log)
    assert light.asked == ["b"] and second[1].value == 1.0 and second[0] == first[0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "file,prompt\na.png,x\n", "'t.csv' lacks the column 'image', needed for a table of images."),
        ("t.jsonl", '{"image": [3], "prompt": "x"}', "Row 1 of 't.jsonl': 'image' is [3], needed is a path."),
        ("t.jsonl", '{"image": "a.png", "prompt": "x", "metadata": "{"}', "'metadata' is not JSON"),
    ],
)
def test_bad_tables_are_refused_by_message(light: Light, name: str, text: str, message: str) -> None:
    Path(name).write_text(text)
    result = visalign(name, "-r", "light")
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_bad_options_are_refused_by_message(light: Light) -> None:
    with pytest.raises(UserError, match=r"names none of the rewards. Did you mean 'jpeg_size'\? Write LABEL"):
        reward_options(["jpeg_sice.quality=9"], ["jpeg_size", "sharpness"])
    assert reward_options(["quality=9"], ["jpeg_size"]) == {"jpeg_size": {"quality": 9}}
    options = reward_options(["a.py:X.y=[1, 2]"], ["a.py:X", "a"])
    assert options == {"a.py:X": {"y": [1, 2]}, "a": {}}
    result = visalign("images", "-p", "x", "-r", "light", "--resume")
    assert result.exit_code == 2 and "Add --output FILE." in result.output
    result = visalign("images", "-r", "light")
    assert result.exit_code == 2 and "Put one into '0.txt' next to the image" in " ".join(result.output.split())
