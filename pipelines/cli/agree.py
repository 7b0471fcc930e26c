# SPDX-License-Identifier: Apache-2.0
"""The command `visalign agree`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .messages import user_messages
from .score import scoring


def agree(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SET",
            help="Table (image, prompt), folder, LAYOUT:FOLDER, shapes:pairs, shapes:quality.",
            show_default=False,
        ),
    ],
    reward: Annotated[
        list[str], typer.Option("--reward", "-r", help="A reward's name; at least two, repeat the option.")
    ],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="For images without one.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", help="LABEL.NAME=VALUE for a reward; repeat for several.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use at most so many images.", min=3)] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Folder in which scores are kept for all later commands.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder for page and JSON; else the screen.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the scoring of --output that was stopped.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Images scored at once.", min=1)] = 32,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show how far rewards agree on a set: rank correlations, where they part company, which images."""
    with user_messages():
        from visalign.pipelines.compare.agree_rewards import (
            PAGE,
            ROWS,
            agree_rewards,
            read_set,
            write_agreement,
        )
        from visalign.pipelines.shared.reward_options import load_each, with_cache
        from visalign.pipelines.shared.run_folder import check_run_folder, pretty
        from visalign.rewards.catalogue import load_reward

        if output is not None:
            check_run_folder(output, resume=resume)
        rewards = with_cache(load_each(reward, options or [], load_reward), cache)
        rows = read_set(source, prompt=prompt, limit=limit)
        log = None if output is None else output / ROWS
        with scoring(log, rewards, len(rows), resume=resume) as keeping:
            result = agree_rewards(rows, rewards, source=source, seed=seed, batch_size=batch_size, **keeping)
        if as_json:
            typer.echo(pretty(result), nl=False)
        else:
            show_agreement(Console(), result)
        if output is not None:
            write_agreement(output, result)
            typer.echo(f"Page: {output / PAGE}", err=as_json)


def show_agreement(console: Console, result: Mapping[str, Any]) -> None:
    """A line per pair of rewards, and what it means."""
    from visalign.evaluation.pages.agree_page import sentences
    from visalign.evaluation.pages.base import share, signed, span

    about = result["set"]
    console.print(Text(f"{about['source']}: {about['images']} images of {about['prompts']} prompts"))
    table = Table("rewards", "Spearman, all images", "within prompts", "same order", "judged by both")
    for pair in result["pairs"]:
        cells = [f"{signed(pair[kind]['estimate'])} ({span(pair[kind])})" for kind in ("overall", "within")]
        names = Text(f"{pair['first']} · {pair['second']}")
        table.add_row(names, *cells, share(pair["same_choice"]), str(pair["images"]))
    console.print(table)
    for sentence in sentences(result):
        console.print(Text(sentence))
    for reward in result["rewards"]:
        if reward["failed"]:
            why = "; ".join(reward["reasons"])
            console.print(Text(f"! {reward['label']} could not judge {reward['failed']} images: {why}"))
