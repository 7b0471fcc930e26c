# SPDX-License-Identifier: Apache-2.0
"""What people mark next to a choice trains HEIE, a checklist and RewardDance's reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from visalign.config import load_config
from visalign.core import laplace_loss
from visalign.data.sets.marks import load_marks
from visalign.data.shapes.preferences import ShapesPreferences
from visalign.errors import UserError
from visalign.pipelines.cli.app import app
from visalign.pipelines.collect.store import Plan, VoteStore
from visalign.pipelines.collect.tasks import QUALITY_WORDS, Form, Task
from visalign.pipelines.text.parts import text_demonstrations
from visalign.pipelines.text.supervised import TextSFTConfig
from visalign.pipelines.train_reward.config import TrainRewardConfig
from visalign.pipelines.train_reward.inputs import prepare_reward
from visalign.pipelines.train_reward.job import build_judge, run
from visalign.rewards import load_reward
from visalign.rewards.heie.heads import Maps, map_losses
from visalign.training.reward.tasks import TASKS

TINY = ["run.iterations=1", "optimizer.updates_per_iteration=2", "data.heldout=null", "data.batch=4", "run.device=cpu"]
QUESTIONS = ("Is there a circle?", "Is it dark?")
BOX = ["left", 0.25, 0.5, 0.75, 1.0]


def export(folder: Path, answer, *, single: bool, voters: tuple[str, ...] = ("ada", "bob"), count: int = 4) -> Path:
    """Votes of the store itself, exported by the command; `answer` (voter, number) has sides as in the task."""
    world, tasks = ShapesPreferences(0), []
    for number in range(count):
        pair = world.pair(number)
        paths = [folder / f"{number}{side}.png" for side in "ab"[: 1 if single else 2]]
        for path, image in zip(paths, pair.images(), strict=False):
            Image.fromarray(np.asarray(image)).save(path)
        tasks.append(Task(prompt=f"{pair.prompt} {number}", images=tuple(map(str, paths))))
    form = Form(slider=QUALITY_WORDS if single else (), checklist=QUESTIONS, boxes=True, text=True)
    store = VoteStore.create(folder / "v.sqlite", tasks, form, Plan(votes=0, gold_every=0, repeat_every=0))
    for voter in voters:
        store.join(voter)
        while (question := store.next(voter)) is not None:
            marks = answer(voter, int(question.task.prompt.rpartition(" ")[2]))
            mirror = {"left": "right", "right": "left"}
            if question.swapped:
                marks |= {"choice": mirror[marks["choice"]]} if "choice" in marks else {}
                marks |= {"boxes": [[mirror[side], *ends] for side, *ends in marks.get("boxes", [])]}
            store.vote(voter, question.assignment, marks, client=f"{voter} {question.assignment}", seconds=1.0)
    store.close()
    file = folder / "marks.jsonl"
    result = CliRunner().invoke(app, ["collect", str(folder / "v.sqlite"), "--export", str(file)])
    assert result.exit_code == 0, result.output
    return file


def about_single(voter: str, number: int) -> dict:
    marks = {"slider": 4.0, "checklist": {QUESTIONS[0]: number < 2, QUESTIONS[1]: voter == "ada"}}
    return marks | ({"boxes": [BOX]} if voter == "ada" or number == 0 else {})


def about_pair(voter: str, number: int) -> dict:
    marks = {"choice": "left" if number % 2 else "right", "boxes": [BOX] if voter == "ada" else []}
    return marks | ({"text": f"the hand is wrong in {number}"} if voter == "bob" and number else {})


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return export(tmp_path_factory.mktemp("single"), about_single, single=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return export(tmp_path_factory.mktemp("pairs"), about_pair, single=False)


def test_boxes_are_maps_and_grades_or_their_absence_plausibility(single, pairs):
    first, second = load_marks(single)[:2]
    rows = [json.loads(line) for line in single.read_text().splitlines()]
    assert [row["voters"] for row in rows] == [2] * 4 and rows[0]["mos_best"] == 5
    boxed = np.zeros((64, 64), np.float32)
    boxed[32:, 16:48] = 1
    assert np.array_equal(first.heat(), boxed) and np.array_equal(second.heat(), boxed / 2)
    assert first.plausibility == 0.75 and first.checklist == {QUESTIONS[0]: 1.0, QUESTIONS[1]: 0.5}
    sides = {Path(image.image).name: image for image in load_marks(pairs)}
    assert [sides[name].plausibility for name in ("1a.png", "1b.png")] == [0.5, 1.0]
    partly = load_marks(single, limit=1)[0]
    object.__setattr__(partly, "boxes", (((0.0, 0.0, 1 / 128, 1.0), (0.0, 0.0, 1 / 64, 0.5)),))
    assert partly.heat()[:32, 0].tolist() == [0.5] * 32 and partly.heat()[32:, 0].tolist() == [0.25] * 32


@pytest.mark.parametrize("fixture", ["single", "pairs"])
def test_boxes_train_heie(request, tmp_path, fixture):
    own = ["model.kind=heie", "objective.task=heie", "model.width=8"]
    config = load_config(TrainRewardConfig, None, [*own, f"data.train={request.getfixturevalue(fixture)}", *TINY])
    summary = run(config, tmp_path / "run")
    assert summary["examples"] == 8
    judge, inputs = build_judge(config, torch.device("cpu")), prepare_reward(config)
    examples = [judge.remember(inputs.train)[n] for n in range(3)]
    batch = judge.encode(examples)
    outputs = judge(batch.inputs)
    total, weight = TASKS["heie"].loss(outputs, batch, config.objective, torch.Generator())
    assert batch.target is not None
    bce = torch.nn.functional.binary_cross_entropy_with_logits(outputs["value"], batch.target)
    torch.testing.assert_close(total / weight, bce + outputs["map_loss"].mean())
    reward: Any = load_reward("heie", model=tmp_path / "run" / "judge", write_reasons=False)
    image = np.asarray(Image.open(inputs.train.rows[0].images[0]))
    explained = reward.explain([image], [inputs.train[0].prompt])
    assert explained.heatmap.shape == (1, 64, 64) and bool(explained.scores.valid[0])


def test_the_loss_of_maps_is_theirs_of_the_paper_row_by_row():
    """A map of one cell: Laplace, cross-entropy and absolute error by hand."""
    logit, log_std = torch.tensor([[[0.4]], [[-1.0]]]), torch.tensor([[[-0.5]], [[0.2]]])
    truth = torch.tensor([1.0, 0.0])
    maps = Maps((logit, log_std), None, logit.sigmoid(), log_std.exp(), torch.zeros(2))
    losses = map_losses(maps, truth[:, None, None].expand(2, 4, 4), wrong_weight=4.0)
    heat, std = logit.sigmoid().flatten(), log_std.exp().flatten()
    cross = torch.nn.functional.binary_cross_entropy(heat, truth, reduction="none")
    expected = (laplace_loss(heat, truth, std) + cross) / 2 + (heat - truth).abs()
    torch.testing.assert_close(losses, expected * (1 + 4 * truth))


def checklist(folder: Path, *questions: str) -> str:
    file = folder / "checklist.json"
    file.write_text(json.dumps({"questions": questions, "coef": [1.0] * len(questions), "has_alignment": False}))
    return str(file)


def test_checklist_answers_train_the_checklist(single, tmp_path):
    options = ["model.kind=checklist", "objective.task=checklist_answers", f"data.train={single}", "model.lora.rank=2"]
    options += [f"model.checklist={checklist(tmp_path, *QUESTIONS, 'Is it red?')}", f"data.heldout={single}"]
    config = load_config(TrainRewardConfig, None, [*options, *(item for item in TINY if "heldout" not in item)])
    with pytest.raises(UserError, match=r"are also in data\.train"):
        prepare_reward(config)
    config = load_config(TrainRewardConfig, None, [*options[:-1], *TINY, "optimizer.lr=0.01"])
    judge, inputs = build_judge(config, torch.device("cpu")), prepare_reward(config)
    judge.remember(inputs.train)
    batch = judge.encode([inputs.train[n] for n in range(4)])
    assert batch.target is not None and batch.target.shape == (4, 3) and batch.target[:, 2].isnan().all()
    outputs = judge(batch.inputs)
    total, weight = TASKS["checklist_answers"].loss(outputs, batch, config.objective, torch.Generator())
    odds, target = outputs["odds"][:, :2], batch.target[:, :2]
    cross = torch.nn.functional.binary_cross_entropy_with_logits(odds, target, reduction="sum")
    torch.testing.assert_close(total, cross - 2 * outputs["log_mass"].sum())
    assert float(weight) == 8
    assert run(config, tmp_path / "run")["updates"] == 2
    reward: Any = load_reward("vision_reward", model=tmp_path / "run")  # a run stands for its judge
    image = np.asarray(Image.open(inputs.train.rows[0].images[0]))
    assert set(QUESTIONS) < set(reward.score([image], [inputs.train[0].prompt]).parts)


def test_words_become_reasons_behind_the_decision(pairs, tmp_path):
    """Pair 0 has no text and is left out; the text of a voter with the majority stands behind the decision."""
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    assert [row.get("reason") for row in rows] == [None, *(f"the hand is wrong in {n}" for n in (1, 2, 3))]
    small = ["run.iterations=1", "data.batch=2", "model.lora.rank=2", "evaluation.every=0", "run.device=cpu"]
    own = [f"data.train={pairs}", f"data.heldout={pairs}", "data.heldout_size=2", "optimizer.micro_batch=2"]
    config = load_config(TextSFTConfig, "shapes_reward_dance_reasons", [*own, *small])
    records = text_demonstrations("train", config.data, 0, config.data.field)
    completions = [f"{word}, the hand is wrong in {n}" for word, n in (("no", 1), ("yes", 2), ("no", 3))]
    assert [record["completion"] for record in records] == completions


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (["left", 0.2, 0.1, 1.4, 0.5], r"row 1 of 'bad.jsonl', voter 'ada': the box .*1\.4.* does not lie inside"),
        (["right", 0.1, 0.1, 0.4, 0.5], r"with side left and shares of the image from 0 to 1"),
        (["left", 0.4, 0.1, 0.4, 0.5], "does not lie inside"),
        (["left", float("nan"), 0.1, 0.4, 0.5], "does not lie inside"),
    ],
)
def test_boxes_outside_the_image_are_refused(single, tmp_path, box, message):
    row = json.loads(single.read_text().splitlines()[0])
    row["answers"][0]["boxes"], row["image"] = [box], str(single.parent / row["image"])
    (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=message):
        load_marks(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.kind=heie", "objective.task=heie"], r"has no box around a fault.*--boxes"),
        (["model.kind=checklist", "objective.task=checklist_answers"], r"has no answers about single images"),
        (["model.kind=checklist", "model.train=head", "objective.task=checklist_answers"], r"Set model\.train: lora"),
        (["model.kind=heie", "objective.task=heie", "data.train=shapes:pairs"], r"visalign collect --boxes exported"),
        (["model.kind=heie", "objective.task=heie", "data.train=none.jsonl"], r"There is no file 'none.jsonl'"),
    ],
)
def test_a_file_without_the_marks_is_refused(tmp_path, options, message):
    bare = export(tmp_path, lambda voter, number: {"choice": "left"}, single=False, count=2)
    with pytest.raises(UserError, match=message):
        prepare_reward(load_config(TrainRewardConfig, None, [f"data.train={bare}", *TINY, *options]))


@pytest.mark.parametrize(
    "change",
    [{"answers": [3]}, {"mos_best": "5"}, {"checklist": ["a"]}, {"mos": 1, "mos_best": 1}, {"voters": -1}],
    ids=str,
)
def test_rows_that_collect_never_writes_are_refused_by_number(single, tmp_path, change):
    rows = [json.loads(line) for line in single.read_text().splitlines()]
    (tmp_path / "bad.jsonl").write_text(json.dumps({**rows[0], **change}))
    with pytest.raises(UserError, match=r"row 1 of 'bad\.jsonl'"):
        load_marks(tmp_path / "bad.jsonl")


def test_questions_that_the_checklist_does_not_ask_are_refused(single, tmp_path):
    options = ["model.kind=checklist", "objective.task=checklist_answers", f"data.train={single}"]
    options += [f"model.checklist={checklist(tmp_path, QUESTIONS[0])}"]
    config = load_config(TrainRewardConfig, None, [*options, *TINY])
    with pytest.raises(UserError, match=r'answered Is it dark\?; .*FILE, .*"questions": \["Is there a circle'):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
