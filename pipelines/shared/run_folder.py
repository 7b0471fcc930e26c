# SPDX-License-Identifier: Apache-2.0
"""Where a run's results go: a folder that nothing is lost in."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from visalign.config import load_config
from visalign.errors import UserError


def dated_folder(name: str) -> Path:
    """`runs/NAME-YYYYmmdd-HHMMSS` under the current folder; not created.

    Args:
        name: what the run is called.
    """
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def output_folder(output: Path | None, name: str, *, resume: bool) -> Path:
    """What the user gave, or a dated folder; checked by `check_run_folder`.

    Args:
        output: what the user gave.
        name: name of the run, for a dated folder where nothing was given.
        resume: whether the folder's run is to be continued.

    Raises:
        UserError: nothing is given although a run is to be resumed or several processes have to share the
            folder, or `check_run_folder` refuses it.
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
    check_run_folder(folder, resume=resume)
    return folder


def check_run_folder(folder: Path, *, resume: bool) -> None:
    """Refuse whatever would overwrite or lose results.

    Args:
        folder: where the run is to write; nothing is created.
        resume: whether the folder's run is to be continued.

    Raises:
        UserError: the folder is a file, holds something (without `resume`), or is absent (with it).
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"The output '{folder}' is a file. Give a folder with --output.")
    if resume and not folder.is_dir():
        raise UserError(
            f"There is no folder '{folder}' to resume. Give its path, or start anew without --resume."
        )
    is_first = int(os.environ.get("RANK", "0")) == 0  # the others may find what the first has just written
    if not resume and is_first and folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"The output folder '{folder}' is not empty, and nothing is overwritten. Give another --output, "
            "or continue its run with --resume."
        )


def check_same_run(config: Any, output: Path, *, resume: bool, free: Collection[str]) -> None:
    """Refuse a folder that would be overwritten, or that holds another run.

    Args:
        config: the configuration, a dataclass.
        output: the run's folder.
        resume: whether its run is to be continued.
        free: dotted keys that may differ on resume.

    Raises:
        UserError: it is not empty (without resume), or holds no run or one of another configuration (with
            it).
    """
    from visalign.training.loop.checkpoint import check_same_config

    check_run_folder(output, resume=resume)
    if resume and any(output.iterdir()):
        if not (output / "config.yaml").is_file():
            raise UserError(
                f"There is no run in '{output}' to resume: it has no config.yaml. Give the folder of a run."
            )
        saved = load_config(type(config), output / "config.yaml")
        check_same_config(asdict(saved), asdict(config), free=free, where=f"the run in '{output}'")
