# SPDX-License-Identifier: Apache-2.0
"""The public names and the modules they come from; `__init__.py` reads them as type checkers do."""

from .heldout.comparison import Comparison as Comparison
from .heldout.comparison import compare as compare
from .heldout.correctness import check_judge as check_judge
from .heldout.images import evaluate as evaluate
from .heldout.result import HeldoutResult as HeldoutResult
from .heldout.result import joined as joined
from .heldout.result import load_heldout as load_heldout
from .pages.curves import CURVES as CURVES
from .pages.curves import Curve as Curve
from .pages.report import write_report as write_report
from .pages.report import write_summary as write_summary
from .rewards.comparison import compare_on_preferences as compare_on_preferences
from .rewards.comparison import compare_on_quality as compare_on_quality
from .rewards.judged_pairs import IntervalSettings as IntervalSettings
from .rewards.pair_scores import PairScores as PairScores
from .rewards.pair_scores import from_probabilities as from_probabilities
from .rewards.pair_scores import from_scores as from_scores
from .rewards.preferences import evaluate_preferences as evaluate_preferences
from .rewards.quality import QualityScores as QualityScores
from .rewards.quality import evaluate_quality as evaluate_quality
from .rewards.quality import from_values as from_values
from .statistics.intervals import Interval as Interval
from .statistics.intervals import paired_bootstrap as paired_bootstrap
from .statistics.intervals import wilson_interval as wilson_interval
