# SPDX-License-Identifier: Apache-2.0
"""Published sets in their own folder layouts, built small with the published names of files and columns."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from visalign.data.sets.checks import check_preferences
from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.layouts import load_layout
from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.sets.sources import load_source
from visalign.errors import UserError


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (level, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def preferences(name: str, folder: Path, **options: Any) -> PreferenceSet:
    layout = load_layout(name, folder, **options)
    assert isinstance(layout, PreferenceSet)
    return layout


def quality(source: str, split: str | None = None) -> QualitySet:
    dataset = load_source(source, split=split)
    assert isinstance(dataset, QualitySet)
    return dataset


def test_hpdv2(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test.json").write_text(
        '[{"prompt": "a cat", "image_path": ["0.jpg", "1.jpg", "2.jpg"], "rank": [1, 2, 2], '
        '"raw_annotations": [{"rank": [1, 2, 3], "user_hash": "u"}, {"rank": [2, 1, 3], "user_hash": "v"}]}]'
    )
    (tmp_path / "train.json").write_text(
        '[{"prompt": "a dog", "file_path": ["a.jpg", "b.jpg"], "human_preference": [0, 1], "user_hash": "u"}]'
    )
    test = preferences("hpdv2", tmp_path)
    assert [pair.label for pair in test.pairs] == [1.0, 1.0, 0.5]
    assert [pair.votes for pair in test.pairs] == [(1, 1, 0), (2, 0, 0), (2, 0, 0)]
    assert test.pairs[0].image_left == str(tmp_path / "test" / "0.jpg")
    assert [pair.label for pair in preferences("hpdv2", tmp_path, split="train").pairs] == [0.0]


def test_hpdv3_mixes_the_sides_of_its_winners(tmp_path: Path) -> None:
    names = {"model1": "flux", "model2": "sd2", "choice_dist": [12, 7], "confidence": 0.99}
    rows = [{"prompt": f"prompt {k}", "path1": f"{k}-won.jpg", "path2": f"{k}-lost.jpg"} for k in range(60)]
    (tmp_path / "test.json").write_text(json.dumps([row | names for row in rows]))
    dataset = preferences("hpdv3", tmp_path)
    won = [pair.image_left if pair.label == 1 else pair.image_right for pair in dataset.pairs]
    assert all("won" in name for name in won)
    assert 10 < sum(pair.label == 1.0 for pair in dataset.pairs) < 50
    for pair in dataset.pairs:
        assert pair.votes == ((12, 7, 0) if pair.label else (7, 12, 0))
        assert (pair.generator_left if pair.label else pair.generator_right) == "flux"
    assert [finding.kind for finding in check_preferences(dataset, files=False)] == []
    assert len(preferences("hpdv3", tmp_path, limit=7)) == 7


def test_pick_a_pic_reads_images_inside_its_files(tmp_path: Path) -> None:
    rows = [
        {
            "caption": f"prompt {k}",
            "jpg_0": png(k),
            "jpg_1": png(100 + k),
            "label_0": (1.0, 0.0, 0.5)[k % 3],
            "label_1": (0.0, 1.0, 0.5)[k % 3],
            "has_label": k != 4,
            "model_0": "a",
            "model_1": "b",
            "ranking_id": k,
        }
        for k in range(6)
    ]
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "validation_unique-00000-of-00001-abc.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    dataset = preferences("pick_a_pic", tmp_path, split="validation_unique")
    assert [pair.prompt for pair in dataset.pairs] == [f"prompt {k}" for k in (0, 1, 2, 3, 5)]
    assert [pair.label for pair in dataset.pairs] == [1.0, 0.0, 0.5, 1.0, 0.5]
    assert np.asarray(resolve_image(dataset.pairs[-1].image_right))[0, 0, 0] == 105
    assert check_preferences(dataset)[0].kind == "ties"  # the file is there, so no image is missing


def test_image_reward_in_both_forms(tmp_path: Path) -> None:
    (tmp_path / "data" / "test_images").mkdir(parents=True)
    (tmp_path / "data" / "test.json").write_text(
        '[{"id": "5-7", "prompt": "a cat", "generations": ["p/0.webp", "p/1.webp", "p/2.webp"], "ranking": [1, 3, 3]}]'
    )
    dataset = preferences("image_reward", tmp_path)
    assert [pair.label for pair in dataset.pairs] == [1.0, 1.0, 0.5] and dataset.pairs[0].prompt_id == "5-7"
    assert dataset.pairs[0].image_left == str(tmp_path / "data" / "test_images" / "p" / "0.webp")
    names = {"prompt_id": "p1", "prompt": "a cat", "classification": "Animals"}
    table = [names | {"image_path": f"images/{k}.webp", "rank": rank} for k, rank in enumerate((2, 1))]
    (tmp_path / "db").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "db" / "metadata-test.parquet")
    pair = preferences("image_reward", tmp_path / "db").pairs[0]
    assert (pair.label, pair.category, pair.prompt_id) == (0.0, "Animals", "p1")


def test_genai_bench(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "left_model": "a", "right_model": "b", "left_image": {"bytes": png(1), "path": None},
         "right_image": {"bytes": png(2), "path": None}, "vote_type": vote}
        for vote in ("leftvote", "rightvote", "tievote", "bothbad_vote")
    ]  # fmt: skip
    (tmp_path / "image_generation").mkdir()
    path = tmp_path / "image_generation" / "test_v1-00000-of-00001.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    dataset = load_source(f"genai_bench:{tmp_path}")
    assert isinstance(dataset, PreferenceSet)
    assert [pair.label for pair in dataset.pairs] == [1.0, 0.0, 0.5, 0.5]
    assert np.asarray(resolve_image(dataset.pairs[0].image_right))[0, 0, 0] == 2
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([rows[0] | {"vote_type": "maybe"}]), path)
    with pytest.raises(UserError, match=r"vote_type is 'maybe'; allowed: leftvote"):
        load_source(f"genai_bench:{tmp_path}")


def test_kadid10k(tmp_path: Path) -> None:
    (tmp_path / "dmos.csv").write_text(
        "dist_img,ref_img,dmos,var\nI01_01_01.png,I01.png,4.57,0.496\nI01_07_05.png,I01.png,1.17,0.21\n"
    )
    dataset = quality(f"kadid10k:{tmp_path}")
    record = dataset.records[1]
    assert (record.image, record.category, record.reference) == (
        str(tmp_path / "images" / "I01_07_05.png"),
        "07",
        "I01.png",
    )
    assert dataset.records[0].std == pytest.approx(0.7043, abs=1e-4) and dataset.higher_is_better


def test_koniq10k_and_spaq(tmp_path: Path) -> None:
    (tmp_path / "512x384").mkdir()
    (tmp_path / "koniq10k_distributions_sets.csv").write_text(
        "image_name,c1,c2,c3,c4,c5,c_total,MOS,SD,set\n1.jpg,0,0,25,73,7,105,3.83,0.53,training\n"
        "2.jpg,0,3,45,47,1,96,3.48,0.58,test\n"
    )
    dataset = quality(f"koniq10k:{tmp_path}", split="test")
    assert [(r.mos, r.std, r.resolution) for r in dataset.records] == [(3.48, 0.58, "512x384")]
    with pytest.raises(UserError, match=r"Splits: test, training"):
        quality(f"koniq10k:{tmp_path}", split="dev")
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "Annotations" / "MOS and Image attribute scores.csv").write_text(
        "Image name,MOS,Brightness\n00001.jpg,50.86,61.9\n00002.jpg,61.3,50\n"
    )
    record = quality(f"spaq:{tmp_path}").records[0]
    assert (record.mos, record.extra) == (50.86, {"Brightness": "61.9"})
    assert record.image == str(tmp_path / "TestImage" / "00001.jpg")


@pytest.mark.parametrize("layout", ["hpdv2", "spaq"])
def test_a_folder_without_annotations_says_what_it_needs(tmp_path: Path, layout: str) -> None:
    (tmp_path / "readme.md").write_text("x")
    with pytest.raises(UserError, match=r"needs .*(json|parquet|csv).* Found there: readme.md"):
        load_source(f"{layout}:{tmp_path}")
    with pytest.raises(UserError, match=r"There is no folder"):
        load_source(f"{layout}:{tmp_path / 'none'}")


def test_missing_columns_are_named_with_those_found(tmp_path: Path) -> None:
    (tmp_path / "test.json").write_text(json.dumps([{"prompt": "p", "path1": "a"}]))
    with pytest.raises(UserError, match=r"lacks the column 'path2', needed for HPDv3.*Found: path1, prompt"):
        preferences("hpdv3", tmp_path)


def test_geneval_has_verdicts_of_its_rules(tmp_path: Path) -> None:
    (tmp_path / "00000" / "samples").mkdir(parents=True)
    (tmp_path / "00000" / "samples" / "0.png").write_bytes(png(9))
    results = tmp_path / "results.jsonl"
    results.write_text(
        '{"filename": "00000/samples/0.png", "tag": "counting", "prompt": "two cups", "correct": true}\n'
        '{"filename": "00000/samples/1.png", "tag": "counting", "prompt": "two cups", "correct": false, '
        '"reason": "expected cup>=2, found 1", "metadata": "{}"}\n'
    )
    first, second = quality(f"geneval:{results}").records
    assert (first.mos, first.prompt, first.category) == (1.0, "two cups", "counting")
    assert first.image == str(tmp_path / "00000/samples/0.png") and second.image == "00000/samples/1.png"
    assert second.mos == 0.0 and second.extra["reason"] == "expected cup>=2, found 1"
    with pytest.raises(UserError, match=r"There is no table"):
        quality(f"geneval:{tmp_path}")
