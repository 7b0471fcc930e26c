# SPDX-License-Identifier: Apache-2.0
"""Programs of unknown origin, run by bubblewrap (`bwrap`) or by a sandbox server.

bubblewrap runs a program without network, without sight of other processes and as nobody; it sees Python and
the system's libraries read-only and one empty folder in memory. All of it is killed with the run. Where
neither bubblewrap nor a server works, nothing is run.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from visalign.rewards.base.contract import RewardError
from visalign.rewards.text.contract import shortened

_BASE_PYTHON: str = vars(sys)["_base_executable"]
"""The interpreter behind a virtual environment."""


class NoSandbox(RewardError):
    """Neither bubblewrap nor a sandbox server runs here."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one run; bubblewrap enforces all, a server the first and the third."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 10  # Per process
    memory_mb: int = 512  # Address space per process in MiB
    processes: int = 16  # Processes and threads at the same time
    file_mb: int = 16  # Size of the folder, and of what is printed, in MiB
    output_bytes: int = 65536  # Longest output that can pass a test


class Run(NamedTuple):
    stdout: str
    stderr: str
    exit_code: int | None
    """None when it was killed for its time."""


def run_bubblewrap(source: str, stdin: str, *, limits: SandboxLimits, packages: bool = False) -> Run:
    """Run a Python program in bubblewrap; `RewardError` where it could not be started."""
    with tempfile.TemporaryDirectory(prefix="code_tests") as folder, ExitStack() as stack:
        os.chmod(folder, 0o711)
        program = Path(folder, "program.py")
        program.write_text(source, "utf-8", "surrogatepass")
        program.chmod(0o644)
        names = ("stdin", "stdout", "stderr", "status")
        files: Any = {name: stack.enter_context(open(Path(folder, name), "w+b")) for name in names}
        files["stdin"].write(stdin.encode("utf-8", "surrogatepass"))
        files["stdin"].seek(0)
        status = files.pop("status")
        command = _bubblewrap_command(program, status.fileno(), limits, packages)
        environment = {"HOME": "/tmp", "TMPDIR": "/tmp", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
        environment |= {"PYTHONPATH": "/packages"} if packages else {}
        options: Any = {"pass_fds": [status.fileno()], "env": environment, "timeout": limits.wall_seconds}
        try:
            # output goes to files, so that the limit of file sizes bounds it
            exit_code: int | None = subprocess.run(command, **options, **files).returncode
        except subprocess.TimeoutExpired:
            exit_code = None
        except OSError as error:
            raise RewardError(f"bubblewrap cannot be started: {error}") from error
        stdout, stderr = (Path(folder, name).read_bytes().decode("utf-8", "replace") for name in ("stdout", "stderr"))
        # bwrap reports an exit code only where it started the program
        if exit_code is not None and "exit-code" not in Path(folder, "status").read_text():
            raise RewardError(f"bubblewrap did not start the program: {stderr.strip()[-300:]}")
    return Run(stdout, stderr, exit_code)


def _bubblewrap_command(program: Path, status: int, limits: SandboxLimits, packages: bool) -> list[str]:
    bwrap, as_root = shutil.which("bwrap") or "bwrap", os.geteuid() == 0
    nobody = ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    isolation = [f"--unshare-{name}" for name in ("pid", "net", "ipc", "uts", "cgroup-try")]
    isolation += ["--die-with-parent", "--new-session", "--json-status-fd", str(status)]
    # Python is bound outside its own path, whose parents others than root may not be able to enter
    system = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
    folders = {**{path: path for path in system}, sys.base_prefix: "/python"}
    folders |= {sysconfig.get_path("purelib"): "/packages"} if packages else {}
    binds = [part for source, target in folders.items() for part in ("--ro-bind-try", source, target)]
    memory, file_size = (int(megabytes * (1 << 20)) for megabytes in (limits.memory_mb, limits.file_mb))
    files = ["--proc", "/proc", "--dev", "/dev", "--size", str(file_size), "--perms", "1777", "--tmpfs", "/tmp"]
    files += ["--ro-bind", str(program), "/program.py", "--remount-ro", "/", "--remount-ro", "/dev"]
    files += ["--chdir", "/tmp", "--"]
    command = [bwrap, *isolation, *([] if as_root else nobody), *binds, *files]
    if as_root:
        # the kernel exempts root from the limit of processes, so root becomes another user first
        command[1:1] = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        command += [shutil.which("setpriv") or "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        command += ["--no-new-privs", "--", bwrap, *nobody, "--die-with-parent", "--dev-bind", "/", "/", "--"]
    command += [shutil.which("prlimit") or "prlimit", f"--cpu={math.ceil(limits.cpu_seconds)}", "--core=0"]
    command += [f"--as={memory}", f"--fsize={file_size}", f"--nproc={int(limits.processes)}"]
    python = Path("/python", os.path.relpath(os.path.realpath(_BASE_PYTHON), sys.base_prefix))
    return [*command, str(python), "-s", "-P", "-B", *([] if packages else ["-S"]), "/program.py"]


@cache
def bubblewrap_problem() -> str:
    """Return why no code can be run on this machine and what to do; "" if bubblewrap works."""
    why = "" if shutil.which("bwrap") else "bwrap is not installed"
    if not why and os.name == "posix":
        try:
            run_bubblewrap("", "", limits=SandboxLimits(wall_seconds=60))
        except RewardError as error:
            why = str(error)
    return why and (
        f"Generated code runs in bubblewrap or on a sandbox server only, and here {why}. Install bubblewrap "
        "0.8 or later (apt-get install bubblewrap) on a Linux that permits user namespaces, or give the "
        "option url, the address of a SandboxFusion server such as http://HOST:8080/run_code."
    )


def run_server(url: str, source: str, stdin: str, *, limits: SandboxLimits) -> Run:
    """Run a Python program on a server with the protocol of SandboxFusion (POST /run_code)."""
    request = {"code": source, "language": "python", "stdin": stdin}
    bounds = {"run_timeout": limits.wall_seconds, "memory_limit_MB": limits.memory_mb}
    try:
        response = httpx.post(url, json=request | bounds, timeout=limits.wall_seconds + 30).raise_for_status().json()
        result = response.get("run_result") or {}
        if response.get("status") == "SandboxError" or not result:
            raise RewardError(f"the sandbox at {url} failed: {shortened(response.get('message'))}")
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        raise RewardError(f"the sandbox at {url} gave no result: {type(error).__name__}: {error}") from error
    exit_code = None if result.get("status") == "TimeLimitExceeded" else int(result.get("return_code") or 0)
    return Run(result.get("stdout") or "", result.get("stderr") or "", exit_code)
