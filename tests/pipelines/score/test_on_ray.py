# SPDX-License-Identifier: Apache-2.0
"""Files of images scored one by one by `--engine ray`: reading, resuming, refusals; with Ray where it is."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from typer.testing import CliRunner

from visalign.data.sets.tables import read_rows
from visalign.errors import UserError
from visalign.pipelines.cli.app import app
from visalign.pipelines.score import on_ray
from visalign.pipelines.score.image_rows import image_rows
from visalign.pipelines.score.on_ray import Worker, ray_running, score_on_ray
from visalign.pipelines.score.parts import (
    ScoringOptions,
    check_part,
    find_parts,
    finished_parts,
    part_metadata,
    read_part,
    write_scores,
)
from visalign.pipelines.score.score import ScoreRow, score_rows
from visalign.rewards import load_reward
from visalign.versions import missing_extra

OPTIONS = ScoringOptions(rewards=["saturation"], batch_size=3)


def image(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (level, 30, 90)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`tables`: Parquet (row 3 damaged, row 4 without a prompt) and a tar file; and seven `images`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables/deep").mkdir(parents=True)
    (tmp_path / "images").mkdir()
    rows = [{"image": {"bytes": image(20 * n), "path": None}, "prompt": f"wall {n}"} for n in range(8)]
    rows[2]["image"] = {"bytes": b"no image", "path": None}
    rows[3]["prompt"] = None
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "tables/a.parquet")
    with tarfile.open("tables/deep/b.tar", "w") as tar:
        members = {"x/1.png": image(9), "x/1.txt": b" a wall\n", "x/2.jpg": image(5), "x/2.json": b"[1"}
        members |= {"3.json": b'{"prompt": "two", "tag": "counting"}', "3.webp": image(8), "4.txt": b"none"}
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    for level in range(7):
        Path(f"images/{level}.png").write_bytes(image(30 * level))
    return tmp_path


def test_each_file_has_its_scores_and_loose_images_theirs(data: Path) -> None:
    parts = find_parts([Path("tables"), Path("images")])
    assert [part.output for part in parts] == ["a.parquet", "deep/b.tar.parquet", "images-00000.parquet"]
    assert parts[0].source == data / "tables/a.parquet" and len(parts[2].source) == 7  # type: ignore[arg-type]
    (data / "tables/deep/a.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"of '.*tables/a\.parquet' and of '.*deep/a\.parquet' would both be"):
        find_parts([Path("tables/a.parquet"), Path("tables/deep/a.parquet")])


def test_rows_are_those_of_the_local_engine_with_reasons_for_the_rest(data: Path) -> None:
    table, tar, loose = find_parts([Path("tables"), Path("images")])
    rows = list(read_part(table, OPTIONS))
    broken = rows.pop(3)
    assert broken.reason == "'prompt' is missing, needed is a text." and broken.image.endswith("a.parquet#4")
    written = pyarrow.parquet.read_table("tables/a.parquet").to_pylist()
    written[3]["prompt"] = "wall 3"
    written = [row | {"record": {"answer": number}} for number, row in enumerate(written)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), "tables/a.parquet")
    local = image_rows([data / "tables/a.parquet"])
    assert [row.metadata for row in read_part(table, OPTIONS)] == [row.metadata for row in local]
    local.pop(3)
    assert [(row.image, row.prompt) for row in rows] == [(row.image, row.prompt) for row in local]
    reward = {"saturation": load_reward("saturation")}
    by_parts, by_files = (score_rows(images, reward) for images in (rows, local))
    assert [(row.image, row.value) for row in by_parts] == [(row.image, row.value) for row in by_files]
    assert score_rows(rows, reward)[2].reason == f"'{rows[2].image}' holds no image that can be read."

    one, two, three, four = read_part(tar, OPTIONS)
    assert one.image == f"{tar.source}/x/1" and one.prompt == "a wall" and one.content == image(9)
    assert two.reason == "'prompt' is missing, needed is a text."
    assert three.prompt == "two" and three.metadata == {"prompt": "two", "tag": "counting"}
    assert four.reason == "'image' is missing, needed is a path."
    mapped = ScoringOptions(rewards=[], names={"prompt": "tag"})
    assert [row.prompt for row in read_part(tar, mapped)][2] == "counting"
    beside = ScoringOptions(rewards=[], needs_prompt=False)
    assert list(read_part(loose, beside)) == image_rows([data / "images"], needs_prompt=False)
    Path("images/images.jsonl").write_text('{"image": "1.png", "clip": "2.png", "prompt": "a wall"}\n')
    with pytest.warns(UserWarning, match="images are left out"):
        for clips in (False, True):
            (part,) = find_parts([data / "images"], clips=clips)
            sampled = image_rows([data / "images"], clips=clips)
            assert list(read_part(part, replace(OPTIONS, clips=clips))) == sampled and part.output == "images.parquet"


class Raises:
    name, unit, range, higher_is_better = "raises", "", (0.0, 1.0), True

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Any:
        raise KeyError("weights")


def test_a_worker_returns_scores_or_an_error_with_its_message(data: Path, monkeypatch: Any) -> None:
    loose, tar = find_parts([Path("images")])[0], find_parts([Path("tables/deep/b.tar")])[0]
    monkeypatch.setattr(on_ray, "loaded_ray", lambda: SimpleNamespace(get_gpu_ids=list))
    options = replace(OPTIONS, prompt="a wall")
    expected = score_rows(image_rows([data / "images"], "a wall"), {"saturation": load_reward("saturation")})
    assert Worker(options, "no/such/folder").score(loose) == expected
    Path("tables/deep/b.tar").write_bytes(Path("tables/deep/b.tar").read_bytes()[:1700])
    assert "b.tar' cannot be read as a tar file" in str(Worker(options, ".").score(tar))
    monkeypatch.setattr(on_ray, "load_reward", lambda *_, **__: Raises())
    assert "Reward 'saturation' raised KeyError: 'weights'" in str(Worker(options, ".").score(loose))


def test_finished_files_stay_and_changed_ones_are_scored_again(data: Path) -> None:
    parts, output = find_parts([Path("tables"), Path("images")]), data / "out"
    rows = score_rows(image_rows([data / "images"], "a wall"), {"saturation": load_reward("saturation")})
    rows.append(ScoreRow(image="x", reward="r", value=None, unit="", reason="why", parts={"half": 0.5}))
    digests = {"saturation": "1"}
    assert finished_parts(output, parts, OPTIONS, digests) == []
    for part in parts[:2]:
        write_scores(output / part.output, rows, part_metadata(part, OPTIONS, digests))
    read = [row.get("value") for _, row in read_rows(output / "a.parquet")]
    assert read == [row.value for row in rows]
    last = pyarrow.parquet.read_table(output / "a.parquet").to_pylist()[-1]
    assert last["value"] is None and last["reason"] == "why" and last["parts"] == [("half", 0.5)]
    assert finished_parts(output, parts, OPTIONS, digests) == parts[:2]
    with tarfile.open("tables/deep/b.tar", "a") as tar:
        tar.add("images/1.png")
    assert finished_parts(output, parts, OPTIONS, digests) == parts[:1]
    with pytest.raises(UserError, match="holds no scores of saturation, or of other versions"):
        finished_parts(output, parts, OPTIONS, {"saturation": "2"})
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), output / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet' holds no scores"):
        finished_parts(output, parts, OPTIONS, digests)


def test_what_cannot_be_scored_is_refused_before_anything_is(data: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"file": ["1.png"], "prompt": ["a"]}), "bad.parquet")
    rewards = {"saturation": load_reward("saturation")}

    def refused(*items: str, output: str = "out", **more: Any) -> str:
        with pytest.raises(UserError) as error:
            score_on_ray([Path(item) for item in items], Path(output), OPTIONS, rewards, **more)
        return str(error.value)

    assert "bad.parquet' lacks the column 'image'" in refused("tables", "bad.parquet")
    assert "has no column 'img'" in _head("bad.parquet", names={"image": "img"})
    assert "has no prompt" in refused("images")
    assert "is to be scored. Give another" in refused("tables", output="tables/scores")
    Path("full").mkdir()
    Path("full/x").write_text("")
    assert "is not empty" in refused("tables", output="full")
    Path("cut.parquet").write_bytes(Path("tables/a.parquet").read_bytes()[:-20])
    assert "cut.parquet' cannot be read as Parquet" in refused("cut.parquet")
    Path("text.tar").write_text("no tar")
    assert "text.tar' cannot be read as a tar file" in refused("text.tar")
    assert "No images were named" in refused()
    assert not Path("out").exists()


def _head(path: str, **asking: Any) -> str:
    with pytest.raises(UserError) as error:
        check_part(find_parts([Path(path)])[0], ScoringOptions(rewards=[], **asking))
    return str(error.value)


def test_an_address_that_does_not_answer_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "loaded_ray", lambda: None)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        free = f"127.0.0.1:{listening.getsockname()[1]}"
    for address in (free, "head", "head:x"):
        with pytest.raises(UserError, match=rf"No Ray at {address}: .* HOST:PORT"), ray_running(address):
            pass


def test_the_command_line_names_the_extra_and_keeps_engines_apart(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*more: str) -> Any:
        return CliRunner().invoke(app, ["score", "images", "-r", "saturation", *more])

    for more in (["--workers", "2"], ["--address", "head:6379"]):
        assert f"{more[0]} needs --engine ray" in said(*more).output
    output = said("--engine", "ray", "-f", "csv", "--cache", "c", "-o", "out").output
    assert "--format, --cache needs --engine local" in output
    monkeypatch.setitem(sys.modules, "ray", None)
    error = said("--engine", "ray", "-o", "out").exception
    assert isinstance(error, ModuleNotFoundError) and "'visalign[ray]'" in str(missing_extra(error))


MINE = """
import os, signal
from pathlib import Path

def mine(images, prompts, metadata=None):
    if "wall 7" in prompts and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [None if prompt == "wall 5" else float(image.mean()) for image, prompt in zip(images, prompts)]
"""


@pytest.mark.slow
def test_a_killed_worker_loses_nothing_and_a_stopped_one_goes_on(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")  # it takes seconds to start and to stop
    Path("mine.py").write_text(MINE)
    names = [f"{n}.parquet" for n in range(3)]
    for name in names:
        rows = [{"image": image(20 * n), "prompt": f"wall {n}"} for n in range(8)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    options = ["-r", "mine.py:mine", "--engine", "ray", "--workers", "2", "--batch-size", "3", "-o", "out"]
    command = [sys.executable, "-m", "visalign", "score", *names, *options]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1 and "3 of 24 scores failed" in process.stderr, process.stderr
    assert Path("killed").exists()
    reward = {"mine.py:mine": load_reward("mine.py:mine")}
    for name in names:
        table = pyarrow.parquet.read_table(f"out/{name}").to_pylist()
        scores = [(row["image"], row.get("value"), row["prompt"]) for row in table]
        local = score_rows(image_rows([data / name]), reward, batch_size=3)
        assert scores == [(row.image, row.value, row.prompt) for row in local]
    before = {name: Path("out", name).stat().st_mtime_ns for name in names}
    Path("out/1.parquet").unlink()
    process = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert "(1 files now, 2 before)" in process.stderr, process.stderr
    assert [before[n] == Path("out", n).stat().st_mtime_ns for n in names] == [True, False, True]
    values = [pyarrow.parquet.read_table(f"out/{name}")["value"].to_pylist() for name in names]
    assert values[0] == values[1] == values[2]
