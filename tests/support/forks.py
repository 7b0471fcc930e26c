# SPDX-License-Identifier: Apache-2.0
"""Programs in forks of a server that has imported visalign: a new Python takes seconds to import it."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.support.training.processes", "visalign.pipelines.cli.app"])


class Fork:
    """`work` in a fork, with its own environment and session; `output` is the file of what it prints."""

    def __init__(self, work: Callable[..., object], *arguments: object, **environment: str) -> None:
        handle, name = tempfile.mkstemp()
        os.close(handle)
        self.output = Path(name)
        self.process = SERVER.Process(target=_run, args=(name, os.getcwd(), environment, work, arguments))
        self.process.start()
        self.pid = self.process.pid or 0

    def wait(self, seconds: float = 500) -> tuple[int | None, str]:
        """Exit status, None while it runs, and what it has printed."""
        self.process.join(seconds)
        return self.process.exitcode, self.output.read_text()


def in_fork(work: Callable[..., object], *arguments: object) -> str:
    """Do `work` in a fork to its end; return what it printed."""
    fork = Fork(work, *arguments)
    code, printed = fork.wait()
    fork.output.unlink()
    if code is None:  # a fork that hangs would be waited for at exit
        os.killpg(fork.pid, signal.SIGKILL)
    assert code == 0, printed[-3000:]
    return printed


def visalign(*arguments: str) -> None:
    """Run the command, as `python -m visalign` does."""
    sys.argv = ["visalign", *arguments]
    runpy.run_module("visalign", run_name="__main__", alter_sys=True)


def _run(
    output: str, folder: str, environment: dict[str, str], work: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    os.setsid()
    handle = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.chdir(folder)
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    torch.set_num_threads(1)
    work(*arguments)
