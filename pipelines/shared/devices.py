# SPDX-License-Identifier: Apache-2.0
"""Devices by name, and the hours that operations take on them under a stated assumption."""

from __future__ import annotations

from dataclasses import dataclass

UTILISATION = 0.35
"""Assumed: the share of the peak that matrix products of a training reach. Measure yours: `--dry-run`."""


@dataclass(frozen=True)
class Device:
    """What a vendor's data sheet says."""

    peak: float
    """Operations a second in dense bfloat16 with float32 sums."""
    memory: float
    """GB."""
    bandwidth: float
    """Bytes a second of its memory."""
    checked: bool = True
    """Whether peak and bandwidth were compared with the data sheet or a table that cites it."""


DEVICES = {
    "RTX 4090": Device(165e12, 24, 1008e9, checked=False),
    "L40S": Device(362e12, 48, 864e9),  # the sheet's 733 is with sparsity, as 1,979 and 4,500 below
    "A100 80 GB": Device(312e12, 80, 2039e9),
    "H100 SXM": Device(989e12, 80, 3350e9),
    "H200 SXM": Device(989e12, 141, 4800e9, checked=False),
    "B200": Device(2250e12, 180, 8000e9),
    "MI300X": Device(1307e12, 192, 5300e9, checked=False),
}
"""Those that are checked were compared with NVIDIA's sheets of the A100 (nvidia-1758950-r4), H100, L40S and
HGX B200 as published tables repeat them; the others are from memory."""
UNCHECKED = ", ".join(name for name, device in DEVICES.items() if not device.checked)


def hours_by_device(operations: float, memory: float) -> dict[str, float | str]:
    """Hours on one device of each kind, or that it does not fit."""
    found: dict[str, float | str] = {}
    for name, device in DEVICES.items():
        hours = operations / (device.peak * UTILISATION) / 3600
        fits = memory <= device.memory
        found[name] = hours if fits else f"{hours:.3g}, but {memory:.0f} GB do not fit {device.memory:.0f} GB"
    basis = f"{UTILISATION:.0%} of the data sheet's dense bfloat16 peak; no judging"
    return found | {"assumed": f"{basis}; the sheets of {UNCHECKED} were not looked up"}


def tokens_by_device(rows: int, read: float) -> dict[str, float | str]:
    """Tokens a second at most while a batch of completions grows, on one device of each kind.

    Args:
        rows: completions that grow together.
        read: bytes that a step reads: all weights, and the keys and values so far.
    """
    found: dict[str, float | str] = {n: rows * device.bandwidth / read for n, device in DEVICES.items()}
    basis = (
        "each step reads weights, keys and values once at the data sheet's bandwidth and does nothing else"
    )
    return found | {"assumed": f"{basis}; the sheets of {UNCHECKED} were not looked up"}
