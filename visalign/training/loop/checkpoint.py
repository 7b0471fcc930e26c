# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are whole or absent: written aside, synced, hashed, renamed; verified before they are
read.

A checkpoint is a folder `step_000123` with tensors as safetensors, counters as JSON, and `manifest.json` with
the size and SHA-256 of each file and the configuration of the run. No pickle. Tensors that are divided among
processes stand in `sharded/`, a file of each process by torch's distributed checkpoint: none has them whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from visalign.errors import UserError

from .sharding import incomplete, local_shard, read_shards, write_shards

FORMAT = 1
_PREFIX = "step_"
_TEMPORARY = ".writing_"
_SHARDS = "sharded"


class CheckpointError(UserError):
    """A checkpoint could not be written, is damaged, or belongs to another configuration."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    """File stem -> tensor name -> tensor on CPU."""
    state: Mapping[str, Any]
    """Counters, JSON values."""


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands."""
    return root / f"{_PREFIX}{step:06d}"


def save(
    root: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    keep: int = 2,
) -> Path:
    """Write the checkpoint of `step`; delete later ones and all but the newest `keep` that are whole.

    The first process calls it; all do where tensors are divided among them.

    Args:
        root: folder of the run's checkpoints; created when missing.
        step: iterations finished.
        tensors: file stem -> tensor name -> tensor.
        state: JSON values.
        config: the run's configuration, JSON values; a resume under another one is refused.
        keep: checkpoints to keep, at least 1.

    Returns:
        The new folder.

    Raises:
        ValueError: keep < 1.
        CheckpointError: writing failed, for example because the disk is full. What was written is removed;
            the previous checkpoints stand untouched. Where tensors are divided, all processes raise it, also
            when they do not share `root`.
        OSError: the checkpoint is written, and one to be deleted could not be.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint must be kept.")
    temporary = root / f"{_TEMPORARY}{step:06d}"
    folder = step_folder(root, step)
    divided = _divided(tensors)
    several = bool(divided)
    try:
        _by_first(several, _make_place, temporary)
        if several:
            write_shards(temporary / _SHARDS, divided)
        _by_first(several, _complete, temporary, folder, step, tensors, state, config)
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if several:
            distributed.barrier()  # who tries again must not find another one removing
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(_write_failure(folder, error)) from error
    _by_first(several, _prune, root, folder, keep)
    return folder


def _by_first(several: bool, work: Callable[..., None], *given: Any) -> None:
    """Do `work`, of `several` processes in the first alone; the others wait for it and raise what it does."""
    if not several:
        work(*given)
        return
    said: list[Any] = [RuntimeError("the first process failed over a checkpoint, and says there at what.")]
    try:
        if distributed.get_rank() == 0:
            work(*given)
            said = [None]
    except (OSError, SafetensorError, CheckpointError) as error:
        said = [error]
        raise
    finally:
        distributed.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise said[0]


def _make_place(temporary: Path) -> None:
    """An empty folder to write to, and no rests of killed writes beside it."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for stale in temporary.parent.glob(_TEMPORARY + "*"):
        shutil.rmtree(stale)
    temporary.mkdir()


def _complete(
    temporary: Path,
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    """Beside what the processes wrote of their parts, write the rest, and let it count."""
    lacking = incomplete(temporary / _SHARDS, _divided(tensors))
    if lacking:
        raise CheckpointError(
            f"not all processes see this folder: {folder.parent} lacks parts of {lacking[0]} that other "
            "processes wrote. The half-written files were removed and earlier checkpoints are untouched. Let "
            "the run write where all its machines share one folder, and run the same command with --resume."
        )
    for stem, named in tensors.items():
        mine = {name: t for name, t in named.items() if not isinstance(t, DTensor)}
        copies = {name: t.detach().cpu().contiguous().clone() for name, t in mine.items()}
        save_file(copies, temporary / f"{stem}.safetensors")
    _write_json(temporary / "state.json", state)
    _finish(temporary, folder, step, config)


def _divided(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Of tensors that are divided among processes: "stem/name" -> tensor."""
    named = ((f"{stem}/{name}", value) for stem, own in tensors.items() for name, value in own.items())
    return {name: value for name, value in named if isinstance(value, DTensor)}


def _finish(temporary: Path, folder: Path, step: int, config: Mapping[str, Any]) -> None:
    """Sync and list what was written, and give it its name: from then on it counts."""
    written = sorted(path for path in temporary.rglob("*") if path.is_file())
    manifest = {
        "format": FORMAT,
        "step": step,
        "config": config,
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "files": {path.relative_to(temporary).as_posix(): _sync_and_describe(path) for path in written},
    }
    _write_json(temporary / "manifest.json", manifest)
    _sync_and_describe(temporary / "manifest.json")
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(temporary, folder)
    _sync_folder(folder.parent)


def not_finite(weights: Mapping[str, Tensor]) -> list[str]:
    """Names of weights that are not finite, as far as this process holds them."""
    return [name for name, value in weights.items() if not bool(local_shard(value).isfinite().all())]


def check_finite(odd: Sequence[str], iteration: int) -> None:
    """Refuse to keep weights that are not finite.

    Args:
        odd: names of these, `not_finite` of all processes.
        iteration: the last one.

    Raises:
        CheckpointError: names the first such.
    """
    if odd:
        raise CheckpointError(
            f"after iteration {iteration} the weight {odd[0]} is not finite: the run has diverged, and no "
            "checkpoint of it is kept. Go on from the last whole one with a lower optimizer.lr, or "
            "compute in bfloat16 or float32 where the model is in float16."
        )


def _prune(root: Path, newest: Path, keep: int) -> None:
    """Delete all checkpoints but `newest` and the whole ones before it, `keep` in all.

    What stands at later steps goes as well: the run has passed it over, or was set back.
    """
    earlier = [path for path in folders(root) if path < newest and _has_all_bytes(path)]
    kept = {newest, *earlier[max(0, len(earlier) - keep + 1) :]}
    for old in folders(root):
        if old not in kept:
            shutil.rmtree(old)


def _has_all_bytes(folder: Path) -> bool:
    """Whether no file is missing or of another size; the hashes are left to `verify`, which reads it all."""
    try:
        listed = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in listed.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def folders(root: Path) -> list[Path]:
    """Checkpoint folders under `root`, oldest first."""
    return sorted(path for path in root.glob(_PREFIX + "*") if path.is_dir())


def verify(folder: Path) -> dict[str, Any]:
    """Check the size and hash of every file of a checkpoint.

    Returns:
        The manifest.

    Raises:
        CheckpointError: a file is missing, cut short or changed; the message names it.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        listed = manifest["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} is no whole checkpoint: manifest.json cannot be read ({error}).{_HINT}"
        ) from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has checkpoint format {manifest.get('format')}; this version reads format {FORMAT}. "
            f"Resume with the version of visalign that wrote it."
        )
    for name, expected in listed:
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing.{_HINT}")
        size = file.stat().st_size
        if size != expected["bytes"]:
            word = "cut short" if size < expected["bytes"] else "too long"
            raise CheckpointError(
                f"{folder} is damaged: {name} is {word} ({size} bytes, the manifest says "
                f"{expected['bytes']}).{_HINT}"
            )
        if _file_sha256(file) != expected["sha256"]:
            raise CheckpointError(
                f"{folder} is damaged: the content of {name} has changed (SHA-256 differs).{_HINT}"
            )
    return manifest


_HINT = " Delete this folder and resume: the newest whole checkpoint before it will be used."


def load(
    folder: Path,
    config: Mapping[str, Any],
    *,
    free: Collection[str] = (),
    divided: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """Read a checkpoint after verifying it, in any number of processes.

    Args:
        folder: of the checkpoint.
        config: the configuration of the run that wants to resume.
        free: dotted keys that may differ without changing what was trained (for example the number of
            iterations).
        divided: parameters that are divided among the processes, by name: of what a checkpoint has divided,
            each process reads its part of them and of their averages and moments.

    Raises:
        CheckpointError: damaged, or written under another configuration; the message lists the keys.
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
    """The newest whole checkpoint under `root`, None if there is none, and why newer ones were passed
    over."""
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
    saved: Mapping[str, Any], now: Mapping[str, Any], *, free: Collection[str] = (), where: str
) -> None:
    """Refuse to continue a run under another configuration.

    Raises:
        CheckpointError: listing each key with its saved and its present value.
    """
    before, after = flatten(json.loads(json.dumps(saved))), flatten(json.loads(json.dumps(now)))
    missing = "(absent)"
    differing = [
        f"{key}: {before.get(key, missing)!r} there, {after.get(key, missing)!r} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, missing) != after.get(key, missing) and key not in free
    ]
    if differing:
        raise CheckpointError(
            f"{where} was written under another configuration. Differing keys: {'; '.join(differing)}. "
            f"Set them back to resume, or start a new run in another output folder."
        )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _write_failure(folder: Path, error: Exception) -> str:
    full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error).lower()
    cause = "the disk is full" if full else str(error)
    return (
        f"could not write checkpoint {folder}: {cause}. The half-written files were removed and earlier "
        "checkpoints are untouched. Free some space (or lower run.keep_checkpoints) and run the same "
        "command with --resume."
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


def _sync_folder(path: Path) -> None:
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
