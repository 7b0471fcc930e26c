# SPDX-License-Identifier: Apache-2.0
"""The whole of the tests runs in one process a core, what is named on the command line in one process."""

from __future__ import annotations

import gc
import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: the processes are the parallelism
    os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # until all is imported: what then lives is never garbage, and to look through it costs a tenth


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes for `-n auto`, at most 8 as each takes up to 3 GB; 0 is this one alone."""
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a test that is slow first: a core is idle while the last file of the other runs."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Collect garbage of the tests alone."""
    gc.freeze()
    gc.enable()
