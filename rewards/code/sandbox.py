# SPDX-License-Identifier: Apache-2.0
"""Run generated Python in a process of its own, with limits, and come back alive.

What is guaranteed on Linux where user namespaces are permitted (`isolation` says "namespaces"; the kernel
enforces it): no network; no sight of or signal to other processes; the whole file system is read-only but for
one empty folder of `file_mb`, which is gone afterwards; everything that was started is killed with the run,
daemons and forks that changed their session included. No capability or set-uid program helps the code. Files
that the user may read stay readable.

Elsewhere ("process") the interpreter refuses network, programs, signals, and changes outside the folder by an
audit hook, and what was started is found by its parents and killed. That stops accidents and
careless code; code that means harm gets around it (native code, for one). Ask for isolation="namespaces" to
refuse that.

Everywhere: CPU seconds, address space, file size, open files per process; forks in all; the wall clock; an
empty environment; output cut. The address space is per process, so a run can take `processes` times as much.
A user namespace cannot bind root's process count; run as another user where that matters (root gives up its
rights by itself if everybody can read Python's library).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from visalign.rewards.base.contract import RewardError

CHILD = Path(__file__).with_name("code_child.py")
ISOLATIONS = ("auto", "namespaces", "process")
RECORDS_LIMIT = 4 * 2**20
"""Bytes that are read of the records of one run."""
_CHUNK = 65536


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may take."""

    wall_seconds: float = 10.0
    """From the moment the code starts, on the wall clock; waiting counts."""
    cpu_seconds: float = 10.0
    """Per process, rounded up to whole seconds."""
    memory_mb: int = 512
    """Address space per process in MiB."""
    processes: int = 4
    """Forks in all."""
    file_mb: int = 16
    """Largest file, and with namespaces the whole folder, in MiB."""
    output_bytes: int = 65536
    """What is kept of each of stdout and stderr; the rest is read and thrown away."""
    start_seconds: float = 60.0
    """Until the interpreter must be up; later is a failure of the machine, not of the code."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "processes" else 0.01 if name.endswith("seconds") else 1
            kinds = int | float if name.endswith("seconds") else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < 1e9:
                words = "numbers" if least == 0.01 else "whole numbers"
                raise ValueError(f"Limits: {name} is {value!r}; allowed are {words} from {least} to 1e9.")


@dataclass(frozen=True, kw_only=True)
class Run:
    """How one run went."""

    failure: str | None
    """Why there is no verdict on the code (the sandbox broke), or None."""
    isolation: str
    """ "namespaces" or "process"; "" when the sandbox broke before."""
    timed_out: bool
    exit_code: int | None
    """Of the code's process, 128 + n where signal n ended it; None when it was killed for its time."""
    stdout: str
    stdout_cut: bool
    stderr: str
    records: list[dict[str, Any]]
    """What the child sent on the channel with the nonce, see `code_child`."""


def run_python(
    source: str,
    *,
    tests: list[dict[str, Any]] | None = None,
    stdin: str = "",
    limits: Limits | None = None,
    isolation: str = "auto",
    packages: bool = False,
) -> Run:
    """Run a program, or a module and tests of it, in the sandbox.

    Args:
        source: Python source.
        tests: None runs the source as a program; else each is {"assert": source}, {"eval": source}, or
            {"call": name, "args": [], "kwargs": {}}, run after the source in the same interpreter.
        stdin: what the program reads.
        limits: the defaults of `Limits` when None.
        isolation: "auto" takes namespaces where they are permitted; "namespaces" insists on them; "process"
            does without.
        packages: whether installed packages can be imported (slower start, weaker audit hook: ctypes opens).

    Returns:
        The run. What the code does is never an exception.

    Raises:
        ValueError: unknown isolation.
        RewardError: the system has no resource limits (Windows), or namespaces are insisted on and refused.
    """
    if isolation not in ISOLATIONS:
        raise ValueError(f"isolation is {isolation!r}; allowed are {', '.join(ISOLATIONS)}.")
    if os.name != "posix":
        raise RewardError("The code sandbox needs Linux or macOS: Windows has no resource limits. Use WSL.")
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="sandbox", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o777)
        config = {
            "source": source,
            "tests": tests,
            "folder": os.path.realpath(folder),
            "nonce": secrets.token_hex(16),
            "limits": asdict(limits),
            "isolation": isolation,
            "packages": packages,
        }
        with _Process(config, stdin) as process:
            run = process.watch(limits)
    if isolation == "namespaces" and (refused := _first(run.records, "refused")):
        raise RewardError(
            f"The code sandbox cannot make namespaces ({refused}). Permit user namespaces (kernel setting, "
            "container option), or choose isolation='auto' and accept the weaker guarantees."
        )
    return run


class _Process:
    """The supervisor with its pipes; leaving the context kills all that it started."""

    def __init__(self, config: dict[str, Any], stdin: str) -> None:
        self._config = config
        self._stdin = stdin
        self._nonce = config["nonce"].encode()
        self._open: list[IO[bytes]] = []

    def __enter__(self) -> _Process:
        read_end, write_end = os.pipe()
        task, given = self._file(json.dumps(self._config)), self._file(self._stdin)
        flags = ["-s", "-P", "-B"] if self._config["packages"] else ["-s", "-S", "-P", "-B"]
        folder = self._config["folder"]
        try:
            self._popen = subprocess.Popen(
                [sys.executable, *flags, str(CHILD), str(task.fileno()), str(write_end)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(task.fileno(), write_end),
                cwd=folder,
                env={"HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
                start_new_session=True,
            )
        except OSError as error:
            os.close(read_end)
            raise RewardError(f"The code sandbox cannot start {sys.executable}: {error}.") from error
        finally:
            os.close(write_end)
            task.close()
            given.close()
        self._records = os.fdopen(read_end, "rb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        kill_tree(self._popen.pid)
        self._popen.wait()
        for stream in (self._records, self._popen.stdout, self._popen.stderr):
            if stream is not None:
                stream.close()

    def _file(self, text: str) -> IO[bytes]:
        file = tempfile.TemporaryFile()  # closed by __enter__
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        return file

    def watch(self, limits: Limits) -> Run:
        """Read all pipes until the code has ended or its time is over."""
        kept = {"records": bytearray(), "stdout": bytearray(), "stderr": bytearray()}
        room = {"records": RECORDS_LIMIT, "stdout": limits.output_bytes, "stderr": limits.output_bytes}
        cut = dict.fromkeys(kept, False)
        deadline, ready, ended = time.monotonic() + limits.start_seconds, False, False
        with selectors.DefaultSelector() as selector:
            streams = zip(("records", "stdout", "stderr"), self._streams(), strict=True)
            for name, stream in streams:
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, name)
            while (left := deadline - time.monotonic()) > 0 and selector.get_map():
                events = selector.select(0 if ended else left)
                if ended and not events:
                    break
                for key, _ in events:
                    chunk = os.read(key.fd, _CHUNK)
                    if not chunk:
                        selector.unregister(key.fileobj)
                        continue
                    space = room[key.data] - len(kept[key.data])
                    kept[key.data] += chunk[:space]
                    cut[key.data] |= len(chunk) > space
                if not ready and self._has(kept["records"], b'{"ready"'):
                    ready, deadline = True, time.monotonic() + limits.wall_seconds
                ended = ended or self._has(kept["records"], b'{"ended"')
        return self._result(kept, cut["stdout"], ready)

    def _streams(self) -> tuple[Any, Any, Any]:
        return self._records, self._popen.stdout, self._popen.stderr

    def _has(self, records: bytearray, start: bytes) -> bool:
        return self._nonce + start in records

    def _result(self, kept: dict[str, bytearray], stdout_cut: bool, ready: bool) -> Run:
        records = _read_records(bytes(kept["records"]), self._nonce)
        exit_code = _first(records, "ended")
        texts = {name: bytes(kept[name]).decode("utf-8", "replace") for name in ("stdout", "stderr")}
        failure = None
        if not ready:
            failure = f"the sandbox did not start: {texts['stderr'].strip()[-300:] or 'no word from it'}"
        return Run(
            failure=failure,
            isolation=_first(records, "isolation") or "",
            timed_out=ready and exit_code is None,
            exit_code=exit_code,
            stdout=texts["stdout"],
            stdout_cut=stdout_cut,
            stderr=texts["stderr"],
            records=records,
        )


def _read_records(raw: bytes, nonce: bytes) -> list[dict[str, Any]]:
    """The records of the lines that carry the nonce; the code's own writing on the pipe is left out."""
    records = []
    for line in raw.split(b"\n"):
        if line.startswith(nonce):
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line[len(nonce) :])
                if isinstance(record, dict):
                    records.append(record)
    return records


def _first(records: list[dict[str, Any]], key: str) -> Any:
    return next((record[key] for record in records if key in record), None)


def kill_tree(root: int) -> None:
    """Kill a process, its group, and all descendants, those too that left the group."""
    for _ in range(50):
        found = _descendants(root)
        if not found:
            break
        for process in found:
            _kill(os.kill, process)
    _kill(os.killpg, root)


def _kill(how: Any, target: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(target, signal.SIGKILL)


def _descendants(root: int) -> list[int]:
    """Living descendants, by the parent of every process; none where there is no /proc."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError):
            state, parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(entry)] = int(parent)
    found, seen = [], {root}
    for _ in range(len(parents)):
        fresh = [process for process, parent in parents.items() if parent in seen and process not in seen]
        if not fresh:
            return found
        found += fresh
        seen |= set(fresh)
    return found
