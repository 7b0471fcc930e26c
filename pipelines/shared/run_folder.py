# SPDX-License-Identifier: Apache-2.0
"""Run folders and output files that are never overwritten; fingerprints, JSON."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from visalign.atomic import write_atomic
from visalign.config import config_to_yaml, load_config
from visalign.errors import UserError
from visalign.locks import LOCK, check_unlocked, hold_lock
from visalign.model_files import read_object

FINGERPRINTS = "inputs.json"  # File of a run folder: what was read -> SHA-256 of its content
BATCHES = "batches.json"  # File of a run folder: batch that is auto -> its number
END = "ended.txt"
"""File of a run folder whose last process ended before the result: `interrupted` or `failed`, then why."""


class RunSummary(dict[str, Any]):
    """Content of a run's summary.json, with the command line that uses the result."""

    next_command: tuple[str, ...]

    def __init__(self, content: Mapping[str, Any], next_command: Sequence[str]) -> None:
        super().__init__(content)
        self.next_command = tuple(next_command)


def resume_command(config: str, overrides: Sequence[str], folder: Path) -> str:
    """Write the command line that continues a run, quoted for a shell.

    >>> resume_command("shapes_quickstart", ["seed=1"], Path("my runs"))
    "visalign train shapes_quickstart seed=1 --output 'my runs' --resume"
    """
    return shlex.join(["visalign", "train", config, *overrides, "--output", str(folder), "--resume"])


def output_folder(output: Path | None, name: str, *, resume: bool) -> Path:
    """Return the given folder, or `runs/NAME-YYYYmmdd-HHMMSS`, checked by `check_run_folder`."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if output is None and (resume or processes > 1):
        why = "--resume continues the run of one folder" if resume else f"{processes} processes share one folder"
        raise UserError(f"No output folder given, but {why}. Add --output DIR.")
    folder = output or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    check_run_folder(folder, resume=resume)
    return folder


def check_run_folder(folder: Path, *, resume: bool) -> None:
    """Refuse whatever would overwrite or lose results; nothing is created."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"The output '{folder}' is a file. Give a folder with --output.")
    check_place(folder)
    if resume and not folder.is_dir():
        raise UserError(f"There is no folder '{folder}' to resume. Give its path, or leave out --resume.")
    if _is_first() and folder.is_dir():
        check_unlocked(folder / LOCK, what=f"The output folder '{folder}'")
        if not resume and set(os.listdir(folder)) - {LOCK}:
            remedy = "Give another --output, or continue with --resume."
            raise UserError(f"The output folder '{folder}' is not empty, and nothing is overwritten. {remedy}")


@contextmanager
def claimed(config: Any, output: Path, *, resume: bool, free: Collection[str]) -> Iterator[None]:
    """Refuse a folder that holds another run, and lock it while the block runs."""
    from visalign.training.loop.checkpoint import check_same_config

    check_run_folder(output, resume=resume)
    with hold_lock(output / LOCK, what=f"The output folder '{output}'") if _is_first() else nullcontext():
        if resume and set(os.listdir(output)) - {LOCK}:
            if not (output / "config.yaml").is_file():
                raise UserError(f"There is no run in '{output}' to resume: it has no config.yaml.")
            saved = load_config(type(config), output / "config.yaml")
            again = resume_command(str(output / "config.yaml"), [], output)
            remedy = f"Resume it under its own: {again}; or start a new run in another output folder."
            where = f"the run in '{output}'"
            check_same_config(asdict(saved), asdict(config), free=free, where=where, remedy=remedy)
        yield


def _is_first() -> bool:
    """Return whether this process writes; the others may see what it has just written."""
    return int(os.environ.get("RANK", "0")) == 0


def fingerprint(records: Sequence[Mapping[str, Any]]) -> str:
    """Hash records of JSON values by SHA-256."""
    return hashlib.sha256(json.dumps(list(records), sort_keys=True, default=str).encode()).hexdigest()


def check_unchanged(output: Path, fingerprints: Mapping[str, str]) -> None:
    """Refuse to continue a run whose data or code of one's own have another content than when it began."""
    from visalign.training.loop.checkpoint import check_same_config

    if (output / FINGERPRINTS).is_file():
        saved = read_object(output / FINGERPRINTS)
        known = {key: value for key, value in fingerprints.items() if key in saved}  # an earlier version kept fewer
        check_same_config(saved, known, where=f"the run in '{output}' (SHA-256 of its inputs)")


def write_beginning(
    output: Path, config: Any, fingerprints: Mapping[str, str], batches: Mapping[str, int | None] | None = None
) -> None:
    """Write the run's copy of its configuration, which can be run again, the hashes of its inputs, and its batches."""
    write_config(output, config)
    write_once(output / FINGERPRINTS, json.dumps(dict(fingerprints), indent=1, sort_keys=True) + "\n")
    if batches:
        write_once(output / BATCHES, json.dumps(dict(batches), indent=1) + "\n")
    (output / END).unlink(missing_ok=True)


def record_end(output: Path, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
    """Write why a run ends before its result, for `visalign watch`; called as a context's end is."""
    if kind is not None:
        stopped = issubclass(kind, KeyboardInterrupt | SystemExit)
        text = "interrupted\n" if stopped else f"failed\n{str(error) or kind.__name__}\n"
        with suppress(OSError):  # a full disk may be what ends the run
            write_atomic(output / END, text)


def write_config(output: Path, config: Any) -> None:
    write_once(output / "config.yaml", f"pipeline: {config.pipeline}\n" + config_to_yaml(config))


def write_once(path: Path, text: str) -> None:
    """Write a file unless it holds this text already."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomic(path, text)


def model_of(folder: Path) -> tuple[str | None, str | None]:
    """Return model.path and model.config of the run that a folder is, or is inside of; None where it is no run."""
    import yaml

    configs = [parent / "config.yaml" for parent in (folder, *folder.absolute().parents[:2])]
    text = next((file.read_text(encoding="utf-8") for file in configs if file.is_file()), "{}")
    model = yaml.safe_load(text).get("model")
    return (model.get("path"), model.get("config")) if isinstance(model, dict) else (None, None)


def new_file(path: Path | None, *, endings: Sequence[str] = ()) -> None:
    """Refuse an output that exists, or that ends in none of the allowed endings (none allows all)."""
    if path is None:
        return
    if endings and path.suffix.lower() not in endings:
        ending = f"ends in '{path.suffix}'" if path.suffix else "has no ending"
        raise UserError(f"'{path}' {ending}; what is written there ends in {' or '.join(endings)}.")
    check_place(path)
    if path.exists():
        raise UserError(f"'{path}' exists, and nothing is overwritten. Give another name or remove it.")


def check_place(path: Path) -> None:
    """Refuse a path that nothing can be written to, before hours of work for it."""
    full = path.absolute()
    folders = (full, *full.parents) if full.is_dir() else full.parents
    existing = next(folder for folder in folders if os.path.lexists(folder))  # a broken link exists, too
    try:  # permissions say too little of root, read-only and virtual file systems
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(
            f"Nothing can be written to '{path}': '{existing}': {error.strerror}. Give another folder."
        ) from None


def pretty(result: Any) -> str:
    """Format a result as indented JSON; a number that is not finite is an error."""
    return json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
