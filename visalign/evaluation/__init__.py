# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation: paired sampling, intervals, the report."""

from .heldout import evaluate
from .intervals import Interval, paired_bootstrap, wilson_interval
from .result import HeldoutResult, load_heldout

__all__ = [
    "HeldoutResult",
    "Interval",
    "evaluate",
    "load_heldout",
    "paired_bootstrap",
    "wilson_interval",
]
