# SPDX-License-Identifier: Apache-2.0
"""Rounds of UGDA: each step leaves a file or a folder, and what is there is not done again.

round_00/samples       images of the policy so far, with images.jsonl
         queue.jsonl   the pairs to label, with the ensemble's deviation and the influence
         labels.jsonl  what was said of them
         pairs.jsonl   all labels so far
         members/0 …   the judges
         policy        the policy, its report included
         round.json    the numbers
report.html            all rounds so far
summary.json           at the end
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from visalign.adapters.catalogue import edits_of
from visalign.atomic import write_atomic
from visalign.config import PIPELINE_KEY, read_config, resolve_config
from visalign.data.assets import resolve_model
from visalign.data.shapes.prompts import parse_prompt
from visalign.errors import UserError
from visalign.evaluation.pages.ugda_page import ugda_page
from visalign.pipelines.collect.store import Plan, VoteStore
from visalign.pipelines.collect.tasks import Form, Task, read_tasks
from visalign.pipelines.collect.votes import exported, images_of, votes_of, write_rows
from visalign.pipelines.flow_grpo.job import sample_command
from visalign.pipelines.jobs import Job, load_job
from visalign.pipelines.sample.job import SampleSettings, sample_images
from visalign.pipelines.shared.parts import build_records
from visalign.pipelines.shared.run_folder import (
    RunSummary,
    claimed,
    summary_json,
    write_beginning,
    write_once,
)
from visalign.rewards.catalogue import load_judge, load_reward
from visalign.rewards.combine.ensemble import Ensemble
from visalign.seeds import sample_seed
from visalign.training.loop.processes import one_process

from .config import PartConfig, UGDAConfig
from .selection import Candidate, by_lot, candidates, log_ratios, most_uncertain, selected

__all__ = ["UGDAConfig", "plan", "run"]

SUMMARY, ROUND, QUEUE, LABELS, PAIRS = (
    "summary.json",
    "round.json",
    "queue.jsonl",
    "labels.jsonl",
    "pairs.jsonl",
)
VOTES = "votes.sqlite"
SHOWN = 12
"""Pairs of a round that the report shows."""


class WaitingForVotes(UserError):
    """People label, and have not yet."""


def plan(config: UGDAConfig) -> dict[str, Any]:
    """What the rounds will do, and what a policy's training is."""
    labels = config.labels
    jobs = [_judge_job(config, 1, Path()), _policy_job(config, [])]
    return {
        "rounds": config.rounds,
        "images_per_round": labels.prompts * labels.images,
        "pairs_labelled": labels.first + (config.rounds - 1) * labels.more,
        "judges_trained": config.rounds * config.ensemble.members,
        "policies_trained": config.rounds,
        "policy": jobs[1].plan(jobs[1].config),
    }


def run(config: UGDAConfig, output: Path, resume: bool = False) -> RunSummary:
    """Run the rounds; with `resume` go on where the folder ends.

    Raises:
        WaitingForVotes: people label, and some pair has fewer votes than wanted; go on with `resume`.
        UserError, TrainingInterrupted: as the jobs do.
    """
    one_process("UGDA's rounds run")
    output, policy = Path(output), _policy_job(config, []).config
    if edits_of(resolve_model(policy.model.path), policy.model.adapter) == "needed":
        raise UserError(f"{policy.model.path} edits images, and UGDA's rounds start from prompts alone.")
    with claimed(config, output, resume=resume, free=()):
        prompts = build_records(policy.data.train, "policy data.train")
        write_beginning(output, config, config.pipeline, {})
        rounds = [_round(config, output, number, prompts) for number in range(config.rounds)]
        summary = {
            "rounds": rounds,
            "before": rounds[0]["policy"]["before"],
            "after": rounds[-1]["policy"]["after"],
        }
        write_once(output / SUMMARY, summary_json(summary))
    last = output / f"round_{config.rounds - 1:02d}" / "policy"
    return RunSummary(summary, sample_command(policy, last, []))


def _round(
    config: UGDAConfig, output: Path, number: int, prompts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One round, or its record where it is done."""
    folder, before = output / f"round_{number:02d}", output / f"round_{number - 1:02d}"
    if (folder / ROUND).is_file():
        return json.loads((folder / ROUND).read_text(encoding="utf-8"))
    folder.mkdir(exist_ok=True)
    lora = before / "policy" / "lora" if number else None
    _sample(config, number, prompts, folder, lora)
    if not (folder / QUEUE).is_file():
        tasks = read_tasks([str(folder / "samples")], single=False, per_prompt=10**6)
        found = candidates(tasks) if number == 0 else _asked(config, tasks, before, lora)
        chosen = _chosen(config, number, found)
        rows = [candidate.row() | {"queued": candidate in chosen} for candidate in found]
        write_rows(folder / "candidates.jsonl", rows)
        write_rows(folder / QUEUE, [candidate.row() for candidate in chosen])
    queue = read_tasks([str(folder / QUEUE)], single=False)
    labels = _labelled(config, folder, queue)
    rows = [_lines(output / f"round_{earlier:02d}" / LABELS) for earlier in range(number)]
    if config.ensemble.off_policy is not None:
        _weigh(config, output, rows, labels)
    write_rows(folder / PAIRS, [row for part in rows for row in part] + labels)
    members = [_fitted(config, folder, member) for member in range(config.ensemble.members)]
    policy = _trained(config, folder, members)
    record = _record(folder, number, labels, policy)
    write_atomic(folder / ROUND, summary_json(record))
    _report(output, number)
    return json.loads((folder / ROUND).read_text(encoding="utf-8"))


def _sample(
    config: UGDAConfig, number: int, prompts: Sequence[Mapping[str, Any]], folder: Path, lora: Path | None
) -> None:
    """Images of this round's prompts by the policy so far."""
    if (folder / "samples" / "images.jsonl").is_file():
        return
    shutil.rmtree(folder / "samples", ignore_errors=True)  # broken off: its images come out the same
    draw = torch.Generator().manual_seed(sample_seed(config.seed, "prompts", number) % 2**63)
    order = torch.randperm(len(prompts), generator=draw)[: config.labels.prompts].tolist()
    sample_images([prompts[place] for place in order], _sampling(config, lora), folder / "samples")


def _sampling(config: UGDAConfig, lora: Path | None) -> SampleSettings:
    policy = _policy_job(config, []).config
    model = policy.model
    shared = {name: model.options.get(name) for name in ("negative_prompt", "num_frames", "call")}
    given = {"guidance": model.guidance, "image_size": model.image_size, **shared}
    return SampleSettings(
        model=policy.model.path,
        adapter=policy.model.adapter,
        lora=lora,
        seeds=range(config.labels.images),
        steps=policy.rollout.steps,
        timestep_schedule=policy.rollout.timestep_schedule,
        batch_size=policy.rollout.batch_size,
        options={name: value for name, value in given.items() if value is not None},
    )


def _asked(config: UGDAConfig, tasks: Sequence[Task], before: Path, lora: Path | None) -> list[Candidate]:
    """The pairs with what the last round's ensemble and policy say of them."""
    ensemble = _ensemble(
        config, [before / "members" / str(member) for member in range(config.ensemble.members)]
    )
    return candidates(tasks, ensemble, _sampling(config, lora), seed=config.seed)


def _chosen(config: UGDAConfig, number: int, found: Sequence[Candidate]) -> list[Candidate]:
    labels = config.labels
    count = labels.first if number == 0 else labels.more
    if number == 0 or labels.select == "random":
        return by_lot(found, count, seed=sample_seed(config.seed, "lot", number))
    if labels.select == "uncertainty":
        return most_uncertain(found, count)
    return selected(found, count, uncertain=labels.uncertain, influential=labels.influential)


def _labelled(config: UGDAConfig, folder: Path, queue: Sequence[Task]) -> list[dict[str, Any]]:
    """Rows of a preference set for the queue; kept, so that nobody is asked twice."""
    if (folder / LABELS).is_file():
        return _lines(folder / LABELS)
    path, labels = folder / VOTES, config.labels
    if not path.is_file():
        wanted = labels.votes if labels.by == "people" else 1
        VoteStore.make(path, queue, Form(), Plan(votes=wanted, repeat_every=0, seed=config.seed)).close()
    store = VoteStore(path)
    try:
        if labels.by == "truth":
            reasons = _truth(store)
            _check_labelled(config, reasons, len(store.tasks))
        elif labels.by == "people":
            _require_votes(store, labels.votes)
        else:
            from visalign.pipelines.collect.judge_votes import judge_votes

            _, reasons = judge_votes(store, load_judge(labels.by, **labels.options), labels.by)
            _check_labelled(config, reasons, len(store.tasks))
        rows = exported(store, votes_of(store))
    finally:
        store.close()
    write_rows(folder / LABELS, rows)
    return _lines(folder / LABELS)


def _weigh(
    config: UGDAConfig, output: Path, earlier: Sequence[list[dict[str, Any]]], labels: list[dict[str, Any]]
) -> None:
    """Give each pair the log ratios of its images under the policy of this round, whose own have 0."""
    adapters = [None, *(output / f"round_{number:02d}" / "policy" / "lora" for number in range(len(earlier)))]
    for row in labels:
        row |= {"log_ratio_left": 0.0, "log_ratio_right": 0.0}
    now = _sampling(config, adapters[-1])
    for rows, made_by in zip(earlier, adapters, strict=False):
        images = [row[f"image_{side}"] for side in ("left", "right") for row in rows]
        found = log_ratios(
            _sampling(config, made_by), now, images, [row["prompt"] for row in rows] * 2, seed=config.seed
        ).tolist()
        for place, row in enumerate(rows):
            row |= {"log_ratio_left": found[place], "log_ratio_right": found[place + len(rows)]}


def _truth(store: VoteStore) -> list[str]:
    """Vote as the verifier does, for the image nearer to its prompt, by the share of what it shows rightly;
    why pairs have no vote."""
    verifier = load_reward("shapes_verifier", mode="mixed")
    answers, reasons = {}, []
    for number, task in store.tasks.items():
        scores = verifier.score(list(task.images), [task.prompt] * 2, [parse_prompt(task.prompt)] * 2)
        if not bool(scores.valid.all()):
            why = next((reason for reason in scores.reason or [] if reason), "no reason given")
            reasons.append(f"{task.images[0]}: {why}")
            continue
        left, right = scores.value.tolist()
        answers[number] = {"choice": "tie" if left == right else "left" if left > right else "right"}
    store.judged("truth", answers)
    return reasons


def _check_labelled(config: UGDAConfig, reasons: Sequence[str], queue: int) -> None:
    """Stop where a labeller failed too often; the votes that there are stay, the others are asked again."""
    limit = config.labels.max_failure_rate
    if len(reasons) > limit * queue:
        raise UserError(
            f"{config.labels.by!r} could not label {len(reasons)} of {queue} pairs; at most {limit:.0%} may "
            f"stay without (labels.max_failure_rate). The first: {reasons[0]}. Mend it, then go on with "
            "--resume."
        )


def _require_votes(store: VoteStore, wanted: int) -> None:
    counts = dict.fromkeys(store.tasks, 0)
    for vote in store.votes():
        counts[vote.task] += not vote.again
    missing = sum(count < wanted for count in counts.values())
    if missing:
        raise WaitingForVotes(
            f"{missing} of {len(counts)} pairs wait for votes. Collect them: visalign collect {store.path}; "
            "then run the same command with --resume."
        )


def _judge_job(config: UGDAConfig, member: int, folder: Path) -> Job:
    """The training of a member of the round in `folder`."""
    pairs, seed = str(folder / PAIRS), config.seed + member
    given: dict[str, Any] = {"data.train": pairs, "data.heldout": None, "seed": seed}
    if member and (weight := config.ensemble.diversity):
        others = [str(folder / "members" / str(other) / "judge") for other in range(member)]
        given["model.diversity"] = {"weight": weight, "others": others}
    if (off_policy := config.ensemble.off_policy) is not None:
        given["data.off_policy"] = asdict(off_policy)
    return _job("ensemble", config.ensemble, "train_reward", given)


def _policy_job(config: UGDAConfig, members: Sequence[Path]) -> Job:
    given: dict[str, Any] = {"seed": config.seed}
    if members:
        share = {
            "name": config.ensemble.judge,
            "weight": 1 / len(members),
        }  # their sum is the ensemble's mean
        given["rewards.terms"] = {
            f"member{n}": share | {"options": {"model": str(m)}} for n, m in enumerate(members)
        }
    return _job("policy", config.policy, "flow_grpo", given)


def _job(name: str, part: PartConfig, pipeline: str, given: Mapping[str, Any]) -> Job:
    """The job of a part with what the round gives it.

    Raises:
        UserError: its configuration is of another pipeline.
    """
    found = read_config(resolve_config(part.config)).get(PIPELINE_KEY)
    if found != pipeline:
        raise UserError(
            f"{name}.config is '{part.config}', of the pipeline '{found}'; needed is one of '{pipeline}'."
        )
    return load_job(
        part.config, [f"{key}={json.dumps(value)}" for key, value in {**given, **part.changes}.items()]
    )


def _fitted(config: UGDAConfig, folder: Path, member: int) -> Path:
    place = folder / "members" / str(member)
    if not (place / SUMMARY).is_file():
        job = _judge_job(config, member, folder)
        job.run(job.config, output=place, resume=(place / "config.yaml").is_file())
    return place / "judge"


def _trained(config: UGDAConfig, folder: Path, members: Sequence[Path]) -> dict[str, Any]:
    place = folder / "policy"
    if not (place / SUMMARY).is_file():
        job = _policy_job(config, members)
        job.run(job.config, output=place, resume=(place / "config.yaml").is_file())
    return json.loads((place / SUMMARY).read_text(encoding="utf-8"))


def _ensemble(config: UGDAConfig, members: Sequence[Path]) -> Ensemble:
    return Ensemble(
        {str(n): load_reward(config.ensemble.judge, model=str(m / "judge")) for n, m in enumerate(members)}
    )


def _record(
    folder: Path, number: int, labels: Sequence[Mapping[str, Any]], policy: Mapping[str, Any]
) -> dict[str, Any]:
    """The numbers of a round."""
    rows = _lines(folder / "candidates.jsonl")
    queued = [row for row in rows if row["queued"]]
    wrong = [
        (row["label"] - 0.5) * row["margin"] < 0
        for row in labels
        if row.get("margin") is not None and row["label"] != 0.5
    ]
    means = {
        f"{what}_{name}": sum(row[what] for row in part) / len(part)
        for what in ("deviation", "influence")
        for name, part in (("all", rows), ("queued", queued))
        if part and part[0].get(what) is not None
    }
    parts = [*(folder / "members").glob(f"*/{SUMMARY}"), folder / "policy" / SUMMARY]
    return {
        "round": number,
        "seconds": sum(json.loads(part.read_text(encoding="utf-8"))["seconds"] for part in parts),
        "candidates": len(rows),
        "labelled": len(labels),
        "pairs": len(_lines(folder / PAIRS)),
        "unlabelled": len(queued) - len(labels),
        "ties": sum(row["label"] == 0.5 for row in labels),
        "ensemble_wrong": sum(wrong) / len(wrong) if wrong else None,
        **means,
        "policy": {when: policy[when] for when in ("before", "after")},
    }


def _report(output: Path, number: int) -> None:
    records = []
    for place in range(number + 1):
        folder = output / f"round_{place:02d}"
        records.append(json.loads((folder / ROUND).read_text(encoding="utf-8")))
    queue = read_tasks([str(output / f"round_{number:02d}" / LABELS)], single=False)
    shown = [{"prompt": task.prompt, "images": images_of(task)} for task in queue[:SHOWN]]
    write_atomic(output / "report.html", ugda_page(records, shown))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file that this pipeline wrote, with images named from the root again."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        for side in ("image_left", "image_right"):
            row[side] = str((path.parent / row[side]).resolve())
    return rows
