# SPDX-License-Identifier: Apache-2.0
"""UGDA rounds: which pairs are chosen, who labels, that nothing is done twice, the page, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from tests.support.judges.brightness import Brightness
from visalign.config import load_config, resolve_config
from visalign.data.shapes.prompts import parse_prompt
from visalign.errors import UserError
from visalign.evaluation.pages.ugda_page import ugda_page
from visalign.pipelines.collect.store import Plan, VoteStore
from visalign.pipelines.collect.tasks import Form, Task
from visalign.pipelines.train_reward.config import OffPolicyConfig
from visalign.pipelines.ugda.config import EnsembleConfig, LabelConfig, PartConfig, UGDAConfig
from visalign.pipelines.ugda.job import Round, WaitingForVotes, _judge_job, _policy_job, plan, run, sample_settings
from visalign.pipelines.ugda.selection import Candidate, member_scores, select_candidates
from visalign.rewards.combine.ensemble import Ensemble


def candidate(number: int, deviation: float, influence: float) -> Candidate:
    task = Task(prompt=f"p{number}", images=(f"/l{number}", f"/r{number}"))
    return Candidate(task, margin=0.0, deviation=deviation, influence=influence)


def test_half_by_deviation_then_half_by_influence():
    """The deviations 8 to 5 stay, of these the influences 40 and 30; influence alone is not enough."""
    candidates = [candidate(n, d, i) for n, (d, i) in enumerate(
        [(1, 999), (2, 50), (3, 1), (4, 1), (5, 10), (6, 40), (7, 20), (8, 30)]
    )]  # fmt: skip
    chosen = select_candidates(candidates, 75, "ugda", seed=0)
    assert [c.task.prompt for c in chosen] == ["p5", "p7"]
    assert select_candidates(candidates, 1, "ugda", seed=0) == chosen[:1]
    unsure = select_candidates(candidates, 2, "uncertainty", seed=0)
    assert [c.task.prompt for c in unsure] == ["p7", "p6"], "influence has no say"


def test_members_are_asked_apart_and_failures_are_nan(tmp_path):
    for name, level in (("a", 0), ("b", 255)):
        Image.new("RGB", (4, 4), (level,) * 3).save(tmp_path / f"{name}.png")
    images = [str(tmp_path / f"{name}.png") for name in "abc"]  # c is missing
    ensemble = Ensemble({"0": Brightness(), "1": Brightness()})
    scores = member_scores(ensemble, images, ["p"] * 3)
    assert scores.shape == (2, 3) and torch.isnan(scores[:, 2]).all() and (scores[:, 1] > scores[:, 0]).all()


def tiny(tmp_path: Path, **labels: Any) -> UGDAConfig:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(json.dumps(parse_prompt("a purple triangle")) + "\n")
    small: dict[str, Any] = {"prompts": 3, "images": 3, "first": 4, "more": 2}
    short = {"run.iterations": 1, "optimizer.updates_per_iteration": 1}
    judges = short | {"data.batch": 4, "data.micro_batch": 4}
    policy = short | {"data.heldout": str(heldout), "evaluation.seeds": [0], "evaluation.every": 0}
    policy |= {"rollout.prompts_per_iteration": 2, "rollout.group_size": 2}
    policy |= {"rollout.steps": 4, "run.max_seconds": None}
    return UGDAConfig(
        rounds=2,
        labels=LabelConfig(**small | labels),
        ensemble=EnsembleConfig(members=2, off_policy=OffPolicyConfig(), changes=judges),
        policy=PartConfig(config="shapes_nft", changes=policy),
    )


@pytest.mark.slow
def test_two_rounds_with_people_who_label(tmp_path):
    config, output = tiny(tmp_path, by="people"), tmp_path / "run"
    with pytest.raises(WaitingForVotes, match=r"4 of 4 pairs wait for votes\. Collect them: visalign collect"):
        run(config, output)
    times = {path: path.stat().st_mtime_ns for path in output.rglob("*.png")}
    for number in range(2):
        store = VoteStore(output / f"round_{number:02d}" / "votes.sqlite")
        store.join("Ada")
        while (question := store.next("Ada")) is not None:
            client = f"{number} {question.assignment}"
            store.vote("Ada", question.assignment, {"choice": "left"}, client=client, seconds=1)
        store.close()
        if number == 0:
            with pytest.raises(WaitingForVotes, match="of 2 pairs wait for votes"):
                run(config, output, resume=True)
    summary = run(config, output, resume=True)
    assert all(path.stat().st_mtime_ns == when for path, when in times.items())
    first, second = summary["rounds"]
    assert (first["labelled"], second["labelled"], second["pairs"]) == (4, 2, 6)
    assert first.get("deviation_all") is None
    assert second["deviation_queued"] > 0 and second["influence_queued"] != 0
    rows = [json.loads(line) for line in (output / "round_01" / "candidates.jsonl").read_text().splitlines()]
    assert len(rows) == 9 and sum(row["queued"] for row in rows) == 2
    lowest = min(row["deviation"] for row in rows if row["queued"])
    assert sum(row["deviation"] > lowest for row in rows) < 5  # of the upper half
    pairs = [json.loads(line) for line in (output / "round_01" / "pairs.jsonl").read_text().splitlines()]
    ratios = [(pair["log_ratio_left"], pair["log_ratio_right"]) for pair in pairs]
    assert all(0.0 not in pair for pair in ratios[:4]) and ratios[4:] == [(0.0, 0.0)] * 2
    page = (output / "report.html").read_text()
    assert "Labelled in the last round" in page and page.count("data:image") == 4
    before = json.dumps(summary)
    assert json.dumps(run(config, output, resume=True)) == before


def test_the_page_and_the_plan(tmp_path):
    policy = {when: {"accuracy": 0.5} for when in ("before", "after")}
    counts = {"round": 0, "candidates": 9, "labelled": 4, "ties": 1, "pairs": 4, "seconds": 60.0}
    record = counts | {"ensemble_wrong": None, "policy": policy}
    assert "50.0" in ugda_page([record], [])
    planned = plan(tiny(tmp_path))
    assert planned["pairs_labelled"] == 6 and planned["judges_trained"] == 4 and "policy" in planned


def test_samples_are_of_the_policys_size():
    changes = {"model.image_size": [32, 64], "model.guidance": 2.0}
    config = UGDAConfig(policy=PartConfig(config="shapes_grpo_guard", changes=changes))
    assert sample_settings(config, None).options == {"guidance": 2.0, "image_size": (32, 64)}


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"policy.changes sets rewards.terms, which each round sets itself"):
        UGDAConfig(policy=PartConfig(config="shapes_nft", changes={"rewards.terms": {}}))
    wrong = UGDAConfig(policy=PartConfig(config="text_grpo"))
    with pytest.raises(UserError, match=r"policy.config: '.*text_grpo.yaml' is of the pipeline 'text_grpo', not"):
        plan(wrong)
    wrong = UGDAConfig(ensemble=EnsembleConfig(config="shapes_nft"))
    with pytest.raises(UserError, match=r"ensemble.config: '.*shapes_nft.yaml' is of the pipeline 'flow_grpo'"):
        plan(wrong)
    assert load_config(UGDAConfig, resolve_config("shapes_ugda"), []).labels.more == 75


def test_labellers_that_fail_are_counted_and_stop_the_run(tmp_path):
    from visalign.pipelines.ugda.job import vote

    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.new("RGB", (64, 64)).save(good)
    bad.write_bytes(b"no image")
    tasks = [Task(prompt="a red circle", images=(str(good), str(bad)))]
    store = VoteStore.create(tmp_path / "v.sqlite", tasks, Form(), Plan())
    vote(store, LabelConfig(max_failure_rate=1.0))
    assert not store.votes(), "what cannot be read is no label"
    with pytest.raises(UserError, match=r"'truth' could not label 1 of 1 pairs; .*_failure_rate is 10%.*good\.png"):
        vote(store, LabelConfig())
    store.close()


def test_members_are_kept_apart_from_those_before_them(tmp_path):
    plain = tiny(tmp_path)
    config = replace(plain, ensemble=replace(plain.ensemble, diversity=0.3))
    terms = [_judge_job(one, member, tmp_path).config.model.diversity for one in (plain, config) for member in (0, 2)]
    assert terms[:3] == [None] * 3 and terms[3].weight == 0.3
    assert terms[3].others == [str(tmp_path / "members" / str(member) / "judge") for member in range(2)]


@pytest.mark.parametrize("key", ["seed", "data.train"])
def test_what_a_round_sets_itself_cannot_be_changed(key):
    with pytest.raises(ValidationError, match=rf"ensemble\.changes sets {key}, which each round sets itself"):
        UGDAConfig(ensemble=EnsembleConfig(changes={key: 3}))


def test_rounds_that_refine_start_from_the_round_before(tmp_path):
    plain = tiny(tmp_path)
    config = replace(plain, refine=True)
    assert Round(plain, tmp_path, 1).start is None and Round(config, tmp_path, 0).start is None
    start = Round(config, tmp_path, 1).start
    judge, policy = _judge_job(config, 1, tmp_path, start).config, _policy_job(config, [], start).config
    assert judge.model.lora_path == str(tmp_path / "round_00" / "members" / "1" / "judge")
    assert policy.model.lora_path == str(tmp_path / "round_00" / "policy" / "lora")
    other = replace(config, ensemble=EnsembleConfig(config="shapes_hpsv3", judge="hpsv3"))
    with pytest.raises(UserError, match="lora_path"):
        plan(other)


@pytest.mark.slow
def test_rounds_that_learn_from_what_the_training_made_and_go_on(tmp_path):
    """As published: the second round's pairs are of the first training's images, members and policy go on."""
    labels = LabelConfig(prompts=3, images=3, first=4, more=2, source="training")
    config = replace(tiny(tmp_path), refine=True, labels=labels)
    summary, output = run(config, tmp_path / "run"), tmp_path / "run"
    assert summary["rounds"][1]["labelled"] > 0 and summary["rounds"][1]["influence_queued"] != 0
    rows = [json.loads(line) for line in (output / "round_01" / "samples" / "images.jsonl").read_text().splitlines()]
    trained = {str(path.resolve()) for path in (output / "round_00" / "policy" / "rollouts").rglob("*.png")}
    assert len(rows) == 4 == len(trained) and {row["image"] for row in rows} <= trained
    assert json.dumps(run(config, output, resume=True)) == json.dumps(summary)
