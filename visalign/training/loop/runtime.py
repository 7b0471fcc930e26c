# SPDX-License-Identifier: Apache-2.0
"""The process a run lives in: phase times, memory."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed


def end_processes() -> None:
    """Leave the other processes, if there are any; to be called last, before the interpreter ends.

    A thread of gloo may still hold the last collective's tensor; where it lets go of it after the interpreter
    has begun to end, the process aborts ("terminate called without an active exception"), and
    DistributedDataParallel keeps the threads alive when the group is destroyed (PyTorch 2.14). So they get
    the time they need.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        time.sleep(0.5)


def peak_memory_bytes() -> dict[str, int]:
    """Largest memory of this process so far: resident `host` memory and, with CUDA, allocated `cuda`
    memory."""
    peak = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB elsewhere
        peak["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if torch.cuda.is_available():
        peak["cuda"] = torch.cuda.max_memory_allocated()
    return peak


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or torch's allocator on the CPU, had less memory than was asked for."""
    said = isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(said)


_NO_MEMORY = re.compile("DefaultCPUAllocator|out of memory|CUBLAS_STATUS_ALLOC_FAILED")


class PhaseClock:
    """Seconds per named phase of an iteration; with CUDA a phase ends when its kernels have.

    Example:
        >>> clock = PhaseClock()
        >>> with clock.phase("rollout"):
        ...     pass
        >>> sorted(clock.take())
        ['rollout', 'total']
    """

    out_of_memory: str | None = None
    """The innermost phase that memory ran out in."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._begin = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent in the block to `name`."""
        begin = self._now()
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if self.out_of_memory is None and is_out_of_memory(error):
                self.out_of_memory = name
            raise
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - begin

    def take(self) -> dict[str, float]:
        """Seconds per phase and `total` since the last call; starts over."""
        now = self._now()
        taken = {**self._seconds, "total": now - self._begin}
        self._seconds, self._begin = {}, now
        return taken

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()
