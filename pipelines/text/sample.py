# SPDX-License-Identifier: Apache-2.0
"""Job that samples completions over a grid of temperatures, nuclei and seeds, and selects a dataset."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from rich.console import Console
from torch import Tensor

from visalign.atomic import write_atomic
from visalign.data.sets.prompt_files import TOOL_ANSWERS, demonstrations_jsonl
from visalign.errors import UserError
from visalign.evaluation.pages.report import summary_json
from visalign.interfaces import Scores
from visalign.model_files import read_object
from visalign.pipelines.shared.parts import Records, check_routes, code_fingerprints, load_terms, name_key, run_device
from visalign.pipelines.shared.places import place_of, say_places
from visalign.pipelines.shared.run_folder import (
    RunSummary,
    check_unchanged,
    claimed,
    fingerprint,
    write_beginning,
)
from visalign.pipelines.shared.sections import MachineConfig, RewardsConfig, RewardTerm
from visalign.rewards.catalogue import load_text_reward
from visalign.schema import STRICT
from visalign.settings import Count, Finite, Natural, Positive, PositiveShare, Share, refuse
from visalign.training.loop.judging import check_failures
from visalign.training.loop.processes import one_process
from visalign.training.text import selection
from visalign.training.text.sampling_grid import (
    UNREAD,
    Completions,
    GridPoint,
    grid_points,
    join_completions,
    sample_point,
    with_hint,
)
from visalign.training.text.settings import CompletionSettings
from visalign.versions import versions

from .config import PromptsConfig, TextModelConfig
from .parts import build_text_policy, text_records, text_sum, with_tool

__all__ = ["TextSampleConfig", "plan", "run"]

DATASET = "dataset.jsonl"
POINTS = "points"  # Folder of scored completions, a file per grid point, which a resumed run does not sample again
FREE_KEYS = (
    *(f"selection.{name}" for name in ("rule", "threshold", "per_prompt", "skip_solved", "truncated", "seed")),
    *("rollout.prompts_per_call", "rollout.max_failure_rate"),
)
"""Keys that may differ when a run is resumed: they do not change the completions."""
OWN_FIELDS = (*"completion reward temperature top_p seed sample group hinted".split(), TOOL_ANSWERS, UNREAD)
"""Fields that the dataset adds to a prompt's record; `sample` counts the completions of one point to one prompt,
`group` is the number of the prompt; `hinted` only where it is true, `tool_answers` where there are some, `unread`
where rewards leave out more than those."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GridConfig(CompletionSettings):
    """Sampling: every combination of temperature, nucleus and seed is a point of the grid."""

    temperatures: list[Positive] = field(default_factory=lambda: [1.0])
    """τ."""
    top_p: list[PositiveShare] = field(default_factory=lambda: [1.0])
    """Nuclei; 1: all tokens."""
    seeds: list[Natural] = field(default_factory=lambda: [0])
    """Seeds; more of them give more completions of the same distributions, without changing the others."""
    samples: Count = 8
    """n, completions to each prompt at each point."""
    hint: str | None = None
    """Text after each prompt at as many further points, such as "The answer is {answer}.", with fields of the
    record in braces. The dataset has the prompt without it, and takes a completion of these points where none
    without the hint reached the threshold (hinted sampling, SPCT, arXiv 2504.02495). null: none."""
    prompts_per_call: Count = 64
    """Prompts that are completed and scored together; memory only."""
    max_failure_rate: Share = 0.1
    """Share of a point's completions that may fail to be scored before the run stops."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with name_key("rollout"):
            self.points()
        if self.hint is not None and self.environment is not None:
            raise UserError("rollout.hint changes the prompts that rollout.environment reads. Set one to null.")

    def points(self) -> list[GridPoint]:
        """List the points, the seeds of one distribution next to each other; then those with hints."""
        plain = grid_points(self.temperatures, self.top_p, self.seeds)
        return plain if self.hint is None else [*plain, *(replace(p, hinted=True) for p in plain)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SelectionConfig:
    """Selection of the dataset. Completions without a reward are never selected."""

    rule: Literal["all", "best_of_n", "rejection"] = "rejection"
    """Rule: all; best_of_n (the highest reward of each prompt over the whole grid, ties at random);
    or rejection (rewards of at least the threshold)."""
    threshold: Finite = 1.0
    """Reward from which a completion is accepted; pass@k counts by it under every rule."""
    per_prompt: Count | None = 4
    """With rejection, most completions of one prompt, distinct ones first; null: no limit."""
    skip_solved: bool = False
    """Leave out prompts all of whose completions (without a hint) reach the threshold: they teach nothing
    (SPCT's second rejection)."""
    truncated: bool = False
    """Allow completions that met the length limit. A dataset takes them for whole."""
    seed: Natural = 0
    """Seed of random choices."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextSampleConfig:
    """Sample completions over a grid, score them, and keep the good ones as a dataset."""

    pipeline: ClassVar[str] = "text_sample"

    seed: Natural = 0
    """Seed of the run: the packaged prompts and all completions."""
    model: TextModelConfig = field(default_factory=TextModelConfig)
    """Language model."""
    data: PromptsConfig = field(default_factory=PromptsConfig)
    """Prompts."""
    rewards: RewardsConfig = field(default_factory=lambda: RewardsConfig(terms={"task_answer": RewardTerm()}))
    """Rewards of the completions."""
    rollout: GridConfig = field(default_factory=GridConfig)
    """Sampling of the completions."""
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    """Selection of the dataset; may change when a finished run is resumed."""
    run: MachineConfig = field(default_factory=MachineConfig)
    """Machine."""


def run(config: TextSampleConfig, output: Path, resume: bool = False) -> RunSummary:
    """Run the job; nothing is written before everything that can be checked has been.

    `resume` reads the grid points that are there, and selects again; `selection` may have changed.
    """
    one_process("Completions are sampled and selected")
    begin = time.perf_counter()
    with claimed(config, output, resume=resume, free=FREE_KEYS):
        records, reward = _prepare(config)
        prints = {"data.train": fingerprint(records), **code_fingerprints(config)}
        if resume:
            check_unchanged(output, prints)
        if config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        files = [output / POINTS / f"{number:03d}.json" for number in range(len(config.rollout.points()))]
        missing = [number for number, file in enumerate(files) if not file.is_file()]
        policy = missing and build_text_policy(config.model, run_device(config.run), config.seed, reference=False)
        say_places({config.model.path: place_of(policy)} if missing else {})
        write_beginning(output, config, prints)
        for number in missing:
            save_point(files[number], _sample_point(config, records, reward, policy, number))
        completions = join_completions([load_point(file) for file in files])
        return _select(config, records, completions, output, begin)


def _prepare(config: TextSampleConfig) -> tuple[Records, Any]:
    records = text_records("train", config.data, config.seed)
    check_routes(config.rewards.terms, records)
    reward = text_sum(config.rewards, load_terms(config.rewards.terms, load_text_reward, None))
    refuse(_broken_rules(config, records, reward))
    if config.rollout.hint is not None:
        for record in records:
            with_hint(record, config.rollout.hint)  # refuses a field that a record lacks
    return records, reward


def _broken_rules(config: TextSampleConfig, records: Records, reward: Any) -> Iterator[str]:
    for term in reward.capabilities.advantage_weights:
        yield f"rewards.terms.{term}.uncertainty is advantage, and nothing is trained here. Use weight or lower_bound."
    for number, record in enumerate(records):
        for name in filter(record.__contains__, OWN_FIELDS):
            yield f"data.train: record {number} has the field {name!r}, which the dataset writes itself. Rename it."
    if reward.capabilities.at_iteration is not None:
        yield "rewards.terms has a weight that changes over iterations, and nothing is trained here. Give a number."
    threshold, highest = config.selection.threshold, float(reward.range[1])
    if threshold > highest:
        yield f"selection.threshold is {threshold:g}, and the rewards reach {highest:g} at most. Lower the threshold."


def _sample_point(config: TextSampleConfig, records: Records, reward: Any, policy: Any, number: int) -> Completions:
    begin, rollout = time.perf_counter(), config.rollout
    points = rollout.points()
    point, title, console = points[number], f"point {number + 1} of {len(points)}", Console()
    with console.status(title) as status:
        completions = sample_point(
            with_tool(rollout, policy, policy, records),
            reward,
            records,
            point,
            samples=rollout.samples,
            stopping=rollout.stopping(),
            seed=config.seed,
            prompts_per_call=rollout.prompts_per_call,
            prompts=[with_hint(record, rollout.hint or "") for record in records] if point.hinted else None,
            after_call=lambda done: status.update(f"{title}: {done} of {len(records)} prompts"),
        )
    reasons = list(completions.reason)
    scores = Scores(value=completions.reward, valid=completions.scored, unit=reward.unit, reason=reasons)
    check_failures(scores, completions.scored, rollout.max_failure_rate, reward.name)
    console.print(
        f"temperature {point.temperature:g}, top-p {point.top_p:g}, seed {point.seed}"
        f"{', with the hint' if point.hinted else ''}: {len(completions)} completions, mean reward "
        f"{float(completions.reward.nanmean()):.3f}, {time.perf_counter() - begin:.0f} s",
        markup=False,
        highlight=False,
    )
    return completions


def _select(
    config: TextSampleConfig, records: Records, completions: Completions, output: Path, begin: float
) -> RunSummary:
    rule = config.selection
    selectable = completions.scored & (~completions.truncated | rule.truncated)
    rules = {"threshold": rule.threshold, "skip_solved": rule.skip_solved}
    chosen = _choose(rule, completions, selectable & selection.worth_learning(completions, selectable, **rules))
    truncated, length = int(completions.truncated.sum()), len(completions)
    if not chosen:
        highest = float(completions.reward.nan_to_num(-math.inf).max())
        raise UserError(
            f"None of {length} completions was selected: {truncated} were too long, the best reward is {highest:g}. "
            f"Change it (threshold {rule.threshold:g}, truncated {rule.truncated}, skip_solved {rule.skip_solved})"
            " and go on with --resume, or sample more."
        )
    write_atomic(output / DATASET, demonstrations_jsonl(_dataset_record(records, completions, i) for i in chosen))

    def table(*by: str) -> list[dict[str, Any]]:
        """Tabulate statistics of the completions grouped by these fields of their points."""
        by = by if config.rollout.hint is None else (*by, "hinted")
        keys, rows = [tuple(getattr(point, name) for name in by) for point in completions.point], []
        for key in dict.fromkeys(keys):
            index = [i for i, other in enumerate(keys) if other == key]
            numbers = selection.statistics(completions.rows(index), selectable[index], threshold=rule.threshold)
            selected = sum(keys[i] == key for i in chosen)
            rows.append({**dict(zip(by, key, strict=True)), **numbers, "selected": selected})
        return rows

    summary = {
        "dataset": DATASET,
        "records": len(chosen),
        "prompts": len(records),
        "prompts_covered": len({completions.prompt[i] for i in chosen}),
        "reward_mean": float(completions.reward[chosen].double().mean()),
        "length_mean": sum(completions.tokens[i] for i in chosen) / len(chosen),
        "completions": length,
        "failed": int((~completions.scored).sum()),
        "failure_reasons": dict(Counter(filter(None, completions.reason)).most_common(3)),
        "truncated": truncated,
        "accepted": int((selectable & (completions.reward >= rule.threshold)).sum()),
        "distributions": table("temperature", "top_p"),
        "points": table("temperature", "top_p", "seed"),
        "seconds": time.perf_counter() - begin,
        "config": asdict(config),
        "versions": versions(),
    }
    path = write_atomic(output / "summary.json", summary_json(summary))
    return RunSummary(read_object(path), ["visalign", "train", "text_sft", *_sft_keys(config, output)])


def _choose(rule: SelectionConfig, completions: Completions, candidates: Tensor) -> list[int]:
    """Return indices of the completions that become the dataset, by prompt, among candidates (bool [B])."""
    reward, prompt = completions.reward, completions.prompt
    if rule.rule == "all":
        chosen = candidates.nonzero()[:, 0].tolist()
    elif rule.rule == "best_of_n":
        chosen = selection.best_of_group(reward, prompt, seed=rule.seed, valid=candidates)
    else:
        options: dict[str, Any] = {"threshold": rule.threshold, "per_group": rule.per_prompt, "seed": rule.seed}
        chosen = selection.accepted_completions(reward, prompt, completions.text, valid=candidates, **options)
    return sorted(chosen, key=lambda i: (completions.prompt[i], i))


def _sft_keys(config: TextSampleConfig, output: Path) -> list[str]:
    """Build keys of text_sft for the dataset: its model and, of images, its question and rewards."""
    keys = [] if config.model.path == TextModelConfig().path else [f"model.path={config.model.path}"]
    keys.append(f"data.train={output / DATASET}")
    parts = {name: getattr(config.rollout, name) for name in ("tool", "environment")}
    keys += [f"generation.{name}={json.dumps(asdict(part))}" for name, part in parts.items() if part is not None]
    if config.data.question is not None:
        rewards = {label: {"name": t.name, "options": t.options} for label, t in config.rewards.terms.items()}
        heldout = config.data.train if config.data.train.startswith("shapes:") else "HELDOUT"
        keys += [
            f"data.heldout={heldout}",
            f"data.question={json.dumps(config.data.question)}",
            f"evaluation={json.dumps({'rewards': rewards, 'correctness': None})}",
        ]
    return keys


def plan(config: TextSampleConfig) -> dict[str, Any]:
    """Plan the samples of a job, in groups of entries."""
    (records, _), rollout, rule = _prepare(config), config.rollout, config.selection
    points = len(rollout.points())
    per_prompt = points * rollout.samples
    limit = {"all": per_prompt, "best_of_n": 1, "rejection": rule.per_prompt or per_prompt}[rule.rule]
    return {
        "sampling": {
            "prompts": len(records),
            "grid_points": points,
            "completions_per_prompt": per_prompt,
            "completions": per_prompt * len(records),
        },
        "selection": {"rule": rule.rule, "records_at_most": min(limit, per_prompt) * len(records)},
    }


def save_point(path: Path, completions: Completions) -> None:
    """Write the completions of one grid point atomically; a failed reward is null."""
    columns: dict[str, Any] = vars(completions) | {"truncated": completions.truncated.tolist()}
    columns["reward"] = [value if math.isfinite(value) else None for value in completions.reward.tolist()]
    columns["point"] = asdict(completions.point[0])
    write_atomic(path, json.dumps(columns, ensure_ascii=False, allow_nan=False))


def load_point(path: Path) -> Completions:
    columns = read_object(path)
    reward = [math.nan if value is None else value for value in columns["reward"]]
    columns["reward"] = torch.tensor(reward, dtype=torch.float32)
    columns["truncated"] = torch.tensor(columns["truncated"], dtype=torch.bool)
    columns.setdefault("completed_prompt", [None] * len(reward))  # files of earlier versions
    columns.setdefault("unread", columns["answers"])
    columns["point"] = [GridPoint(**columns["point"])] * len(reward)
    return Completions(**columns)


def _dataset_record(records: Records, completions: Completions, index: int) -> dict[str, Any]:
    """Build a line of the dataset: prompt, completion, its origin, and the rest of the prompt's record."""
    point, record = completions.point[index], records[completions.prompt[index]]
    origin: dict[str, Any] = {"completion": completions.text[index], "reward": float(completions.reward[index])}
    origin |= {name: getattr(point, name) for name in ("temperature", "top_p", "seed")}
    origin |= {"sample": completions.number[index], "group": completions.prompt[index]}
    origin |= {"hinted": True} if point.hinted else {}
    answers, unread = completions.answers[index], completions.unread[index]
    origin |= {TOOL_ANSWERS: answers} if answers else {}
    origin |= {UNREAD: unread} if unread != answers else {}
    prompt = completions.completed_prompt[index] or record["prompt"]
    return {"prompt": prompt, **origin, **{k: v for k, v in record.items() if k != "prompt"}}
