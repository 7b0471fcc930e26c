# SPDX-License-Identifier: Apache-2.0
"""Tables as pandas, Excel, Label Studio, Argilla, kohya's trainers and the hub have them."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from visalign.data.sets import hub_datasets
from visalign.data.sets.annotation_tools import to_argilla, to_label_studio
from visalign.data.sets.checks import check_quality, summed_votes
from visalign.data.sets.columns import Columns, parse_scores
from visalign.data.sets.hub_datasets import find_table
from visalign.data.sets.prompt_files import load_demonstrations, load_prompts
from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.sets.sources import load_preferences, load_quality, load_source
from visalign.data.sets.tables import read_rows
from visalign.errors import UserError
from visalign.pipelines.compare.agree_rewards import read_set
from visalign.pipelines.evaluate.job import evaluate
from visalign.pipelines.score.image_rows import image_rows

ROWS = [{"prompt": "a cat", "mos": 1}, {"prompt": "a dog", "mos": 2}]
CHAT = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]


def save(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "content",
    [
        ROWS,
        {"data": ROWS, "version": 1},
        {"prompt": ["a cat", "a dog"], "mos": [1, 2]},
        {"prompt": {"0": "a cat", "1": "a dog"}, "mos": {"0": 1, "1": 2}},
        {"columns": ["prompt", "mos"], "index": [0, 1], "data": [["a cat", 1], ["a dog", 2]]},
        {"x": ROWS[0], "y": ROWS[1]},
        "\n".join(map(json.dumps, ROWS)),
    ],
    ids=["list", "data", "columns", "frame", "split", "ids", "lines"],
)
def test_forms_of_json(tmp_path, content):
    rows = [row for _, row in read_rows(save(tmp_path / "a.json", content))]
    assert [{name: row[name] for name in ROWS[0]} for row in rows] == ROWS


@pytest.mark.parametrize(
    ("content", "counts"),
    [
        ({"prompt": ["a", "b"], "mos": [1]}, r"\('prompt' has 2, 'mos' has 1\)"),
        ({"train": ROWS, "test": ROWS}, r"\('train' has 2, 'test' has 2\)"),
        ({}, "must end in .jsonl"),
    ],
)
def test_json_that_is_no_table_is_refused(tmp_path, content, counts):
    with pytest.raises(UserError, match=rf"a.json' is no list; .*columns of equal length.*{counts}"):
        list(read_rows(save(tmp_path / "a.json", content)))


def test_excel(tmp_path):
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("openpyxl")
    cells = [{"image": "a.png", "mos": 3.5, "prompt": None, "category": "None"}]
    pandas.DataFrame(cells).to_excel(tmp_path / "a.xlsx", index=False)
    assert list(read_rows(tmp_path / "a.xlsx")) == [(2, {"image": "a.png", "mos": 3.5, "category": "None"})]
    save(tmp_path / "b.xlsx", "image,mos")
    with pytest.raises(UserError, match=r"b.xlsx' cannot be read as an Excel sheet"):
        list(read_rows(tmp_path / "b.xlsx"))


def captions(tmp_path):
    for name, ending, caption in (("a", "txt", "a cat"), ("b", "caption", "a\ndog"), ("c", None, "")):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
        if ending:
            save(tmp_path / f"{name}.{ending}", caption)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "caption,tag\na cat,x\na dog,y\n"),
        ("a.tsv", "Prompt\ttag\na cat\tx\na dog\ty\n"),
        ("a.json", {"text": ["a cat", "a dog"]}),
        ("metadata.csv", "file_name,text\na.png,a cat\nb.png,a dog\n"),
        (None, captions),
    ],
)
@pytest.mark.filterwarnings("ignore:1 of 3 images have no caption")
def test_prompts_of_images(tmp_path, name, content):
    source = save(tmp_path / name, content) if name else content(tmp_path)
    prompts = [record["prompt"] for record in load_prompts(source)]
    assert name or prompts == [row.prompt for row in image_rows([source / "a.png", source / "b.png"])]
    assert [" ".join(prompt.split()) for prompt in prompts] == ["a cat", "a dog"]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1 + 1?", "answer": "2"},
        {"prompt": "1 + 1?", "response": "2"},
        {"prompt": json.dumps([{"role": "user", "content": "1 + 1?"}]), "completion": "2"},
        {"conversations": CHAT},
    ],
    ids=["gsm8k", "response", "json", "sharegpt"],
)
def test_demonstrations_of_public_sets(tmp_path, row):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    (record,) = load_demonstrations(tmp_path / "a.parquet")
    assert record["completion"] == "2"
    assert record["prompt"] in ("1 + 1?", [{"role": "user", "content": "1 + 1?"}])


def task(index, *results, by=1, **data):
    entries = [{"from_name": name, "to_name": "x", "type": kind, "value": value} for name, kind, value in results]
    submitted = {"completed_by": {"id": by, "email": f"{by}@x.org"}, "result": entries, "was_cancelled": False}
    skipped = {"completed_by": 9, "result": [], "was_cancelled": True}
    return {"id": index, "data": data, "annotations": [submitted, skipped], "predictions": []}


RATED = [
    {"image": "/data/upload/3/0a1b2c3d-a.png", "prompt": "a cat"},
    {"image": "/data/local-files/?d=b%20c.png", "prompt": "a dog"},
]


def label_studio():
    return [
        task(i, ("q", "rating", {"rating": mos}), by=by, **RATED[i])
        for i in (0, 1)
        for by, mos in ((1, 2 + i), (2, 5))
    ]


def label_studio_min():
    return [
        {**RATED[i], "id": i, "annotator": by, "annotation_id": 10 * i + by, "q": [{"rating": mos}]}
        for i in (0, 1)
        for by, mos in ((1, 2 + i), (2, 5))
    ]


def label_studio_plain():
    return [{**row, "rating": row.pop("q")[0]["rating"]} for row in label_studio_min()]


def argilla(form):
    answers = [[(2 + i, "u1"), (5, "u2")] for i in (0, 1)]
    fields = [{"image": name, "prompt": prompt} for name, prompt in (("a.png", "a cat"), ("b c.png", "a dog"))]
    if form == "flat":
        marked = [[*((v, user, "submitted") for v, user in a), (1, "u3", "draft")] for a in answers]
        names = ("q.responses", "q.responses.users", "q.responses.status")
        rows = [dict(zip(names, map(list, zip(*entries, strict=True)), strict=True)) for entries in marked]
        return [
            {"id": "x", "_server_id": None, **f, **row, "q.suggestion": None}
            for f, row in zip(fields, rows, strict=True)
        ]
    if form == "dataset":
        rows = [{"q": [{"value": v, "user_id": u, "status": "submitted"} for v, u in a]} for a in answers]
        return [{**f, **row} for f, row in zip(fields, rows, strict=True)]
    rows = [{"q": [{"value": v, "user_id": u} for v, u in a]} for a in answers]
    return [{"id": "x", "fields": f, "metadata": {}, "responses": row} for f, row in zip(fields, rows, strict=True)]


@pytest.mark.parametrize(
    "rows",
    [label_studio(), label_studio_min(), label_studio_plain(), *map(argilla, ("nested", "flat", "dataset"))],
    ids=["label-studio", "label-studio-min", "label-studio-plain", "argilla", "argilla-flat", "argilla-dataset"],
)
def test_exported_ratings(tmp_path, rows):
    ratings = load_source(str(save(tmp_path / "a.json", rows)))
    assert isinstance(ratings, QualitySet) and ratings.ratings is not None
    assert [(r.image, r.prompt, r.mos) for r in ratings.records] == [
        (str(tmp_path / "a.png"), "a cat", 3.5),
        (str(tmp_path / "b c.png"), "a dog", 4.0),
    ]
    assert len(image_rows([tmp_path / "a.json"])) == 2  # not four
    (finding, *_) = check_quality(ratings, files=False)
    assert finding.message == "4 ratings of 2 images by 2 raters: an image's score is their mean."


def pairs():
    data = {"prompt": "a cat", "one": "l.png", "two": "r.png"}
    label_studio = [
        task(0, ("pw", "pairwise", {"selected": "left"}), by=1, **data),
        task(0, ("pw", "choices", {"choices": ["Right"]}), by=2, **data),
        task(0, ("pw", "pairwise", {"selected": "left"}), by=3, **data),
    ]
    ranks = [[1, 2], [2, 1], [1, 2]]
    ranked = [[{"value": "left", "rank": a}, {"value": "right", "rank": b}] for a, b in ranks]
    responses = {"pick": [{"value": value, "user_id": f"u{i}"} for i, value in enumerate(ranked)]}
    csv = ",Left,Image B,rater,choice,caption\n0,l.png,r.png,A,left,a cat\n1,r.png,l.png,B,r.png,a cat\n"
    csv += "2,l.png,r.png,C,l.png,a cat\n"
    return {"a.json": label_studio, "b.json": [{"fields": data, "responses": responses}], "c.csv": csv}


@pytest.mark.parametrize("name", ["a.json", "b.json", "c.csv"])
def test_exported_pairs(tmp_path, name):
    loaded = load_source(str(save(tmp_path / name, pairs()[name])))
    assert isinstance(loaded, PreferenceSet)
    (pair,) = summed_votes(loaded)[0].pairs
    assert (pair.prompt, pair.image_left, pair.votes) == ("a cat", str(tmp_path / "l.png"), (2, 1, 0))


@pytest.mark.parametrize("write", [to_label_studio, to_argilla])
@pytest.mark.parametrize("answer", [{"label": "tie"}, {"mos": 4.0}], ids=["pairs", "ratings"])
def test_what_is_exported_is_read_again(tmp_path, write, answer):
    images = ("image_left", "image_right") if "label" in answer else ("image",)
    data = {"prompt": "a cat", **{name: f"/x/{name}.png" for name in images}}
    votes = [{**data, **answer, "annotator": name} for name in ("ann", "bob")]
    rows = [row for _, row in read_rows(save(tmp_path / "a.json", write(votes)))]
    ours = [{k: v for k, v in row.items() if k not in ("annotator", "voters")} for row in rows]
    assert ours == [{**data, **answer}] * 2 and len({row["annotator"] for row in rows}) == 2


def test_a_note_on_a_region_is_not_its_annotator(tmp_path):
    note = {"from_name": "box", "value": {"rectanglelabels": ["fault"]}, "meta": {"text": ["blurry"]}}
    choice = {"from_name": "label", "value": {"choices": ["left"]}}
    annotations = [{"completed_by": user, "result": [note, choice]} for user in (1, 2)]
    data = {"prompt": "p", "image_left": "a.png", "image_right": "b.png"}
    (tmp_path / "export.json").write_text(json.dumps([{"data": data, "annotations": annotations}]))
    assert [pair.annotator for pair in load_preferences(tmp_path / "export.json").pairs] == ["1", "2"]


def test_ratings_without_a_name_count_each(tmp_path):
    (tmp_path / "r.csv").write_text("image,mos,annotator\na,1,\na,1,\na,1,\na,5,ann\nb,2,ann\n")
    record = load_quality(tmp_path / "r.csv").records[0]
    assert (record.mos, record.extra["ratings"]) == (2.0, 4)


def test_an_empty_judgement_is_not_filled_from_another_column(tmp_path):
    (tmp_path / "r.csv").write_text("image,mos,score\na,1,9\nb,,7\n")
    with pytest.raises(UserError, match=r"Row 3 .* 'mos' is None"):
        load_source(str(tmp_path / "r.csv"))
    (tmp_path / "p.jsonl").write_text('{"image": "a", "rating": 1, "score": 9}\n{"image": "b", "score": 7}\n')
    with pytest.raises(UserError, match=r"Row 2 .* 'mos' is None"):
        load_source(str(tmp_path / "p.jsonl"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("json", [{"id": 1, "data": RATED[0], "annotations": []}], "1 tasks and no submitted annotation.*Annotate"),
        ("csv", "image,rater,score\na.png,ann,1\na.png,ann,2\n", "ann rated '.*/a.png' 1 in row 2 and 2 in row 3"),
    ],
)
def test_tasks_without_a_rating_or_with_two_by_one_rater_are_refused(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message):
        load_source(str(save(tmp_path / f"a.{name}", content)))


def test_odd_ratings_are_reported(tmp_path):
    lines = [f"{i}.png,ann,{(1, 3, 4, 5, 55)[i % 5 if i < 5 else i % 4]}" for i in range(20)]
    ratings = load_source(str(save(tmp_path / "a.csv", "\n".join(["image,rater,score", *lines]))))
    assert isinstance(ratings, QualitySet)
    single_rater, far = [finding.message for finding in check_quality(ratings, files=False)]
    assert "All 20 ratings are by one rater, ann" in single_rater
    assert far == "1 scores are far from the others (1 to 5): 55 in row 6. Check them."


def test_pairs_need_no_prompt_where_nothing_reads_one(tmp_path):
    path = save(tmp_path / "a.csv", "left,right,choice\na.png,b.png,left\nc.png,d.png,right\n")
    with pytest.raises(UserError, match="lacks the column 'prompt'"):
        load_source(str(path))
    loaded = load_source(str(path), columns=Columns(needs_prompt=False))
    assert isinstance(loaded, PreferenceSet) and len({pair.group for pair in loaded.pairs}) == 2


def test_what_is_a_dataset_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_datasets, "_fetch", lambda *parts: parts)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for source in ("a/b", "c/d.csv", "./c/d", "shapes:pairs", "/c/d", "c/d/e/f"):
        assert str(find_table(source)) == source.removeprefix("./")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_table("~/p.jsonl") == tmp_path / "p.jsonl"
    assert str(find_table("~nobody-here/p.jsonl")) == "~nobody-here/p.jsonl"
    assert find_table("openai/gsm8k") == ("openai/gsm8k", None, None, None)
    assert find_table("openai/gsm8k/main:test") == ("openai/gsm8k", None, "main", "test")
    assert find_table("https://huggingface.co/datasets/openai/gsm8k") == ("openai/gsm8k", None, None, None)
    assert find_table("hf://datasets/openai/gsm8k@v1:train[:5]") == ("openai/gsm8k", "v1", None, "train[:5]")


def test_a_dataset_that_cannot_be_reached_is_named(monkeypatch):
    for module in ("visalign.hub", "visalign.data.sets.hub_datasets"):
        monkeypatch.setattr(f"{module}.go_offline_if_unreachable", lambda: "no route")
    message = r"no file or folder 'no/such' here. The dataset no/such is not in the .* cannot be reached \(no route\)"
    with pytest.raises(UserError, match=message):
        load_source("no/such:test")


def test_a_cached_dataset_is_read_without_a_network(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the extra datasets is not installed")
    file, cache = save(tmp_path / "a.jsonl", '{"question": "1 + 1?", "answer": "#### 2"}'), tmp_path / "cache"
    datasets.load_dataset("json", data_files={"train": str(file), "test": str(file)}, cache_dir=str(tmp_path))
    folder = next((tmp_path / "json").glob("*/*/*/"))
    for arrow in folder.glob("*.arrow"):
        arrow.rename(arrow.with_name(arrow.name.replace("json", "gsm8k")))
    info = json.loads((folder / "dataset_info.json").read_text()) | {"dataset_name": "gsm8k", "config_name": "main"}
    save(folder / "dataset_info.json", info)
    (cache / "me___gsm8k" / "main").mkdir(parents=True)
    folder.parent.rename(cache / "me___gsm8k" / "main" / "0.0.0")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(hub_datasets, "go_offline_if_unreachable", lambda: "no route")
    record = {"prompt": "1 + 1?", "answer": "#### 2"}
    for source in ("me/gsm8k", "me/gsm8k:test", "hf://datasets/me/gsm8k/main:train[:1]"):
        assert load_prompts(source, chat=True) == [record]
    for source, message in (
        ("me/gsm8k:tst", r"has the splits train, test. Write me/gsm8k:SPLIT"),
        ("me/gsm8k/mn", r"has the configurations main. Write me/gsm8k/CONFIG:SPLIT"),
    ):
        with pytest.raises(UserError, match=message):
            load_prompts(source)


@pytest.mark.parametrize(
    ("kind", "scores"), [("ratings", ["a=first judge", "b=second"]), ("pairs", ["a=l1,r1", "b=second"])]
)
def test_scores_in_columns_of_any_name(tmp_path, kind, scores):
    lines = ["image;rater;rating;first judge;second"] if kind == "ratings" else ["left;right;choice;l1;r1;second_prob"]
    for i in range(20):
        if kind == "ratings":
            lines += [
                f"{i}.png;{rater};{1 + i % 4 + wide};{i}7,{i};{-i},5" for rater, wide in (("ann", 0), ("bob", 1))
            ]
        else:
            lines.append(f"{i}l.png;{i}r.png;{'left' if i % 2 else 'right'};{i % 2},5;{(i + 1) % 2},5;0,{i + 10}")
    path, (names, columns) = save(tmp_path / "a.csv", "\n".join(lines)), parse_scores(scores)
    result = evaluate(str(path), columns=names, table=Columns(names=columns))
    assert [entry["judge"]["name"] for entry in result["judges"]] == ["a", "b"]
    if kind == "ratings":
        with pytest.warns(UserWarning, match="20 of 40 rows name an image again"):
            assert len(read_set(str(path), scores=names, columns=Columns(names=columns, has_images=False))) == 20
    with pytest.raises(UserError, match=r"'a' has no .*'ann'.* --scores ann=COLUMN"):
        evaluate(str(path), columns=["ann"])
    with pytest.raises(UserError, match=r"--scores is 'a='; write NAME, NAME=COLUMN or, of pairs, NAME=LEFT,RIGHT"):
        parse_scores(["a="])
