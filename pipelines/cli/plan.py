# SPDX-License-Identifier: Apache-2.0
"""The command `visalign plan`."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.console import Console

from .messages import user_messages
from .options import AsJson, clean_output


def plan(
    config: Annotated[str, typer.Argument(help="A name from `visalign configs`, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change: key.sub=value ...", show_default=False)
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of devices; memory is reported per device.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate a run without loading its model: memory, forward-equivalents, hours by device."""
    if processes is not None:
        os.environ["WORLD_SIZE"] = str(processes)  # as torchrun says it
    with user_messages():
        from visalign.pipelines.jobs import load_job

        from .show import show_plan

        job = load_job(config, overrides or [])
        with clean_output():
            estimate = job.estimate(job.config)
        if as_json:
            typer.echo(json.dumps(estimate, indent=1))
        else:
            show_plan(Console(), estimate)
