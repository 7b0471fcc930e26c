# SPDX-License-Identifier: Apache-2.0
"""Atomic checkpoints: written to a temporary folder, synced, hashed, renamed; verified before they are read.

A checkpoint is a folder `step_000123` with tensors as safetensors, counters as JSON, and `manifest.json` with
the size and SHA-256 of each file and the configuration of the run. No pickle. Tensors that are divided among
processes are in `sharded/`, one file per process by torch's distributed checkpoint: none has them whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from visalign.config import flatten
from visalign.errors import UserError

from .sharding import incomplete, local_shard, read_shards, write_shards

FORMAT = 2
_TEMPORARY = ".writing_"
_SHARDS = "sharded"
_HINT = " Delete this folder and resume: the newest whole checkpoint before it will be used."

Tensors = Mapping[str, Mapping[str, Tensor]]  # File stem -> tensor name -> tensor
SHOWN = 6  # Differing keys that a message names


class CheckpointError(UserError):
    """A checkpoint could not be written, is damaged, or belongs to another configuration."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Content of a checkpoint."""

    step: int
    tensors: Tensors
    state: Mapping[str, Any]  # Counters, JSON values


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`."""
    return root / f"step_{step:06d}"


def folders(root: Path) -> list[Path]:
    """List the checkpoint folders under `root`, oldest first."""
    return sorted(path for path in root.glob("step_*") if path.is_dir())


def save(
    root: Path, step: int, tensors: Tensors, state: Mapping[str, Any], config: Mapping[str, Any], *, keep: int = 2
) -> Path:
    """Write the checkpoint of `step` iterations; delete later ones and all but the newest `keep` that are whole.

    The first process calls it; all do where tensors are divided among them, and all then raise the CheckpointError
    of a write that failed, also when they do not share `root`. What was written of it is removed.
    """
    temporary, folder = root / f"{_TEMPORARY}{step:06d}", step_folder(root, step)
    several = bool(divided := _divided(tensors))
    try:
        _in_first_process(several, _create_folder, temporary)
        if several:
            write_shards(temporary / _SHARDS, divided)
        _in_first_process(several, _complete, temporary, folder, tensors, state, config)
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if several:
            distributed.barrier()  # a retry must not meet a process that still removes files
        if isinstance(error, CheckpointError):
            raise
        full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error).lower()
        raise CheckpointError(
            f"could not write checkpoint {folder}: {'the disk is full' if full else error}. The half-written "
            "files were removed and earlier checkpoints are untouched. Free some space (or lower "
            "run.keep_checkpoints) and run the same command with --resume."
        ) from error
    _in_first_process(several, _prune, root, folder, keep)
    return folder


def _in_first_process(several: bool, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work` in the first of `several` processes; the others wait and raise the error that it raised."""
    if not several:
        work(*arguments)
        return
    outcome: list[Any] = [RuntimeError("the first process failed to write a checkpoint; see its error.")]
    try:
        if distributed.get_rank() == 0:
            work(*arguments)
            outcome = [None]
    except (OSError, SafetensorError, CheckpointError) as error:
        outcome = [error]
        raise
    finally:
        distributed.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]


def _create_folder(temporary: Path) -> None:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for stale in temporary.parent.glob(_TEMPORARY + "*"):
        shutil.rmtree(stale)
    temporary.mkdir()


def _complete(
    temporary: Path, folder: Path, tensors: Tensors, state: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Write all but the shards, sync, list the files in the manifest, and rename the folder."""
    if lacking := incomplete(temporary / _SHARDS, _divided(tensors)):
        raise CheckpointError(
            f"not all processes see this folder: {folder.parent} lacks parts of {lacking[0]} that other "
            "processes wrote. The half-written files were removed and earlier checkpoints are untouched. Let "
            "the run write where all its machines share one folder, and run the same command with --resume."
        )
    for stem, group in tensors.items():
        undivided = {name: t for name, t in group.items() if not isinstance(t, DTensor)}
        copies = {name: t.detach().cpu().contiguous().clone() for name, t in undivided.items()}
        save_file(copies, temporary / f"{stem}.safetensors")
    _write_json(temporary / "state.json", state)
    written = sorted(path for path in temporary.rglob("*") if path.is_file())
    manifest = {
        "format": FORMAT,
        "step": int(folder.name.removeprefix("step_")),
        "config": config,
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "files": {path.relative_to(temporary).as_posix(): _sync_and_describe(path) for path in written},
    }
    _write_json(temporary / "manifest.json", manifest)
    _sync_and_describe(temporary / "manifest.json")
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(temporary, folder)  # from here on it is a checkpoint
    if os.name == "posix":
        handle = os.open(folder.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _divided(tensors: Tensors) -> dict[str, Tensor]:
    """Select the tensors that are divided among processes: "stem/name" -> tensor."""
    items = ((f"{stem}/{name}", value) for stem, group in tensors.items() for name, value in group.items())
    return {name: value for name, value in items if isinstance(value, DTensor)}


def not_finite(weights: Mapping[str, Tensor]) -> list[str]:
    """List the weights that are not finite, of this process's share."""
    return [name for name, value in weights.items() if not bool(local_shard(value).isfinite().all())]


def _prune(root: Path, newest: Path, keep: int) -> None:
    """Delete all checkpoints but `newest` and the whole ones before it, `keep` in all.

    Later steps go as well: the run passed them over, or was set back.
    """
    earlier = [path for path in folders(root) if path < newest and _has_all_bytes(path)]
    current = {newest, *earlier[max(0, len(earlier) - keep + 1) :]}
    for folder in folders(root):
        if folder not in current:
            shutil.rmtree(folder)


def _has_all_bytes(folder: Path) -> bool:
    """Return True where all files have their sizes; `verify` also reads them for their hashes."""
    try:
        files = _read_manifest(folder)["files"]
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (OSError, CheckpointError):
        return False


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] == FORMAT:
            return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} is no whole checkpoint: manifest.json cannot be read ({error}).{_HINT}"
        ) from error
    raise CheckpointError(
        f"{folder} has checkpoint format {manifest['format']}; this version reads format {FORMAT}. "
        "Resume with the version of visalign that wrote it."
    )


def verify(folder: Path) -> dict[str, Any]:
    """Check the size and hash of every file of a checkpoint; return the manifest."""
    manifest = _read_manifest(folder)
    for name, expected in manifest["files"].items():
        file, problem = folder / name, ""
        if not file.is_file():
            problem = "is missing"
        elif (size := file.stat().st_size) != expected["bytes"]:
            problem = f"has {size} bytes instead of {expected['bytes']}"
        elif _file_sha256(file) != expected["sha256"]:
            problem = "has changed (SHA-256 differs)"
        if problem:
            raise CheckpointError(f"{folder} is damaged: {name} {problem}.{_HINT}")
    return manifest


def load(
    folder: Path, config: Mapping[str, Any], *, free: Collection[str] = (), divided: Mapping[str, Tensor] | None = None
) -> Checkpoint:
    """Read a checkpoint after verifying it, in any number of processes.

    `free` are dotted keys of the configuration that may differ. Of the parameters `divided` among the
    processes, each reads its part, and that of their averages and moments.
    """
    manifest = verify(folder)
    check_same_config(manifest["config"], config, free=free, where=str(folder))
    tensors = {
        name.removesuffix(".safetensors"): load_file(folder / name)
        for name in manifest["files"]
        if name.endswith(".safetensors") and "/" not in name
    }
    if (folder / _SHARDS).is_dir():
        for key, value in read_shards(folder / _SHARDS, divided or {}).items():
            stem, _, name = key.partition("/")
            tensors[stem][name] = value
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(step=manifest["step"], tensors=tensors, state=state)


def newest_intact(root: Path) -> tuple[Path | None, list[str]]:
    """Find the newest whole checkpoint (None if there is none), and why newer ones were passed over."""
    passed = []
    for folder in reversed(folders(root)):
        try:
            verify(folder)
        except CheckpointError as error:
            passed.append(str(error).removesuffix(_HINT))
        else:
            return folder, passed
    return None, passed


def check_same_config(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    free: Collection[str] = (),
    where: str,
    remedy: str = "Set them back to resume, or start a new run in another output folder.",
) -> None:
    """Refuse to continue a run under another configuration; a setting that one of them lacks is null there."""
    before, after = flatten(json.loads(json.dumps(saved))), flatten(json.loads(json.dumps(now)))
    missing = "(absent)"
    differing = [
        f"{key}: {before.get(key, missing)!r} there, {after.get(key, missing)!r} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in free
    ]
    if differing:
        raise CheckpointError(
            f"{where} was written under another configuration. Differing keys: {'; '.join(differing[:SHOWN])}"
            f"{f' and {len(differing) - SHOWN} more' if len(differing) > SHOWN else ''}. {remedy}"
        )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True), encoding="utf-8")


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_and_describe(path: Path) -> dict[str, Any]:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": _file_sha256(path)}
