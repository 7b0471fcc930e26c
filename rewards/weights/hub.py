# SPDX-License-Identifier: Apache-2.0
"""Files of a hub repository on this disk: asked for once, in one form, and not where there is no network.

The hub's libraries try each file of a model several times while nothing answers, which is minutes for a large
one. Here the list of a repository's files is asked for first, once; without an answer what is on the disk is
taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from visalign.rewards.base.contract import RewardError

from .checkpoint_files import first_sentence

TRANSFORMERS_FILES = ("*.json", "*.txt", "*.jinja", "model*.safetensors", "pytorch_model*.bin")
"""Names of the files of a model in transformers' layout."""
SMALL_FILES = ("*.json", "*.txt", "*.jinja")
"""Of these the ones that hold no weights."""
META = "meta"
"""Device of a model that has shapes alone: of its files those without weights are read and fetched."""
TIMEOUT = 10.0
"""Seconds that the hub may take to list a repository."""


def is_hub_id(name: str | Path) -> bool:
    """Whether a name is written as a hub id: "organisation/model", or that and "@revision"."""
    place = str(name).partition("@")[0]
    return place.count("/") == 1 and not place.startswith((".", "/", "~")) and not place.endswith("/")


def local_folder(name: str | Path, patterns: Sequence[str], device: Any = None) -> Path:
    """A folder on this disk, or the local copy of a hub repository "organisation/model" (with "@" before a
    branch, tag or commit), of which the files of these names are fetched, weights in one form alone, and none
    for the device `META`.
    """
    patterns = SMALL_FILES if str(device) == META else patterns
    if Path(name).is_dir():
        return Path(name)
    if not is_hub_id(name):
        raise RewardError(
            f"There is no folder {str(name)!r}. Allowed: an existing folder, or a hub id "
            "'organisation/model'."
        )
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # Its HTTP library's errors, whichever that is in the version at hand, are of the class above its own.
    http_error: type[Exception] = HfHubHTTPError.__bases__[0]  # type: ignore[assignment]
    failures = (OSError, ValueError, RuntimeError, http_error)
    repository, _, revision = str(name).partition("@")
    there: dict[str, Any] = {"revision": revision or None}
    try:
        told = huggingface_hub.HfApi().model_info(repository, timeout=TIMEOUT, **there)
        files = needed_files([one.rfilename for one in told.siblings or ()], patterns)
        there = {"revision": told.sha, "allow_patterns": files}
    except failures as error:  # no network, no such repository, or not for us
        if _refused(error) and isinstance(error, HfHubHTTPError):
            raise RewardError(
                f"The hub has no model {repository!r} for you{f' at {revision!r}' if revision else ''} "
                f"({first_sentence(error)}). Check the name; where it is gated, accept its terms on its page "
                "and run `hf auth login`."
            ) from error
        there["local_files_only"], unheard = True, error
    else:
        unheard = None
    try:
        return Path(huggingface_hub.snapshot_download(repository, **there))
    except failures as error:
        why = unheard if unheard is not None and isinstance(error, LocalEntryNotFoundError) else error
        raise RewardError(
            f"The model {str(name)!r} is not on this disk and cannot be fetched from here "
            f"({type(why).__name__}: {first_sentence(why)}). Where there is a network, run `hf download "
            f"{repository} --local-dir FOLDER`, and give that folder as the model."
        ) from error


def needed_files(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Of a repository's files those whose names (without folders) fit a pattern; of the weights in a folder
    the safetensors alone where there are any.

    >>> needed_files(["a/model.safetensors", "a/pytorch_model.bin", "b/pytorch_model.bin"], ["*"])
    ['a/model.safetensors', 'b/pytorch_model.bin']
    """
    paths = [PurePosixPath(name) for name in names]
    paths = [path for path in paths if any(fnmatch(path.name, pattern) for pattern in patterns)]
    safe = {path.parent for path in paths if path.suffix == ".safetensors"}
    doubles = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ckpt")
    return [str(path) for path in paths if not (path.suffix in doubles and path.parent in safe)]


def revision_of(folder: str | Path | None) -> str:
    """The commit of a repository's local copy, which is the name of its folder; "" for other folders."""
    name, above = ("", "") if folder is None else (Path(folder).name, Path(folder).parent.name)
    return name if above == "snapshots" else ""


def _refused(error: Exception) -> bool:
    """Whether the hub answered that there is nothing for this user."""
    return getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404)
