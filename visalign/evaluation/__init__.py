# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a model, and of rewards on preference and quality sets, with intervals and pages.

It needs what was sampled or judged, handed in; no model and no judge is loaded here.
"""

from visalign.evaluation.heldout.comparison import Comparison, compare
from visalign.evaluation.heldout.correctness import check_judge
from visalign.evaluation.heldout.images import evaluate
from visalign.evaluation.heldout.result import HeldoutResult, joined, load_heldout
from visalign.evaluation.pages.curves import CURVES, Curve
from visalign.evaluation.pages.report import write_report, write_summary
from visalign.evaluation.rewards.comparison import compare_on_preferences, compare_on_quality
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.evaluation.rewards.pair_scores import PairScores, from_probabilities, from_scores
from visalign.evaluation.rewards.preferences import evaluate_preferences
from visalign.evaluation.rewards.quality import QualityScores, evaluate_quality, from_values
from visalign.evaluation.statistics.intervals import Interval, paired_bootstrap, wilson_interval

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
    "joined",
    "load_heldout",
    "paired_bootstrap",
    "wilson_interval",
    "write_report",
    "write_summary",
]
