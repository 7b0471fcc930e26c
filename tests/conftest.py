# SPDX-License-Identifier: Apache-2.0
"""All tests run in one process per core; those named on the command line run in one process."""

from __future__ import annotations

import gc
import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: the processes are the parallelism
    os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # until all is imported: what then lives is never garbage, and scanning it costs a tenth


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes for `-n auto`, at most 8 as each takes up to 3 GB; 0 is this one alone."""
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a slow test first: a core is idle while the other's last file runs."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Collect only the tests' garbage."""
    gc.freeze()
    gc.enable()
