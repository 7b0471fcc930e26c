# SPDX-License-Identifier: Apache-2.0
"""The commands `visalign compare`, `rank` and `agree`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Exit, Option, echo

from . import options as opt
from .score import scoring
from .show import print_provenance


def compare(
    first: Annotated[Path, Argument(metavar="A", help="An image.")],
    second: Annotated[Path, Argument(metavar="B", help="Another image.")],
    reward: opt.Rewards,
    prompt: opt.Prompt = None,
    options: opt.LabelOptions = None,
    output: opt.NewFile = None,
    tables: opt.Tables = None,
    cache: opt.Cache = None,
    device: opt.Device = None,
    as_json: opt.AsJson = False,
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
    with opt.clean_output():
        judges = load_each(reward, options or [], load_judge, device)
        text = needed_prompt(prompt, judges)
        result = compare_images(images, text, with_cache(judges, cache))
    result["images"] = {"A": str(first), "B": str(second)}
    opt.print_result(result, show_comparison, as_json)
    opt.write_page_or_json(output, result, lambda: compare_page(result, images, [first.name, second.name]), as_json)
    opt.write_table_files(tables, lambda: file_tables(result))
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
        list[Path], Argument(help="Image files or folders, or a table of images or completions of one prompt.")
    ],
    reward: Annotated[str, Option("--reward", "-r", help="Name of the reward.")],
    prompt: opt.Prompt = None,
    options: opt.LabelOptions = None,
    budget: Annotated[float, Option(help="Calls of a pairwise reward as a share of all pairs, in (0, 2].")] = 0.3,
    level: Annotated[float, Option(help="Confidence level of the intervals.")] = 0.9,
    output: opt.NewFile = None,
    tables: opt.Tables = None,
    cache: opt.Cache = None,
    device: opt.Device = None,
    as_json: opt.AsJson = False,
) -> None:
    """Rank images, or texts, of one prompt, best first. Exits with 1 if any image could not be judged."""
    from visalign.data.sets.image_references import resolve_image
    from visalign.data.sets.tables import READERS
    from visalign.evaluation.pages.rank_page import file_tables
    from visalign.pipelines.compare.compare import ranking_page, ranking_record, samples_to_rank
    from visalign.pipelines.score.image_rows import find_images, require_still
    from visalign.pipelines.shared.reward_options import load_each, needed_prompt, with_cache
    from visalign.pipelines.shared.run_folder import new_file
    from visalign.rewards.pairs.ranking import rank as order
    from visalign.rewards.text.completions import load_any_judge

    new_file(output, endings=(".html", ".json"))
    new_file(tables)
    metadata = dict[str, Any]()
    if any(path.suffix.lower() in READERS for path in images):
        names, prompt, metadata = samples_to_rank(images, prompt)
    else:
        names = [str(path) for path in find_images(images)]
        for name in names:
            require_still(Path(name))
    with opt.clean_output():
        loaded = load_each([reward], options or [], load_any_judge, device)
        text, judge = needed_prompt(prompt, loaded), with_cache(loaded, cache)[reward]
        samples = [resolve_image(name) for name in names]
        ranking = order(samples, text, judge, metadata=metadata or None, budget=budget, level=level)
    result = ranking_record(ranking, names, text, reward, judge)
    opt.print_result(result, show_ranking, as_json)
    opt.write_page_or_json(output, result, lambda: ranking_page(result), as_json)
    opt.write_table_files(tables, lambda: file_tables(result))
    print_provenance({reward: judge}, [text])
    if failed := sum(row["reason"] is not None for row in result["images"]):
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


def agree(
    source: Annotated[
        str,
        Argument(
            metavar="SET",
            help="Table (image or completion, prompt), folder, hub dataset, LAYOUT:FOLDER, shapes:pairs, ...",
        ),
    ],
    reward: opt.OptionalRewards = None,
    scores: opt.Scores = None,
    lower_is_better: opt.LowerIsBetter = None,
    columns: opt.MapColumns = None,
    prompt: opt.Prompt = None,
    options: opt.LabelOptions = None,
    limit: Annotated[int | None, Option(help="Maximum number of images.", min=3, max=2**32 - 1)] = None,
    cache: opt.Cache = None,
    device: opt.Device = None,
    output: opt.NewFolder = None,
    resume: opt.Resume = False,
    batch_size: opt.Batch = 32,
    seed: opt.Seed = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Show how far rewards agree on a set: rank correlations, and the images or texts they disagree on."""
    from visalign.data.sets.columns import Columns, parse_map, parse_scores
    from visalign.pipelines.compare.agree_rewards import ROWS, agree_rewards, read_set, write_agreement
    from visalign.pipelines.shared.reward_options import load_each, need_prompts, with_cache
    from visalign.pipelines.shared.run_folder import check_run_folder
    from visalign.rewards.text.completions import load_any_reward

    if output is not None:
        check_run_folder(output, resume=resume)
    with opt.clean_output():
        loaded = load_each(reward or [], options or [], load_any_reward, device)
    names, score_columns = parse_scores(scores or [])
    table = Columns(names=parse_map(columns or []) | score_columns, has_images=need_prompts(loaded))
    rows = read_set(source, prompt=prompt, limit=limit, columns=table, scores=names)
    rewards, log = with_cache(loaded, cache), output / ROWS if output is not None and loaded else None
    with scoring(log, rewards, len(rows), resume=resume) as keeping, opt.clean_output():
        keeping |= {"seed": seed, "batch_size": batch_size, "columns": names, "lower_is_better": lower_is_better or ()}
        result = agree_rewards(rows, rewards, source=source, **keeping)
    opt.print_result(result, show_agreement, as_json)
    if output is not None:
        echo(f"Page: {write_agreement(output, result)}", err=as_json)


def show_agreement(console: Console, result: Mapping[str, Any]) -> None:
    from visalign.evaluation.pages.agree_page import sentences
    from visalign.evaluation.pages.base import share, with_span

    about = result["set"]
    console.print(Text(f"{about['source']}: {about['images']} images of {about['prompts']} prompts"))
    table = Table("rewards", "Spearman, all images", "within prompts", "same order", "judged by both")
    for pair in result["pairs"]:
        names = Text(f"{pair['first']} · {pair['second']}")
        correlations = with_span(pair["overall"]), with_span(pair["within"])
        table.add_row(names, *correlations, share(pair["same_choice"]), str(pair["images"]))
    console.print(table)
    for sentence in sentences(result):
        console.print(Text(sentence))
    for reward in result["rewards"]:
        if reward["failed"]:
            why = "; ".join(reward["reasons"])
            console.print(Text(f"! {reward['label']} could not score {reward['failed']} images: {why}"))
