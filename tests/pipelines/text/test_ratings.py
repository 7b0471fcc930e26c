# SPDX-License-Identifier: Apache-2.0
"""Judges that learn by reinforcement: rated images as prompts, a folder that judges again; prompts of SPCT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from visalign.config import load_config, resolve_config
from visalign.data.sets.sources import shapes_pairs
from visalign.errors import UserError
from visalign.pipelines.text import job
from visalign.pipelines.text.config import HeldoutPromptsConfig
from visalign.pipelines.text.job import TextGRPOConfig
from visalign.pipelines.text.parts import prepare, text_records
from visalign.pipelines.text.supervised import TextSFTConfig, prepare_supervised
from visalign.rewards.catalogue import load_reward
from visalign.rewards.chat.text_judge import SCORES, question_fields
from visalign.rewards.text.rating import ScoresReward
from visalign.training.loop.metrics import read_metrics

TINY = ["data.size=40", "data.heldout_size=6", "rollout.prompts_per_iteration=4", "rollout.group_size=3"]
TINY += ["optimizer.micro_batch=5", "evaluation.seeds=[0, 1]", "run.device=cpu"]


def config(*more: str) -> TextGRPOConfig:
    return load_config(TextGRPOConfig, resolve_config("shapes_visual_quality_r1"), [*TINY, *more])


def rated(folder: Path) -> Path:
    """A table of five rated images."""
    lines = []
    for n in range(5):
        Image.new("RGB", (64, 64), (50 * n,) * 3).save(folder / f"{n}.png")
        lines.append(json.dumps({"image": f"{n}.png", "mos": 1.0 + n / 2}))
    (folder / "rated.jsonl").write_text("\n".join(lines))
    return folder / "rated.jsonl"


@pytest.mark.slow
def test_a_run_learns_to_rate_and_its_folder_is_a_judge(tmp_path):
    summary = job.run(config("run.iterations=2"), tmp_path / "whole")
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert 0.5 < rows[0]["reward_mean"] <= 1.1 and rows[0]["reward_part/rating.rating"] > 1
    assert set(summary["after"]["by_category"]) <= {"none", "blur", "jpeg", "noise", "contrast"}
    judges = [load_reward("visual_quality_r1", model=m) for m in ("shapes-vlm", str(tmp_path / "whole" / "model"))]
    grey = torch.full((3, 64, 64), 0.5)
    before, after = (judge.score([grey], [""]) for judge in judges)
    assert bool(after.valid.all()) and float(after.value) != float(before.value)


def test_files_of_rated_images_are_asked_about(tmp_path):
    files = [f"data.train={rated(tmp_path)}", f"data.heldout={tmp_path / 'rated.jsonl'}"]
    inputs = prepare(config(*files, "data.size=4"))
    assert [record["mos"] for record in inputs.records] == [1.0, 1.5, 2.0, 2.5] and len(inputs.heldout) == 5
    (message,) = inputs.records[1]["prompt"]
    assert message["content"][0] == {"type": "image", "image": str(tmp_path / "1.png")}
    (tmp_path / "3.png").write_bytes(b"none")
    policy = job.build_text_policy(config().model, torch.device("cpu"), 0)
    with pytest.raises(UserError, match=r"image 0 of prompt 3, '.*3\.png', cannot be read"):
        policy.generate([record["prompt"] for record in inputs.records], seeds=0)


def test_pairs_are_asked_about_without_ties(tmp_path):
    inputs = prepare(config("data.train=shapes:pairs", "data.question=Which is {prompt}", "data.heldout=shapes:pairs"))
    first = inputs.records[0]
    images = [part.get("image") for part in first["prompt"][0]["content"]]
    assert [str(image)[-4:] for image in images[:2]] == ["left", "ight"] and first["label"] != 0.5
    question = first["prompt"][0]["content"][2]["text"]
    assert question.startswith("Which is ") and "{prompt}" not in question and 30 < len(inputs.records) <= 40
    rows = [{"prompt": "p", "image_left": "0.png", "image_right": f"{n}.png", "label": 0.5} for n in (1, 2)]
    rated(tmp_path)
    (tmp_path / "ties.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=r"data\.train: .*tie"):
        prepare(config(f"data.train={tmp_path / 'ties.jsonl'}"))


def decided(*overrides: str) -> TextSFTConfig:
    """Demonstrations from pairs: a decision first, and perhaps a reason."""
    defaults = ["model.path=shapes-vlm", "data.train=shapes:pairs", "data.heldout=shapes:pairs", "data.size=12"]
    defaults += ["data.heldout_size=4", "data.question=Is image 2 better for {prompt}?", "run.device=cpu"]
    defaults += ["evaluation={rewards: {verdict: {options: {words: ['no', 'yes']}}}, correctness: null}"]
    return load_config(TextSFTConfig, None, [*defaults, "data.decision=['no', 'yes']", *overrides])


def test_a_teachers_reason_stands_behind_the_decision():
    pairs = [pair for pair in shapes_pairs(12, split="train").pairs if pair.label != 0.5]
    for field in ("reason", None):
        demonstrations = prepare_supervised(decided(f"data.field={field or 'null'}")).records
        assert len(demonstrations) == len(pairs)
        for record, pair in zip(demonstrations, pairs, strict=True):
            decision = "no" if pair.label > 0.5 else "yes"  # whether the second, the right one, is better
            assert record["completion"] == (f"{decision}, {pair.extra['reason']}" if field else decision)
            assert record["prompt"][0]["content"][2]["text"] == f"Is image 2 better for {pair.prompt}?"
    assert {record["completion"] for record in demonstrations} == {"no", "yes"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.decision=[no, yes]", r"is \[False, True\]; give two .*YAML reads yes as true"),
        ("data.question=null", r"data\.question, which asks about them, is null"),
        ("data.field=why", r"data\.train: no decided pair has a text in 'why'"),
    ],
)
def test_decisions_of_what_are_no_pairs_are_refused(override, message):
    with pytest.raises(UserError, match=message):
        prepare_supervised(decided(override))


def records(folder: Path, rows: list[dict], question: str = "{prompt}|{responses}") -> list:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return list(text_records("train", HeldoutPromptsConfig(train=str(path), heldout="x", question=question), 0))


def test_the_order_is_drawn_and_the_record_names_the_best(tmp_path: Path):
    rows = [{"prompt": f"p{n}", "chosen": "good", "rejected": "bad"} for n in range(8)]
    questions = records(tmp_path, rows)
    assert {record["best"] for record in questions} == {1, 2}
    for record in questions:
        assert record["prompt"].split("[Response ")[record["best"]].splitlines()[1] == "good"
        assert record["rewards"][record["best"] - 1] == max(record["rewards"]) == 1
        scores = ["9" if number == record["best"] else "4" for number in (1, 2)]
        answer = rf"\boxed{{{', '.join(scores)}}}"
        assert ScoresReward().score([answer], ["?"], [record]).value.tolist() == [1]


def test_lists_are_asked_about_as_the_judge_itself_asks(tmp_path: Path):
    rows = [{"prompt": "three", "completions": ["aaa1", "bbb2", "ccc3"], "scores": [1, 9, 5]}]
    rows += [{"prompt": "tied", "completions": ["a", "b"], "scores": [2, 2]}]
    (record,) = records(tmp_path, rows, "text_judge")
    assert sorted(record["rewards"]) == [1, 5, 9] and record["rewards"][record["best"] - 1] == 9
    answers = sorted(("aaa1", "bbb2", "ccc3"), key=record["prompt"].index)
    (message,) = SCORES.filled({"prompt": "three", **question_fields(answers)})
    assert r"\boxed{score 1, score 2, score 3}" in record["prompt"] == message["content"][0]["text"]


def test_packaged_tasks_and_what_has_no_best(tmp_path: Path):
    config = HeldoutPromptsConfig(size=6, heldout="tasks:heldout", question="{prompt} {responses}")
    assert len(text_records("train", config, 0)) == 6 and len(text_records("heldout", config, 0)) == 285
    with pytest.raises(UserError, match=r"no prompt of '.*' has one best response"):
        records(tmp_path, [{"prompt": "p", "completions": ["a", "b"], "scores": [1, 1]}])
