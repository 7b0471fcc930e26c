# SPDX-License-Identifier: Apache-2.0
"""Golden family of calibration, correlation and preference-set metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from tests.golden_families import Outputs, Row, family
from visalign.evaluation.statistics.agreement import policy_credit
from visalign.evaluation.statistics.calibration import both_sides, brier, nll, reliability
from visalign.evaluation.statistics.correlations import kendall, plcc, rmse, srcc


def _array(case: Any, name: str) -> np.ndarray:
    return np.asarray(case.inputs[name], dtype=np.float64)


def _rate(policy: str, margin: np.ndarray, label: np.ndarray) -> float:
    credit, count = policy_credit(policy, margin, label)
    return credit.sum() / count.sum()


def _bounds(case: Any) -> Outputs | None:
    """Calibration of rewards [N, 2] with lower and upper bounds, and how often the two intervals part."""
    rewards = _array(case, "rewards")
    if rewards.ndim != 3 or rewards.shape[1:] != (2, 3):
        return None
    (mean, lower, upper), bins = np.moveaxis(rewards, 2, 0), int(case.params.get("n_bins", 20))
    gaps = (mean[:, 0] - mean[:, 1], lower[:, 0] - upper[:, 1], upper[:, 0] - lower[:, 1])
    point, low, high = (1 / (1 + np.exp(-gap)) for gap in gaps)
    p, y = both_sides(point, np.ones_like(point))
    curve = reliability(p, y, bins=bins)
    below = _one_sided(reliability(np.concatenate([low, 1 - high]), y, bins=bins), -1)
    above = _one_sided(reliability(np.concatenate([high, 1 - low]), y, bins=bins), 1)
    right = float(np.mean(mean[:, 0] > mean[:, 1]))
    sure = [float(np.mean(lower[:, k] > upper[:, 1 - k])) for k in (0, 1)]
    outputs = {"win_rate": right, "ece": curve.ece, "mce": curve.mce, "brier_score": float(brier(p, y).mean())}
    outputs |= {"elce": below[0], "mlce": below[1], "euce": above[0], "muce": above[1]}
    outputs |= {"confident_true_rate": sure[0], "confident_false_rate": sure[1]}
    outputs |= {"unconfident_true_rate": right - sure[0], "unconfident_false_rate": 1 - right - sure[1]}
    for beta in (0.0, 0.01, 0.2, 1.0):
        weights = [(1 - beta) * share + beta for share in (right, 1 - right)]
        parts = [part / weight if weight else 0.0 for part, weight in zip(sure, weights, strict=True)]
        outputs[f"ranking/{beta}"] = parts[0] - parts[1]
    return outputs


def _one_sided(curve: Any, sign: int) -> tuple[float, float]:
    gap = np.maximum(sign * curve.gap, 0.0)
    return float(np.nansum(curve.count * gap) / curve.count.sum()), float(np.nanmax(gap))


def _ensemble(case: Any) -> Outputs:
    members, beta = _array(case, "members"), float(case.params.get("beta", 2.0))
    mean, std = members.mean(1), members.std(1, ddof=1)
    outputs = {"mean": mean, "std": std, "lower": mean - beta * std, "upper": mean + beta * std}
    outputs |= {"min": members.min(1), "max": members.max(1)}
    return outputs | {"median": np.sort(members, axis=1)[:, (members.shape[1] - 1) // 2]}


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
    outputs: Outputs = {
        "brier": float(brier(p, y).mean()),
        "nll": float(nll(p, y).mean()),
        "accuracy": float(np.mean((p > 0.5) == (y > 0.5))),
    }
    for key in case.expected:
        if key[:3] in ("ece", "mce") and key[3:].isdigit():
            outputs[key] = getattr(reliability(p, y, bins=int(key[3:])), key[:3])
    return outputs


def _ranking_pairs(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    i, j = np.triu_indices(len(scores), k=1)
    return scores[i] - scores[j], (np.sign(truth[i] - truth[j]) + 1) / 2


def _ranking(case: Any) -> Outputs:
    prediction, truth = _array(case, "prediction"), _array(case, "ground_truth")
    margin, label = _ranking_pairs(prediction, truth)
    as_ranks = _ranking_pairs(prediction, -truth)
    credit, count = policy_credit("calc_ImageReward", margin, label)
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
    accuracies = []
    for threshold in case.inputs["thresholds"]:
        credit, count = policy_credit("PickScore", p0 - (1 - p0), y, float(threshold))
        accuracies.append(credit.sum() / count.sum())
    return {"accuracy": accuracies}


METRICS: tuple[Row, ...] = (
    (".*", _bounds, (), ("rewards",)),
    (".*", _ensemble, (), ("members",)),
    (".*", _correlations, (), ("x", "y")),
    (".*", _binary, (), ("prob", "label")),
    (".*", _ranking, (), ("prediction", "ground_truth")),
    (".*", _pickscore, (), ("prob0", "label0", "thresholds")),
)
FAMILIES = {"G_metrics": family(METRICS)}
