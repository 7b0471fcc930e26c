# SPDX-License-Identifier: Apache-2.0
"""Phase times and memory of the process; which setting bounds the memory that ran out."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from visalign.errors import UserError
from visalign.memory import LESS_MEMORY


def end_processes() -> None:
    """Leave the process group, if there is one; call it last, before the interpreter ends.

    A gloo thread may still hold the last collective's tensor. If it releases it while the interpreter shuts
    down, the process aborts ("terminate called without an active exception"), and DistributedDataParallel
    keeps these threads alive when the group is destroyed (PyTorch 2.14). Hence the pause.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        time.sleep(0.5)


def peak_memory_bytes() -> dict[str, int]:
    """Return the peak memory of this process: resident `host` and, if a GPU was used, allocated `cuda` memory."""
    peak = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB elsewhere
        peak["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if torch.cuda.is_available() and (allocated := torch.cuda.max_memory_allocated()):
        peak["cuda"] = allocated
    return peak


def is_out_of_memory(error: BaseException) -> bool:
    """Return True where a device, or torch's CPU allocator, ran out of memory."""
    is_named = isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(is_named)


_NO_MEMORY = re.compile("DefaultCPUAllocator|out of memory|CUBLAS_STATUS_ALLOC_FAILED")


class PhaseClock:
    """Seconds per named phase of an iteration; with CUDA a phase ends when its kernels have finished.

    >>> clock = PhaseClock()
    >>> with clock.phase("rollout"):
    ...     pass
    >>> sorted(clock.take())
    ['rollout', 'total']
    """

    out_of_memory: str | None = None  # Innermost phase in which memory ran out

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
        """Return seconds per phase and `total` since the last call, and start over."""
        now = self._now()
        taken = {**self._seconds, "total": now - self._begin}
        self._seconds, self._begin = {}, now
        return taken

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


BOUNDS = {
    "rollout": ("while sampling", ("rollout.batch_size", "model.generate_batch")),
    "decode": ("while decoding or encoding images", ("model.decode_batch",)),
    "replay": ("while recomputing log-probs", ("model.score_batch", "optimizer.micro_batch")),
    "update": ("in an update", ("optimizer.micro_batch", "data.micro_batch")),
    "evaluation": ("in an evaluation", ("evaluation.batch_size", "evaluation.batch", "model.generate_batch")),
}
"""Phase -> (when that is, settings that bound its memory, of which the first in the configuration counts)."""
_REQUEST = re.compile(r"tried to allocate [\d.]+ \w+", re.I)


class OutOfMemory(UserError):
    """Too much went through the network together."""


@contextmanager
def explain_out_of_memory(clock: PhaseClock, values: Mapping[str, Any], free: Collection[str]) -> Iterator[None]:
    """Raise `OutOfMemory` with the setting that bounds the memory which ran out in the block, if one does.

    `values` are those of the settings in `BOUNDS`; keys in `free` may differ on resume.
    """
    clock.out_of_memory = None
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        when, keys = BOUNDS.get(clock.out_of_memory or "", ("", ()))
        key = next((key for key in keys if key in values), None)
        if key is None or not is_out_of_memory(error):
            raise
        request = _REQUEST.search(str(error))
        text = f"Out of memory {when}{f' ({request[0]})' if request else ''}. {key} is "
        if values[key] == 1:
            raise OutOfMemory(f"{text}1 already. {LESS_MEMORY}") from error
        current, lower = (values[key], values[key] // 2) if values[key] else ("null, the model's own number", 1)
        harmless, again = "", "and another --output: a run is resumed with the value that it started with."
        if key in free:
            harmless = " It bounds memory only: samples and updates stay the same."
            again = "and --resume: it continues from the last checkpoint, or starts where there is none."
        raise OutOfMemory(
            f"{text}{current}.{harmless} Start the same command again with {key}={lower} {again}"
        ) from error
