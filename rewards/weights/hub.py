# SPDX-License-Identifier: Apache-2.0
"""Fetch the files of a hub repository, once and in one format, or use the local copy.

Without a network the hub's libraries retry each file for minutes. Here the list of files is requested once;
if there is no answer, the local copy is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from visalign.hub import go_offline_if_unreachable
from visalign.rewards.base.contract import RewardError

from .checkpoint_files import first_sentence

TRANSFORMERS_FILES = ("*.json", "*.txt", "*.jinja", "model*.safetensors", "pytorch_model*.bin")
"""Files of a model in transformers' layout."""
SMALL_FILES = ("*.json", "*.txt", "*.jinja")
"""Files without weights."""
META = "meta"
"""Device of a model without weights; only its small files are fetched."""
TIMEOUT = 10.0
"""Timeout for listing a repository, in seconds."""


def is_hub_id(name: str | Path) -> bool:
    """Return True for names of the form "organisation/model" or "organisation/model@revision"."""
    repository = str(name).partition("@")[0]
    is_path = repository.startswith((".", "/", "~")) or repository.endswith("/")
    return repository.count("/") == 1 and not is_path


def local_folder(name: str | Path, patterns: Sequence[str], device: Any = None) -> Path:
    """Return a local folder, or the local copy of a hub repository after fetching its matching files.

    `name` may end with "@" and a branch, tag or commit; weights are fetched in one format only, and none for
    the device `META`.
    """
    patterns = SMALL_FILES if str(device) == META else patterns
    if Path(name).is_dir():
        return Path(name)
    if not is_hub_id(name):
        raise RewardError(f"There is no folder {str(name)!r}; give one, or a hub id 'organisation/model'.")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # errors of the hub's HTTP library, which depends on its version, derive from this base class
    http_error: type[Exception] = HfHubHTTPError.__bases__[0]  # type: ignore[assignment]
    failures = (OSError, ValueError, RuntimeError, http_error)
    repository, _, revision = str(name).partition("@")
    request: dict[str, Any] = {"revision": revision or None}
    hub_error: Exception | None = None
    go_offline_if_unreachable()
    try:
        info = huggingface_hub.HfApi().model_info(repository, timeout=TIMEOUT, **request)
        files = needed_files([sibling.rfilename for sibling in info.siblings or ()], patterns)
        request = {"revision": info.sha, "allow_patterns": files}
    except failures as error:  # no network, no such repository, or no access
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
            raise RewardError(
                f"The hub has no model {repository!r} for you{f' at {revision!r}' if revision else ''} "
                f"({first_sentence(error)}). Check the name; where it is gated, accept its terms on its page "
                "and run `hf auth login`."
            ) from error
        request["local_files_only"], hub_error = True, error
    try:
        return Path(huggingface_hub.snapshot_download(repository, **request))
    except failures as error:
        cause = hub_error if hub_error is not None and isinstance(error, LocalEntryNotFoundError) else error
        reason = go_offline_if_unreachable() or f"{type(cause).__name__}: {first_sentence(cause)}"
        raise RewardError(
            f"The model {str(name)!r} is not on this disk and cannot be fetched ({reason}). Elsewhere run "
            f"`hf download {repository} --local-dir FOLDER`, and give that folder as the model."
        ) from error


def needed_files(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Select files by name patterns; in a folder with safetensors, other formats of weights are dropped.

    >>> needed_files(["a/model.safetensors", "a/pytorch_model.bin", "b/pytorch_model.bin"], ["*"])
    ['a/model.safetensors', 'b/pytorch_model.bin']
    """
    paths = [PurePosixPath(name) for name in names]
    paths = [path for path in paths if any(fnmatch(path.name, pattern) for pattern in patterns)]
    safe = {path.parent for path in paths if path.suffix == ".safetensors"}
    doubles = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ckpt")
    return [str(path) for path in paths if not (path.suffix in doubles and path.parent in safe)]


def revision_of(folder: str | Path | None) -> str:
    """Return the commit of a repository's local copy, the name of its folder; "" for other folders."""
    return Path(folder).name if folder is not None and Path(folder).parent.name == "snapshots" else ""
