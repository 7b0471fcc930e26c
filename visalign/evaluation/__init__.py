# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation: paired sampling, intervals, the terminal table, the report."""

from .comparison import Comparison, compare
from .curves import CURVES, Curve
from .heldout import evaluate
from .intervals import Interval, paired_bootstrap, wilson_interval
from .report import write_report, write_summary
from .result import HeldoutResult, load_heldout
from .table import render_table

__all__ = [
    "CURVES",
    "Comparison",
    "Curve",
    "HeldoutResult",
    "Interval",
    "compare",
    "evaluate",
    "load_heldout",
    "paired_bootstrap",
    "render_table",
    "wilson_interval",
    "write_report",
    "write_summary",
]
