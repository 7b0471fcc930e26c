# SPDX-License-Identifier: Apache-2.0
"""A file that says who works in a folder, so that a second process is refused instead of mixing results."""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from .errors import UserError

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None

LOCK = ".lock"
"""The lock of a folder."""
_TAKEN = (errno.EAGAIN, errno.EACCES)
_held: set[Path] = set()


class FolderInUse(UserError):
    """Another process, which the message names, works there."""


@contextmanager
def hold(lock: Path, *, what: str, instead: str = "give another --output") -> Iterator[None]:
    """Hold a lock file until the block ends, or the process and what it forked are dead.

    Nested blocks of one process are one. The file goes with the block, and so do the folders made for it that
    hold nothing else. On Windows, and on file systems without locks (that with a warning), nothing is held.

    Args:
        lock: The file; missing folders are made.
        what: What is held, for the message.
        instead: What to do beside waiting, for the message.

    Raises:
        FolderInUse: Another process holds it; the message names its number, machine, begin and command.
        OSError: The file cannot be written.
    """
    lock = lock.absolute()
    if fcntl is None or lock in _held:
        yield
        return
    made = [folder for folder in lock.parents if not folder.exists()]
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _taken(lock, what, instead)
    try:
        _held.add(lock)
        yield
    finally:
        _held.discard(lock)
        lock.unlink(missing_ok=True)  # while it is held: nobody can have taken it already
        os.close(descriptor)
        with suppress(OSError):  # something was written there
            for folder in made:
                folder.rmdir()


def check_free(lock: Path, *, what: str) -> None:
    """Refuse what another process holds now; see `hold`."""
    if lock.is_file():
        with hold(lock, what=what):
            pass


def _taken(lock: Path, what: str, instead: str) -> int:
    """The open and locked file, which says who holds it."""
    assert fcntl is not None
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            said = os.pread(descriptor, 4096, 0)
            if error.errno in _TAKEN:
                os.close(descriptor)
                raise FolderInUse(
                    f"{what} is in use by {_holder(said)}. Wait until that ends, or {instead}."
                ) from None
            warnings.warn(
                f"{what} cannot be locked ({error.strerror}). See that no second process writes there.",
                stacklevel=3,
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                break
        os.close(descriptor)  # its holder ended meanwhile and removed it
    mine = {
        "process": os.getpid(),
        "machine": socket.gethostname(),
        "since": f"{datetime.now():%Y-%m-%d %H:%M}",
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:1000],
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(mine).encode() + b"\n", 0)
    return descriptor


def _holder(said: bytes) -> str:
    """Who holds a lock, by what stands in it."""
    try:
        who = json.loads(said)
        named = f"process {who['process']} on {who['machine']} since {who['since']} ({who['command']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
    return named
