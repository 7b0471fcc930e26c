# SPDX-License-Identifier: Apache-2.0
"""Run generated Python in a process of its own, with limits, and come back alive.

Always: CPU seconds, address space, file size, open files per process; forks in all; the wall clock; an empty
environment; output cut; no sockets and no memory without an address (memfd, System V), by the kernel where it
filters calls (Linux on x86-64 and ARM64). The address space is per process, so a run can take `processes`
times as much. A run ends with its caller, however that ends.

With namespaces ("namespaces", and "auto"; the kernel enforces it): no network; no sight of or signal to other
processes; of the file system Python, the system's programs and libraries, read-only, and one empty folder of
`file_mb`, which is gone afterwards: no home, no socket, no temporary folder. Everything that was started is
killed with the run, daemons and forks that changed their session included. No capability or set-uid program
helps the code, and root becomes nobody. Where the system permits no namespaces nothing is run.

Without them ("process", which has to be asked for and says so once as a warning) the interpreter refuses
network, programs, signals, and changes outside the folder by an audit hook, and what was started is found by
its parents and killed. Files that the user may read stay readable, and root stays root where nobody else can
read Python's library. That stops accidents and careless code; code that means harm gets around it (native
code, for one). Where the code's author is an enemy, run all of this in a virtual machine: neither kind is
meant as the only wall.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from visalign.rewards.base.contract import RewardError

CHILD = Path(__file__).with_name("code_child.py")
ISOLATIONS = ("auto", "namespaces", "process")
RECORDS_LIMIT = 4 * 2**20
"""Bytes that are read of the records of one run."""
_CHUNK = 65536


class NoIsolation(RewardError):
    """The system does not isolate, and nobody said that this is enough."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
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
    """What the supervisor and the judge sent, see `code_child` and `code_judge`."""


def run_python(
    source: str,
    *,
    setup: str = "",
    tests: list[dict[str, Any]] | None = None,
    stdin: str = "",
    limits: SandboxLimits | None = None,
    isolation: str = "auto",
    packages: bool = False,
) -> Run:
    """Run a program, or a module and tests of it, in the sandbox.

    Args:
        source: Python source.
        setup: source that is put before it; tests see its functions and plain values as it made them.
        tests: None runs the source as a program; else each is {"assert": source} or
            {"call": name, "args": [], "kwargs": {}}, run in a process that never meets the code.
        stdin: what the program reads.
        limits: the defaults of `SandboxLimits` when None.
        isolation: "auto" and "namespaces" have the kernel isolate, and refuse where it does not; "process"
            does without.
        packages: whether installed packages can be imported (slower start, weaker audit hook: ctypes opens).

    Returns:
        The run. What the code does is never an exception.

    Raises:
        ValueError: unknown isolation.
        RewardError: the system has no resource limits (Windows), or refuses namespaces.
    """
    if isolation not in ISOLATIONS:
        raise ValueError(f"isolation is {isolation!r}; allowed are {', '.join(ISOLATIONS)}.")
    if os.name != "posix":
        raise RewardError("The code sandbox needs Linux or macOS: Windows has no resource limits. Use WSL.")
    limits = limits or SandboxLimits()
    with tempfile.TemporaryDirectory(prefix="sandbox", ignore_cleanup_errors=True) as place:
        os.chmod(place, 0o755)
        base = os.path.realpath(place)
        folder, root = os.path.join(base, "work"), os.path.join(base, "root")
        for path, mode in ((folder, 0o777), (root, 0o755)):
            os.mkdir(path)
            os.chmod(path, mode)
        config = {
            "source": f"{setup}\n{source}" if setup else source,
            "tested": tests is not None,
            "folder": folder,
            "root": root,
            "parent": os.getpid(),
            "limits": asdict(limits),
            "isolation": "process" if isolation == "process" else "namespaces",
            "packages": packages,
        }
        run = _run(config, [setup, tests], stdin, limits)
    _say_isolation(run)
    return run


def _say_isolation(run: Run) -> None:
    """Refuse where nothing isolates; warn where only limits and an audit hook do."""
    if refused := _first(run.records, "refused"):
        raise NoIsolation(
            f"The code sandbox cannot isolate here ({refused}), so it runs nothing. Permit user namespaces "
            "(kernel setting, container option) or run in a virtual machine; isolation='process' does "
            "without, for code that you trust."
        )
    if run.isolation == "process":
        as_root = ", and it runs as root" if _first(run.records, "root") else ""
        warnings.warn(
            f"The code sandbox runs code with isolation='process'{as_root}: limits and an audit hook, which "
            "code that means harm gets around. isolation='namespaces' has the kernel isolate.",
            stacklevel=3,
        )


def _run(config: dict[str, Any], tests: Any, stdin: str, limits: SandboxLimits) -> Run:
    """Start the supervisor, read its pipes until all has ended, and see that nothing is left."""
    folder, flags = config["folder"], ["-s", "-P", "-B"] if config["packages"] else ["-s", "-S", "-P", "-B"]
    read_end, write_end = os.pipe()
    records = open(read_end, "rb", buffering=0)
    with records, _file(json.dumps(config)) as task, _file(json.dumps(tests)) as asked, _file(stdin) as given:
        passed = (task.fileno(), write_end, asked.fileno())
        try:
            popen = subprocess.Popen(
                [sys.executable, *flags, str(CHILD), *map(str, passed)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=passed,
                cwd=folder,
                env={"HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
                start_new_session=True,
            )
        except OSError as error:
            raise RewardError(f"The code sandbox cannot start {sys.executable}: {error}.") from error
        finally:
            os.close(write_end)
        streams = {"records": (records, RECORDS_LIMIT)}
        streams |= {name: (getattr(popen, name), limits.output_bytes) for name in ("stdout", "stderr")}
        with popen:
            try:
                seconds = limits.start_seconds + limits.wall_seconds
                kept, cut = _read(streams, seconds, b'\n{"ended"')
            finally:  # the supervisor has gone by itself, or cannot be relied on
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(popen.pid, signal.SIGKILL)
    said = _records(bytes(kept["records"]))
    stdout, stderr = (kept[name].decode("utf-8", "replace") for name in ("stdout", "stderr"))
    is_ready, exit_code = _first(said, "ready"), _first(said, "ended")
    return Run(
        failure=None
        if is_ready
        else f"the sandbox did not start: {stderr.strip()[-300:] or 'no word from it'}",
        isolation=_first(said, "isolation") or "",
        timed_out=bool(is_ready) and exit_code is None,
        exit_code=exit_code,
        stdout=stdout,
        stdout_cut="stdout" in cut,
        stderr=stderr,
        records=said,
    )


def _file(text: str) -> IO[bytes]:
    file = tempfile.TemporaryFile()
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file


def _read(
    streams: Mapping[str, tuple[Any, int]], seconds: float, last: bytes
) -> tuple[dict[str, bytearray], set[str]]:
    """What is kept of each stream, and which were cut; until their ends, or soon after the last record."""
    kept = {name: bytearray() for name in streams}
    cut: set[str] = set()
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for name, (stream, _) in streams.items():
            selector.register(stream, selectors.EVENT_READ, name)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    selector.unregister(key.fileobj)
                space = streams[key.data][1] - len(kept[key.data])
                kept[key.data] += chunk[:space]
                cut |= {key.data} if len(chunk) > space else set()
                if key.data == "records" and last in kept["records"]:
                    deadline = min(deadline, time.monotonic() + 1.0)
    return kept, cut


def _records(raw: bytes) -> list[dict[str, Any]]:
    """The records of the lines; the last may be cut."""
    records = []
    for line in raw.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return records


def _first(records: list[dict[str, Any]], key: str) -> Any:
    return next((record[key] for record in records if key in record), None)
