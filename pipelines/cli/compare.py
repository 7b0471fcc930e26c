# SPDX-License-Identifier: Apache-2.0
"""The commands `visalign compare` and `visalign rank`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Exit, Option, echo

from .options import (
    AsJson,
    Cache,
    Device,
    LabelOptions,
    NewFile,
    Prompt,
    Rewards,
    Tables,
    clean_output,
    print_result,
    write_page_or_json,
    write_table_files,
)
from .show import print_provenance


def compare(
    first: Annotated[Path, Argument(metavar="A", help="An image.", show_default=False)],
    second: Annotated[Path, Argument(metavar="B", help="Another image.", show_default=False)],
    reward: Rewards,
    prompt: Prompt = None,
    options: LabelOptions = None,
    output: NewFile = None,
    tables: Tables = None,
    cache: Cache = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Compare two images: winner, margin, confidence and reasons. Exits with 1 if a reward fails."""
    from visalign.evaluation.pages.compare_page import compare_page, file_tables
    from visalign.pipelines.compare.compare import compare_images, read_two
    from visalign.pipelines.shared.reward_options import load_each, needed_prompt, with_cache
    from visalign.pipelines.shared.run_folder import new_file
    from visalign.rewards.catalogue import load_judge

    new_file(output, endings=(".html", ".json"))
    new_file(tables)
    images = read_two([first, second])
    with clean_output():
        judges = load_each(reward, options or [], load_judge, device)
        text = needed_prompt(prompt, judges)
        result = compare_images(images, text, with_cache(judges, cache))
    result["images"] = {"A": str(first), "B": str(second)}
    print_result(result, show_comparison, as_json)
    write_page_or_json(output, result, lambda: compare_page(result, images, [first.name, second.name]), as_json)
    write_table_files(tables, lambda: file_tables(result))
    print_provenance(judges, [text])
    if result["votes"].get("failed"):
        raise Exit(1)


def show_comparison(console: Console, result: Mapping[str, Any]) -> None:
    from visalign.evaluation.pages.base import plain
    from visalign.evaluation.pages.compare_page import in_words, margin

    table = Table("reward", "which, how sure", "A", "B", "by how much (for A)", "notes")
    explanations = []
    for judge in result["judges"]:
        sides = judge.get("sides") or {}
        values = [plain(sides[side]["value"]) if sides else "" for side in "AB"]
        label, notes = Text(judge["label"]), Text("; ".join(judge["notes"]))
        table.add_row(label, in_words(judge), *values, Text(margin(judge)), notes)
        answers = sides or {f"{order['left']} on the left": order for order in judge["orders"]}
        explanations += [f"{judge['label']}, {what}: {a['text']}" for what, a in answers.items() if a["text"]]
    console.print(table)
    for line in (*explanations, result["summary"]):
        console.print(Text(line))
    if result["unsure"] or "tie" in result["votes"]:
        console.print(Text(f"The rule: {result['rule']}."))


def rank(
    images: Annotated[
        list[Path],
        Argument(help="Image files or folders, or a table of completions of one prompt.", show_default=False),
    ],
    reward: Annotated[str, Option("--reward", "-r", help="Name of the reward.")],
    prompt: Prompt = None,
    options: LabelOptions = None,
    budget: Annotated[float, Option(help="Calls of a pairwise reward as a share of all pairs, in (0, 2].")] = 0.3,
    level: Annotated[float, Option(help="Confidence level of the intervals.")] = 0.9,
    output: NewFile = None,
    tables: Tables = None,
    cache: Cache = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Rank images, or texts, of one prompt, best first. Exits with 1 if any image could not be judged."""
    from visalign.data.sets.image_references import resolve_image
    from visalign.data.sets.tables import READERS
    from visalign.evaluation.pages.rank_page import file_tables
    from visalign.pipelines.compare.rank_images import completions_to_rank, ranking_page, ranking_record
    from visalign.pipelines.score.image_rows import find_images, require_still
    from visalign.pipelines.shared.reward_options import load_each, needed_prompt, with_cache
    from visalign.pipelines.shared.run_folder import new_file
    from visalign.rewards.pairs.ranking import rank as order
    from visalign.rewards.text.completions import load_any_judge

    new_file(output, endings=(".html", ".json"))
    new_file(tables)
    if any(path.suffix.lower() in READERS for path in images):
        names, prompt = completions_to_rank(images, prompt)
    else:
        names = [str(path) for path in find_images(images)]
        for name in names:
            require_still(Path(name))
    with clean_output():
        loaded = load_each([reward], options or [], load_any_judge, device)
        text, judge = needed_prompt(prompt, loaded), with_cache(loaded, cache)[reward]
        ranking = order([resolve_image(name) for name in names], text, judge, budget=budget, level=level)
    result = ranking_record(ranking, names, text, reward, judge)
    print_result(result, show_ranking, as_json)
    write_page_or_json(output, result, lambda: ranking_page(result), as_json)
    write_table_files(tables, lambda: file_tables(result))
    print_provenance({reward: judge}, [text])
    failed = sum(row["reason"] is not None for row in result["images"])
    if failed:
        echo(f"{failed} of {len(names)} images could not be judged; their rows give the reasons.", err=True)
        raise Exit(1)


def show_ranking(console: Console, result: Mapping[str, Any]) -> None:
    from visalign.evaluation.pages.base import plain, short_names
    from visalign.evaluation.pages.rank_page import sentences

    names = short_names(row["image"] for row in result["images"])
    image = Column("image", overflow="fold")
    table = Table("place", image, f"score ({result['unit']})", f"{result['level']:.0%} interval")
    for row in result["images"]:
        interval = "" if row["low"] is None else f"{plain(row['low'])} to {plain(row['high'])}"
        position = "–" if row["place"] is None else str(row["place"])
        table.add_row(position, Text(names[row["image"]]), plain(row["score"]), interval)
    console.print(table)
    reasons = [f"! {names[row['image']]}: {row['reason']}" for row in result["images"] if row["reason"]]
    for line in (*reasons, *sentences(result)):
        console.print(Text(line))
