# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, and that others may read where the umask lets them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, content: bytes | str) -> Path:
    """Write a file beside its place, flush it to disk, then rename it: a reader never sees half of it.

    Args:
        path: Where it shall stand; missing folders are made.
        content: All of it. Text becomes UTF-8; bytes of file names that are no text are escaped as in JSON.

    Returns:
        The path.

    Raises:
        OSError: Where the folder cannot be written or the disk is full; a file that stood there before
            survives, and nothing new is left behind.
    """
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask_permissions(Path(name))
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)  # there is nothing left to remove after the rename
    return path


def umask_permissions(path: Path) -> None:
    """Give a file, or every file of a folder, the permissions that a newly made one gets from the umask.

    Libraries that write to a temporary file first (safetensors) leave 0600, and colleagues cannot read it.

    Raises:
        OSError: A file belongs to somebody else.
    """
    mask = os.umask(0)
    os.umask(mask)
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            file.chmod(0o666 & ~mask)
