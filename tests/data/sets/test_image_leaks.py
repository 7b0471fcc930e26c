# SPDX-License-Identifier: Apache-2.0
"""Images in more than one set: under other names, linked, copied."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from visalign.data.sets.checks import check_preferences, check_quality, shared_images
from visalign.data.sets.image_references import shapes_reference
from visalign.data.sets.records import PreferencePair, PreferenceSet, QualityRecord, QualitySet
from visalign.errors import UserError
from visalign.pipelines.jobs import load_job
from visalign.pipelines.train_reward.inputs import prepare_reward


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Four files of different content, three of equal length."""
    for number, content in enumerate((b"aaa", b"bbb", b"ccc", b"dddd")):
        (tmp_path / f"{number}.png").write_bytes(content)
    return [str(tmp_path / f"{number}.png") for number in range(4)]


def test_different_images_are_no_leak(files: list[str]) -> None:
    assert shared_images({"train": files[:2] * 2, "heldout": files[2:]}) == []
    world = [shapes_reference("train", 0, "pair", number, "left") for number in range(3)]
    assert shared_images({"train": world[:2], "heldout": world[2:]}) == []


@pytest.mark.parametrize(
    "copy",
    [
        shutil.copy,
        lambda source, new: new.symlink_to(os.path.relpath(source, new.parent)),
        lambda source, new: new.hardlink_to(source),
    ],
)
def test_an_image_under_two_names_is_found(
    files: list[str], tmp_path: Path, copy: Callable[[Path, Path], None]
) -> None:
    copy(Path(files[1]), tmp_path / "copy.png")
    (first, second), *rest = shared_images({"train": files[:2], "heldout": [str(tmp_path / "copy.png")]})
    assert (first, second) == ((files[1], "train"), (str(tmp_path / "copy.png"), "heldout")) and not rest


def test_a_set_with_splits_is_refused_by_image(files: list[str], tmp_path: Path) -> None:
    shutil.copy(files[1], tmp_path / "copy.png")
    names = [files[0], files[1], str(tmp_path / "copy.png"), files[2]]
    pairs = tuple(
        PreferencePair(prompt=split, image_left=left, image_right=right, label=1.0, split=split)
        for split, left, right in (("train", *names[:2]), ("test", *names[2:]))
    )
    with pytest.raises(UserError, match=r"1 images of 's' are in more than one split: '.*1.png' \(train\)"):
        check_preferences(PreferenceSet(name="s", pairs=pairs))
    records = tuple(QualityRecord(image=name, mos=k, split=("train", "test")[k // 2]) for k, name in enumerate(names))
    with pytest.raises(UserError, match="are in more than one split"):
        check_quality(QualitySet(name="s", records=records))


def test_training_on_a_held_out_image_is_refused(files: list[str], tmp_path: Path) -> None:
    shutil.copy(files[1], tmp_path / "copy.png")
    names = {"train": files[:2], "heldout": [files[2], str(tmp_path / "copy.png")]}
    for which, (left, right) in names.items():
        rows = [{"prompt": f"{which} {k}", "image_left": left, "image_right": right, "label": k} for k in (0, 1)]
        (tmp_path / f"{which}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_job("shapes_hpsv3", [f"data.{which}={tmp_path / which}.jsonl" for which in names]).config
    message = r"1 images of data.heldout are also in data.train: '.*copy.png' \(data.heldout\) is "
    with pytest.raises(UserError, match=rf"{message}'.*1.png' \(data.train\). Take each out of one"):
        prepare_reward(config)
