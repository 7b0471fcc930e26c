# SPDX-License-Identifier: Apache-2.0
"""The best of several images: groups, places, the pairs of the export, agreement, the page in a browser."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.pipelines.collect.test_server import browser, in_browser, open_page, serving, type_name  # noqa: F401
from visalign.data.sets.marks import load_marks
from visalign.data.sets.sources import load_preferences
from visalign.errors import UserError
from visalign.pipelines.cli.app import app
from visalign.pipelines.collect.server import vote_server
from visalign.pipelines.collect.store import Plan, VoteStore
from visalign.pipelines.collect.tasks import Form, read_tasks
from visalign.pipelines.collect.votes import export_rows, write_rows


def _images(folder: Path, prompts: int = 3, per_prompt: int = 4) -> Path:
    """Images of increasing brightness."""
    folder.mkdir()
    for prompt in range(prompts):
        for number in range(per_prompt):
            Image.new("RGB", (16, 16), (60 * number,) * 3).save(folder / f"{prompt}_{number}.png")
            (folder / f"{prompt}_{number}.txt").write_text(f"prompt {prompt}")
    return folder


def _store(tmp_path: Path) -> VoteStore:
    tasks = read_tasks([str(_images(tmp_path / "set"))], single=False, best_of=4)
    return VoteStore.create(tmp_path / "v.sqlite", tasks, Form(), Plan(votes=0, gold_every=0, repeat_every=0))


def _vote(store: VoteStore, name: str, number: int) -> None:
    """Choose the image of this number in every group, wherever it is on the screen."""
    store.join(name)
    while (question := store.next(name)) is not None:
        choice = next(p for p in question.task.places if question.image(p).endswith(f"_{number}.png"))
        store.vote(name, question.assignment, {"choice": choice}, client=f"{name} {question.assignment}", seconds=1.0)


def test_groups_are_of_one_prompt_and_disjoint(tmp_path):
    folder = _images(tmp_path / "set", per_prompt=9)
    with pytest.warns(UserWarning, match=r"3 images are left out: a group has 4.*10 groups at most"):
        tasks = read_tasks([str(folder)], single=False, best_of=4)
    assert len(tasks) == 6 and {task.places for task in tasks} == {("1", "2", "3", "4")}
    assert len({image for task in tasks for image in task.images}) == 24
    assert all({Path(i).name[0] for i in task.images} == {task.prompt[-1]} for task in tasks)
    with pytest.raises(UserError, match=r"--best-of is 12, and no prompt has so many images: 9 at most"):
        read_tasks([str(folder)], single=False, best_of=12)


def test_export_and_report(tmp_path):
    """Two voters choose image 3, one image 1: 3 beats 1 by 2 : 1, and both beat the others unanimously."""
    with closing(_store(tmp_path)) as store:
        for name, number in (("Ada", 3), ("Bo", 3), ("Cy", 1)):
            _vote(store, name, number)
    run = CliRunner().invoke
    result = run(app, ["collect", f"{tmp_path}/v.sqlite", "--export", f"{tmp_path}/pairs.jsonl"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    shares = {}
    for row in rows:
        left, right = (Path(row[f"image_{side}"]).stem[-1] for side in ("left", "right"))
        shares[left, right], shares[right, left] = row["label"], 1 - row["label"]
    assert len(rows) == 3 * 5 and ("0", "2") not in shares  # nobody chose either
    assert shares["3", "1"] == pytest.approx(2 / 3) and shares["3", "0"] == shares["1", "2"] == 1
    pairs = load_preferences(str(tmp_path / "pairs.jsonl"))
    assert len(pairs) == 15 and {sum(pair.votes or ()) for pair in pairs.pairs} == {1, 2, 3}
    result = run(
        app, ["collect", f"{tmp_path}/v.sqlite", "--report", f"{tmp_path}/page.html", "--tables", f"{tmp_path}/t"]
    )
    assert result.exit_code == 0, result.output
    # alpha: of each group's 3 pairs of votes 2 differ; of the 36 votes with every place in turn 9 are for each place
    alpha = 1 - (2 / 3) / (36 * 27 / (36 * 35))
    assert f"alpha: {alpha:.3f}" in result.output.replace("−", "-") and (tmp_path / "page.html").is_file()
    refused = run(app, ["collect", f"{tmp_path}/v.sqlite", "--export", f"{tmp_path}/m.jsonl", "--model"])
    assert refused.exit_code == 2 and "--model is of pairs" in refused.output
    refused = run(app, ["collect", f"{tmp_path}/w.sqlite", f"{tmp_path}/set", "--best-of", "4", "--single"])
    assert refused.exit_code == 2 and "Leave --single" in refused.output and not (tmp_path / "w.sqlite").exists()


def test_export_keeps_the_other_answers_of_every_voter(tmp_path):
    """Ada chooses image 3 and marks a fault of image 1, Bo chooses image 1."""
    tasks = read_tasks([str(_images(tmp_path / "set", prompts=1))], single=False, best_of=4)
    form, plan = Form(checklist=("sharp?",), boxes=True, text=True), Plan(votes=0, gold_every=0, repeat_every=0)
    with closing(VoteStore.create(tmp_path / "v.sqlite", tasks, form, plan)) as store:
        for name, number in (("Ada", 3), ("Bo", 1)):
            store.join(name)
            question = store.next(name)
            assert question is not None
            choices = {question.image(choice)[-5]: choice for choice in question.task.places}
            marks = {"text": "good hands", "boxes": [[choices["1"], 0.1, 0.2, 0.5, 0.6]]} if name == "Ada" else {}
            answer = {"choice": choices[str(number)], "checklist": {"sharp?": name == "Ada"}, **marks}
            store.vote(name, question.assignment, answer, client=name, seconds=1.0)
        rows = export_rows(store, store.votes())
    assert len(rows) == 5 and all(row["checklist"] == {"sharp?": [1, 1]} and row["voters"] == 2 for row in rows)
    for row in rows:
        sides = [side for side in ("left", "right") if row[f"image_{side}"].endswith("_1.png")]
        boxes = {"boxes": [[sides[0], 0.1, 0.2, 0.5, 0.6]]} if sides else {}
        assert row["answers"] == [{"annotator": "Ada", "text": "good hands", **boxes}]
    write_rows(tmp_path / "pairs.jsonl", rows)
    marked = load_marks(tmp_path / "pairs.jsonl")
    assert {(Path(image.image).stem[-1], image.voters, len(image.boxes)) for image in marked} == {
        (number, 2, int(number == "1")) for number in "0123"
    }


@pytest.mark.slow
@in_browser
def test_the_page_by_keys_and_pointer(tmp_path, browser):  # noqa: F811
    with closing(_store(tmp_path)) as store, serving(vote_server(store)) as url:
        open_page(browser, url, 390, 844)
        type_name(browser, "Ada")
        assert browser.value("document.documentElement.scrollWidth") <= 390
        browser.until("ready && document.images.length", 4)
        browser.press("3", 51)
        browser.until("document.querySelector('#progress').value", 1)
        browser.until("ready")
        browser.press("ArrowLeft", 37)  # no key of this page
        browser.value("document.querySelector('[data-choice=\"4\"]').click()")
        browser.until("document.querySelector('#progress').value", 2)
        assert [v.answer["choice"] for v in store.votes()] == ["2" if v.swapped else "3" for v in store.votes()][
            :1
        ] + ["1" if v.swapped else "4" for v in store.votes()][1:]
        assert not browser.seen("Runtime.exceptionThrown")
