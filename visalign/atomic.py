# SPDX-License-Identifier: Apache-2.0
"""Atomic file writes that respect the umask."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, content: bytes | str) -> Path:
    """Write a temporary file, flush it to disk and rename it: no reader sees half a file. Return the path."""
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")  # surrogates of undecodable file names
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
        Path(name).unlink(missing_ok=True)  # a no-op after the rename
    return path


def umask_permissions(path: Path) -> None:
    """Give a file, or every file of a folder, the permissions that the umask gives new files."""
    # libraries that write a temporary file first (safetensors) leave 0600, which colleagues cannot read
    mask = os.umask(0)
    os.umask(mask)
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            file.chmod(0o666 & ~mask)
