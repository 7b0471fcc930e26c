# SPDX-License-Identifier: Apache-2.0
"""The command `visalign`. Heavy modules are imported inside the command that needs them: --help is quick."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from visalign.versions import visalign_version

from .agree import agree
from .collect import collect
from .compare import compare, rank
from .diagnose import diagnose
from .evaluate import evaluate
from .export_lora import export_lora
from .messages import user_messages
from .options import Command, Config, DryRun, Labels, MapColumns, Overrides
from .plan import plan
from .probe import probe_reward
from .sample import sample
from .score import score
from .serve import serve_reward

app = typer.Typer(
    name="visalign",
    help="Align visual generation: train with rewards, score images, inspect the results.",
    epilog="Errors are shown without a traceback; set VISALIGN_TRACEBACK=1 to see it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

command = partial(app.command, cls=Command)

Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Results folder. Default: a dated folder in runs/.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")]


def main() -> None:
    """Entry point of the installed command and of `python -m visalign`."""
    try:
        app(prog_name="visalign")
    finally:
        if "visalign.training" in sys.modules:
            sys.modules["visalign.training"].end_processes()


def _version(show_version: bool) -> None:
    if show_version:
        typer.echo(visalign_version())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""
    for stream in (sys.stdout, sys.stderr):  # file names may be no text, and terminals know not every letter
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@command()
def quickstart(
    output: Output = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Improve the packaged text-to-image model in a few minutes on a CPU, and show what changed."""
    then = ["visalign", "train", "shapes_flow_grpo"]
    _train("shapes_quickstart", [f"seed={seed}"], output, next_command=then)


@command()
def train(
    config: Config,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    """Run the job of a configuration file."""
    _train(config, overrides or [], output, resume=resume, dry_run=dry_run)


@command("train-reward")
def train_reward(
    config: Annotated[str, typer.Argument(help="Name such as shapes_hpsv3, or a YAML file.")],
    overrides: Overrides = None,
    columns: MapColumns = None,
    labels: Labels = None,
    output: Output = None,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    """Train a reward model on pairs, votes or quality scores."""
    from visalign.data.sets.columns import parse_map

    names = parse_map(columns or [])
    changes = [f"data.columns.{ours}={json.dumps(theirs)}" for ours, theirs in names.items()]
    changes += [] if labels is None else [f"data.coding={json.dumps(labels)}"]
    changes += overrides or []
    _train(config, changes, output, resume=resume, dry_run=dry_run, pipeline="train_reward")


def _train(
    config: str,
    overrides: list[str],
    output: Path | None,
    *,
    resume: bool = False,
    dry_run: bool = False,
    pipeline: str | None = None,
    next_command: Sequence[str] = (),
) -> None:
    from visalign.config import config_to_yaml
    from visalign.pipelines.jobs import load_job
    from visalign.pipelines.shared.job import resume_command
    from visalign.pipelines.shared.run_folder import output_folder
    from visalign.rewards.weights.checkpoint_files import quiet_loading

    from .show import show_plan, show_summary, show_yaml

    console = Console()
    if dry_run:
        job = load_job(config, overrides, pipeline=pipeline)
        show_yaml(console, config_to_yaml(job.config))
        show_plan(console, job.plan(job.config))
        return
    folder = output_folder(output, Path(config).stem, resume=resume)
    job = load_job(config, overrides, pipeline=pipeline)
    with user_messages(resume=resume_command(config, overrides, folder)), quiet_loading():
        summary = job.run(job.config, output=folder, resume=resume)
    if int(os.environ.get("RANK", "0")) == 0:
        show_summary(console, folder, summary, next_command or summary.next_command)


command()(plan)
command()(sample)
command("export-lora")(export_lora)
command()(score)
command()(evaluate)
command("serve-reward")(serve_reward)
command("probe-reward")(probe_reward)
command()(compare)
command()(rank)
command()(agree)
command()(diagnose)
command()(collect)


@command()
def doctor() -> None:
    """Check this installation and print what to paste into an issue."""
    from visalign.doctor import examine

    report = examine()
    typer.echo(report.text)
    raise typer.Exit(0 if report.passed else 1)


@command()
def configs(
    name: Annotated[str | None, typer.Argument(help="Name of the configuration to show.", show_default=False)] = None,
) -> None:
    """List the packaged configurations, or show one."""
    from visalign.config import resolve_config

    from .show import show_configs, show_yaml

    if name is None:
        show_configs(Console())
    else:
        show_yaml(Console(), resolve_config(name).read_text(encoding="utf-8"))


@command()
def rewards() -> None:
    """List the rewards and judges by name."""
    from .show import show_rewards

    show_rewards(Console())


@command()
def probes() -> None:
    """List the probes of probe-reward."""
    from .show import show_probes

    show_probes(Console())
