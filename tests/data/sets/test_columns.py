# SPDX-License-Identifier: Apache-2.0
"""Tables as people keep them: names, labels, votes, separators, JSON shapes, scores in another table."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from visalign.data.sets.columns import Columns, parse_map, read_table
from visalign.data.sets.prompt_files import load_prompts
from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.sets.sources import from_dataframe, join_scores, load_preferences, load_quality, load_source
from visalign.errors import UserError
from visalign.pipelines.score.parts import Part, ScoringOptions, read_part
from visalign.pipelines.score.score import ScoreRow, encode_rows


def pairs_of(folder: Path, values: list[Any], **columns: Any) -> list[float]:
    rows = [{"prompt": "p", "image_left": f"{k}l", "image_right": f"{k}r", "label": v} for k, v in enumerate(values)]
    (folder / "a.json").write_text(json.dumps(rows))
    dataset = load_preferences(folder / "a.json", columns=Columns(**columns))
    return [pair.label for pair in dataset.pairs]


def test_numbers_that_are_not_plain_ask_for_their_meaning(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Row 3 .* label is 2; .* --labels margin"):
        pairs_of(tmp_path, [0, 1, 2])
    assert pairs_of(tmp_path, ["A", "b", "Left", "tie"]) == [1, 0, 1, 0.5]
    assert pairs_of(tmp_path, [0, 1, 2], labels="0=left,1=right,2=tie") == [1, 0, 0.5]
    assert pairs_of(tmp_path, [0.3, -7, 0], labels="margin") == [1, 0, 0.5]
    assert pairs_of(tmp_path, [0, 1, 0.3]) == [0, 1, 0.3]
    with pytest.raises(UserError, match=r"the label is 3; --labels names 1, 2"):
        pairs_of(tmp_path, [1, 3], labels="1=left,2=right")
    with pytest.raises(UserError, match="is '1=up'; write share or margin, or words"):
        pairs_of(tmp_path, [1], labels="1=up")


def test_a_wrong_map_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("file,score\na.png,1\nb.png,2\n")
    rated = load_source(str(tmp_path / "a.csv"), columns=Columns(names={"image": "file", "mos": "score"}))
    assert isinstance(rated, QualitySet) and [r.mos for r in rated.records] == [1, 2]
    with pytest.raises(UserError, match=r"no column 'scor', which --map mos=scor names. Did you mean 'score'"):
        load_source(str(tmp_path / "a.csv"), columns=Columns(names={"image": "file", "mos": "scor"}))
    with pytest.raises(UserError, match="write OURS=THEIRS"):
        parse_map(["mos"])
    with pytest.raises(UserError, match="has its own layout"):
        load_source("shapes:pairs", columns=Columns(names={"mos": "x"}))


def test_another_separator_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt^image_left^image_right^label\na^1^2^left\n")
    with pytest.raises(UserError, match=r"There is one column; those of a CSV are separated by , ; \| or tabs"):
        load_preferences(tmp_path / "a.csv")


def test_a_set_without_images_is_read_where_none_is_opened(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,m_left,m_right\nleft,1,0\nright,1,2\n")
    with pytest.raises(UserError, match="lacks the columns 'prompt', 'image_left', 'image_right'"):
        load_source(str(tmp_path / "a.csv"))
    dataset = load_source(str(tmp_path / "a.csv"), columns=Columns(has_images=False))
    assert isinstance(dataset, PreferenceSet) and len({pair.group for pair in dataset.pairs}) == 2
    assert dataset.pairs[0].extra == {"m_left": "1", "m_right": "0"}
    (tmp_path / "q.csv").write_text("mos,m\n1,2\n3,4\n")
    rated = load_source(str(tmp_path / "q.csv"), columns=Columns(has_images=False))
    assert isinstance(rated, QualitySet) and len({record.image for record in rated.records}) == 2


def test_scores_are_joined_by_image(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "image_left": f"im/{k}.png", "image_right": "im/9.png", "label": 1} for k in range(3)]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = load_preferences(tmp_path / "set.jsonl")
    wide = "image,good\n" + "".join(f"elsewhere/{k}.png,{k}\n" for k in (0, 1, 2, 9))
    (tmp_path / "wide.csv").write_text(wide)
    both = join_scores(dataset, tmp_path / "wide.csv")
    assert isinstance(both, PreferenceSet)
    assert [p.extra["good_left"] for p in both.pairs] == ["0", "1", "2"]
    assert {p.extra["good_right"] for p in both.pairs} == {"9"}
    long = "image,reward,value,unit,std\nim/0.png,a,0.5,x,\nim/9.png,a,0.25,x,0.1\n"
    long += "im/0.png,b,1,x,\nim/9.png,b,2,x,\n"
    (tmp_path / "long.csv").write_text(long)
    with pytest.warns(UserWarning, match="Of 3 records of 'set' the joined tables have a for 1, b for 1"):
        some = join_scores(dataset, tmp_path / "long.csv")
    assert isinstance(some, PreferenceSet)
    scores = {"a_left": "0.5", "b_left": "1", "a_right": "0.25", "b_right": "2", "a_std_right": "0.1"}
    assert some.pairs[0].extra == scores
    (tmp_path / "none.csv").write_text("image,good\nother.png,1\n")
    with pytest.raises(UserError, match="None of the images of 'set' is in"):
        join_scores(dataset, tmp_path / "none.csv")


def test_scores_of_two_tables_are_joined_by_path_where_files_have_one_name(tmp_path: Path) -> None:
    (tmp_path / "set.csv").write_text("prompt,image_left,image_right,label\np,m1/0.png,m2/0.png,left\n")
    for model, value in (("m1", 1), ("m2", 2)):
        (tmp_path / f"{model}.csv").write_text(f"image,reward,value\n{model}/0.png,r,{value}\n")
    dataset = load_preferences(tmp_path / "set.csv")
    both = join_scores(dataset, tmp_path / "m1.csv", tmp_path / "m2.csv")
    assert isinstance(both, PreferenceSet) and both.pairs[0].extra == {"r_left": "1", "r_right": "2"}
    with pytest.warns(UserWarning, match="r for 0"):
        half = join_scores(dataset, tmp_path / "m1.csv")
    assert isinstance(half, PreferenceSet) and half.pairs[0].extra == {"r_left": "1"}


def test_scores_of_an_image_under_several_prompts_are_joined_by_prompt(tmp_path: Path) -> None:
    rows = "".join(f"{prompt},a.png,b.png,left\n" for prompt in ("p", "q"))
    (tmp_path / "set.csv").write_text(f"prompt,image_left,image_right,label\n{rows}")
    scores = "".join(
        f"{i}.png,{p},r,{v}\n" for i, p, v in (("a", "p", 1), ("a", "q", 2), ("b", "p", 3), ("b", "q", 4))
    )
    (tmp_path / "scores.csv").write_text(f"image,prompt,reward,value\n{scores}")
    joined = join_scores(load_preferences(tmp_path / "set.csv"), tmp_path / "scores.csv")
    assert isinstance(joined, PreferenceSet)
    assert [(p.extra["r_left"], p.extra["r_right"]) for p in joined.pairs] == [("1", "3"), ("2", "4")]


def test_texts_that_begin_like_formulas_are_read_back_from_csv(tmp_path: Path) -> None:
    row = ScoreRow(image="=x.png", reward="r", value=1.0, unit="u", prompt="@home")
    (tmp_path / "scores.csv").write_text(encode_rows([row], "csv"))
    ((_, cells),) = read_table(tmp_path / "scores.csv", {})
    assert (cells["image"], cells["prompt"]) == ("=x.png", "@home")


def test_columns_of_texts_under_other_names_are_no_empty_completions(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("prompt,completion,other\np,good,bad\nq,fine,\n")
    pairs = load_preferences(tmp_path / "p.csv", columns=Columns(names={"chosen": "completion", "rejected": "other"}))
    sides = [{p.image_left, p.image_right} for p in pairs.pairs]
    assert sides == [{"text://good", "text://bad"}, {"text://fine", "text://"}]
    (tmp_path / "c.csv").write_text("prompt,completion\np,yes\nq,\n")
    assert [row["image"] for _, row in read_table(tmp_path / "c.csv", {})] == ["text://yes", "text://"]
    (tmp_path / "i.csv").write_text("image,mos,chosen\na.png,1,\nb.png,2,x\n")
    assert load_quality(tmp_path / "i.csv").records[0].extra == {}


@pytest.mark.parametrize("as_text", [False, True])
def test_votes_of_chosen_and_rejected_follow_their_sides(tmp_path: Path, as_text: bool) -> None:
    votes: Any = {"votes": [3, 1, 0], "ballots": [["ann", 0.75]]}
    votes = {name: json.dumps(value) for name, value in votes.items()} if as_text else votes
    rows = [{"prompt": f"p{k}", "chosen": f"yes {k}", "rejected": f"no {k}", **votes} for k in range(9)]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = load_preferences(tmp_path / "set.jsonl").pairs
    expected = {1.0: ((3, 1, 0), (("ann", 0.75),)), 0.0: ((1, 3, 0), (("ann", 0.25),))}
    assert {(p.label, p.votes, p.ballots) for p in pairs} == {(label, *rest) for label, rest in expected.items()}


@pytest.mark.parametrize("votes", [5, "many", [1], {"a": 1}, [["a", "b"]]])
def test_votes_that_cannot_be_turned_are_refused_with_their_row(tmp_path: Path, votes: Any) -> None:
    for k in range(4):  # both sides
        row = {"prompt": f"p{k}", "chosen": f"yes {k}", "rejected": f"no {k}", "votes": votes}
        (tmp_path / "set.jsonl").write_text(json.dumps(row))
        with pytest.raises(UserError, match=r"Row 1 of .* votes are whole counts"):
            load_preferences(tmp_path / "set.jsonl")


def test_scores_of_texts_are_joined_by_text_alone(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": f"{x} = {n}/2", "mos": n} for n, x in enumerate("abc")]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "scores.jsonl").write_text(json.dumps({"image": "text://a = 0/2", "reward": "r", "value": 5}))
    with pytest.warns(UserWarning, match="r for 1"):
        joined = join_scores(load_quality(tmp_path / "set.jsonl"), tmp_path / "scores.jsonl")
    assert isinstance(joined, QualitySet) and [r.extra.get("r") for r in joined.records] == [5, None, None]


def test_scores_of_chosen_and_rejected_follow_their_sides(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{k}", "chosen": f"yes {k}", "rejected": f"no {k}", "good": 8, "bad": 3} for k in range(20)]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = {"r_left": "good", "r_right": "bad"}
    pairs = load_preferences(tmp_path / "set.jsonl", columns=Columns(names=names)).pairs
    assert {pair.label for pair in pairs} == {0.0, 1.0}
    assert all((pair.extra["r_left"] > pair.extra["r_right"]) == (pair.label == 1.0) for pair in pairs)


@pytest.mark.parametrize("write", ["to_csv", "to_excel", "to_parquet", "to_json"])
def test_empty_cells_are_alike_in_all_formats(tmp_path: Path, write: str) -> None:
    pandas, names = pytest.importorskip("pandas"), {"prompt": "caption", "mos": "score"}
    cells = [("1.png", "old", "new", 1, 3), ("2.png", None, "newer", 2, 4), ("3.png", "older", None, 3, None)]
    frame = pandas.DataFrame(cells, columns=["image", "prompt", "caption", "mos", "score"])
    path = tmp_path / f"a.{ {'to_excel': 'xlsx', 'to_json': 'json'}.get(write, write[3:]) }"
    getattr(frame, write)(path, **({"orient": "records"} if write == "to_json" else {"index": False}))
    with pytest.raises(UserError, match=r"row \d has an empty field 'caption', which data.map.prompt"):
        load_prompts(path, names={"prompt": "caption"})
    with pytest.raises(UserError, match=r"row \d needs a .prompt. that is text"):
        load_prompts(path)
    assert [row.get("prompt") for _, row in read_table(path, names)] == ["new", "newer", None]
    assert [row.get("prompt") for _, row in read_table(path, {})] == ["old", None, "older"]
    for load in (partial(load_source, str(path)), partial(from_dataframe, frame)):
        with pytest.raises(UserError, match=r"Row \d of .*'mos' is None"):
            load(columns=Columns(names={"mos": "score"}))


def test_an_empty_cell_is_not_filled_from_another_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "image,prompt,caption,text\n1.png,old,new,SALE\n2.png,older,,SALE\n3.png,,new,SALE\n"
    )
    part = Part(source=tmp_path / "a.csv", output="a")
    rows = list(read_part(part, ScoringOptions(rewards=[], names={"prompt": "caption"})))
    assert [row.prompt for row in rows] == ["new", "", "new"] and "prompt" in str(rows[1].reason)
    assert [row.prompt for row in read_part(part, ScoringOptions(rewards=[]))] == ["old", "older", ""]
    (tmp_path / "b.csv").write_text("path,file_name,Prompt,text\n1.png,2.png,old,SALE\n,3.png,,SALE\n")
    part = Part(source=tmp_path / "b.csv", output="b")
    assert [row.prompt for row in read_part(part, ScoringOptions(rewards=[]))] == ["old", ""]
    for name, content in (("empty", b""), ("latin", "image,prompt\n1.png,Stra\xdfe\n".encode("latin-1"))):
        (tmp_path / f"{name}.csv").write_bytes(content)
        with pytest.raises(UserError):
            load_prompts(str(tmp_path / f"{name}.csv"))
