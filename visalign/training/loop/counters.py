# SPDX-License-Identifier: Apache-2.0
"""Optimizer counters of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progressed:
    """Optimizer counters of a run."""

    updates: int = 0
    skipped: int = 0
    checked: bool = False
    """Whether the ratio-is-one check of this process's life has been done."""
