# SPDX-License-Identifier: Apache-2.0
"""UGDA rounds: a chain of sampling, voting, reward and policy jobs. Finished files are never computed again.

round_00/samples       images of the policy so far, with images.jsonl
         queue.jsonl   the pairs to label, with the ensemble's deviation and the influence
         labels.jsonl  their labels
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
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from visalign.adapters.catalogue import edits_of
from visalign.atomic import write_atomic
from visalign.errors import UserError
from visalign.evaluation.pages.report import summary_json
from visalign.evaluation.pages.ugda_page import ugda_page
from visalign.model_files import read_object
from visalign.pipelines.collect.judge_votes import judge_votes
from visalign.pipelines.collect.store import Plan, VoteStore
from visalign.pipelines.collect.tasks import Form, read_tasks
from visalign.pipelines.collect.votes import export_rows, select_votes, write_rows
from visalign.pipelines.flow_grpo.job import sample_command, sampling_options
from visalign.pipelines.jobs import Job, load_job
from visalign.pipelines.sample.job import SampleSettings, sample_images
from visalign.pipelines.score.image_rows import SAMPLED
from visalign.pipelines.score.report import load_shown_images
from visalign.pipelines.shared.parts import Records, build_records, code_fingerprints, name_key
from visalign.pipelines.shared.run_folder import (
    RunSummary,
    check_unchanged,
    claimed,
    write_beginning,
    write_once,
)
from visalign.rewards.catalogue import load_judge, load_reward
from visalign.rewards.combine.ensemble import Ensemble
from visalign.seeds import sample_seed
from visalign.training.loop.processes import one_process

from .config import LabelConfig, PartConfig, UGDAConfig
from .selection import Candidate, log_ratios, score_candidates, select_candidates

__all__ = ["UGDAConfig", "plan", "run"]

SUMMARY, ROUND = "summary.json", "round.json"
CANDIDATES, QUEUE, LABELS, PAIRS = "candidates.jsonl", "queue.jsonl", "labels.jsonl", "pairs.jsonl"
SIDES = "image_left", "image_right"
REPORTED_PAIRS = 12  # Pairs of the last round in the report


class WaitingForVotes(UserError):
    """Some pairs still lack votes of people."""


def plan(config: UGDAConfig) -> dict[str, Any]:
    """Count what the rounds will sample, label and train, with the plan of a policy's training."""
    labels, policy = config.labels, _policy_job(config, [])
    # refuses what the ensemble's configuration does not allow
    _judge_job(config, 1, Path(), Path() if config.refine else None)
    return {
        "rounds": config.rounds,
        "images_per_round": labels.prompts * labels.images,
        "pairs_labelled": labels.first + (config.rounds - 1) * labels.more,
        "judges_trained": config.rounds * config.ensemble.members,
        "policies_trained": config.rounds,
        "policy": policy.plan(policy.config),
    }


def run(config: UGDAConfig, output: Path, resume: bool = False) -> RunSummary:
    """Run the rounds; with `resume` continue with the first step that has left no file."""
    one_process("UGDA's rounds run")
    policy = _policy_job(config, []).config
    _judge_job(config, 1, Path(), Path() if config.refine else None)  # refused here, not after the labelling
    if edits_of(policy.model.described_by, policy.model.adapter) == "needed":
        raise UserError(f"{policy.model.path} edits images, and UGDA's rounds start from prompts alone.")
    with claimed(config, output, resume=resume, free=()):
        prompts = build_records(policy.data.train, "policy data.train", names=policy.data.map)
        prints = code_fingerprints(config) | code_fingerprints(policy)
        if resume:
            check_unchanged(output, prints)
        write_beginning(output, config, prints)
        rounds = [Round(config, output, number).run(prompts) for number in range(config.rounds)]
        before, after = rounds[0]["policy"]["before"], rounds[-1]["policy"]["after"]
        summary = {"rounds": rounds, "before": before, "after": after}
        write_once(output / SUMMARY, summary_json(summary))
    last = Round(config, output, config.rounds - 1).folder
    return RunSummary(summary, sample_command(policy, last / "policy"))


@dataclass(frozen=True)
class Round:
    config: UGDAConfig
    output: Path
    number: int

    @property
    def folder(self) -> Path:
        return self.output / f"round_{self.number:02d}"

    @property
    def earlier(self) -> list[Round]:
        return [replace(self, number=number) for number in range(self.number)]

    @property
    def start(self) -> Path | None:
        """Folder of the round whose members and policy this one trains on; None: from their start."""
        return self.earlier[-1].folder if self.config.refine and self.number else None

    @property
    def sampling(self) -> SampleSettings:
        """Sampling of the policy so far: the base model, or with the adapters of the round before."""
        return sample_settings(self.config, self.earlier[-1].folder / "policy" / "lora" if self.number else None)

    @property
    def members(self) -> list[Path]:
        """Folders of the judges that this round trains."""
        return [self.folder / "members" / str(member) for member in range(self.config.ensemble.members)]

    def run(self, prompts: Records) -> dict[str, Any]:
        """Sample, label, train judges and policy; return the round's record."""
        if not (self.folder / ROUND).is_file():
            self.folder.mkdir(exist_ok=True)
            self.sample(prompts)
            self.queue()
            labels = self.label()
            pairs = [_read_rows(part.folder / LABELS) for part in self.earlier]
            if self.config.ensemble.off_policy is not None:
                self._weigh(pairs, labels)
            write_rows(self.folder / PAIRS, [row for rows in (*pairs, labels) for row in rows])
            for member, folder in enumerate(self.members):
                _run_part(_judge_job(self.config, member, self.folder, self.start), folder)
            policy = _policy_job(self.config, [folder / "judge" for folder in self.members], self.start)
            _run_part(policy, self.folder / "policy")
            write_atomic(self.folder / ROUND, summary_json(self._record(labels)))
            records = [read_object(part.folder / ROUND) for part in (*self.earlier, self)]
            tasks = read_tasks([str(self.folder / LABELS)], single=False)[:REPORTED_PAIRS]
            images = [[*load_shown_images(task.images).values()] for task in tasks]
            reported = [{"prompt": task.prompt, "images": i} for task, i in zip(tasks, images, strict=True)]
            write_atomic(self.output / "report.html", ugda_page(records, reported))
        return read_object(self.folder / ROUND)

    def sample(self, prompts: Records) -> None:
        """Sample images of this round's prompts from the policy so far."""
        samples = self.folder / "samples"
        if (samples / "images.jsonl").is_file():
            return
        shutil.rmtree(samples, ignore_errors=True)  # an interrupted sampling: its images come out the same
        labels = self.config.labels
        draw = torch.Generator().manual_seed(sample_seed(self.config.seed, "prompts", self.number) % 2**63)
        if labels.source == "policy" or not self.number:
            order = torch.randperm(len(prompts), generator=draw)[: labels.prompts].tolist()
            sample_images([prompts[i] for i in order], self.sampling, samples)
            return
        groups: dict[tuple[Path, str], list[dict[str, Any]]] = {}  # Of what the training in the round before made
        for table in sorted((self.earlier[-1].folder / "policy" / "rollouts").glob(f"*/{SAMPLED}")):
            for row in _read_rows(table, ["image"]):
                groups.setdefault((table, row["prompt"]), []).append(row)
        order = torch.randperm(len(groups), generator=draw)[: labels.prompts].tolist()
        samples.mkdir()
        write_rows(samples / SAMPLED, [row for i in order for row in list(groups.values())[i][: labels.images]])

    def queue(self) -> None:
        if (self.folder / QUEUE).is_file():
            return
        labels, seed = self.config.labels, self.config.seed
        tasks = read_tasks([str(self.folder / "samples")], single=False, per_prompt=10**6)
        if self.number == 0:  # no ensemble yet
            pool, count, rule = [Candidate(task) for task in tasks], labels.first, "random"
        else:
            folders, name = self.earlier[-1].members, self.config.ensemble.judge
            members = {str(n): load_reward(name, model=str(folder / "judge")) for n, folder in enumerate(folders)}
            pool = score_candidates(tasks, Ensemble(members), self.sampling, seed=seed)
            count, rule = labels.more, labels.select
        chosen = select_candidates(pool, count, rule, seed=sample_seed(seed, "lot", self.number))
        write_rows(self.folder / CANDIDATES, [c.row() | {"queued": c in chosen} for c in pool])
        write_rows(self.folder / QUEUE, [candidate.row() for candidate in chosen])

    def label(self) -> list[dict[str, Any]]:
        """Return the labelled pairs of the queue, as rows of a preference set; nobody is asked twice."""
        path, labels = self.folder / "votes.sqlite", self.config.labels
        if not (self.folder / LABELS).is_file():
            votes = labels.votes if labels.by == "people" else 1
            if not path.is_file():
                queue = read_tasks([str(self.folder / QUEUE)], single=False)
                settings = Plan(votes=votes, repeat_every=0, seed=self.config.seed)
                VoteStore.create(path, queue, Form(), settings).close()
            with closing(VoteStore(path)) as store:
                if labels.by != "people":
                    vote(store, labels)
                counts = Counter(entry.task for entry in store.votes() if not entry.is_repeat)
                if labels.by == "people" and (missing := sum(counts[task] < votes for task in store.tasks)):
                    wait = f"{missing} of {len(store.tasks)} pairs wait for votes"
                    raise WaitingForVotes(f"{wait}. Collect them: visalign collect {store.path}; then add --resume.")
                write_rows(self.folder / LABELS, export_rows(store, select_votes(store)))
        return _read_rows(self.folder / LABELS)

    def _weigh(self, pairs: list[list[dict[str, Any]]], labels: list[dict[str, Any]]) -> None:
        """Add to each pair the log ratios of its images under this round's policy; its own pairs have 0."""
        for row in labels:
            row |= {"log_ratio_left": 0.0, "log_ratio_right": 0.0}
        for source, rows in zip(self.earlier, pairs, strict=True):
            images = [row[side] for side in SIDES for row in rows]
            prompts = [row["prompt"] for row in rows] * 2
            ratios = log_ratios(source.sampling, self.sampling, images, prompts, seed=self.config.seed).tolist()
            for row, left, right in zip(rows, ratios[: len(rows)], ratios[len(rows) :], strict=True):
                row |= {"log_ratio_left": left, "log_ratio_right": right}

    def _record(self, labels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows = _read_rows(self.folder / CANDIDATES)
        queued = [row for row in rows if row["queued"]]
        decided = [row for row in labels if row.get("margin") is not None and row["label"] != 0.5]
        wrong = [(row["label"] - 0.5) * row["margin"] < 0 for row in decided]
        means = {
            f"{measure}_{name}": sum(row[measure] for row in part) / len(part)
            for measure in ("deviation", "influence")
            for name, part in (("all", rows), ("queued", queued))
            if part and part[0].get(measure) is not None
        }
        policy = read_object(self.folder / "policy" / SUMMARY)
        judges = [read_object(path / SUMMARY) for path in self.members]
        return {
            "round": self.number,
            "seconds": sum(summary["seconds"] for summary in (*judges, policy)),
            "candidates": len(rows),
            "labelled": len(labels),
            "pairs": len(_read_rows(self.folder / PAIRS)),
            "unlabelled": len(queued) - len(labels),
            "ties": sum(row["label"] == 0.5 for row in labels),
            "ensemble_wrong": sum(wrong) / len(wrong) if wrong else None,
            **means,
            "policy": {when: policy[when] for when in ("before", "after")},
        }


def sample_settings(config: UGDAConfig, lora: Path | None) -> SampleSettings:
    """Return the sampling of the policy with these adapters, as its training samples."""
    policy = _policy_job(config, []).config
    options = {**sampling_options(policy), "guidance": policy.model.guidance}
    return SampleSettings(
        model=policy.model.path,
        adapter=options.pop("adapter", None),
        lora=[] if lora is None else [lora],
        seeds=range(config.labels.images),
        steps=policy.rollout.steps,
        solver=policy.rollout.solver,
        timestep_schedule=policy.rollout.timestep_schedule,
        batch_size=policy.with_batches().rollout.batch_size,
        dtype=policy.model.dtype,
        options=options,
    )


def vote(store: VoteStore, labels: LabelConfig) -> None:
    """Vote on each pair by a judge or the verifier of the shapes world, unless too many of them fail."""
    name, options = ("shapes_verifier", {"mode": "mixed"}) if labels.by == "truth" else (labels.by, labels.options)
    judge = load_judge(name, **options)
    _, reasons = judge_votes(store, judge, labels.by)
    if len(reasons) > labels.max_failure_rate * len(store.tasks):  # its votes stay, the other pairs are asked again
        raise UserError(
            f"{labels.by!r} could not label {len(reasons)} of {len(store.tasks)} pairs; labels.max_failure_rate is "
            f"{labels.max_failure_rate:.0%}. The first: {reasons[0]}. Fix it, then continue with --resume."
        )


def _judge_job(config: UGDAConfig, member: int, folder: Path, start: Path | None = None) -> Job:
    """Build the training of a member in the round of `folder`, from that in the round of `start`."""
    ensemble = config.ensemble
    changes: dict[str, Any] = {"data.train": str(folder / PAIRS), "data.heldout": None, "seed": config.seed + member}
    if start is not None:
        changes["model.lora_path"] = str(start / "members" / str(member) / "judge")
    if member and ensemble.diversity:
        earlier = [str(folder / "members" / str(other) / "judge") for other in range(member)]
        changes["model.diversity"] = {"weight": ensemble.diversity, "others": earlier}
    if ensemble.off_policy is not None:
        changes["data.off_policy"] = asdict(ensemble.off_policy)
    return _part_job("ensemble", ensemble, "train_reward", changes)


def _policy_job(config: UGDAConfig, judges: Sequence[Path], start: Path | None = None) -> Job:
    """Build the training of the policy on the mean of these judges, from that in the round of `start`."""
    changes: dict[str, Any] = {"seed": config.seed, "rollout.keep_images": config.labels.source == "training"}
    if start is not None:
        changes["model.lora_path"] = str(start / "policy" / "lora")
    if judges:
        term = {"name": config.ensemble.judge, "weight": 1 / len(judges)}
        terms = {f"member{n}": term | {"options": {"model": str(j)}} for n, j in enumerate(judges)}
        changes["rewards.terms"] = terms
    job = _part_job("policy", config.policy, "flow_grpo", changes)
    if config.rounds > 1 and job.config.model.lora is None:
        raise UserError("UGDA's rounds hand the policy on as a LoRA. Set policy.changes={model.lora: {rank: 8}}.")
    return job


def _part_job(name: str, part: PartConfig, pipeline: str, changes: Mapping[str, Any]) -> Job:
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**changes, **part.changes}.items()]
    with name_key(f"{name}.config"):
        return load_job(part.config, overrides, pipelines=(pipeline,))


def _run_part(job: Job, output: Path) -> None:
    if not (output / SUMMARY).is_file():
        job.run(job.config, output=output, resume=(output / "config.yaml").is_file())


def _read_rows(path: Path, columns: Sequence[str] = SIDES) -> list[dict[str, Any]]:
    """Read rows that a job wrote, with absolute paths of the images in these columns."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row | {column: str((path.parent / row[column]).resolve()) for column in columns} for row in rows]
