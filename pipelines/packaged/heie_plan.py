# SPDX-License-Identifier: Apache-2.0
"""What a HEIE training run can be told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HeiePlan:
    """Sizes of a training; the defaults made `shapes-heie`."""

    pictures: int = 3000
    """For training."""
    steps: int = 800
    batch: int = 32
    width: int = 64
    """Of the heads; 64 stays below 0.3 MB in float16."""
    tiles: int = 2
    """n of n × n; 1 for none."""
    test: int = 600
    """Held-out pictures that the card is measured on."""
    seed: int = 6
