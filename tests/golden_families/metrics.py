# SPDX-License-Identifier: Apache-2.0
"""Golden family of calibration, correlation and preference-set metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

from visalign.evaluation.statistics.agreement import credits_of, ranking_pairs
from visalign.evaluation.statistics.calibration import brier, nll, reliability
from visalign.evaluation.statistics.correlations import kendall, plcc, rmse, srcc
from visalign.evaluation.statistics.selective import BoundedRewards, ensemble_summary

Outputs = dict[str, Any]


def _array(case: Any, name: str) -> np.ndarray:
    return np.asarray(case.inputs[name], dtype=np.float64)


def _rate(policy: str, margin: np.ndarray, label: np.ndarray) -> float:
    credit, count = credits_of(policy, margin, label)
    return credit.sum() / count.sum()


def _bounds(case: Any) -> Outputs | None:
    rewards = _array(case, "rewards")
    if rewards.ndim != 3 or rewards.shape[1:] != (2, 3):
        return None
    mean, lower, upper = (rewards[:, :, k] for k in range(3))
    bounded = BoundedRewards(mean=mean, lower=lower, upper=upper)
    return bounded.statistics(bins=int(case.params.get("n_bins", 20)))


def _ensemble(case: Any) -> Outputs:
    return dict(ensemble_summary(_array(case, "members"), beta=float(case.params.get("beta", 2.0))))


def _correlations(case: Any) -> Outputs:
    x, y = _array(case, "x"), _array(case, "y")
    return {
        "srcc": srcc(x, y),
        "plcc": plcc(x, y),
        "kendall_b": kendall(x, y, "b"),
        "kendall_c": kendall(x, y, "c"),
        "ranks_x": stats.rankdata(x),
        "rmse": rmse(x, y),
    }


def _binary(case: Any) -> Outputs:
    p, y = _array(case, "prob"), _array(case, "label")
    found: Outputs = {
        "brier": float(brier(p, y).mean()),
        "nll": float(nll(p, y).mean()),
        "accuracy": float(np.mean((p > 0.5) == (y > 0.5))),
    }
    for key in case.expected:
        if key[:3] in ("ece", "mce") and key[3:].isdigit():
            found[key] = getattr(reliability(p, y, bins=int(key[3:])), key[:3])
    return found


def _ranking(case: Any) -> Outputs:
    prediction, truth = _array(case, "prediction"), _array(case, "ground_truth")
    margin, label = ranking_pairs(prediction, truth)
    as_ranks = ranking_pairs(prediction, -truth)
    credit, count = credits_of("calc_ImageReward", margin, label)
    untied = label != 0.5
    return {
        "inversion_score": _rate("inversion_score", margin, label),
        "calc_imagereward": _rate("calc_ImageReward", *as_ranks),
        "outputs_policies": {
            "pairs_total": len(margin),
            "pairs_gt_untied": int(count.sum()),
            "strict_correct": credit.sum(),
            "predicted_ties": float((untied & (margin == 0)).sum()),
            "half_credit_accuracy": _rate("half_credit", margin, label),
        },
    }


def _pickscore(case: Any) -> Outputs:
    p0, y = _array(case, "prob0"), _array(case, "label0")
    found = []
    for threshold in case.inputs["thresholds"]:
        credit, count = credits_of("PickScore", p0 - (1 - p0), y, float(threshold))
        found.append(credit.sum() / count.sum())
    return {"accuracy": found}


_BY_INPUTS: tuple[tuple[set[str], Callable[[Any], Outputs | None]], ...] = (
    ({"rewards"}, _bounds),
    ({"members"}, _ensemble),
    ({"x", "y"}, _correlations),
    ({"prob", "label"}, _binary),
    ({"prediction", "ground_truth"}, _ranking),
    ({"prob0", "label0", "thresholds"}, _pickscore),
)


def metrics(case: Any) -> Outputs | None:
    """Told apart by the inputs, whatever the case is called."""
    for names, function in _BY_INPUTS:
        if names <= set(case.inputs):
            return function(case)
    return None


FAMILIES = {"G_metrics": metrics}
