# SPDX-License-Identifier: Apache-2.0
"""Sample completions over a grid of temperatures, nuclei and seeds, judge them, and select a dataset."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from visalign.atomic import write_atomic
from visalign.config import config_to_yaml
from visalign.data.sets.prompt_files import demonstrations_jsonl
from visalign.errors import UserError
from visalign.interfaces import Scores
from visalign.pipelines.shared.json_values import finite
from visalign.pipelines.shared.parts import Records
from visalign.pipelines.shared.run_folder import check_same_run
from visalign.pipelines.shared.run_inputs import FINGERPRINTS, check_unchanged, fingerprint, write_once
from visalign.training.loop.judging import check_failures
from visalign.training.text.sampling_grid import Completions, join_completions, sample_point
from visalign.training.text.sampling_statistics import failure_reasons, may_be_chosen

from .config import TextConfig, TextDataConfig, TextEvaluationConfig
from .parts import build_text_policy, prepare
from .sample_config import TextSampleConfig
from .sample_points import load_point, point_file, save_point
from .sample_selection import OWN_FIELDS, chosen_completions, dataset_record, nothing_chosen, table

__all__ = ["TextSampleConfig", "plan", "run"]

DATASET = "dataset.jsonl"
FREE_KEYS = (
    *(f"selection.{name}" for name in ("rule", "threshold", "per_prompt", "truncated", "seed")),
    "rollout.prompts_per_call",
    "rollout.max_failure_rate",
)
"""Keys that may differ when a run is resumed: they do not change the completions."""


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    records: Records
    reward: Any


def run(config: TextSampleConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; nothing is written before everything that can be checked has been.

    Args:
        config: the configuration.
        output: run folder; new or empty, or with `resume` that of the run to continue.
        resume: take the grid points that are there, and select anew; `selection` may have changed.

    Returns:
        The content of summary.json.

    Raises:
        UserError: something in the configuration or the folder cannot be used, or nothing was selected.
        RewardFailure: too many completions of a point could not be judged.
    """
    import torch

    begin, output = time.perf_counter(), Path(output)
    check_same_run(config, output, resume=resume, free=FREE_KEYS)
    inputs = _prepare(config)
    prints = {"data.train": fingerprint(inputs.records)}
    if resume:
        check_unchanged(output, prints)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    completions = _sample(config, inputs, output, prints)
    return _select(config, inputs, completions, output, begin)


def _prepare(config: TextSampleConfig) -> _Inputs:
    """Prompts and reward, checked."""
    data = config.data
    found = prepare(
        TextConfig(
            seed=config.seed,
            data=TextDataConfig(
                train=data.train, heldout=data.train, tasks=data.tasks, levels=data.levels, size=data.size
            ),
            rewards=config.rewards,
            evaluation=TextEvaluationConfig(rewards={}, correctness=None),
        )
    )
    for place, record in enumerate(found.records):
        if taken := [name for name in OWN_FIELDS if name in record]:
            raise UserError(
                f"data.train: record {place} has the field {taken[0]!r}, which the dataset writes itself "
                f"({', '.join(OWN_FIELDS)}). Rename it."
            )
    most = float(found.reward.range[1])
    if config.selection.threshold > most:
        raise UserError(
            f"selection.threshold is {config.selection.threshold:g}, and the rewards reach {most:g} at most: "
            "no completion could be accepted. Lower the threshold, or change rewards.terms."
        )
    return _Inputs(records=found.records, reward=found.reward)


def _sample(
    config: TextSampleConfig, inputs: _Inputs, output: Path, prints: Mapping[str, str]
) -> Completions:
    """The completions of all grid points; those on disk are not sampled again."""
    points = config.rollout.points()
    missing = [i for i in range(len(points)) if not point_file(output, i).is_file()]
    policy = _policy(config) if missing else None
    write_once(output / "config.yaml", "pipeline: text_sample\n" + config_to_yaml(config))
    write_once(output / FINGERPRINTS, json.dumps(dict(prints), indent=1, sort_keys=True) + "\n")
    for place in missing:
        _sample_point(config, inputs, policy, place, point_file(output, place))
    return join_completions([load_point(point_file(output, i)) for i in range(len(points))])


def _policy(config: TextSampleConfig) -> Any:
    import torch

    cuda = config.run.device == "auto" and torch.cuda.is_available()
    return build_text_policy(
        config.model, torch.device("cuda" if cuda else "cpu"), config.seed, reference=False
    )


def _sample_point(config: TextSampleConfig, inputs: _Inputs, policy: Any, place: int, path: Path) -> None:
    """Sample, judge and write the completions of one grid point."""
    begin, rollout = time.perf_counter(), config.rollout
    point = rollout.points()[place]
    console = Console()
    with console.status(f"point {place + 1} of {len(rollout.points())}") as shown:
        completions = sample_point(
            policy,
            inputs.reward,
            inputs.records,
            point,
            samples=rollout.samples,
            stopping=rollout.stopping(),
            seed=config.seed,
            prompts_per_call=rollout.prompts_per_call,
            after_call=lambda done: shown.update(
                f"point {place + 1} of {len(rollout.points())}: {done} of {len(inputs.records)} prompts"
            ),
        )
    scores = Scores(
        value=completions.reward,
        valid=completions.judged,
        unit=inputs.reward.unit,
        reason=list(completions.reason),
    )
    check_failures(scores, completions.judged, rollout.max_failure_rate, inputs.reward.name)
    save_point(path, completions)
    mean, seconds = float(completions.reward.nanmean()), time.perf_counter() - begin
    console.print(
        f"temperature {point.temperature:g}, top-p {point.top_p:g}, seed {point.seed}: "
        f"{len(completions)} completions, mean reward {mean:.3f}, {seconds:.0f} s",
        markup=False,
        highlight=False,
    )


def _select(
    config: TextSampleConfig, inputs: _Inputs, completions: Completions, output: Path, begin: float
) -> dict[str, Any]:
    """Choose, write the dataset and the summary."""
    from visalign.versions import versions

    rule = config.selection
    free = may_be_chosen(completions, truncated=rule.truncated)
    chosen = sorted(chosen_completions(rule, completions, free), key=lambda i: (completions.prompt[i], i))
    if not chosen:
        raise nothing_chosen(rule, completions, free, output)
    write_atomic(
        output / DATASET, demonstrations_jsonl(dataset_record(inputs.records, completions, i) for i in chosen)
    )
    rewards = completions.reward[chosen].double()
    summary = {
        "dataset": DATASET,
        "records": len(chosen),
        "prompts": len(inputs.records),
        "prompts_covered": len({completions.prompt[i] for i in chosen}),
        "reward_mean": float(rewards.mean()),
        "length_mean": sum(completions.tokens[i] for i in chosen) / len(chosen),
        "completions": len(completions),
        "failed": int((~completions.judged).sum()),
        "failure_reasons": failure_reasons(completions),
        "truncated": int(completions.truncated.sum()),
        "accepted": int((free & (completions.reward >= rule.threshold)).sum()),
        "distributions": table(completions, free, chosen, rule.threshold, ("temperature", "top_p")),
        "points": table(completions, free, chosen, rule.threshold, ("temperature", "top_p", "seed")),
        "seconds": time.perf_counter() - begin,
        "config": asdict(config),
        "versions": versions(),
    }
    text = json.dumps(finite(summary), indent=2, allow_nan=False, ensure_ascii=False)
    write_atomic(output / "summary.json", (text + "\n").encode("utf-8"))
    return json.loads(text)


def plan(config: TextSampleConfig) -> dict[str, Any]:
    """What a job would sample.

    Args:
        config: the configuration.

    Returns:
        Groups of entries: sampling, selection.

    Raises:
        UserError: something in the configuration cannot be used.
    """
    inputs, rollout, rule = _prepare(config), config.rollout, config.selection
    points = len(rollout.points())
    each = {"all": points * rollout.samples, "best_of_n": 1, "rejection": rule.per_prompt}[rule.rule]
    each = points * rollout.samples if each is None else min(each, points * rollout.samples)
    return {
        "sampling": {
            "prompts": len(inputs.records),
            "grid_points": points,
            "completions_per_prompt": points * rollout.samples,
            "completions": points * rollout.samples * len(inputs.records),
        },
        "selection": {"rule": rule.rule, "records_at_most": each * len(inputs.records)},
    }
