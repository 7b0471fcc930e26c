# SPDX-License-Identifier: Apache-2.0
"""Timing, results and turns of the GPU measurements."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, ".")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PEAK = 989e12
SCRATCH = Path(os.environ.get("BENCH_SCRATCH", tempfile.gettempdir()))
RESULTS = os.environ.get("BENCH_RESULTS")
BEGIN = time.time()


def sync():
    if CUDA:
        torch.cuda.synchronize()


def emit(**row):
    """Print a row as JSON, and append it to the file of results."""
    row = {k: (float(f"{v:.5g}") if isinstance(v, float) else v) for k, v in row.items()} | {
        "at": round(time.time() - BEGIN, 1)
    }
    line = json.dumps(row)
    print(line, flush=True)
    if RESULTS:
        with open(RESULTS, "a") as file:
            file.write(line + "\n")


def end_after(seconds):
    """End this process by then, whatever it does."""
    signal.alarm(int(seconds))


@contextmanager
def alone():
    """Inside, no other of these processes times anything."""
    with open(SCRATCH / "turn.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            sync()
            fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def attempt(name):
    """Report a failure and go on."""
    try:
        yield
    except Exception as error:  # a benchmark goes on with its next row
        emit(failed=name, error=type(error).__name__, message=str(error)[:600])


def free():
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def timed(function, *, warm=2, count=5):
    """Median milliseconds of a call."""
    for _ in range(warm):
        function()
    sync()
    times = []
    for _ in range(count):
        if CUDA:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            t = time.perf_counter()
            function()
            times.append((time.perf_counter() - t) * 1e3)
    return statistics.median(times)


@contextmanager
def peak():
    """A dictionary that holds GB at most (`gib`) and beyond what was held before (`more_mib`) afterwards."""
    found = {"gib": 0.0, "more_mib": 0.0}
    if not CUDA:
        yield found
        return
    sync()
    free()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield found
    sync()
    most = torch.cuda.max_memory_allocated()
    found.update(gib=round(most / 2**30, 2), more_mib=round((most - before) / 2**20, 1))


def kernels(function, most=14):
    """Milliseconds of GPU kernels by name, the longest first."""
    if not CUDA:
        return []
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        function()
        sync()
    found = {}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = found.setdefault(event.name, [0.0, 0])
            entry[0] += event.device_time / 1e3
            entry[1] += 1
    rows = sorted(found.items(), key=lambda item: -item[1][0])[:most]
    return [(name[:110], round(ms, 2), n) for name, (ms, n) in rows], round(sum(v[0] for v in found.values()), 1)
