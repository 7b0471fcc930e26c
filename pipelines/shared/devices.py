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


DEVICES = {
    "RTX 4090": Device(165e12, 24),
    "L40S": Device(362e12, 48),
    "A100 80 GB": Device(312e12, 80),
    "H100 SXM": Device(989e12, 80),
    "H200 SXM": Device(989e12, 141),
    "B200": Device(2250e12, 180),
    "MI300X": Device(1307e12, 192),
}


def hours_by_device(operations: float, memory: float) -> dict[str, float | str]:
    """Hours on one device of each kind, or that it does not fit.

    Args:
        operations: of the run, on each device.
        memory: GB that it needs.
    """
    found: dict[str, float | str] = {}
    for name, device in DEVICES.items():
        hours = operations / (device.peak * UTILISATION) / 3600
        fits = memory <= device.memory
        found[name] = hours if fits else f"{hours:.3g}, but {memory:.0f} GB do not fit {device.memory:.0f} GB"
    return found | {"assumed": f"{UTILISATION:.0%} of the data sheet's dense bfloat16 peak; no judging"}
