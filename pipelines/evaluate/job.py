# SPDX-License-Identifier: Apache-2.0
"""Evaluate rewards on a preference or quality set: scores, reports, comparisons, JSON and page."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from visalign.atomic import write_atomic
from visalign.data.sets.checks import (
    Finding,
    check_preferences,
    check_quality,
    summed_votes,
    without_duplicates,
)
from visalign.data.sets.columns import Columns
from visalign.data.sets.records import PreferenceSet, QualitySet, mix_sides
from visalign.data.sets.sources import join_scores, load_source
from visalign.errors import UserError
from visalign.evaluation.rewards.comparison import (
    add_holm,
    compare_on_preferences,
    compare_on_quality,
    leaderboard,
    worst_records,
)
from visalign.evaluation.rewards.fusion import fuse_preferences, fuse_quality
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.evaluation.rewards.preferences import evaluate_preferences
from visalign.evaluation.rewards.quality import evaluate_quality
from visalign.interfaces import PointwiseReward
from visalign.pipelines.score.provenance import domain_note, provenance, reward_identity
from visalign.pipelines.score.report import load_shown_images
from visalign.pipelines.shared.reward_options import load_each, with_cache
from visalign.pipelines.shared.run_folder import check_run_folder, pretty

from .columns import column_scores, quality_column_scores
from .scores import OnBatch, ScoringOptions, score_pairs, score_quality

RESULT = "evaluation.json"
PAGE = "evaluation.html"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of an evaluation."""

    source: str
    """A set as `visalign.data.sets.sources.load_source` takes it."""
    rewards: tuple[str, ...] = ()
    """Names of rewards that are asked now."""
    options: tuple[str, ...] = ()
    """Options of these, `LABEL.NAME=VALUE`, or `NAME=VALUE` where there is only one."""
    columns: tuple[str, ...] = ()
    """Names of precomputed scores in the set's columns."""
    lower_is_better: tuple[str, ...] = ()
    """Names among `columns` where a lower score is better."""
    table: Columns = field(default_factory=Columns)
    """How the columns of the source are read."""
    join: tuple[Path, ...] = ()
    """Tables with scores of the source's images."""
    split: str | None = None
    limit: int | None = None
    output: Path | None = None
    """Folder for results and scores; None writes nothing."""
    resume: bool = False
    """Continue the scoring in the output folder."""
    swap_sides: bool = False
    """Exchange the sides of half of the pairs, always the same half."""
    fuse: bool = False
    """Stack all of them into one more judge, cross-fitted by prompt."""
    keep_duplicates: bool = False
    """Keep rows in which an annotator repeats an earlier row."""
    batch_size: int = 32
    max_failure_rate: float = 0.5
    cache: Path | None = None
    """Folder of the cache of scores; None computes every score."""
    settings: IntervalSettings = field(default_factory=IntervalSettings)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.lower_is_better) - set(self.columns))
        rules = (
            (self.options and not self.rewards, "--option is of a --reward, and there is none."),
            (
                not self.rewards and not self.columns,
                "Nothing to evaluate: name a reward (--reward) or columns of scores in the set (--scores).",
            ),
            (
                self.fuse and len({*self.rewards, *self.columns}) < 2,
                "--fuse stacks two or more judges, and one was named. Add --scores or --reward.",
            ),
            (unknown, f"--lower-is-better names {', '.join(unknown)}, which is no --scores column."),
        )
        for broken, message in rules:
            if broken:
                raise UserError(message)


@dataclass(frozen=True)
class _Kind:
    """Functions for a set of one kind."""

    name: str
    read_columns: Callable[..., Any]
    ask_reward: Callable[..., Any]
    report: Callable[..., dict[str, Any]]
    compare: Callable[..., dict[str, Any]]
    fuse: Callable[..., tuple[Any, dict[str, Any]]]


PREFERENCES = _Kind(
    "preferences", column_scores, score_pairs, evaluate_preferences, compare_on_preferences, fuse_preferences
)
QUALITY = _Kind("quality", quality_column_scores, score_quality, evaluate_quality, compare_on_quality, fuse_quality)


def evaluate(options: EvaluateOptions, *, on_batch: OnBatch | None = None) -> dict[str, Any]:
    """Run an evaluation: a report per judge, comparisons of every two, a leaderboard, as JSON.

    With an output folder it is also written there, with a page and tables.
    """
    from visalign.rewards.catalogue import load_judge

    started = time.perf_counter()
    if options.output is not None:
        check_run_folder(options.output, resume=options.resume)
    rewards = with_cache(load_each(options.rewards, options.options, load_judge), options.cache)
    source, findings = _load_set(options, rewards)
    kind = PREFERENCES if isinstance(source, PreferenceSet) else QUALITY
    scores, fusion = _all_scores(kind, source, options, rewards, on_batch), None
    if options.fuse:
        fused, fusion = kind.fuse(source, scores)
        scores.append(fused)
    identities = {reward.name: reward_identity(reward) for reward in rewards.values()}
    reports, reported, failed = _reports(kind, source, scores, options.settings)
    for report in reports:
        if (identity := identities.get(report["judge"]["name"])) is not None:
            report["judge"]["identity"] = {"model": identity.model, "digest": identity.digest}
    comparisons = []
    for first, second in combinations(reported, 2):
        try:
            comparisons.append(kind.compare(source, first, second, options.settings))
        except ValueError as error:  # no pair that both decided; the reports remain
            failed.append({"judge": f"{first.name} against {second.name}", "error": str(error)})
    add_holm(comparisons, level=options.settings.level)
    records = source.pairs if isinstance(source, PreferenceSet) else source.records
    for name, reward in rewards.items():
        if note := domain_note(reward, [record.prompt or "" for record in records]):
            findings.append(Finding(kind="packaged judge", count=1, message=f"{name}: {note}"))
    findings += [Finding(kind="no report", count=1, message=f"{f['judge']}: {f['error']}") for f in failed]
    result = {
        "format": "visalign evaluation 1",
        "set": {
            "source": options.source,
            "name": source.name,
            "kind": kind.name,
            "size": len(source),
            "split": options.split,
            "seed": options.settings.seed,
            "resamples": options.settings.resamples,
            "findings": [asdict(finding) for finding in findings],
        },
        "judges": reports,
        "provenance": {name: provenance(reward) for name, reward in rewards.items()},
        "comparisons": comparisons,
        "leaderboard": leaderboard(source, reported, comparisons, options.settings),
        "fusion": fusion,
        "failed": failed,
        "seconds": round(time.perf_counter() - started, 3),
    }
    if options.output is not None:
        write_result(options.output, result)
    return result


def _reports(
    kind: _Kind, source: Any, scores: Sequence[Any], settings: IntervalSettings
) -> tuple[list[dict[str, Any]], list[Any], list[dict[str, str]]]:
    """Compute (reports, their scores, and the reasons of rewards without a report)."""
    reports: list[dict[str, Any]] = []
    reported, failed = [], []
    for entry in scores:
        try:
            reports.append(kind.report(source, entry, settings) | {"worst": worst_records(source, entry)})
            reported.append(entry)
        except ValueError as error:
            failed.append({"judge": entry.name, "error": str(error)})
    if not reports:
        raise UserError("; ".join(f"{item['judge']}: {item['error']}" for item in failed))
    return reports, reported, failed


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write `evaluation.json`, `evaluation.html` and `tables/`, each file atomically."""
    from visalign.evaluation.pages.reward_page import evaluation_page, file_tables
    from visalign.evaluation.pages.table_files import FOLDER, write_tables

    write_atomic(folder / RESULT, pretty(result))
    write_tables(folder / FOLDER, file_tables(result))
    columns = ("image", "image_left", "image_right")
    names = [row[key] for judge in result["judges"] for row in judge["worst"] for key in columns if key in row]
    images = load_shown_images(dict.fromkeys(names))
    write_atomic(folder / PAGE, evaluation_page(result, images=images))


def _load_set(options: EvaluateOptions, rewards: dict[str, Any]) -> tuple[PreferenceSet | QualitySet, list[Finding]]:
    """Load and check the set; votes of a pair are summed."""
    table = replace(options.table, has_images=bool(rewards or options.join))
    source = load_source(options.source, split=options.split, limit=options.limit, columns=table)
    for path in options.join:
        source = join_scores(source, path)
    if isinstance(source, QualitySet):
        return source, check_quality(source, files=bool(rewards))
    if options.swap_sides:
        source = replace(source, pairs=tuple(mix_sides(pair) for pair in source.pairs))
    sees_sides = any(not isinstance(reward, PointwiseReward) for reward in rewards.values())
    findings = check_preferences(source, files=bool(rewards), judge_sees_sides=sees_sides)
    if not options.keep_duplicates:
        source = without_duplicates(source)
    source, summed = summed_votes(source)
    return source, findings + summed


def _all_scores(
    kind: _Kind, source: Any, options: EvaluateOptions, rewards: dict[str, Any], on_batch: OnBatch | None
) -> list[Any]:
    scores = [
        kind.read_columns(source, name, higher_is_better=name not in options.lower_is_better)
        for name in options.columns
    ]
    for name, reward in rewards.items():
        file_name = re.sub(r"[^\w.-]+", "-", name).strip("-") or "judge"
        scoring = ScoringOptions(
            log=None if options.output is None else options.output / f"scores-{file_name}.jsonl",
            batch_size=options.batch_size,
            max_failure_rate=options.max_failure_rate,
            on_batch=on_batch,
        )
        scores.append(kind.ask_reward(source, reward, scoring))
    return scores
