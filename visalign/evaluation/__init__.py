# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation: paired sampling, verdicts, intervals, the report."""

from .comparison import Comparison, compare
from .curves import CURVES, Curve
from .heldout import evaluate
from .intervals import Interval, paired_bootstrap, wilson_interval
from .judge import check_judge
from .report import write_report, write_summary
from .result import HeldoutResult, load_heldout

__all__ = [
    "CURVES",
    "Comparison",
    "Curve",
    "HeldoutResult",
    "Interval",
    "check_judge",
    "compare",
    "evaluate",
    "load_heldout",
    "paired_bootstrap",
    "wilson_interval",
    "write_report",
    "write_summary",
]
