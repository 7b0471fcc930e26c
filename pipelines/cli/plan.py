# SPDX-License-Identifier: Apache-2.0
"""The command `visalign plan`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from .options import AsJson, Config, Overrides, clean_output, print_result


def plan(
    config: Config,
    overrides: Overrides = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of devices; memory is reported per device.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate a run without loading its model: memory, forward-equivalents, hours by device."""
    if processes is not None:
        os.environ["WORLD_SIZE"] = str(processes)  # as torchrun says it
    from visalign.pipelines.jobs import load_job

    from .show import show_plan

    job = load_job(config, overrides or [])
    with clean_output():
        estimate = job.estimate(job.config)
    print_result(estimate, show_plan, as_json)
