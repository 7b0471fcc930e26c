# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a model, and of rewards on preference and quality sets, with intervals and pages."""

from .comparison import Comparison, compare
from .curves import CURVES, Curve
from .heldout import evaluate
from .intervals import Interval, paired_bootstrap, wilson_interval
from .judge import check_judge
from .judged_pairs import IntervalSettings
from .pair_scores import PairScores, from_probabilities, from_scores
from .preference_evaluation import evaluate_preferences
from .quality_evaluation import QualityScores, evaluate_quality, from_values
from .report import write_report, write_summary
from .result import HeldoutResult, load_heldout
from .reward_comparison import compare_on_preferences, compare_on_quality

__all__ = [
    "CURVES",
    "Comparison",
    "Curve",
    "HeldoutResult",
    "Interval",
    "IntervalSettings",
    "PairScores",
    "QualityScores",
    "check_judge",
    "compare",
    "compare_on_preferences",
    "compare_on_quality",
    "evaluate",
    "evaluate_preferences",
    "evaluate_quality",
    "from_probabilities",
    "from_scores",
    "from_values",
    "load_heldout",
    "paired_bootstrap",
    "wilson_interval",
    "write_report",
    "write_summary",
]
