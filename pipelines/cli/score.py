# SPDX-License-Identifier: Apache-2.0
"""The command `visalign score`."""

from __future__ import annotations

import enum
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from visalign.errors import UserError

from .messages import user_messages
from .options import (
    Batch,
    Cache,
    LabelOptions,
    MapColumns,
    Prompt,
    Resume,
    Rewards,
    Tables,
    clean_output,
    keep_tables,
)

if TYPE_CHECKING:
    from visalign.pipelines.score.on_ray import RayResult


class Format(enum.StrEnum):
    """Output format of scores."""

    table = "table"
    json = "json"
    csv = "csv"
    jsonl = "jsonl"


class Engine(enum.StrEnum):
    """Runner of the rewards."""

    local = "local"
    ray = "ray"


def score(
    images: Annotated[
        list[Path],
        typer.Argument(
            help="Image files, folders of images or clips, tables with the columns image, prompt.",
            show_default=False,
        ),
    ],
    reward: Rewards,
    prompt: Prompt = None,
    form: Annotated[
        Format | None,
        typer.Option(
            "--format", "-f", help="Format of the scores. Default: by the ending of --output, or a table."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Output file (must not exist). Default: print to the terminal."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--page", help="Also write a page (.html): spread, best, worst, failures."),
    ] = None,
    tables: Tables = None,
    columns: MapColumns = None,
    resume: Resume = False,
    cache: Cache = None,
    options: LabelOptions = None,
    batch_size: Batch = 32,
    engine: Annotated[
        Engine, typer.Option(help="ray: many workers, tar files too, a Parquet of scores for each file.")
    ] = Engine.local,
    workers: Annotated[
        int | None, typer.Option(help="With --engine ray: scoring processes. Default: one.", min=1)
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="With --engine ray: HOST:PORT of a cluster's head. Default: this machine."),
    ] = None,
) -> None:
    """Score images with one or more rewards. Exits with 1 if any image could not be scored; its row gives the
    reason."""
    again = shlex.join(["visalign", *sys.argv[1:], *([] if resume else ["--resume"])])
    saved = output or page
    if engine is Engine.ray:
        with user_messages(resume=again):
            local = {"--format": form, "--page": page, "--tables": tables, "--cache": cache}
            _only("local", local)
            request = {"prompt": prompt, "options": options or [], "batch_size": batch_size}
            result = _on_ray(images, reward, output, columns or [], request, resume, workers or 1, address)
        _tell(result.failed, result.rows, unread=result.unread)
        return
    with user_messages(resume=again if saved is not None else None):
        _only("ray", {"--workers": workers, "--address": address})
        _check_files(output, page, tables, resume)
        from visalign.data.sets.columns import parse_map
        from visalign.pipelines.score.image_rows import image_rows
        from visalign.pipelines.score.log import partial_path
        from visalign.pipelines.score.report import file_tables, score_summary, write_score_page
        from visalign.pipelines.score.score import score_rows, takes_clips
        from visalign.pipelines.shared.reward_options import any_needs_prompt, load_each, with_cache
        from visalign.rewards.catalogue import load_reward

        from .show import print_provenance, show_scores

        started, names = time.perf_counter(), parse_map(columns or [])
        with clean_output():
            loaded = load_each(reward, options or [], load_reward)
        clips = any(map(takes_clips, loaded.values()))
        table = image_rows(images, prompt, needs_prompt=any_needs_prompt(loaded), names=names, clips=clips)
        rewards = with_cache(loaded, cache)
        part = None if saved is None else partial_path(saved)
        with scoring(part, rewards, len(table), resume=resume) as keeping, clean_output():
            rows = score_rows(table, rewards, batch_size=batch_size, **keeping)
        show_scores(rows, _form(form, output), output)
        print_provenance(rewards, [row.prompt for row in rows])
        summary = score_summary(rows, rewards, seconds=time.perf_counter() - started)
        keep_tables(tables, lambda: file_tables(rows, summary))
        if page is not None:
            typer.echo(f"Page: {write_score_page(page, summary)}", err=True)
        if part is not None:
            part.unlink()
    _tell(sum(row.value is None for row in rows), len(rows))


def _tell(failed: int, total: int, *, unread: Mapping[str, str] = {}) -> None:
    """Report what could not be scored and exit with 1 if there is any."""
    if failed:
        what = f"All {total}" if failed == total else f"{failed} of {total}"
        typer.echo(f"{what} scores failed; their rows give the reasons.", err=True)
    for path, reason in unread.items():
        typer.echo(f"No scores of '{path}': {reason}", err=True)
    if failed or unread:
        raise typer.Exit(1)


def _only(engine: str, options: Mapping[str, Any]) -> None:
    """Refuse options that only the other engine has."""
    if names := [name for name, value in options.items() if value is not None]:
        raise UserError(f"{', '.join(names)} needs --engine {engine}. Leave it out.")


def _on_ray(
    images: list[Path],
    reward: list[str],
    output: Path | None,
    columns: list[str],
    request: dict[str, Any],
    resume: bool,
    workers: int,
    address: str | None,
) -> RayResult:
    from visalign.data.sets.columns import parse_map
    from visalign.pipelines.score.on_ray import loaded_ray, score_on_ray
    from visalign.pipelines.score.parts import ScoringOptions
    from visalign.pipelines.score.score import takes_clips
    from visalign.pipelines.shared.reward_options import any_needs_prompt, load_each
    from visalign.rewards.catalogue import load_reward

    from .show import print_provenance

    loaded_ray()
    if output is None:
        raise UserError("--engine ray writes a file of scores for each file of images. Add --output FOLDER.")
    with clean_output():
        loaded = load_each(reward, request["options"], load_reward)
    needs_prompt, names = any_needs_prompt(loaded), parse_map(columns)
    clips = any(map(takes_clips, loaded.values()))
    options = ScoringOptions(rewards=reward, needs_prompt=needs_prompt, names=names, clips=clips, **request)
    with Progress(console=Console(stderr=True), transient=True) as progress, clean_output():
        bar = progress.add_task("scoring", total=None)
        result = score_on_ray(
            images,
            output,
            options,
            loaded,
            resume=resume,
            workers=workers,
            address=address,
            on_part=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    print_provenance(loaded, [])
    typer.echo(f"Scores: {output} ({result.files} files now, {result.before} before)", err=True)
    return result


def _form(form: Format | None, output: Path | None) -> str:
    """Return the format: the given one, else by the file's ending, else a table."""
    if form is not None:
        return form.value
    ending = "" if output is None else output.suffix.lower().removeprefix(".")
    return ending if ending in Format.__members__ else Format.table.value


def _check_files(output: Path | None, page: Path | None, tables: Path | None, resume: bool) -> None:
    """Refuse output files that cannot be written, before anything is scored."""
    from visalign.pipelines.shared.run_folder import new_file

    new_file(output)
    new_file(page, endings=(".html",))
    new_file(tables)
    if output is not None and output.suffix.lower() == ".html":
        raise UserError(f"'{output}' ends in '.html'. For a page write --page '{output}'.")
    if resume and output is None and page is None:
        raise UserError("--resume goes on with the scoring of a file. Add --output FILE.")


@contextmanager
def scoring(
    path: Path | None, rewards: Mapping[str, Any], total: int, *, resume: bool
) -> Iterator[dict[str, Any]]:
    """Progress bar on the error stream and a file that receives each finished batch, for `score_rows`."""
    from visalign.pipelines.score.log import RowLog

    with nullcontext() if path is None else RowLog(path, rewards, resume=resume) as log:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("scoring", total=total)
            yield {"store": log, "on_batch": lambda count: progress.advance(task, count)}
