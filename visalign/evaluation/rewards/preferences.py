# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a reward on a preference set: every number of the report with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visalign.data.sets.records import PreferenceSet
from visalign.evaluation.statistics.agreement import HEADLINE, POLICIES, best_tie_threshold, policy_credit
from visalign.evaluation.statistics.calibration import brier, nll
from visalign.evaluation.statistics.intervals import RatioTable

from .certainty import calibration_numbers, selective_numbers, std_numbers
from .judged_pairs import IntervalSettings, JudgedPairs, judged_pairs
from .pair_scores import READINGS, PairScores, swap_consistency
from .people import people_numbers
from .rewardbench import benchmark_scores
from .slices import slice_masks

Array = NDArray[np.float64]


def evaluate_preferences(
    pairs: PreferenceSet, scores: PairScores, settings: IntervalSettings | None = None
) -> dict[str, Any]:
    """Compute all numbers of one reward on one set; pairs without a score are left out, and counted.

    Scores are in the order of the pairs. JSON-able: `judge`, `counts`, `agreement` (policy -> micro, macro),
    `calibration`, `selective`, `std`, `slices`, `ties` (of RewardBench 2), `swap`, `people`, `notes`. Undefined
    numbers are None. A ValueError says why no pair has a score.
    """
    settings = settings or IntervalSettings()
    judged = judged_pairs(pairs, scores)
    credits, ties = benchmark_scores(pairs.pairs, scores.margin)
    agreement, slices, losses = _accuracies(pairs, judged, settings, credits)
    report = {
        "kind": "preferences",
        "judge": {"name": scores.name, "unit": scores.unit, "gives_std": scores.std is not None},
        "counts": {
            "pairs": len(pairs),
            "judged": len(judged.pairs),
            "failed": len(pairs) - len(judged.pairs),
            "failures": scores.failures(),
            "prompts": judged.clusters,
            "label_ties": int((judged.label == 0.5).sum()),
            "predicted_ties": int((judged.margin == 0).sum()),
        },
        "agreement": agreement,
        "calibration": calibration_numbers(judged, settings, **losses, reading=READINGS[scores.link]),
        "selective": selective_numbers(judged, settings),
        "std": std_numbers(judged, settings),
        "slices": slices,
        "ties": ties,
        "swap": swap_consistency(scores),
        "people": people_numbers(judged, settings),
        "level": settings.level,
    }
    return report | {"notes": _notes(report)}


def _accuracies(
    pairs: PreferenceSet, judged: JudgedPairs, settings: IntervalSettings, credits: Mapping[str, Array]
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Return agreement by policy, accuracy by slice, and mean NLL and Brier score, from one set of draws."""
    thresholds = _thresholds(judged)
    masks = slice_masks(pairs.pairs, ("generator_left", "generator_right"))
    table, agreement, slices = RatioTable(judged.index, judged.clusters), {}, {}
    for policy, about in POLICIES.items():
        threshold = thresholds.get(policy, 0.0)
        credit, count = policy_credit(policy, judged.margin, judged.label, threshold)
        table.add(("micro", policy), credit, count)
        table.add(("macro", policy), credit, count, macro=True)
        agreement[policy] = {"pairs": int(count.sum()), "threshold": threshold, "meaning": about.meaning}
    credit, count = policy_credit(HEADLINE, judged.margin, judged.label)
    rows = judged.rows
    parts = {key: (credit * mask[rows], count * mask[rows], mask[rows]) for key, mask in masks.items()}
    parts |= {("best_of_n", name): (c[0, rows], c[1, rows], c[1, rows]) for name, c in credits.items()}
    for key, (part_credit, part_count, _) in parts.items():
        table.add(key, part_credit, part_count)
    for name, loss in (("mean_nll", nll), ("mean_brier", brier)):
        values = loss(judged.prob, judged.label)
        table.add(name, values, np.ones_like(values), share=False)
    numbers = table.intervals(**settings.drawing(), level=settings.level)
    for policy, entry in agreement.items():
        entry |= {kind: numbers[kind, policy].to_dict() for kind in ("micro", "macro")}
    for (kind, name), (*_, in_part) in parts.items():
        entry = {"name": name, "pairs": int(in_part.sum()), "accuracy": numbers[kind, name].to_dict()}
        slices.setdefault(kind, []).append(entry)
    return agreement, slices, {name: numbers[name] for name in ("mean_nll", "mean_brier")}


def headline_credit(scores: PairScores, label: Array) -> Array:
    """Return credit [N] under the headline's policy; NaN where the reward failed or people tied."""
    credit, valid = np.full(len(scores), np.nan), scores.judged & (label != 0.5)
    credit[valid] = policy_credit(HEADLINE, scores.margin[valid], label[valid])[0]
    return credit


def _thresholds(judged: JudgedPairs) -> dict[str, float]:
    """Return tie thresholds tuned on the set itself; none where people tied nothing."""
    if not (judged.label == 0.5).any():
        return {}
    return {
        "PickScore": best_tie_threshold(judged.margin, judged.label, half=True),
        "VisionReward_tau": best_tie_threshold(judged.margin, judged.label),
    }


def _notes(report: dict[str, Any]) -> list[str]:
    counts, headline = report["counts"], report["agreement"][HEADLINE]["micro"]
    notes = []
    if report["ties"] is not None:
        notes.append(
            "RewardBench 2: {:.3f} for questions with several right answers ({} of them).".format(*report["ties"])
        )
    if counts["failed"]:
        share = counts["failed"] / counts["pairs"]
        notes.append(f"{counts['failed']} of {counts['pairs']} pairs ({share:.1%}) have no score; they count nowhere.")
    if report["agreement"]["imscore_dropped"]["micro"]["estimate"] is None:  # of ties alone
        split = counts["label_ties"] == counts["judged"]
        notes.append(
            "People are split on every pair, so that there is no side to agree with: numbers that forgive ties say "
            "nothing about the reward."
            if split
            else "The reward gives both images the same score in every pair on which people prefer one: numbers "
            "that forgive ties say nothing about it."
        )
    if headline["high"] is not None and headline["high"] < 0.5:
        notes.append(
            "The reward disagrees with people more often than chance: check whether a lower score is better "
            "(--lower-is-better)."
        )
    return notes
