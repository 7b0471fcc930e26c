# SPDX-License-Identifier: Apache-2.0
"""The command `visalign bench`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from typer import Argument, Exit, Option, echo

from visalign.errors import UserError

from . import options as opt
from .messages import user_messages
from .sample import numbers


def bench(
    models: Annotated[
        list[str],
        Argument(
            metavar="MODEL...",
            help="Packaged models, run folders, folders of pipelines or hub ids, each with options, such as "
            "runs/flow,steps=4,guidance=1,name=student. With --images: folders or tables of images.",
        ),
    ],
    output: Annotated[Path, Option("--output", "-o", help="Folder of the result (must not exist).")],
    suite: Annotated[
        str | None,
        Option(
            "--suite", "-s", help="Suite: NAME, NAME:FILE with its published file, or a prompt file. Default: world."
        ),
    ] = None,
    reward: opt.OptionalRewards = None,
    lora: Annotated[opt.Repeated, Option(help="Also compare the one MODEL with this LoRA; repeat.")] = None,
    images: Annotated[bool, Option("--images", help="Compare folders of images instead of models.")] = False,
    seeds: Annotated[str | None, Option(help="Seeds such as 0-3, an image each. Default: the suite's.")] = None,
    steps: Annotated[
        int | None, Option(help="Denoising steps. Default: each run's or pipeline's.", min=1, max=10_000)
    ] = None,
    limit: Annotated[
        int | None, Option(help="Number of prompts, evenly over the suite.", min=1, max=2**32 - 1)
    ] = None,
    options: opt.LabelOptions = None,
    device: opt.Device = None,
    resume: opt.Resume = False,
    batch_size: opt.Batch = 16,
    as_json: opt.AsJson = False,
) -> None:
    """Compare image models on a suite of prompts: scores, win rates, intervals, a page. Exits with 1 if a score fails.

    torchrun in front of the command divides the drawing among GPUs.
    """
    with (
        user_messages(resume=opt.resume_line(resume)),
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        from visalign.pipelines.bench.job import IMAGES, run_bench
        from visalign.pipelines.bench.result import PAGE
        from visalign.pipelines.bench.sides import folder_sides, model_side, suite_edits
        from visalign.pipelines.bench.suites import load_suite
        from visalign.pipelines.shared.reward_options import load_each, reward_options
        from visalign.pipelines.shared.run_folder import check_run_folder
        from visalign.precision import default_device
        from visalign.rewards.catalogue import load_reward

        check_run_folder(output, resume=resume)
        drawing = {"--lora": lora, "--seeds": seeds, "--steps": steps, "--limit": limit}
        if images and (unused := [name for name, value in drawing.items() if value is not None]):
            raise UserError(f"{unused[0]} belongs to models, and --images draws nothing. Leave one of the two out.")
        if lora and len(models) > 1:
            raise UserError(f"--lora belongs to one MODEL, and {len(models)} are named. Write MODEL,lora=PATH.")
        edits = "none" if images else suite_edits(models)
        rule, records = (None, []) if images and suite is None else load_suite(suite or "world", limit, edits)
        names: list[str] = list(dict.fromkeys([*(rule.rewards if rule else ()), *(reward or [])]))
        if not names:
            raise UserError("Nothing scores the images: without the rule of a suite name a reward, such as -r hpsv3.")
        rules = [*(rule.options if rule else ()), *(options or [])]
        chosen = reward_options(rules, names)
        for name in rule.rewards if rule and rule.question_model else ():
            if not chosen[name].get("model"):
                raise UserError(
                    f"Suite {suite} asks questions about each image, and no model is named that answers them. Add "
                    f"--option {name}.model=FOLDER (published: {rule and rule.question_model})."
                )
        if device is None and (device := default_device()) == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # torchrun's
        with opt.clean_output():
            rewards = load_each(names, rules, load_reward, device)
            scoring = {"rewards": rewards, "correctness": rule and rule.correctness}
            if rule is None or images:
                drawn, sides = [0], folder_sides(models, records if rule else None, scoring)
            else:
                drawn = [*rule.seeds] if seeds is None else numbers(seeds)
                common = {"device": device, "batch_size": batch_size, "steps": steps}
                texts = [*models, *(f"{models[0]},lora={path}" for path in lora or [])]
                sides = [model_side(t, records, drawn, output / IMAGES, scoring, **common) for t in texts]
            bar = progress.add_task("drawing and scoring", total=sum(len(side.rows) for side in sides))
            size, advance = batch_size * len(drawn), partial(progress.advance, bar)
            result = run_bench(sides, rule, rewards, output, part_size=size, on_part=advance)
    if result is None:  # a further process of torchrun
        return
    opt.print_result(result, show_bench, as_json)
    echo(f"Page: {output / PAGE}", err=as_json)
    if any(measured["failed"] for model in result["models"] for measured in model["numbers"].values()):
        echo("Reasons of missing scores: visalign score IMAGES -r NAME, with the images of that model.", err=True)
        raise Exit(1)


def show_bench(console: Console, result: Mapping[str, Any]) -> None:
    from visalign.evaluation.pages.base import plain, with_span
    from visalign.evaluation.pages.bench_page import sentences

    table = Table("model", *result["measures"])
    for model in result["models"]:
        table.add_row(Text(model["label"]), *(with_span(numbers, plain) for numbers in model["numbers"].values()))
    console.print(table)
    warnings = [f"{name}: {reward['warning']}" for name, reward in result["rewards"].items() if reward["warning"]]
    for line in (*sentences(result), *warnings):
        console.print(Text(line))
