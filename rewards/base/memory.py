# SPDX-License-Identifier: Apache-2.0
"""Memory of the machine, and the number of pixels that are decoded for it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from visalign.errors import UserError

BYTES_PER_PIXEL = 128  # Peak memory assumed of a judge; an image as three float64 channels alone takes 24
_LARGEST = 1 << 25
_VARIABLE = "VISALIGN_MAX_PIXELS"


def max_pixels() -> int:
    """Largest size of an image: VISALIGN_MAX_PIXELS, or a quarter of the memory and at most 2^25 pixels."""
    value = os.environ.get(_VARIABLE, "")
    if not value:
        return min(_LARGEST, machine_memory() // 4 // BYTES_PER_PIXEL)
    if not (value.isascii() and value.isdigit() and int(value)):
        raise UserError(f"{_VARIABLE} is {value!r}; it is a number of pixels, at least 1. Set or unset it.")
    return int(value)


@cache
def machine_memory() -> int:
    """Bytes of the machine, or those that a control group leaves of it."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a Unix
        total = 8 << 30
    return min(total, _of_group("memory.max", total))


def free_memory() -> int:
    """Bytes that a new process may take without making others swap, as the kernel reckons."""
    total = machine_memory()
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        free = total // 2
    return min(free, max(0, _of_group("memory.max", total) - _of_group("memory.current", 0)))


def _of_group(name: str, otherwise: int) -> int:
    try:
        value = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return otherwise
    return int(value) if value.isdigit() else otherwise
