# SPDX-License-Identifier: Apache-2.0
"""The command `visalign score`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from rich.console import Console
from rich.progress import Progress
from typer import Exit, Option, echo

from visalign.errors import UserError

from . import options as opt
from .messages import user_messages

Format = Literal["table", "json", "csv", "jsonl"]


def score(
    images: opt.ImageFiles,
    reward: opt.Rewards,
    prompt: opt.Prompt = None,
    form: Annotated[
        Format | None,
        Option("--format", "-f", help="Format of the scores. Default: by the ending of --output, or a table."),
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Output file (must not exist). Default: print to the terminal.")
    ] = None,
    page: Annotated[
        Path | None, Option("--page", help="Also write a page (.html): spread, best, worst, failures.")
    ] = None,
    tables: opt.Tables = None,
    columns: opt.MapColumns = None,
    resume: opt.Resume = False,
    cache: opt.Cache = None,
    device: opt.Device = None,
    options: opt.LabelOptions = None,
    batch_size: opt.Batch = 32,
    engine: Annotated[
        Literal["local", "ray"], Option(help="ray: many workers, tar files too, a Parquet of scores for each file.")
    ] = "local",
    workers: Annotated[
        int | None, Option(help="With --engine ray: scoring processes. Default: one.", min=1, max=opt.MOST_COUNTED)
    ] = None,
    address: Annotated[
        str | None, Option(help="With --engine ray: HOST:PORT of a cluster's head. Default: this machine.")
    ] = None,
) -> None:
    """Score images or texts with one or more rewards. Exits with 1 if any could not be scored; its row gives the
    reason."""
    on_ray, saved = engine == "ray", output or page
    local_options = {"--format": form, "--page": page, "--tables": tables, "--cache": cache}
    only_other = local_options if on_ray else {"--workers": workers, "--address": address}
    if names := [name for name, value in only_other.items() if value is not None]:
        raise UserError(f"{', '.join(names)} needs --engine {'local' if on_ray else 'ray'}. Leave it out.")
    with user_messages(resume=opt.resume_line(resume) if saved is not None else None):
        from visalign.data.sets.columns import parse_map
        from visalign.pipelines.score.image_rows import image_rows
        from visalign.pipelines.score.log import partial_path
        from visalign.pipelines.score.report import file_tables, score_summary, write_score_page
        from visalign.pipelines.score.score import score_rows, takes_clips
        from visalign.pipelines.shared.reward_options import load_each, need_prompts, with_cache
        from visalign.pipelines.shared.run_folder import new_file
        from visalign.rewards.text.completions import load_any_reward

        from .show import print_provenance, show_scores

        if on_ray:
            from visalign.pipelines.score.on_ray import loaded_ray

            loaded_ray()
            if output is None:
                raise UserError("--engine ray writes a Parquet of scores for each file. Add --output FOLDER.")
        else:
            new_file(output)
            new_file(page, endings=(".html",))
            new_file(tables)
            if resume and saved is None:
                raise UserError("--resume goes on with the scoring of a file. Add --output FILE.")
        started = time.perf_counter()
        with opt.clean_output():
            loaded = load_each(reward, options or [], load_any_reward, device)
        reading: dict[str, Any] = {"needs_prompt": need_prompts(loaded), "names": parse_map(columns or [])}
        reading["clips"] = any(map(takes_clips, loaded.values()))
        if output is not None and on_ray:
            request = reading | {"options": options or [], "prompt": prompt, "batch_size": batch_size}
            _score_on_ray(images, output, loaded, request, resume=resume, workers=workers or 1, address=address)
            return
        table, rewards = image_rows(images, prompt, **reading), with_cache(loaded, cache)
        part = None if saved is None else partial_path(saved)
        with scoring(part, rewards, len(table), resume=resume) as store, opt.clean_output():
            rows = score_rows(table, rewards, batch_size=batch_size, **store)
        ending = "" if output is None else output.suffix.lower().removeprefix(".")
        show_scores(rows, form or (ending if ending in get_args(Format) else "table"), output)
        print_provenance(rewards, [row.prompt for row in rows])
        summary = score_summary(rows, rewards, seconds=time.perf_counter() - started)
        opt.write_table_files(tables, lambda: file_tables(rows, summary))
        if page is not None:
            echo(f"Page: {write_score_page(page, summary)}", err=True)
        if part is not None:
            part.unlink()  # the output is complete: there is nothing to resume
    _report_failures(sum(row.value is None for row in rows), len(rows), {})


def _report_failures(failed: int, total: int, unread: Mapping[str, str]) -> None:
    """Report what could not be scored and exit with 1 if there is any."""
    if failed:
        echo(f"{failed} of {total} scores failed; their rows give the reasons.", err=True)
    for path, reason in unread.items():
        echo(f"No scores of '{path}': {reason}", err=True)
    if failed or unread:
        raise Exit(1)


def _score_on_ray(
    images: list[Path], output: Path, rewards: Mapping[str, Any], request: Mapping[str, Any], **running: Any
) -> None:
    from visalign.pipelines.score.on_ray import score_on_ray
    from visalign.pipelines.score.parts import ScoringOptions

    from .show import print_provenance

    options = ScoringOptions(rewards=list(rewards), **request)
    with Progress(console=Console(stderr=True), transient=True) as progress, opt.clean_output():
        bar = progress.add_task("scoring", total=None)
        running["on_part"] = lambda done, total: progress.update(bar, completed=done, total=total)
        result = score_on_ray(images, output, options, rewards, **running)
    print_provenance(rewards, [])
    echo(f"Scores: {output} ({result.files} files now, {result.before} before)", err=True)
    _report_failures(result.failed, result.rows, result.unread)


@contextmanager
def scoring(path: Path | None, rewards: Mapping[str, Any], total: int, *, resume: bool) -> Iterator[dict[str, Any]]:
    """Progress bar on the error stream and a file that receives each finished batch, for `score_rows`."""
    from visalign.pipelines.score.log import ScoreLog
    from visalign.pipelines.score.score import ScoreRow

    opened = nullcontext() if path is None else closing(ScoreLog(path, rewards, ScoreRow, resume=resume))
    with opened as log:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("scoring", total=total)
            yield {"store": log, "on_batch": lambda count: progress.advance(task, count)}
