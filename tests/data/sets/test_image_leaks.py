# SPDX-License-Identifier: Apache-2.0
"""Images in more than one set: under other names, linked, saved anew, in Parquet; in bounded time."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from visalign.data.sets import leaks as image_leaks
from visalign.data.sets.checks import check_preferences, check_quality
from visalign.data.sets.image_references import parquet_reference, shapes_reference
from visalign.data.sets.leaks import refuse_shared_images, shared_images
from visalign.data.sets.records import PreferencePair, PreferenceSet, QualityRecord, QualitySet
from visalign.errors import UserError
from visalign.pipelines.jobs import load_job
from visalign.pipelines.train_reward.inputs import prepare_reward

RNG = np.random.default_rng(0)


def noise(path: Path, width: int = 12, height: int = 9) -> Image.Image:
    """An image like no other, saved."""
    image = Image.fromarray(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return image


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, list[str]]:
    """Three held-out and twelve training images, all different, most of one size."""
    found: dict[str, list[str]] = {"train": [], "heldout": []}
    for name, count in (("train", 12), ("heldout", 3)):
        for number in range(count):
            path = tmp_path / name / f"{number}.png"
            noise(path, width=12 if number else 20)
            found[name].append(str(path))
    return found


def pairs_of(sets: dict[str, list[str]]) -> set[frozenset[str]]:
    return {frozenset(ref for ref, _ in pair) for pair in shared_images(sets).shared}


def test_different_images_are_no_leak_and_all_are_compared(sets: dict[str, list[str]]) -> None:
    found = shared_images(sets)
    assert found.shared == () and found.compared == found.total == 15 and found.note() is None
    assert refuse_shared_images(sets, what="x") == []
    assert shared_images({"one": sets["train"] * 2}).shared == ()


def _copied(source: Path, new: Path) -> None:
    shutil.copy(source, new)


def _linked(source: Path, new: Path) -> None:
    new.symlink_to(os.path.relpath(source, new.parent))


def _hard_linked(source: Path, new: Path) -> None:
    new.hardlink_to(source)


def _compressed_anew(source: Path, new: Path) -> None:
    Image.open(source).save(new, format="TIFF", compression="tiff_lzw")
    assert new.stat().st_size != source.stat().st_size


def _as_bmp(source: Path, new: Path) -> None:
    Image.open(source).save(new, format="BMP")


def _with_opaque_alpha(source: Path, new: Path) -> None:
    Image.open(source).convert("RGBA").save(new)


def _turned_with_a_note(source: Path, new: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # shown a quarter to the right, so stored a quarter to the left
    Image.open(source).transpose(Image.Transpose.ROTATE_90).save(new, exif=exif)


@pytest.mark.parametrize(
    "copy",
    [_copied, _linked, _hard_linked, _compressed_anew, _as_bmp, _with_opaque_alpha, _turned_with_a_note],
)
def test_one_image_under_two_names_is_found(sets: dict[str, list[str]], tmp_path: Path, copy: Any) -> None:
    copy(Path(sets["train"][7]), tmp_path / "other name.png")
    sets["heldout"].append(str(tmp_path / "other name.png"))
    assert pairs_of(sets) == {frozenset({sets["train"][7], str(tmp_path / "other name.png")})}
    with pytest.raises(UserError, match=r"1 images of data.heldout are also in data.train: '.*7.png'"):
        refuse_shared_images(sets, what="of data.heldout are also in data.train")


def test_what_looks_different_is_another_image(sets: dict[str, list[str]], tmp_path: Path) -> None:
    source = Image.open(sets["train"][7])
    pixels = np.asarray(source).copy()
    pixels[0, 0, 0] ^= 1
    Image.fromarray(pixels).save(tmp_path / "one level.png")
    clear = source.convert("RGBA")
    clear.putalpha(128)
    clear.save(tmp_path / "clear.png")
    source.rotate(90, expand=True).save(tmp_path / "turned.png")
    sets["heldout"] += [str(tmp_path / f"{name}.png") for name in ("one level", "clear", "turned")]
    assert pairs_of(sets) == set()


def test_deep_levels_are_not_cut(tmp_path: Path) -> None:
    deep = RNG.integers(0, 60_000, (8, 8)).astype(np.uint16)
    for name, levels in (("a", deep), ("b", deep), ("c", deep + 1)):
        Image.fromarray(levels).save(tmp_path / f"{name}.png", compress_level=ord(name) % 9)
    a, b, c = (str(tmp_path / f"{name}.png") for name in "abc")
    assert pairs_of({"one": [a], "two": [b]}) == {frozenset({a, b})}
    assert pairs_of({"one": [a], "two": [c]}) == set()


def test_images_in_parquet_and_of_the_world(sets: dict[str, list[str]], tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.open(sets["train"][3]).save(content, format="BMP")
    other = io.BytesIO()
    noise(tmp_path / "x.png").save(other, format="PNG")
    table = pyarrow.table({"image": [other.getvalue(), content.getvalue()]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    inside = [parquet_reference(tmp_path / "t.parquet", "image", row) for row in (0, 1)]
    assert pairs_of({"train": sets["train"], "heldout": inside}) == {frozenset({sets["train"][3], inside[1]})}
    world = [shapes_reference("train", 0, "pair", k, "left") for k in range(3)]
    assert (
        len(pairs_of({"a": world, "b": world[2:]})) == 1
        and pairs_of({"a": world[:2], "b": world[2:]}) == set()
    )


def test_only_images_of_a_size_that_both_sets_have_are_decoded(
    sets: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[tuple[int, int]] = []
    monkeypatch.setattr(
        image_leaks, "_pixel_hash", lambda image: bytes(decoded.append(image.size) or 0) or None
    )
    found = shared_images({"train": sets["train"][1:], "heldout": sets["heldout"][:1]})
    assert decoded == [(20, 9)] and found.compared == 12 and found.is_complete


def test_time_that_is_over_is_said_and_files_are_still_compared(
    sets: dict[str, list[str]], tmp_path: Path
) -> None:
    found = shared_images(sets, seconds=0)
    assert found.compared == 0 and not found.is_complete
    [note] = refuse_shared_images(sets, what="x", seconds=0)
    assert note.startswith("By pixels 0 of 15 images were compared in 0 s")
    sets["heldout"].append(sets["train"][2])
    with pytest.raises(UserError, match=r"'.*2.png' \(train and heldout\)"):
        refuse_shared_images(sets, what="x", seconds=0)


def test_unreadable_images_stop_nothing(sets: dict[str, list[str]], tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    sets["heldout"] += [str(tmp_path / "bad.png"), str(tmp_path / "gone.png")]
    found = shared_images(sets)
    assert found.shared == () and found.unreadable == 2 and found.is_complete


def test_a_set_with_splits_is_refused_by_image(sets: dict[str, list[str]], tmp_path: Path) -> None:
    _compressed_anew(Path(sets["train"][1]), tmp_path / "again.png")
    names = [sets["train"][0], sets["train"][1], str(tmp_path / "again.png"), sets["train"][2]]
    pairs = tuple(
        PreferencePair(
            prompt=f"p{k}", image_left=names[2 * k], image_right=names[2 * k + 1], label=k, split=split
        )
        for k, split in enumerate(("train", "test"))
    )
    message = r"1 images of 's' are in more than one split: '.*1.png' \(train\) is '.*again.png' \(test"
    with pytest.raises(UserError, match=message):
        check_preferences(PreferenceSet(name="s", pairs=pairs))
    assert check_preferences(PreferenceSet(name="s", pairs=pairs), files=False) == []
    records = tuple(
        QualityRecord(image=name, mos=k, split=("train", "test")[k // 2]) for k, name in enumerate(names)
    )
    with pytest.raises(UserError, match="are in more than one split"):
        check_quality(QualitySet(name="s", records=records))
    assert check_quality(QualitySet(name="s", records=records), files=False) == []


def test_training_on_a_held_out_image_is_refused(sets: dict[str, list[str]], tmp_path: Path) -> None:
    _as_bmp(Path(sets["train"][1]), tmp_path / "again.bmp")
    names = {"train": sets["train"][:4], "heldout": [*sets["heldout"][:3], str(tmp_path / "again.bmp")]}
    for which, files in names.items():
        rows = [
            {"prompt": f"{which} {k}", "image_left": files[k], "image_right": files[k + 1], "label": k // 2}
            for k in (0, 2)
        ]
        (tmp_path / f"{which}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = [f"data.{which}={tmp_path / which}.jsonl" for which in names]
    config = load_job("shapes_hpsv3", changes).config
    with pytest.raises(
        UserError,
        match=r"1 images of data.heldout are also in data.train: '.*again.bmp' \(data.heldout\) is "
        r"'.*train/1.png' \(data.train\). Training and test would share them.",
    ):
        prepare_reward(config)
