# SPDX-License-Identifier: Apache-2.0
"""The command `visalign evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from . import options as opt
from .messages import user_messages

MOST_COLUMNS = 3  # Judges per table in a terminal; more follow in tables below


def evaluate(
    source: Annotated[
        list[str],
        Argument(
            help="Labelled set, or several for one leaderboard: table, Label Studio or Argilla export, "
            "owner/name:split of the hub, LAYOUT:FOLDER, shapes:pairs, shapes:quality."
        ),
    ],
    reward: opt.OptionalRewards = None,
    reward_options: opt.LabelOptions = None,
    scores: opt.Scores = None,
    lower_is_better: opt.LowerIsBetter = None,
    columns: opt.MapColumns = None,
    labels: opt.Labels = None,
    join: Annotated[
        list[Path] | None, Option("--join", help="Table of scores by image, as `visalign score` writes it; repeat.")
    ] = None,
    split: Annotated[str | None, Option(help="Split of the set.")] = None,
    limit: Annotated[int | None, Option(help="Maximum number of records.", min=1, max=2**32 - 1)] = None,
    output: opt.NewFolder = None,
    resume: opt.Resume = False,
    swap_sides: Annotated[bool, Option("--swap-sides", help="Swap the sides of random pairs.")] = False,
    keep_duplicates: Annotated[
        bool, Option("--keep-duplicates", help="Count repeated votes of one annotator.")
    ] = False,
    fuse: Annotated[bool, Option("--fuse", help="Also fuse all rewards into one, cross-fitted by prompt.")] = False,
    cache: opt.Cache = None,
    device: opt.Device = None,
    batch_size: opt.Batch = 32,
    max_failure_rate: Annotated[float, Option(help="Stop above this share of failed records.")] = 0.5,
    seed: opt.Seed = 0,
    resamples: Annotated[int, Option(help="Number of bootstrap draws.", min=100, max=opt.MOST_COUNTED)] = 1_000,
    bins: Annotated[int, Option(help="Number of bins in the reliability diagram.", min=1, max=1_000)] = 10,
) -> None:
    """Measure rewards on a preference or quality set of images or texts: agreement, calibration, slices."""
    with user_messages(resume=opt.resume_line(resume) if output is not None else None):
        from visalign.data.sets.columns import Columns, parse_map, parse_scores
        from visalign.evaluation.pages.table_files import FOLDER
        from visalign.evaluation.rewards.judged_pairs import IntervalSettings
        from visalign.pipelines.evaluate.job import BOARD, PAGE, evaluate_sets
        from visalign.pipelines.evaluate.job import evaluate as run

        names, score_columns = parse_scores(scores or [])
        table = Columns(names=parse_map(columns or []) | score_columns, labels=labels)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("scoring", total=None, visible=bool(reward))
            reading = {"table": table, "join": join or (), "split": split, "limit": limit, "columns": names}
            options: dict[str, Any] = reading | {
                "rewards": reward or (),
                "options": reward_options or (),
                "lower_is_better": lower_is_better or (),
                "swap_sides": swap_sides,
                "keep_duplicates": keep_duplicates,
                "fuse": fuse,
                "max_failure_rate": max_failure_rate,
                "settings": IntervalSettings(seed=seed, resamples=resamples, bins=bins),
                "on_batch": lambda done, total: progress.update(task, completed=done, total=total),
            }
            options |= {"output": output, "resume": resume, "cache": cache, "device": device, "batch_size": batch_size}
            console, several = Console(), len(source) > 1
            results, boards = evaluate_sets(source, **options) if several else ({"": run(source[0], **options)}, [])
        if several:
            show_leaderboards(console, results, boards)
        else:
            show_evaluation(console, results[""])
        failed = [(name, item) for name, result in results.items() for item in result["failed"]]
        lines = [f"No report on {item['judge']}{name and f' on {name}'}: {item['error']}" for name, item in failed]
        if output is not None:
            lines += [f"Page: {output / (f'{BOARD}.html' if several else PAGE)}", f"CSV and LaTeX: {output / FOLDER}"]
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)


def show_evaluation(console: Console, result: Mapping[str, Any]) -> None:
    from visalign.data.sets.checks import PACKAGED_JUDGE
    from visalign.evaluation.pages.base import provenance_sentence
    from visalign.evaluation.pages.reward_page import comparison_lines, evaluation_tables, fusion_line

    about, judges = result["set"], result["judges"]
    what = "pairs" if about["kind"] == "preferences" else "images"
    console.print(Text(f"{about['name']}: {about['size']} {what}"))
    for finding in about["findings"]:
        style = "bold red" if finding["kind"] == PACKAGED_JUDGE else ""
        console.print(Text(f"  {finding['message']}", style=style))
    for name, provenance in result["provenance"].items():
        console.print(Text(provenance_sentence(name, provenance)), soft_wrap=True)
    names = [escape(judge["judge"]["name"]) for judge in judges]
    tables = [table for tables in evaluation_tables(result).values() for table in tables]
    for entry in sorted(tables, key=lambda table: bool(table.columns)):
        _print_table(console, entry, names)
    notes = [f"! {judge['judge']['name']}: {note}" for judge in judges for note in judge["notes"]]
    for line in (*filter(None, [fusion_line(result)]), *comparison_lines(result), *notes):
        console.print(Text(line))


def show_leaderboards(
    console: Console, results: Mapping[str, Mapping[str, Any]], boards: Sequence[Mapping[str, Any]]
) -> None:
    from visalign.data.sets.checks import PACKAGED_JUDGE
    from visalign.evaluation.pages.reward_page import sets_table

    findings = [finding for result in results.values() for finding in result["set"]["findings"]]
    for message in dict.fromkeys(f["message"] for f in findings if f["kind"] == PACKAGED_JUDGE):
        console.print(Text(message, style="bold red"))
    for board in boards:
        _print_table(console, sets_table(board), [])
        if board["unranked"]:
            console.print(Text(f"Without a report on some set, and so not ranked: {', '.join(board['unranked'])}."))


def _print_table(console: Console, entry: Any, names: Sequence[str]) -> None:
    for start in range(0, 1 if entry.columns else len(names), MOST_COLUMNS):
        chosen = slice(None) if entry.columns else slice(start, start + MOST_COLUMNS)
        heads = [*map(escape, entry.columns)] or names[chosen]
        table = Table("", *heads, title=entry.title, title_justify="left", box=None, pad_edge=False)
        for row in entry.rows:
            table.add_row(Text(row.what), *(Text(str(cell)) for cell in row.cells[chosen]))
        console.print(table)
