# SPDX-License-Identifier: Apache-2.0
"""The command `visalign agree`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option, echo

from .options import (
    AsJson,
    Batch,
    Cache,
    Device,
    LabelOptions,
    MapColumns,
    NewFolder,
    OptionalRewards,
    Prompt,
    Resume,
    Scores,
    Seed,
    clean_output,
    print_result,
)
from .score import scoring


def agree(
    source: Annotated[
        str,
        Argument(
            metavar="SET",
            help="Table (image, prompt), folder, hub dataset, LAYOUT:FOLDER, shapes:pairs, shapes:quality.",
            show_default=False,
        ),
    ],
    reward: OptionalRewards = None,
    scores: Scores = None,
    columns: MapColumns = None,
    prompt: Prompt = None,
    options: LabelOptions = None,
    limit: Annotated[int | None, Option(help="Maximum number of images.", min=3, max=2**32 - 1)] = None,
    cache: Cache = None,
    device: Device = None,
    output: NewFolder = None,
    resume: Resume = False,
    batch_size: Batch = 32,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Show how far rewards agree on a set: rank correlations, and the images they disagree on."""
    from visalign.data.sets.columns import Columns, parse_map, parse_scores
    from visalign.pipelines.compare.agree_rewards import ROWS, agree_rewards, read_set, write_agreement
    from visalign.pipelines.shared.reward_options import any_needs_prompt, load_each, with_cache
    from visalign.pipelines.shared.run_folder import check_run_folder
    from visalign.rewards.text.completions import load_any_reward

    if output is not None:
        check_run_folder(output, resume=resume)
    with clean_output():
        loaded = load_each(reward or [], options or [], load_any_reward, device)
    names, score_columns = parse_scores(scores or [])
    table = Columns(names=parse_map(columns or []) | score_columns, has_images=any_needs_prompt(loaded))
    rows = read_set(source, prompt=prompt, limit=limit, columns=table, scores=names)
    rewards, log = with_cache(loaded, cache), output / ROWS if output is not None and loaded else None
    with scoring(log, rewards, len(rows), resume=resume) as keeping, clean_output():
        result = agree_rewards(
            rows, rewards, source=source, columns=names, seed=seed, batch_size=batch_size, **keeping
        )
    print_result(result, show_agreement, as_json)
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
