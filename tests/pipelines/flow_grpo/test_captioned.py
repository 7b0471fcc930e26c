# SPDX-License-Identifier: Apache-2.0
"""`pipeline: sft_images` on folders, tables and tar files of images with captions, and what is refused."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from tests.support.models.pipelines import tiny_folder
from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.config import load_config
from visalign.data.sets.image_references import resolve_image
from visalign.errors import ConfigError, UserError
from visalign.pipelines.flow_grpo.inputs import fingerprint_inputs, prepare
from visalign.pipelines.flow_grpo.job import SFTImagesConfig, plan, run
from visalign.pipelines.flow_grpo.stored_pairs import read_captioned
from visalign.pipelines.jobs import load_job
from visalign.pipelines.shared.parts import read_images
from visalign.training.loop.metrics import read_metrics
from visalign.vision.pixels import first_frame_upright

SMALL = (
    "model.lora.rank=4",
    "rollout={prompts_per_iteration: 4, group_size: 1, steps: 4}",
    "optimizer={lr: 1e-3, updates_per_iteration: 2, micro_batch: 3, ema_every: 1}",
    "evaluation={seeds: [0], rewards: {jpeg_size: {}}, correctness: null}",
    "run={iterations: 2, checkpoint_every: 1, device: cpu}",
)
SIZES = {"wide": (64, 32), "tall": (32, 64), "square": (40, 40), "also": (48, 44)}


def _folder(folder: Path) -> Path:
    """Four images with captions, one without, one that is no image, one that is cut short."""
    folder.mkdir(parents=True)
    for name, size in SIZES.items():
        Image.new("RGB", size, "red").save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a {name} thing")
    Image.new("RGB", (8, 8)).save(folder / "silent.png")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "broken.txt").write_text("a broken thing")
    Image.effect_noise((64, 64), 50).save(folder / "cut.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:900])
    (folder / "cut.txt").write_text("a cut thing")
    return folder


def _tar(path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, size in SIZES.items():
            file = io.BytesIO()
            Image.new("RGB", size, "blue").save(file, "PNG")
            mask, text = b"no image", f"a {name} thing".encode()
            for ending, content in ((".mask", mask), (".png", file.getvalue()), (".txt", text)):
                info = tarfile.TarInfo(f"part#1/{name}{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def _table(path: Path) -> Path:
    path.parent.mkdir()
    rows = [{"caption": f"a {name} thing", "image": f"images/{name}.png"} for name in SIZES]
    _folder(path.parent / "images")
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["folder", "tar", "table"])
def test_images_and_captions_are_read_with_their_buckets(tmp_path, kind: str):
    source = {
        "folder": _folder,
        "tar": lambda p: _tar(p.with_suffix(".tar")),
        "table": lambda p: _table(p / "t.jsonl"),
    }
    path = source[kind](tmp_path / "data")
    names = {"prompt": "caption"} if kind == "table" else {}
    records, notes = read_captioned(str(path), "none", None, [(32, 64), 32, (64, 32)], names)
    buckets = {record["prompt"].split()[1]: record["bucket"] for record in records}
    assert buckets == {"wide": 0, "square": 1, "also": 1, "tall": 2}
    twice, _ = read_captioned(str(path), "none", None, [(24, 24), (64, 64), (46, 46)], names)
    assert {r["prompt"].split()[1]: r["bucket"] for r in twice} == dict.fromkeys(SIZES, 2), "the nearest area"
    for record in records:
        (image,) = read_images([record["candidates"][0]["image"]], "a test")
        assert tuple(image.shape[:0:-1]) == SIZES[record["prompt"].split()[1]]
    if kind == "folder":
        (note,) = notes
        assert "left out, of 7 images: 3." in note and "silent.png" in note and "broken.png" in note
        assert "cut.jpg" in note
    first, notes = read_captioned(str(path), "none", 3, None, names)
    assert len(first) <= 3 and "the first 3 images are read" in notes[-1]


def test_an_image_is_shown_as_its_camera_was_held_and_tables_of_samples_are_read(tmp_path):
    """EXIF 6: the file lies on its side. `visalign sample` writes images.jsonl beside its images."""
    image = Image.new("RGB", (64, 32))
    exif = image.getexif()
    exif[0x0112] = 6
    (tmp_path / "drawn" / "deep").mkdir(parents=True)
    (tmp_path / "drawn" / ".Trash-0" / "old").mkdir(parents=True)
    for folder in ("drawn", "drawn/deep", "drawn/.Trash-0/old"):
        image.save(tmp_path / folder / "a.jpg", exif=exif)
        row = {"image": "a.jpg", "prompt": f"a tower {folder}"}
        (tmp_path / folder / "images.jsonl").write_text(json.dumps(row))
    records, _ = read_captioned(str(tmp_path / "drawn"), "none", None, [(32, 64), (64, 32)], {})
    assert [(r["bucket"], r["prompt"]) for r in records] == [(1, "a tower drawn/deep"), (1, "a tower drawn")]


def test_sets_as_other_tools_write_them(tmp_path):
    """img2dataset's samples of an image and its JSON, a Parquet file of datasets, first rows without caption."""
    content = io.BytesIO()
    Image.new("RGB", (8, 8), "blue").save(content, "PNG")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in {
            "0.png": b"",
            "1.png": content.getvalue(),
            "1.json": b'{"caption": "a blue thing"}',
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    column = [{"bytes": content.getvalue(), "path": "a.png"}, {"bytes": b"", "path": "b.png"}]
    columns = {"image": column, "text": ["a blue thing"] * 2, "latents": [[0.5] * 9] * 2}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    Image.fromarray(np.full((8, 8), 300, np.float32)).save(tmp_path / "deep.tiff")
    (tmp_path / "1.png").write_bytes(content.getvalue())
    rows = ["1.png,", "1.png,  ", "deep.tiff,a deep thing", '1.png,"a ""blue"", thing"']
    (tmp_path / "a.csv").write_text("\n".join(["file_name,caption", *rows]))
    file = pyarrow.parquet.ParquetFile
    with patch.object(file, "iter_batches", autospec=True, side_effect=file.iter_batches) as reading:
        read_captioned(str(tmp_path / "a.parquet"), "none", None, None, {})
    assert reading.call_args.kwargs["columns"] == ["image", "text"]  # the latents stay where they are
    for name, left_out in {"a.tar": 1, "a.parquet": 1, "a.csv": 3}.items():
        (record,), (note,) = read_captioned(str(tmp_path / name), "none", None, None, {})
        assert record["prompt"].startswith("a ") and f": {left_out}." in note, note
        (image,) = read_images([record["candidates"][0]["image"]], "a test")
        assert image[2].min() == 1
        assert "images of data.images" in fingerprint_inputs("data.images", [record])  # a resumed run compares it
    assert "its values are 300 to 300" in note


def test_what_is_not_read_is_named(tmp_path):
    """Images beside tables or tar files, a caption in a tar file that is no UTF-8, damaged AVIF and GIF files."""
    folder = _folder(tmp_path / "photos")
    _tar(folder / "deep.tar")
    with tarfile.open(folder / "deep.tar", "a") as tar:
        for name, ending, text in (("more", ".caption", b"a more thing"), ("latin", ".txt", b"caf\xe9")):
            for suffix, content in ((".png", (folder / "wide.png").read_bytes()), (ending, text)):
                info = tarfile.TarInfo(f"{name}{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    # as img2dataset writes it
    pyarrow.parquet.write_table(pyarrow.table({"url": ["a"], "caption": ["a thing"]}), folder / "deep.parquet")
    records, (left_out, unread) = read_captioned(str(folder), "none", None, None, {})
    assert {record["prompt"].split()[1] for record in records} == {*SIZES, "more"}
    assert "left out, of 6 images: 1." in left_out and "not UTF-8" in left_out
    assert "6 images with captions beside tables or tar files are not read, such as " in unread
    noise = Image.effect_noise((64, 64), 50)
    noise.save(tmp_path / "two.gif", save_all=True, append_images=[Image.effect_noise((64, 64), 90)])
    content = bytearray((tmp_path / "two.gif").read_bytes())
    content[-400:] = bytes(400)  # in the second frame
    (tmp_path / "two.gif").write_bytes(content)
    with Image.open(tmp_path / "two.gif") as opened:
        assert first_frame_upright(opened).size == (64, 64)
    assert read_images([str(tmp_path / "two.gif")], "a test")[0].shape == (3, 64, 64)
    broken = str(_folder(tmp_path / "all"))
    with patch.object(Image.Image, "load", side_effect=RuntimeError("Failed to decode frame 0")):
        with pytest.raises(UserError, match=r"no image with a caption that can be read.*Failed to decode frame 0"):
            read_captioned(broken, "none", None, None, {})


def test_scenes_of_the_world_have_their_prompts():
    records, notes = read_captioned("shapes:images", "none", 20, None, {})
    assert len(records) == 20 and not notes and len({record["prompt"] for record in records}) > 10
    assert resolve_image(records[3]["candidates"][0]["image"]).shape == (64, 64, 3)


def test_a_run_by_the_configuration(tmp_path, capsys):
    tiny_sd3_pipeline().save_pretrained(tmp_path / "model")
    sources = (f"model.path={tmp_path}/model", f"data={{images: {_folder(tmp_path / 'set')}, caption_dropout: 0.5}}")

    def config(*overrides: str) -> SFTImagesConfig:
        sizes = "rollout.image_sizes=[32, [16, 32]]"
        return load_config(SFTImagesConfig, None, [*SMALL, *sources, sizes, *overrides])

    summary = run(config(), tmp_path / "whole")
    printed = "".join(capsys.readouterr())
    assert "data.images: left out, of 7 images: 3." in printed and "loss " in printed and "no signal" not in printed
    unmeasured = prepare(config("evaluation={rewards: {}}", "rollout.guidance=2"), 1).notes
    assert "name a reward, evaluation.rewards" in unmeasured[-1] and len(unmeasured) == 4
    assert "drawn without guidance. Set evaluation.guidance" in unmeasured[-2]
    assert not any("without guidance" in note for note in prepare(config("evaluation.guidance=5"), 1).notes)
    assert "rollout.merge_adapters are unused" in unmeasured[-3]
    planned = plan(config(), measure=False)
    assert planned["cost"]["forward_equivalents_per_image"] == 3 and planned["batch"]["pairs_per_iteration"] == 4
    log = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert {row["forward_equivalents_per_image"] for row in log} == {3} and all(row["loss"] > 0 for row in log)
    assert summary["images"] == 8
    # the LoRA goes on in a training by preferences
    job = load_job("shapes_nft", [f"model.path={tmp_path}/model", f"model.lora_path={tmp_path}/whole/lora"])
    assert job.config.model.lora_path == f"{tmp_path}/whole/lora"


def test_a_network_that_predicts_noise_is_trained_by_min_snr(tmp_path):
    model = tiny_folder("sd15", tmp_path / "model")
    changes = "objective={algorithm: sft, changes: {weighting: min_snr}}"
    data = f"data.images={_folder(tmp_path / 'set')}"
    config = load_config(SFTImagesConfig, None, [*SMALL, f"model.path={model}", data, changes, "run.iterations=1"])
    run(config, tmp_path / "run")
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert 0 < row["loss"] < row["match_error"]  # the weights are below 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.images=absent",), r"'absent' does not exist"),
        (("data.images=CUT",), r"a\.tar\.gz' is compressed or not named \.tar"),
        (("data.images=no_prompt.jsonl",), r"lacks the column 'prompt'"),
        (("data.images=SET", "data.caption_dropout=1"), r"leaves no caption to learn"),
        (("data.images=SET", "model.guidance=4.5"), r"model\.guidance is 4\.5, and captions teach"),
        (("data.images=SET", "objective.changes={density_options: {mean: abc}}"), r"options are numbers, mean"),
        (("data.images=SET", "objective.changes={density: mode, density_options: {scale: 20}}"), r"scale \(-1 to 1"),
        (("data.images=EMPTY",), r"EMPTY' holds no image"),
        (("data.images=BAD",), r"has no image with a caption that can be read: .*no caption"),
        (("data.images=SET", "objective.algorithm=diffusion_dpo"), r"none better than another.*algorithm=sft"),
        (("data.images=SET", "objective.algorithm=dmd2"), r"and objective.algorithm=dmd2 learns from samples of its"),
        (
            ("data.images=SET", "data.cache=no_prompt.jsonl"),
            r"data\.cache is no_prompt\.jsonl, a file\. Name a folder",
        ),
        (("data.pairs=shapes:pairs",), r"learns every image alike, and data\.pairs says.*data\.images"),
        (("data.images=SET", "rollout.group_size=2"), r"group_size is 2, and an image with its caption has no group"),
        ((), r"learns every image alike, good or bad\. Set data\.images"),
        (("data.caption_dropout=0.1",), r"caption_dropout and data\.images_size are of data\.images"),
        (("data.images=SET", "rollout.image_sizes=[30]"), r"rollout\.image_sizes: .*30"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused_before_training(tmp_path, monkeypatch, overrides: Any, message: str):
    monkeypatch.chdir(tmp_path)
    _folder(tmp_path / "SET")
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "BAD").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "BAD" / "a.png")
    (tmp_path / "CUT").mkdir()
    (tmp_path / "CUT" / "a.tar.gz").write_bytes(b"")
    (tmp_path / "no_prompt.jsonl").write_text('{"image": "BAD/a.png", "remark": "a thing"}')
    with pytest.raises((UserError, ConfigError), match=message):
        config = load_config(SFTImagesConfig, None, [*SMALL, *overrides])
        prepare(config, 1)
        run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_tables_beside_images_and_tar_files_are_seen(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "words": "a cat"}))
    with pytest.raises(UserError, match=r"it has no caption\)\. To read its table with the columns file_name, words"):
        read_captioned(str(tmp_path), "none", None, None, {})
    (tmp_path / "a.json").write_text('{"key": "a"}')  # as img2dataset leaves one beside each image
    (tmp_path / "an.csv").write_text("")
    (tmp_path / "b.txt").write_text("b")
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    assert "columns file_name, words" in read_captioned(str(tmp_path), "none", None, None, {})[1][0]
    (tmp_path / "late.csv").write_text("image,caption\n" + "a.png,\n" * 20 + "a.png,a dog\n")
    assert len(read_captioned(str(tmp_path / "late.csv"), "none", None, None, {})[0]) == 1
    (tmp_path / "both").mkdir()
    folder = _tar(tmp_path / "both" / "x.tar").parent
    rows = [{"image": {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}, "caption": "own"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "x.parquet")
    prompts = [record["prompt"] for record in read_captioned(str(folder), "none", None, None, {})[0]]
    assert prompts[0] == "own" and len(prompts) > 1
