# SPDX-License-Identifier: Apache-2.0
"""Preference and quality sets from files: what is read, what is refused and how it is said."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import patch

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from visalign.data.sets.checks import check_preferences, check_quality, summed_votes, without_duplicates
from visalign.data.sets.columns import Columns
from visalign.data.sets.image_references import image_bytes, parquet_reference, resolve_image
from visalign.data.sets.records import PreferencePair, PreferenceSet, mix_sides
from visalign.data.sets.sources import load_preferences, load_quality, load_source, shapes_pairs, write_rows
from visalign.data.sets.tables import require_columns
from visalign.errors import UserError
from visalign.pipelines.score.image_rows import image_rows
from visalign.rewards.base.images import load_images


def row(**changes: Any) -> dict[str, Any]:
    return {"prompt": "a cat", "image_left": "l.png", "image_right": "r.png", "label": "left"} | changes


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return path


def test_labels_and_votes(tmp_path: Path) -> None:
    rows = [
        row(),
        row(label="tie", score_left=1.5),
        row(label=0.25),
        {**row(votes=[3, 1]), "label": 0.75},
        {k: v for k, v in row(votes_left=2, votes_right=5, votes_tie=1).items() if k != "label"},
    ]
    dataset = load_preferences(write(tmp_path / "set.jsonl", rows))
    assert [pair.label for pair in dataset.pairs] == [1.0, 0.5, 0.25, 0.75, 2.5 / 8]
    assert dataset.pairs[3].votes == (3, 1, 0) and dataset.pairs[4].votes == (2, 5, 1)
    assert dataset.pairs[0].image_left == str(tmp_path / "l.png")
    assert dataset.pairs[1].extra == {"score_left": 1.5} and dataset.rows == (1, 2, 3, 4, 5)


def test_all_formats_agree(tmp_path: Path) -> None:
    rows = [row(category="x", label="1"), row(image_left="a,b.png", label="0", category="y")]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    lines = ["prompt,image_left,image_right,label,category", "a cat,l.png,r.png,1,x", 'a cat,"a,b.png",r.png,0,y']
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "a.tsv").write_text(
        "\n".join(lines).replace('"a,b.png"', "a;b.png").replace(",", "\t").replace("a;b", "a,b")
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    sets = [load_preferences(tmp_path / f"a.{ending}") for ending in ("jsonl", "json", "csv", "tsv", "parquet")]
    assert all(dataset.pairs == sets[0].pairs for dataset in sets) and len(sets[0]) == 2


def test_rows_written_are_read_back(tmp_path: Path) -> None:
    pairs = shapes_pairs(4).pairs
    dataset = load_preferences(write_rows(tmp_path / "new" / "set.jsonl", pairs))
    assert dataset.pairs == pairs
    with pytest.raises(UserError, match=r"nothing is overwritten"):
        write_rows(tmp_path / "new" / "set.jsonl", pairs)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "one": "l.png"}], "lacks the columns 'image_left', 'image_right'.*Found: prompt, one"),
        ([row(), row(label="middle")], "Row 2 of .*label is 'middle'; needed is left, right, tie"),
        ([{k: v for k, v in row().items() if k != "label"}], "lacks the column 'label', needed for a pref"),
    ],
)
def test_unusable_rows_are_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_preferences(write(tmp_path / "set.jsonl", rows))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text(json.dumps(row()) + '\n{"prompt": \n')
    with pytest.raises(UserError, match=r"Line 2 of .* is not JSON"):
        load_preferences(tmp_path / "set.jsonl")
    for ending, text in (("jsonl", '{{"label": {}}}'), ("json", '[{{"label": {}}}]')):
        for value, message in (("9" * 4400, "a number has too many digits"), ("[" * 9999, "it is nested too deeply")):
            (tmp_path / f"big.{ending}").write_text(text.format(value + "]" * value.count("[")))
            with pytest.raises(UserError, match=rf"big.* is not JSON \({message}"):
                load_preferences(tmp_path / f"big.{ending}")
    (tmp_path / "set.jsonl").write_text(json.dumps(row(label=10**400)))
    with pytest.raises(UserError, match=r"Row 1 of .*the label is 1000"):
        load_preferences(tmp_path / "set.jsonl")
    (tmp_path / "set.csv").write_text("prompt,image_left,image_right,label\na,l.png,r.png\n")
    with pytest.raises(UserError, match=r"Line 2 of .* has 3 fields, the first line names 4"):
        load_preferences(tmp_path / "set.csv")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not quite")
    with pytest.raises(UserError, match=r"cannot be read as Parquet"):
        load_preferences(tmp_path / "bad.parquet")
    (tmp_path / "set.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(UserError, match=r"not UTF-8"):
        load_preferences(tmp_path / "set.jsonl")
    with pytest.raises(UserError, match=r"There is no table"):
        load_preferences(tmp_path / "none.jsonl")


def pairs_of(*rows: dict[str, Any]) -> PreferenceSet:
    plain: dict[str, Any] = {"label": 1.0}
    return PreferenceSet(name="set", pairs=tuple(PreferencePair(**(plain | entry)) for entry in rows))


BASE: dict[str, Any] = {"prompt": "a cat", "image_left": "l.png", "image_right": "r.png"}
MIRRORED = BASE | {"image_left": "r.png", "image_right": "l.png"}


def test_what_means_nothing_is_refused() -> None:
    tie = pairs_of(BASE | {"label": 0.5})
    with pytest.raises(UserError, match=r"All 1 pairs of 'set' are ties"):
        check_preferences(tie, files=False)
    leaking = pairs_of(BASE | {"split": "train"}, BASE | {"prompt": "A  cat", "split": "test", "label": 0.0})
    with pytest.raises(UserError, match=r"1 prompts .* more than one split: 'a cat' \(test and train\)"):
        check_preferences(leaking, files=False)
    with pytest.raises(UserError, match=r"2 image files do not exist: l.png, r.png"):
        check_preferences(pairs_of(BASE))
    with pytest.raises(UserError, match=r"All 1 winners .* always saying left .*--swap-sides"):
        check_preferences(pairs_of(BASE), files=False, judge_sees_sides=True)


def test_what_is_odd_is_reported() -> None:
    rows = pairs_of(BASE, BASE, MIRRORED | {"label": 0.0}, MIRRORED, BASE | {"label": 0.5})
    findings = check_preferences(rows, files=False)
    counts = {finding.kind: finding.count for finding in findings}
    assert counts == {"disagreement": 1, "ties": 1}
    same = check_preferences(pairs_of(BASE, BASE | {"image_left": "r.png", "label": 0.0}), files=False)
    assert [finding.kind for finding in same] == ["same_image"]
    assert [finding.kind for finding in check_preferences(pairs_of(BASE), files=False)] == ["one_side"]


def test_rows_of_annotators_are_votes_and_only_the_same_voice_repeats_itself() -> None:
    rows = pairs_of(
        BASE | {"annotator": "ann"},
        BASE | {"annotator": "bob"},
        MIRRORED | {"label": 0.0, "annotator": "ann"},  # ann says it again, mirrored
        MIRRORED | {"annotator": "cat"},
        BASE | {"annotator": "dan", "label": 0.5},
        BASE | {"annotator": "bob", "label": 0.0},  # bob contradicts himself: both stay
    )
    counts = {finding.kind: finding.count for finding in check_preferences(rows, files=False)}
    assert counts == {"duplicates": 1, "disagreement": 1, "ties": 1}
    unique = without_duplicates(rows)
    assert len(unique) == 5
    summed, (finding,) = summed_votes(unique)
    (pair,) = summed.pairs
    assert (pair.votes, pair.label, pair.annotator) == ((2, 2, 1), 0.5, None)
    assert pair.ballots == (("ann", 1.0), ("bob", 1.0), ("cat", 0.0), ("dan", 0.5), ("bob", 0.0))
    assert pair.swapped().ballots[0] == ("ann", 0.0) and pair.swapped().swapped() == pair
    assert finding.message == "5 rows of 4 annotators are votes on 1 pairs; those of a pair are summed."


def test_rows_without_a_name_are_votes_and_tallies_repeat() -> None:
    summed, (finding,) = summed_votes(without_duplicates(pairs_of(BASE, BASE, MIRRORED, BASE)))
    assert [(pair.votes, pair.label) for pair in summed.pairs] == [((3, 1, 0), 0.75)]
    assert finding.message.endswith("4 rows name no annotator and count as one vote each.")
    tally = {"label": 0.75, "votes": (3, 1, 0)}
    again = without_duplicates(pairs_of(BASE | tally, MIRRORED | {"label": 0.25, "votes": (1, 3, 0)}))
    assert len(again) == 1 and summed_votes(again) == (again, [])
    single, none = summed_votes(pairs_of(BASE, BASE | {"prompt": "a dog", "annotator": "ann"}))
    assert [pair.votes for pair in single.pairs] == [None, (1, 0, 0)] and not none


def test_shares_of_annotators_are_averaged_and_are_no_votes() -> None:
    rows = (BASE | {"label": label, "annotator": name} for label, name in ((0.62, "a"), (0.3, "b")))
    (pair,) = summed_votes(pairs_of(*rows))[0].pairs
    assert (pair.label, pair.votes) == (pytest.approx(0.46), None)


@pytest.mark.parametrize(
    ("label", "votes", "is_against"),
    [
        (1.0, (1, 4, 0), True),
        (0.75, (3, 1, 0), False),
        (1.0, (2, 2, 0), True),
        (0.5, (2, 1, 7), False),
        (0.5, (4, 1, 0), True),
    ],
)
def test_votes_that_do_not_favour_the_label_are_reported(label: float, votes: Any, is_against: bool) -> None:
    findings = check_preferences(
        pairs_of(BASE | {"label": label, "votes": votes}, MIRRORED | {"label": 0.0}), files=False
    )
    assert [f.count for f in findings if f.kind == "label_against_votes"] == [1] * is_against


def test_tables_of_votes_are_read_and_written(tmp_path: Path) -> None:
    names = {"generator_left": "sd3", "generator_right": "flux"}
    rows = [row(annotator=7, **names), row(annotator=8, label="right", **names), row(model_left="1.5")]
    dataset = load_preferences(write(tmp_path / "set.jsonl", rows))
    assert [pair.annotator for pair in dataset.pairs] == ["7", "8", None]
    assert (dataset.pairs[0].generator_left, dataset.pairs[0].generator_right) == ("sd3", "flux")
    assert dataset.pairs[2].generator_left is None and dataset.pairs[2].extra == {"model_left": "1.5"}
    summed, _ = summed_votes(dataset)
    again = load_preferences(write_rows(tmp_path / "again.jsonl", summed.pairs))
    assert again.pairs == summed.pairs and again.pairs[0].ballots == (("7", 1.0), ("8", 0.0))
    with pytest.raises(UserError, match=r"ballots must be pairs .*got \[\[1, 2\]\]"):
        load_preferences(write(tmp_path / "bad.jsonl", [row(ballots=[[1, 2]])]))


def test_sides_are_mixed_the_same_way_always() -> None:
    pairs = [PreferencePair(**(BASE | {"image_left": f"/a/{k}.png", "label": 1.0})) for k in range(200)]
    mixed = [mix_sides(pair) for pair in pairs]
    assert 60 < sum(pair.label == 1.0 for pair in mixed) < 140
    assert mixed == [mix_sides(pair.swapped()) for pair in pairs]
    pair = PreferencePair(**BASE, label=1.0, votes=(2, 1, 3), generator_left="a", extra={"x_left": 1, "y": 2})
    turned = pair.swapped()
    assert (turned.votes, turned.generator_right, turned.extra) == ((1, 2, 3), "a", {"x_right": 1, "y": 2})
    assert turned.swapped() == pair
    extra = {"prob": 0.25, "a_prob": "0.25", "b_prob": 0.25, "b_prob_swapped": 0.5, "c_prob": "none"}
    turned = PreferencePair(**BASE, label=1.0, extra=extra).swapped()
    assert turned.extra == {
        "prob": 0.75, "a_prob": 0.75, "b_prob_swapped": 0.25, "b_prob": 0.5, "c_prob": "none",
    }  # fmt: skip


def test_quality_sets(tmp_path: Path) -> None:
    good = [{"image": "a.png", "mos": 1.0, "std": 0.1}, {"image": "b.png", "mos": "3"}]
    dataset = load_quality(write(tmp_path / "q.jsonl", good))
    assert [record.mos for record in dataset.records] == [1.0, 3.0] and dataset.higher_is_better
    assert check_quality(dataset, files=False) == []
    mixed = [entry | {"higher_is_better": k == 0} for k, entry in enumerate(good)]
    with pytest.raises(UserError, match=r"higher_is_better must be true or false, and the same in all rows"):
        load_quality(write(tmp_path / "q.jsonl", mixed))
    lower = load_quality(write(tmp_path / "q.jsonl", [entry | {"higher_is_better": False} for entry in good]))
    assert not lower.higher_is_better
    for rows, message in (
        ([good[0], good[0] | {"image": "b.png"}], "The 2 images of 'q' have one score"),
        ([good[0], good[1], good[0] | {"mos": 2}], "'.*a.png' has the score 1 in row 1 and 2 in row 3"),
        (
            [entry | {"reference": "I1", "split": s} for entry, s in zip(good, "ab", strict=True)],
            "more than one split",
        ),
    ):
        with pytest.raises(UserError, match=message):
            check_quality(load_quality(write(tmp_path / "q.jsonl", rows)), files=False)
    with pytest.raises(UserError, match=r"'mos' is 'good', needed is a finite number"):
        load_quality(write(tmp_path / "q.jsonl", [{"image": "a", "mos": "good"}]))


def test_references_into_parquet_files(tmp_path: Path) -> None:
    """Threads read a row group once, however many need it; what leads nowhere is refused."""
    path, file = tmp_path / "x.parquet", pyarrow.parquet.ParquetFile
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"jpg": b"x"}] * 5), path)
    with patch.object(file, "read_row_group", autospec=True) as reading, ThreadPoolExecutor(5) as pool:
        reading.side_effect = lambda *_, **__: (sleep(0.1), pyarrow.table({"jpg": [b"x"] * 5}))[1]
        assert [*pool.map(image_bytes, [parquet_reference(path, "jpg", row) for row in range(5)])] == [b"x"] * 5
    assert reading.call_count == 1
    for broken in (parquet_reference(path, "jpg", 9), parquet_reference(path, "png", 1), "parquet://x"):
        with pytest.raises(UserError, match=r"leads to no image"):
            resolve_image(broken)


def png(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), color).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("right", [png("green"), [png("green")], [{"bytes": png("green"), "width": 4}]])
def test_images_inside_parquet_are_read_as_references(tmp_path: Path, right: Any) -> None:
    """The datasets library writes {"bytes", "path"}; without bytes the path counts, under any column name."""
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "blue.png")
    cells = [{"bytes": png("red"), "path": "red.png"}, {"bytes": None, "path": "blue.png"}]
    rows = [{"caption": "a", "one": cell, "image_right": right, "label": 1} for cell in cells]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    columns = Columns(names={"prompt": "caption", "image_left": "one"})
    pairs = load_preferences(tmp_path / "a.parquet", columns=columns).pairs
    batch = load_images([resolve_image(name) for pair in pairs for name in (pair.image_left, pair.image_right)])
    assert [image[:, 0, 0].round(decimals=1).tolist() for image in batch.images if image is not None] == [
        [1, 0, 0], [0, 0.5, 0], [0, 0, 1], [0, 0.5, 0]
    ]  # fmt: skip
    scored = image_rows([tmp_path / "a.parquet"], names={"prompt": "caption", "image": "one"})
    assert [row.image for row in scored] == [pair.image_left for pair in pairs]


def test_messages_list_the_columns_of_the_file(tmp_path: Path) -> None:
    """Not our names after a mapping; columns with an empty cell too."""
    path = tmp_path / "a.csv"
    path.write_text("caption,one,other,score\na,l.png,,1\n")
    two = {"prompt": "caption", "image_left": "one"}
    for names, message in (
        (two, r"lacks the columns 'image_right', 'label'.*Found: caption, one, other, score"),
        ({"prompt": "text"}, r"no column 'text', .*Found: caption, one, other, score\."),
        ({**two, "image_right": "other"}, r"lacks the columns 'image_right', 'label'.*other"),
    ):
        with pytest.raises(UserError, match=message):
            load_preferences(path, columns=Columns(names=names))
    with pytest.raises(UserError, match=r"has an empty cell in the column 'other'"):
        require_columns(path, {"caption": "a"}, ("other",), purpose="a test")


def test_generated_sets_and_unknown_sources(tmp_path: Path) -> None:
    pairs = load_source("shapes:pairs", limit=20)
    assert isinstance(pairs, PreferenceSet) and len(pairs) == 20
    assert resolve_image(pairs.pairs[3].image_left).shape == (64, 64, 3)
    assert load_source("shapes:pairs", limit=20) == pairs
    with pytest.raises(UserError, match=r"shapes:pairs, shapes:quality, or LAYOUT:FOLDER"):
        load_source("hpdv9:there")
    with pytest.raises(UserError, match=r"There is no set '/"):
        load_source(str(tmp_path))
