# SPDX-License-Identifier: Apache-2.0
"""The command `visalign probe-reward`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from typer import Argument, Exit, Option, echo

from . import options as opt


def probe_reward(
    reward: Annotated[str, Argument(help="Name of the reward, module:Name or file.py:Name.")],
    reference: Annotated[
        list[Path] | None,
        Option(
            "--reference",
            "-i",
            help="Table of images or texts, folder or image. Default: the shapes world, or the text tasks.",
        ),
    ] = None,
    prompt: opt.Prompt = None,
    options: opt.Options = None,
    device: opt.Device = None,
    only: Annotated[opt.Repeated, Option("--only", help="Name of a probe to run; repeat for several.")] = None,
    count: Annotated[int, Option(help="Maximum number of reference samples.", min=2, max=opt.MOST_COUNTED)] = 64,
    batch_size: opt.Batch = 32,
    seed: opt.Seed = 0,
    output: opt.NewFolder = None,
    as_json: opt.AsJson = False,
) -> None:
    """Find irrelevant changes that shift a reward's scores. Exits with 1 if a probe fails."""
    from visalign.pipelines.probe.job import probe_reward as run
    from visalign.pipelines.probe.job import probes_for, write_probe
    from visalign.pipelines.probe.reference import read_reference, shapes_reference_set, task_reference_set
    from visalign.pipelines.score.image_rows import image_rows
    from visalign.pipelines.shared.reward_options import load_each, need_prompts
    from visalign.pipelines.shared.run_folder import check_run_folder
    from visalign.rewards.text.completions import CompletionPairs, CompletionScores, load_any_judge

    if output is not None:
        check_run_folder(output, resume=False)
    with opt.clean_output():
        judge = load_each([reward], options or [], load_any_judge, device)[reward]
    probes = probes_for(judge, only)
    if reference:
        rows = image_rows(reference, prompt, needs_prompt=need_prompts({reward: judge}))
        images = read_reference(", ".join(map(str, reference)), rows[:count])
    else:
        of_texts = isinstance(judge, CompletionScores | CompletionPairs)
        images = (task_reference_set if of_texts else shapes_reference_set)(count, seed=seed)
    with Progress(console=Console(stderr=True), transient=True) as progress, opt.clean_output():
        task = progress.add_task("probing", total=len(probes))
        result = run(
            judge,
            images,
            probes=probes,
            seed=seed,
            batch_size=batch_size,
            on_probe=lambda done, title: progress.update(task, completed=done, description=title),
        )
    opt.print_result(result, show_probe, as_json)
    if output is not None:
        echo(f"Page: {write_probe(output, result, images, seed=seed)}", err=as_json)
    if result["summary"].get("fails"):
        raise Exit(1)


def show_probe(console: Console, result: Mapping[str, Any]) -> None:
    from visalign.evaluation.pages.probe_page import (
        VERDICTS,
        best_paid,
        headline,
        in_words,
        unit_in_words,
        worst_level,
    )

    table = Table("probe", "level", "mean response, or share", "verdict")
    styles = {"bad": "red", "good": "green", "flat": ""}
    failures = []
    for probe in result["probes"]:
        level = worst_level(probe)
        colour, words = VERDICTS[probe["verdict"]]
        response = Text(", ".join(in_words(level, probe["wanted"])))
        table.add_row(Text(probe["title"]), Text(level["label"]), response, Text(words, style=styles[colour]))
        if probe["failed"]:
            why = "; ".join(dict.fromkeys(reason for entry in probe["levels"] for reason in entry["reasons"]))
            failures.append(f"! {probe['title']}: {probe['failed']} answers failed: {why}")
    console.print(Text(f"{result['judge']['name']}: {unit_in_words(result)}"))
    console.print(table)
    for line in filter(None, (*failures, headline(result), best_paid(result))):
        console.print(Text(line))
