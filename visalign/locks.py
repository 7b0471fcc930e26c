# SPDX-License-Identifier: Apache-2.0
"""Lock files: a second process that would write to the same folder is refused."""

from __future__ import annotations

import errno
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

LOCK = ".lock"  # Name of the lock file inside a folder
_own_locks: set[Path] = set()


class FolderInUseError(UserError):
    """Another process holds the lock; the message names it."""


@contextmanager
def hold_lock(lock: Path, *, what: str, instead: str = "give another --output") -> Iterator[None]:
    """Hold a lock file for the length of the block, or until the process and its forks are dead.

    Nested blocks of one process share the lock. Missing folders are created; afterwards the file is removed,
    and so are those folders if they are empty. On Windows, and (with a warning) on file systems without
    locks, nothing is locked. `what` and `instead` are the subject of the message and the alternative to waiting.
    """
    lock = lock.absolute()
    if fcntl is None or lock in _own_locks:
        yield
        return
    created = [folder for folder in lock.parents if not folder.exists()]
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _acquire(lock, what, instead)
    try:
        _own_locks.add(lock)
        yield
    finally:
        _own_locks.discard(lock)
        lock.unlink(missing_ok=True)  # still locked, so nobody else can have it open and locked
        os.close(descriptor)
        with suppress(OSError):  # not empty
            for folder in created:
                folder.rmdir()


def check_unlocked(lock: Path, *, what: str) -> None:
    """Raise `FolderInUseError` if another process holds the lock now."""
    if lock.is_file():
        with hold_lock(lock, what=what):
            pass


def _acquire(lock: Path, what: str, instead: str) -> int:
    """Open and lock the file, write this process's description into it, return its descriptor."""
    assert fcntl is not None
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                holder = os.pread(descriptor, 4096, 0).decode("utf-8", "replace").strip() or "another process"
                os.close(descriptor)
                raise FolderInUseError(f"{what} is in use by {holder}. Wait until it ends, or {instead}.") from None
            warnings.warn(
                f"{what} cannot be locked ({error.strerror}). See that no second process writes there.", stacklevel=3
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                break
        os.close(descriptor)  # the previous holder removed this file meanwhile: open the new one
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:1000]
    since = f"{datetime.now():%Y-%m-%d %H:%M}"
    holder = f"process {os.getpid()} on {socket.gethostname()} since {since} ({command})\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, holder.encode("utf-8", "replace"), 0)
    return descriptor
