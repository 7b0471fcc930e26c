# SPDX-License-Identifier: Apache-2.0
"""The command `visalign score`."""

from __future__ import annotations

import enum
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from visalign.errors import UserError

from .cli_messages import user_messages

if TYPE_CHECKING:
    from .image_rows import ImageRow
    from .score import ScoreRow


class Format(enum.StrEnum):
    """How scores are written."""

    table = "table"
    json = "json"
    csv = "csv"
    jsonl = "jsonl"


def score(
    images: Annotated[
        list[Path],
        typer.Argument(
            help="Image files, folders of images, tables with the columns image, prompt.", show_default=False
        ),
    ],
    reward: Annotated[list[str], typer.Option("--reward", "-r", help="A reward's name; repeat for several.")],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="What the images should show; tables have their own.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", "-f", help="How to write the scores.")] = Format.table,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new file; else the screen.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the scoring of --output that was stopped.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Folder in which scores are kept for all later commands.")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", help="LABEL.NAME=VALUE for a reward; repeat for several.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images held in memory at once.", min=1)] = 32,
) -> None:
    """Score images with rewards. Exit code 1 when some image could not be judged; its row says why."""
    again = shlex.join(["visalign", *sys.argv[1:], *([] if resume else ["--resume"])])
    with user_messages(resume=again if output is not None else None):
        if output is not None and output.exists():
            raise UserError(
                f"'{output}' exists, and nothing is overwritten. Give another --output or remove it."
            )
        if resume and output is None:
            raise UserError("--resume goes on with the scoring of a file. Add --output FILE.")
        from visalign.rewards.catalogue import load_reward

        from .cli_show import show_scores
        from .image_rows import image_rows
        from .reward_options import load_each, with_cache
        from .score_rows_log import part_of

        table = image_rows(images, prompt)
        rewards = with_cache(load_each(reward, options or [], load_reward), cache)
        rows = _score(table, rewards, batch_size, None if output is None else part_of(output), resume)
        show_scores(rows, form.value, output)
        if output is not None:
            part_of(output).unlink()
    failed = [row.reason for row in rows if row.value is None]
    if failed:
        what = f"All {len(rows)}" if len(failed) == len(rows) else f"{len(failed)} of {len(rows)}"
        typer.echo(f"{what} scores failed; the reasons stand in their rows.", err=True)
        raise typer.Exit(1)


def _score(
    table: list[ImageRow], rewards: dict[str, Any], batch_size: int, part: Path | None, resume: bool
) -> list[ScoreRow]:
    """All rows, with a bar on the error stream; each batch stands in the working file when it is done."""
    from .score import score_rows
    from .score_rows_log import RowLog

    log = None if part is None else RowLog(part, rewards, resume=resume)
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("scoring", total=len(table))
            return score_rows(
                table,
                rewards,
                batch_size=batch_size,
                keeper=log,
                on_batch=lambda count: progress.advance(task, count),
            )
    finally:
        if log is not None:
            log.close()
