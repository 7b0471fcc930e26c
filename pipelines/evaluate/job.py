# SPDX-License-Identifier: Apache-2.0
"""Rewards on a preference or quality set: scored or read, measured, compared, written as JSON and page."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from .scores import Asking, OnBatch, judge_pairs, judge_quality

RESULT = "evaluation.json"
PAGE = "evaluation.html"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What to evaluate and how."""

    source: str
    """What `visalign.data.sets.sources.load_source` takes."""
    rewards: tuple[str, ...] = ()
    """Names of judges that are asked now."""
    options: tuple[str, ...] = ()
    """Of these, `LABEL.NAME=VALUE`, or `NAME=VALUE` where there is one alone."""
    columns: tuple[str, ...] = ()
    """Names of precomputed scores in the set's columns."""
    lower_is_better: tuple[str, ...] = ()
    """Those of `columns` where a lower score is better."""
    table: Columns = field(default_factory=Columns)
    """How the columns of the source are read."""
    join: tuple[Path, ...] = ()
    """Tables with scores of the source's images."""
    split: str | None = None
    limit: int | None = None
    output: Path | None = None
    """Folder for results and scores; None writes nothing."""
    resume: bool = False
    """Go on with the scoring that the output folder holds."""
    swap_sides: bool = False
    """Exchange the sides of half of the pairs, always the same half."""
    fuse: bool = False
    """Stack all of them into one more judge, cross-fitted by prompt."""
    keep_duplicates: bool = False
    """Keep rows in which an annotator says again what an earlier row says."""
    batch_size: int = 32
    max_failure_rate: float = 0.5
    cache: Path | None = None
    """Folder of the cache of judgements; None asks each judge for everything."""
    settings: IntervalSettings = field(default_factory=IntervalSettings)

    def __post_init__(self) -> None:
        if self.options and not self.rewards:
            raise UserError(f"--option is {self.options[0]!r}, and no --reward is asked that could take it.")
        if not self.rewards and not self.columns:
            raise UserError(
                "Nothing to evaluate: name a reward (--reward) or columns of scores in the set (--scores)."
            )
        if self.fuse and len({*self.rewards, *self.columns}) < 2:
            raise UserError("--fuse stacks two or more judges, and one was named. Add --scores or --reward.")
        unknown = set(self.lower_is_better) - set(self.columns)
        if unknown:
            raise UserError(
                f"--lower-is-better names {', '.join(sorted(unknown))}, which is no --scores column; a "
                "reward declares its direction itself."
            )
        if self.settings.resamples < 100:
            raise UserError(f"resamples is {self.settings.resamples}; intervals need at least 100.")


def evaluate(options: EvaluateOptions, *, on_batch: OnBatch | None = None) -> dict[str, Any]:
    """Run an evaluation.

    Returns:
        JSON-able: `set`, `judges` (a report each), `comparisons` (of every two), `leaderboard`, `fusion`,
        `seconds`.
        Written to `evaluation.json` and `evaluation.html` where an output folder is given.
    """
    from visalign.rewards.catalogue import load_judge

    started = time.perf_counter()
    if options.output is not None:
        check_run_folder(options.output, resume=options.resume)
    judges = with_cache(load_each(options.rewards, options.options, load_judge), options.cache)
    table = replace(options.table, has_images=bool(judges or options.join))
    source = load_source(options.source, split=options.split, limit=options.limit, columns=table)
    for path in options.join:
        source = join_scores(source, path)
    if isinstance(source, PreferenceSet):
        source, findings = _prepared(source, options, judges)
    else:
        findings = check_quality(source, files=bool(judges))
    scores, fusion = _all_scores(source, options, judges, on_batch), None
    if options.fuse:
        fused, fusion = _kind(source).fuse(source, scores)
        scores.append(fused)
    reports, whole, failed = _reports(source, scores, options.settings)
    asked = {judge.name: judge for judge in judges.values()}
    for report in reports:
        if (judge := asked.get(report["judge"]["name"])) is not None:
            identity = reward_identity(judge)
            report["judge"]["identity"] = {"model": identity.model, "digest": identity.digest}
    for report, entry in zip(reports, whole, strict=True):
        report["worst"] = worst_records(source, entry)
    comparisons, incomparable = _comparisons(source, whole, options.settings)
    failed += incomparable
    asked = source.pairs if isinstance(source, PreferenceSet) else source.records
    prompts = [row.prompt or "" for row in asked]
    for name, judge in judges.items():
        if caution := domain_note(judge, prompts):
            findings.append(Finding(kind="packaged judge", count=1, message=f"{name}: {caution}"))
    findings += [Finding(kind="no report", count=1, message=f"{f['judge']}: {f['error']}") for f in failed]
    result = {
        "format": "visalign evaluation 1",
        "set": _set_record(source, options, findings),
        "judges": reports,
        "whose": {name: provenance(judge) for name, judge in judges.items()},
        "comparisons": comparisons,
        "leaderboard": leaderboard(source, whole, comparisons, options.settings),
        "fusion": fusion,
        "failed": failed,
        "seconds": round(time.perf_counter() - started, 3),
    }
    if options.output is not None:
        write_result(options.output, result)
    return result


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write `evaluation.json`, `evaluation.html` and `tables/`, each file whole or not at all."""
    from visalign.evaluation.pages.reward_page import evaluation_page, file_tables
    from visalign.evaluation.pages.table_files import FOLDER, write_tables

    write_atomic(folder / RESULT, pretty(result))
    write_tables(folder / FOLDER, file_tables(result))
    fields = ("image", "image_left", "image_right")
    names = [row[key] for judge in result["judges"] for row in judge["worst"] for key in fields if key in row]
    images = load_shown_images(dict.fromkeys(names))
    write_atomic(folder / PAGE, evaluation_page(result, images=images))


def _prepared(
    source: PreferenceSet, options: EvaluateOptions, judges: dict[str, Any]
) -> tuple[PreferenceSet, list[Finding]]:
    if options.swap_sides:
        source = replace(source, pairs=tuple(mix_sides(pair) for pair in source.pairs))
    sees_sides = any(not isinstance(judge, PointwiseReward) for judge in judges.values())
    findings = check_preferences(source, files=bool(judges), judge_sees_sides=sees_sides)
    if not options.keep_duplicates:
        source = without_duplicates(source)
    source, summed = summed_votes(source)
    return source, findings + summed


@dataclass(frozen=True)
class _Kind:
    """What is done with a set of one kind."""

    name: str
    read: Callable[..., Any]
    """Scores from the set's columns."""
    ask: Callable[..., Any]
    """Scores from a judge."""
    report: Callable[..., dict[str, Any]]
    compare: Callable[..., dict[str, Any]]
    fuse: Callable[..., tuple[Any, dict[str, Any]]]


def _kind(source: PreferenceSet | QualitySet) -> _Kind:
    if isinstance(source, PreferenceSet):
        about = column_scores, judge_pairs, evaluate_preferences, compare_on_preferences, fuse_preferences
        return _Kind("preferences", *about)
    about = quality_column_scores, judge_quality, evaluate_quality, compare_on_quality, fuse_quality
    return _Kind("quality", *about)


def _all_scores(
    source: PreferenceSet | QualitySet,
    options: EvaluateOptions,
    judges: dict[str, Any],
    on_batch: OnBatch | None,
) -> list[Any]:
    kind = _kind(source)
    found = [
        kind.read(source, name, higher_is_better=name not in options.lower_is_better)
        for name in options.columns
    ]
    for name, judge in judges.items():
        log = None if options.output is None else options.output / f"scores-{_file_name(name)}.jsonl"
        asking = Asking(
            log=log,
            batch_size=options.batch_size,
            max_failure_rate=options.max_failure_rate,
            on_batch=on_batch,
        )
        found.append(kind.ask(source, judge, asking))
    return found


def _reports(
    source: PreferenceSet | QualitySet, scores: Sequence[Any], settings: IntervalSettings
) -> tuple[list[dict[str, Any]], list[Any], list[dict[str, str]]]:
    """(reports, the scores they are of, and for the other judges why there is no report)."""
    reports: list[dict[str, Any]] = []
    whole: list[Any] = []
    failed: list[dict[str, str]] = []
    for entry in scores:
        try:
            reports.append(_kind(source).report(source, entry, settings))
            whole.append(entry)
        except ValueError as error:
            failed.append({"judge": entry.name, "error": str(error)})
    if not reports:
        raise UserError("; ".join(f"{item['judge']}: {item['error']}" for item in failed))
    return reports, whole, failed


def _comparisons(
    source: PreferenceSet | QualitySet, scores: Sequence[Any], settings: IntervalSettings
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Every two judges, their p-values held together by Holm."""
    found: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    for first, second in combinations(scores, 2):
        try:
            found.append(_kind(source).compare(source, first, second, settings))
        except ValueError as error:  # no pair that both decided: the reports stand without it
            failed.append({"judge": f"{first.name} against {second.name}", "error": str(error)})
    add_holm(found, level=settings.level)
    return found, failed


def _set_record(
    source: PreferenceSet | QualitySet, options: EvaluateOptions, findings: Sequence[Finding]
) -> dict[str, Any]:
    return {
        "source": options.source,
        "name": source.name,
        "kind": _kind(source).name,
        "size": len(source),
        "split": options.split,
        "seed": options.settings.seed,
        "resamples": options.settings.resamples,
        "findings": [{"kind": f.kind, "count": f.count, "message": f.message} for f in findings],
    }


def _file_name(name: str) -> str:
    """A reward's name as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "judge"
