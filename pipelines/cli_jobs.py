# SPDX-License-Identifier: Apache-2.0
"""What stands between the command line and a pipeline: which job a file is for, where its results go."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from visalign.config import PIPELINE_KEY, load_config, read_config, resolve_config
from visalign.errors import ConfigError, UserError, suggestion

PIPELINES = {
    "flow_grpo": "visalign.pipelines.flow_grpo:FlowGRPOConfig",
}
"""`pipeline:` in a file -> module:dataclass; the module offers run(config, output, resume), plan(config)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A configuration with the functions that plan and run it."""

    config: Any
    run: Callable[..., Any]
    plan: Callable[[Any], Mapping[str, Any]]


def load_job(name_or_path: str, overrides: Sequence[str] = ()) -> Job:
    """Read a configuration file and find the pipeline that it is for.

    Args:
        name_or_path: what `visalign.config.resolve_config` takes.
        overrides: items `key.sub=value`.

    Returns:
        The job, nothing of it run yet.

    Raises:
        ConfigError: the file names no pipeline or an unknown one, or `load_config` refuses it.
    """
    path = resolve_config(name_or_path)
    pipeline = read_config(path).get(PIPELINE_KEY)
    if pipeline not in PIPELINES:
        given = f"names the pipeline '{pipeline}', which does not exist" if pipeline else "names no pipeline"
        raise ConfigError(
            f"'{path}' {given}. {suggestion(str(pipeline or ''), PIPELINES)}Write a line "
            f"'pipeline: NAME' with one of: {', '.join(PIPELINES)}."
        )
    module_name, _, schema = PIPELINES[pipeline].partition(":")
    module = importlib.import_module(module_name)
    config = load_config(getattr(module, schema), path, overrides)
    return Job(config=config, run=module.run, plan=module.plan)


def dated_folder(name: str) -> Path:
    """`runs/NAME-YYYYmmdd-HHMMSS` under the current folder; not created.

    Args:
        name: what the run is called.
    """
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def output_folder(output: Path | None, name: str, *, resume: bool) -> Path:
    """Where a run may write; refuses whatever would overwrite or lose results.

    Args:
        output: what the user gave.
        name: name of the run, for a dated folder where nothing was given.
        resume: whether the folder's run is to be continued.

    Returns:
        A folder that is empty or absent, or with `resume` one that exists.

    Raises:
        UserError: the folder holds something (without `resume`), is absent or not given (with it), is a file,
            or is not given although several processes have to share one.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if output is None and (resume or processes > 1):
        why = (
            "--resume continues the run of one folder"
            if resume
            else f"{processes} processes share one folder"
        )
        raise UserError(f"No output folder given, but {why}. Add --output DIR.")
    folder = output or dated_folder(name)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"The output '{folder}' is a file. Give a folder with --output.")
    if resume and not folder.is_dir():
        raise UserError(
            f"There is no folder '{folder}' to resume. Give its path, or start anew without --resume."
        )
    is_first = (
        int(os.environ.get("RANK", "0")) == 0
    )  # the others may find what the first one has just written
    if not resume and is_first and folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"The output folder '{folder}' is not empty, and nothing is overwritten. Give another --output, "
            "or continue its run with --resume."
        )
    return folder


def resume_command(config: str, overrides: Sequence[str], folder: Path) -> str:
    """The command line that continues a run, quoted for a shell.

    Args:
        config: name or path of the configuration.
        overrides: items `key.sub=value`.
        folder: the run's folder.

    >>> resume_command("shapes_quickstart", ["seed=1"], Path("my runs"))
    "visalign train shapes_quickstart seed=1 --output 'my runs' --resume"
    """
    return shlex.join(["visalign", "train", config, *overrides, "--output", str(folder), "--resume"])
