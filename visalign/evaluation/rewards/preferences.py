# SPDX-License-Identifier: Apache-2.0
"""A judge on a preference set: every number of the report with its interval, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visalign.data.sets.records import PreferenceSet
from visalign.evaluation.statistics.agreement import HEADLINE, POLICIES, best_tie_threshold, credits_of
from visalign.evaluation.statistics.calibration import brier, nll
from visalign.evaluation.statistics.generator_control import GeneratorControl, generator_control
from visalign.evaluation.statistics.intervals import RatioTable

from .certainty import calibration_numbers, finite, selective_numbers, std_numbers
from .judged_pairs import IntervalSettings, JudgedPairs, judged_pairs
from .pair_scores import PairScores, swap_consistency
from .people import people_numbers
from .slices import Slice, pair_slices

Array = NDArray[np.float64]

WITHOUT_TIES = "imscore_dropped"
"""The policy that leaves out predicted ties."""


def evaluate_preferences(
    pairs: PreferenceSet, scores: PairScores, settings: IntervalSettings | None = None
) -> dict[str, Any]:
    """All numbers of one judge on one set; what it could not judge is left out everywhere, and counted.

    Scores stand in the order of the pairs. JSON-able: `judge`, `counts`, `agreement` (policy -> micro,
    macro), `calibration`, `selective`, `std`, `slices`, `generators`, `swap`, `people`, `notes`. What the
    data do not allow is None.
    """
    settings = settings or IntervalSettings()
    judged = judged_pairs(pairs, scores)
    control = generator_control(
        [pair.generator_left for pair in judged.pairs],
        [pair.generator_right for pair in judged.pairs],
        judged.label,
        judged.index,
    )
    thresholds = _thresholds(judged)
    slices = [
        Slice(kind=part.kind, name=part.name, rows=part.rows[judged.rows]) for part in pair_slices(pairs)
    ]
    table = RatioTable(judged.index, judged.clusters)
    _add_agreement(table, judged, thresholds)
    _add_slices(table, judged, slices)
    _add_control(table, judged, control)
    _add_calibration(table, judged)
    found = table.intervals(**settings.drawing(), level=settings.level)
    report = {
        "kind": "preferences",
        "judge": {"name": scores.name, "unit": scores.unit, "gives_std": scores.std is not None},
        "counts": _counts(pairs, scores, judged),
        "agreement": _agreement(found, judged, thresholds),
        "calibration": calibration_numbers(
            judged,
            settings,
            mean_nll=found["calibration", "nll"],
            mean_brier=found["calibration", "brier"],
            reading=scores.reading,
        ),
        "selective": selective_numbers(judged, settings),
        "std": std_numbers(judged, settings),
        "slices": _slice_rows(found, slices),
        "generators": _generators(found, judged, control),
        "swap": swap_consistency(scores),
        "people": people_numbers(judged, settings),
        "level": settings.level,
    }
    return report | {"notes": _notes(report)}


def headline_credit(scores: PairScores, label: Array) -> Array:
    """[N] credit under the headline's policy; NaN where the judge failed or people tied."""
    found = np.full(len(scores), np.nan)
    known = scores.judged & (label != 0.5)
    found[known] = credits_of(HEADLINE, scores.margin[known], label[known])[0]
    return found


def _thresholds(judged: JudgedPairs) -> dict[str, float]:
    """Tie thresholds tuned on the set itself; 0 where people tied nothing."""
    if not (judged.label == 0.5).any():
        return {}
    return {
        "PickScore": best_tie_threshold(judged.margin, judged.label, half=True),
        "VisionReward_tau": best_tie_threshold(judged.margin, judged.label),
    }


def _add_agreement(table: RatioTable, judged: JudgedPairs, thresholds: dict[str, float]) -> None:
    for policy in POLICIES:
        credit, count = credits_of(policy, judged.margin, judged.label, thresholds.get(policy, 0.0))
        table.add(("micro", policy), credit, count)
        table.add_macro(("macro", policy), credit, count)


def _add_slices(table: RatioTable, judged: JudgedPairs, slices: Sequence[Slice]) -> None:
    credit, count = credits_of(HEADLINE, judged.margin, judged.label)
    for part in slices:
        table.add((part.kind, part.name), credit * part.rows, count * part.rows)


def _add_control(table: RatioTable, judged: JudgedPairs, control: GeneratorControl) -> None:
    credit, count = credits_of(HEADLINE, judged.margin, judged.label)
    cross = control.known & ~control.same & np.isfinite(control.identity_margin)
    alone, of = credits_of(HEADLINE, np.where(cross, control.identity_margin, 0.0), judged.label)
    against = control.against(judged.label)
    for name, own, all_of, rows in (
        ("identity_alone", alone, of, cross),
        ("judge_between", credit, count, cross),
        ("judge_within", credit, count, control.same),
        ("judge_against", credit, count, against),
    ):
        table.add(("control", name), own * rows, all_of * rows)


def _add_calibration(table: RatioTable, judged: JudgedPairs) -> None:
    ones = np.ones_like(judged.prob)
    table.add(("calibration", "nll"), nll(judged.prob, judged.label), ones, share=False)
    table.add(("calibration", "brier"), brier(judged.prob, judged.label), ones, share=False)


def _counts(pairs: PreferenceSet, scores: PairScores, judged: JudgedPairs) -> dict[str, Any]:
    return {
        "pairs": len(pairs),
        "judged": len(judged.pairs),
        "failed": len(pairs) - len(judged.pairs),
        "failures": scores.failures(),
        "prompts": judged.clusters,
        "label_ties": int((judged.label == 0.5).sum()),
        "predicted_ties": int((judged.margin == 0).sum()),
    }


def _agreement(found: dict[Any, Any], judged: JudgedPairs, thresholds: dict[str, float]) -> dict[str, Any]:
    rows = {}
    for policy, about in POLICIES.items():
        threshold = thresholds.get(policy, 0.0)
        _, count = credits_of(policy, judged.margin, judged.label, threshold)
        rows[policy] = {
            "micro": found["micro", policy].to_dict(),
            "macro": found["macro", policy].to_dict(),
            "pairs": int(count.sum()),
            "threshold": threshold,
            "meaning": about.meaning,
        }
    return rows


def _slice_rows(found: dict[Any, Any], slices: Sequence[Slice]) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for part in slices:
        number = found[part.kind, part.name]
        rows.setdefault(part.kind, []).append(
            {"name": part.name, "pairs": int(part.rows.sum()), "accuracy": number.to_dict()}
        )
    return rows


def _generators(
    found: dict[Any, Any], judged: JudgedPairs, control: GeneratorControl
) -> dict[str, Any] | None:
    if not control.known.any():
        return None
    counts = {
        "identity_alone": control.known & ~control.same,
        "judge_between": control.known & ~control.same,
        "judge_within": control.same,
        "judge_against": control.against(judged.label),
    }
    order = sorted(control.strength.items(), key=lambda item: -item[1])
    return {
        **{
            name: found["control", name].to_dict() | {"pairs": int(rows.sum())}
            for name, rows in counts.items()
        },
        "judge_follows": finite(control.follows(judged.margin)),
        "strength": {name: round(value, 4) for name, value in order},
    }


def _notes(report: dict[str, Any]) -> list[str]:
    """Warnings that follow from the numbers of `evaluate_preferences`; none where nothing is wrong."""
    found = []
    counts, headline = report["counts"], report["agreement"][HEADLINE]["micro"]
    if counts["failed"]:
        share = counts["failed"] / counts["pairs"]
        found.append(
            f"{counts['failed']} of {counts['pairs']} pairs ({share:.1%}) could not be judged; they count "
            "nowhere."
        )
    if counts["judged"] and report["agreement"][WITHOUT_TIES]["micro"]["estimate"] is None:
        found.append(
            "The judge gives both images of every pair the same score: it tells none apart, and numbers that "
            "forgive ties say nothing of it."
        )
    if headline["high"] is not None and headline["high"] < 0.5:
        found.append(
            "The judge disagrees with people more often than chance: if lower is better for its scores, "
            "say so (--lower-is-better)."
        )
    control = report["generators"]
    if control:
        found += _control_notes(control)
    return found


def _control_notes(control: dict[str, Any]) -> list[str]:
    alone, judge = control["identity_alone"], control["judge_between"]
    within, against = control["judge_within"], control["judge_against"]
    found = []
    if alone["estimate"] is not None and judge["low"] is not None and alone["estimate"] >= judge["low"]:
        evidence = [
            f"{part['estimate']:.1%} of {part['pairs']} {what}"
            for part, what in (
                (within, "pairs of one generator"),
                (against, "pairs decided against the usual order"),
            )
            if part["estimate"] is not None
        ]
        rest = f" What it sees beyond that: it is right in {' and '.join(evidence)}." if evidence else ""
        found.append(
            f"The names of the generators alone predict {alone['estimate']:.1%} of the votes between "
            f"generators, the judge {judge['estimate']:.1%}: those pairs cannot tell a judge of images "
            f"from a detector of generators.{rest}"
        )
    if not within["pairs"] and not against["pairs"]:
        found.append(
            "No pair is of one generator, and none was decided against the usual order of the generators: "
            "the set cannot show that a judge looks at more than the generator."
        )
    return found
