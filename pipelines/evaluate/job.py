# SPDX-License-Identifier: Apache-2.0
"""Evaluate rewards on a preference or quality set: scores, reports, comparisons, JSON and page."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from visalign.atomic import write_atomic
from visalign.data.sets.checks import (
    PACKAGED_JUDGE,
    Finding,
    check_preferences,
    check_quality,
    summed_votes,
    without_duplicates,
)
from visalign.data.sets.columns import Columns, read_table
from visalign.data.sets.records import PreferenceSet, QualitySet, mix_sides
from visalign.data.sets.sources import join_scores, load_source, lower_rewards
from visalign.data.sets.tables import listed
from visalign.data.sets.trained_images import image_print, trained_images
from visalign.errors import UserError
from visalign.evaluation.pages.base import short_names
from visalign.evaluation.pages.reward_page import evaluation_page, file_tables, judge_file_table, sets_page, sets_table
from visalign.evaluation.pages.table_files import FOLDER, write_tables
from visalign.evaluation.rewards.comparison import (
    add_holm,
    compare_on_preferences,
    compare_on_quality,
    leaderboard,
    leaderboard_of_sets,
    worst_records,
)
from visalign.evaluation.rewards.fusion import fuse_preferences, fuse_quality
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.evaluation.rewards.preferences import evaluate_preferences
from visalign.evaluation.rewards.quality import evaluate_quality
from visalign.interfaces import PointwiseReward
from visalign.pipelines.score.provenance import domain_note, provenance, reward_identity
from visalign.pipelines.score.report import load_shown_images
from visalign.pipelines.shared.reward_options import check_columns, load_each, need_prompts, reward_options, with_cache
from visalign.pipelines.shared.run_folder import check_run_folder, pretty
from visalign.rewards.text.completions import load_any_judge

from .scores import column_scores, quality_column_scores, score_pairs, score_quality

RESULT, PAGE = "evaluation.json", "evaluation.html"
BOARD = "leaderboard"  # Name of page, JSON and table of an evaluation on several sets


@dataclass(frozen=True)
class Kind:
    """Functions for a set of one kind."""

    name: str
    read_columns: Callable[..., Any]
    ask_reward: Callable[..., Any]
    report: Callable[..., dict[str, Any]]
    compare: Callable[..., dict[str, Any]]
    fuse: Callable[..., tuple[Any, dict[str, Any]]]


PAIRS = Kind("preferences", column_scores, score_pairs, evaluate_preferences, compare_on_preferences, fuse_preferences)
QUALITY = Kind("quality", quality_column_scores, score_quality, evaluate_quality, compare_on_quality, fuse_quality)


def evaluate(
    source: str,
    *,
    rewards: Sequence[str] = (),
    options: Sequence[str] = (),
    columns: Sequence[str] = (),
    lower_is_better: Sequence[str] = (),
    table: Columns | None = None,
    join: Sequence[Path] = (),
    split: str | None = None,
    limit: int | None = None,
    output: Path | None = None,
    resume: bool = False,
    swap_sides: bool = False,
    keep_duplicates: bool = False,
    fuse: bool = False,
    cache: Path | None = None,
    device: str | None = None,
    batch_size: int = 32,
    max_failure_rate: float = 0.5,
    settings: IntervalSettings | None = None,
    on_batch: Callable[[int, int], object] | None = None,
    loaded: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run an evaluation: a report per judge, comparisons of every two, a leaderboard, as JSON.

    The keywords are the options of the command, `columns` those of --scores, `table` how the source is read, `loaded`
    the rewards by name where they are loaded already. `on_batch` gets the numbers of finished scores and of all.
    """
    started, settings = time.perf_counter(), settings or IntervalSettings()
    if options and not rewards:
        raise UserError("--option is of a --reward, and there is none.")
    if not rewards and not columns:
        raise UserError("Nothing to evaluate: name a reward (--reward) or columns of scores in the set (--scores).")
    check_columns(columns, rewards, lower_is_better)
    if output is not None:
        check_run_folder(output, resume=resume)  # before hours of scoring
    judges = with_cache(load_each(rewards, options, load_any_judge, device), cache) if loaded is None else loaded
    reads = {"has_images": bool(judges or join), "needs_prompt": need_prompts(judges)}  # columns open no image
    table = replace(table or Columns(), **reads)
    records = load_source(source, split=split, limit=limit, columns=table)
    if join:
        records = join_scores(records, *join)
    records, findings = _checked(records, judges, swap_sides=swap_sides, keep_duplicates=keep_duplicates)
    chosen = reward_options(options, list(judges))
    findings += _trained_on(records, {n: str(o["model"]) for n, o in chosen.items() if "model" in o})
    kind = PAIRS if isinstance(records, PreferenceSet) else QUALITY
    lower = {*lower_is_better} | lower_rewards(row for path in join for _, row in read_table(path, {}))
    scores = [kind.read_columns(records, n, higher_is_better=n not in lower, names=table.names) for n in columns]
    for name, judge in judges.items():
        file_name = re.sub(r"[^\w.-]+", "-", name).strip("-") or "judge"
        log = None if output is None else output / f"scores-{file_name}.jsonl"
        asking = {"log": log, "batch_size": batch_size, "max_failure_rate": max_failure_rate, "on_batch": on_batch}
        scores.append(kind.ask_reward(records, judge, **asking))
    fused, fusion = kind.fuse(records, scores) if fuse else (None, None)
    scores += [] if fused is None else [fused]
    measured = _measure(kind, records, scores, judges, settings, max_failure_rate)
    findings += [Finding(kind="no report", count=1, message=f"{f['judge']}: {f['error']}") for f in measured["failed"]]
    about = {"source": source, "name": records.name, "kind": kind.name, "size": len(records), "split": split}
    about |= {"seed": settings.seed, "resamples": settings.resamples, "findings": list(map(asdict, findings))}
    result = {
        "format": "visalign evaluation 1",
        "set": about,
        **measured,
        "provenance": {name: provenance(judge) for name, judge in judges.items()},
        "fusion": fusion,
        "seconds": round(time.perf_counter() - started, 3),
    }
    if output is not None:
        write_result(output, result)
    return result


def evaluate_sets(
    sources: Sequence[str],
    *,
    output: Path | None = None,
    resume: bool = False,
    settings: IntervalSettings | None = None,
    **options: Any,
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Evaluate on several sets; return set -> result of `evaluate`, and a leaderboard over the sets of each kind."""
    settings = settings or IntervalSettings()
    files = [Path(source).resolve() for source in sources]
    if twice := [source for source, file in zip(sources, files, strict=True) if files.count(file) > 1]:
        raise UserError(f"A set is named twice: {listed(twice)}.")
    if output is not None:
        check_run_folder(output, resume=resume)
    rewards, of_rewards, device = (options.get(name) for name in ("rewards", "options", "device"))
    loaded = with_cache(load_each(rewards or (), of_rewards or (), load_any_judge, device), options.get("cache"))
    results = {}
    for source, name in _set_names(sources).items():
        folder = None if output is None else output / name
        again = resume and folder is not None and folder.is_dir()
        shared: dict[str, Any] = {**options, "settings": settings, "loaded": loaded}
        results[name] = evaluate(source, output=folder, resume=again, **shared)
    boards = []
    for kind in dict.fromkeys(result["set"]["kind"] for result in results.values()):
        of_kind = {name: result for name, result in results.items() if result["set"]["kind"] == kind}
        boards.append(leaderboard_of_sets(of_kind, level=settings.level))
    if output is not None:
        write_atomic(output / f"{BOARD}.json", pretty({"format": "visalign leaderboard 1", "leaderboards": boards}))
        tables = [judge_file_table(f"{BOARD}_{board['kind']}", sets_table(board)) for board in boards]
        write_tables(output / FOLDER, tables)
        write_atomic(output / f"{BOARD}.html", sets_page(boards, results, settings.level))
    return results, boards


def _set_names(sources: Sequence[str]) -> dict[str, str]:
    """Name each source after its file, without what all of them share, as a folder can be called."""
    stems = {source: str(Path(source).with_suffix("")) for source in sources}
    short = short_names(stems.values())
    names: dict[str, str] = {}
    for source, stem in stems.items():
        name = re.sub(r"[^\w.-]+", "-", short[stem]).strip("-.") or "set"
        names[source] = name if name not in names.values() else f"{name}-{len(names) + 1}"
    return names


def _checked(
    source: PreferenceSet | QualitySet, judges: Mapping[str, Any], *, swap_sides: bool, keep_duplicates: bool
) -> tuple[PreferenceSet | QualitySet, list[Finding]]:
    """Check a set and sum the votes of its pairs."""
    if isinstance(source, QualitySet):
        findings = check_quality(source, files=bool(judges))
        prompts = [record.prompt or "" for record in source.records]
    else:
        if swap_sides:
            source = replace(source, pairs=tuple(mix_sides(pair) for pair in source.pairs))  # by a hash of each pair
        sees_sides = any(not isinstance(judge, PointwiseReward) for judge in judges.values())
        findings = check_preferences(source, files=bool(judges), judge_sees_sides=sees_sides)
        source, summed = summed_votes(source if keep_duplicates else without_duplicates(source))
        findings, prompts = findings + summed, [pair.prompt for pair in source.pairs]
    notes = {name: domain_note(judge, prompts) for name, judge in judges.items()}
    findings += [Finding(kind=PACKAGED_JUDGE, count=1, message=f"{n}: {note}") for n, note in notes.items() if note]
    return source, findings


def _trained_on(source: PreferenceSet | QualitySet, models: Mapping[str, str]) -> list[Finding]:
    """Tell of each judge, by the fingerprints beside its model, how many rows show images of its training."""
    known = {name: prints for name, model in models.items() if (prints := trained_images(model))}
    if not known:
        return []
    if isinstance(source, QualitySet):
        rows = [{image_print(record.image)} for record in source.records]
    else:
        rows = [{image_print(pair.image_left), image_print(pair.image_right)} for pair in source.pairs]
    counts = {name: sum(bool(row & prints) for row in rows) for name, prints in known.items()}
    message = f"of {len(rows)} rows show an image that it was trained on, and say nothing about new images."
    lines = {name: f"{name}: {count} {message} Leave them out." for name, count in counts.items() if count}
    return [Finding(kind="trained on", count=counts[name], message=line) for name, line in lines.items()]


def _measure(
    kind: Kind, source: Any, scores: Sequence[Any], judges: Mapping[str, Any], settings: Any, limit: float
) -> dict[str, Any]:
    """Report on every judge, compare every two, and rank them; `failed` names those without a report."""
    identities = {judge.name: reward_identity(judge) for judge in judges.values()}
    reports: list[dict[str, Any]] = []
    reported, comparisons, failed = [], [], []
    for entry in scores:
        try:
            report = dict(kind.report(source, entry, settings), worst=worst_records(source, entry))
            missing, size = int((~entry.judged).sum()), len(entry.judged)
            if missing > limit * size:  # the numbers would be about the easy part of the set
                raise ValueError(
                    f"{missing} of {size} scores are missing, above max_failure_rate {limit:g}; most often because: "
                    f"{next(iter(entry.failures()))}. Mend them, or raise --max-failure-rate."
                )
        except ValueError as error:
            failed.append({"judge": entry.name, "error": str(error)})
            continue
        if (identity := identities.get(report["judge"]["name"])) is not None:
            report["judge"]["identity"] = {"model": identity.model, "digest": identity.digest}
        reports.append(report)
        reported.append(entry)
    if not reports:
        raise UserError("; ".join(f"{item['judge']}: {item['error']}" for item in failed))
    for first, second in combinations(reported, 2):
        try:
            comparisons.append(kind.compare(source, first, second, settings))
        except ValueError as error:  # no pair that both decided; the reports remain
            failed.append({"judge": f"{first.name} against {second.name}", "error": str(error)})
    add_holm(comparisons, level=settings.level)
    board = leaderboard(source, reported, comparisons, settings)
    return {"judges": reports, "comparisons": comparisons, "leaderboard": board, "failed": failed}


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write `evaluation.json`, `evaluation.html` and `tables/`, each file atomically."""
    write_atomic(folder / RESULT, pretty(result))
    write_tables(folder / FOLDER, file_tables(result))
    columns = ("image", "image_left", "image_right")
    names = [row[key] for judge in result["judges"] for row in judge["worst"] for key in columns if key in row]
    write_atomic(folder / PAGE, evaluation_page(result, load_shown_images(dict.fromkeys(names))))
