# SPDX-License-Identifier: Apache-2.0
"""How a reward answered a probe: mean response with its interval at each level, and a verdict.

With v the score of a sample, v′ the score after the change, s the standard deviation of v over the reference
samples, and d = ±1 the reward's direction, the response of a sample is r = d (v′ − v) / s: what an optimizer
gains by the change, in units in which good and bad images of the reference differ.

A judge that compares has no scores, but the log-odds ℓ(a, b) of a over b, the mean of both orders. Were they
differences of scores (Bradley-Terry), their root mean square over pairs of reference images would be √2
standard deviations of those scores: so s = √(mean ℓ² / 2), r = ℓ(changed, unchanged) / s, and the same limits
hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from visalign.evaluation.statistics.intervals import wilson_interval

from .catalogue import Probe

GAIN = 0.1
"""Spreads by which a score may rise on average where it should not."""
MOVE = 0.2
"""Spreads by which scores may move on average, either way, where they should stay."""
SAME = 0.02
"""Spreads by which any single score may differ where it must be the same; rounding of bfloat16 is below."""
LOSS = 0.25
"""Spreads by which a score must fall on average where the content is gone."""
CONSISTENT = 0.9
"""Share of pairs whose winner must be the same in both orders."""
CIRCLES = 0.5
"""Circles among three images, as a share of those that chance gives."""
LIMITS = {
    "gain": GAIN,
    "move": MOVE,
    "same": SAME,
    "loss": LOSS,
    "consistent": CONSISTENT,
    "circles": CIRCLES,
}
"""As the page and the JSON name them."""
FEWEST = 3
"""Judged samples below which a mean says nothing."""
ROUNDING = 1e-6
"""Spreads by which equal answers differ."""
LEVEL = 0.95
"""Of the intervals."""

ORDER = ("fails", "unclear", "not judged", "holds", "shown")
"""Verdicts, the worst first."""

Array = NDArray[np.float64]


def level_report(
    label: str, x: float | None, response: Array, reasons: Sequence[str | None], *, left_out: int = 0
) -> dict[str, Any]:
    """One level as JSON.

    Args:
        label: Of the level.
        x: Its place on the curve.
        response: [N] responses of the samples to which the change applies.
        reasons: Why a sample was not judged, None for the judged.
        left_out: Samples to which it does not apply.

    Returns:
        mean, low, high (of the mean), size (mean of |r|) with its ends, largest |r|, share that rose, counts.
    """
    known = response[np.isfinite(response)]
    counts = Counter(reason for reason in reasons if reason)
    report: dict[str, Any] = {"label": label, "x": x, "judged": len(known), "left_out": left_out}
    report |= {"failed": len(response) - len(known), "reasons": dict(counts.most_common(3))}
    report |= dict(zip(("mean", "low", "high"), mean_interval(known), strict=True))
    report |= dict(zip(("size", "size_low", "size_high"), mean_interval(np.abs(known)), strict=True))
    report["largest"] = float(np.abs(known).max()) if len(known) else None
    report["rose"] = float((known > GAIN).mean()) if len(known) else None
    return report


def mean_interval(values: Array) -> tuple[float | None, float | None, float | None]:
    """Mean of [N] finite values and the ends of Student's t interval; None where there are too few values.

    Where all N values are equal up to rounding, t would give no width, as if N images had shown all. The
    reach is then 1 − ((1 − LEVEL) / 2)^(1/N), the largest share of images that N draws would miss (Clopper
    and Pearson), each of them one unit away.
    """
    if not len(values):
        return None, None, None
    mean = float(values.mean())
    if len(values) == 1:
        return mean, None, None
    if np.ptp(values) <= ROUNDING * max(1.0, abs(mean)):
        reach = 1 - ((1 - LEVEL) / 2) ** (1 / len(values))
        return mean, mean - reach, mean + reach
    reach = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return mean, mean - reach, mean + reach


def probability_interval(values: Array) -> dict[str, float | None]:
    """Mean probability with its interval, cut to [0, 1]: `win`, `win_low`, `win_high`."""
    mean, low, high = mean_interval(values[np.isfinite(values)])
    return {
        "win": mean,
        "win_low": None if low is None else max(low, 0.0),
        "win_high": None if high is None else min(high, 1.0),
    }


def share_report(
    label: str, hits: ArrayLike, reasons: Sequence[str | None], *, chance: float | None, left_out: int = 0
) -> dict[str, Any]:
    """One level whose answer is a share, as JSON with the keys of `level_report` and Wilson's interval.

    Args:
        label: Of the level.
        hits: [N] bool, one per judged case.
        reasons: Why a case was not judged, None for the judged.
        chance: The share that answers without content would give; None where nothing was judged.
        left_out: Cases to which it does not apply.
    """
    known = np.asarray(hits, dtype=bool)
    report = level_report(label, None, np.zeros(0), reasons, left_out=left_out)
    found = wilson_interval(int(known.sum()), len(known), level=LEVEL).to_dict()
    return report | {
        "judged": len(known),
        "failed": sum(1 for reason in reasons if reason),
        "share": found["estimate"],
        "share_low": found["low"],
        "share_high": found["high"],
        "chance": chance,
    }


def circle_chance(ties: float) -> float:
    """How often three pairwise answers by chance contradict each other, where that share of them are ties.

    (1 − t)³ / 4 of three decided answers run in a circle, and half of 3 t (1 − t)² with one tie do.
    """
    return (1 - ties) ** 3 / 4 + 1.5 * ties * (1 - ties) ** 2


def goes_in_circles(first: Array, second: Array, third: Array) -> NDArray[np.bool_]:
    """Whether log-odds [N] of a over b, b over c, c over a run in a circle; one of them may be 0, a tie."""
    signs = np.sign(np.stack([first, second, third]))
    return (np.abs(signs.sum(0)) >= 2) & ((signs >= 0).all(0) | (signs <= 0).all(0))


def reference_counts(reasons: Sequence[str | None], size: int) -> dict[str, Any]:
    """How many of the unchanged samples, or of their pairs, were judged, and why the others were not."""
    counts = Counter(reason for reason in reasons if reason)
    return {
        "size": size,
        "judged": size - counts.total(),
        "failed": counts.total(),
        "reasons": dict(counts.most_common(3)),
    }


def probe_report(probe: Probe, table: Sequence[tuple[Array, dict[str, Any]]]) -> dict[str, Any]:
    """One probe as JSON: its levels, each with a verdict, and the worst of them.

    `table` has per level, in their order, the responses [N] of all samples (NaN where there is none) and the
    report of the level.
    """
    levels = []
    for place, (response, report) in enumerate(table):
        verdict = level_verdict(probe.wanted, report)
        if probe.wanted == "falling" and place and verdict == "holds":
            verdict = _step_verdict(response - table[place - 1][0])
        levels.append({**report, "verdict": verdict})
    found = [entry["verdict"] for entry in levels]
    if any(verdict != "not judged" for verdict in found):
        found = [verdict for verdict in found if verdict != "not judged"]
    return {
        "name": probe.name,
        "title": probe.title,
        "wanted": probe.wanted,
        "why": probe.why,
        "x_name": probe.x_name,
        "neutral": probe.neutral,
        "verdict": min(found, key=ORDER.index),
        "levels": levels,
        "judged": sum(entry["judged"] for entry in levels),
        "failed": sum(entry["failed"] for entry in levels),
    }


def level_verdict(wanted: str, report: Mapping[str, Any]) -> str:
    """Whether a level does what is wanted: "holds", "fails", "unclear" where the interval holds the limit."""
    if wanted == "same" and report["judged"] + report["failed"]:
        return "holds" if not report["failed"] and report["largest"] <= SAME else "fails"
    if report["judged"] < FEWEST:
        return "not judged"
    if wanted == "shown":
        return "shown"
    if wanted == "consistent":
        share, low, high = (1 - report[key] for key in ("share", "share_high", "share_low"))
        return _below(share, low, high, 1 - CONSISTENT)
    if wanted == "acyclic":
        limit = CIRCLES * report["chance"]
        return _below(report["share"], report["share_low"], report["share_high"], limit)
    if wanted == "steady":
        return _below(report["size"], report["size_low"], report["size_high"], MOVE)
    if wanted == "loss":
        return _below(report["mean"], report["low"], report["high"], -LOSS)
    return _below(report["mean"], report["low"], report["high"], GAIN)


def _step_verdict(step: Array) -> str:
    """Whether the stronger level is scored no higher than the weaker one."""
    known = step[np.isfinite(step)]
    mean, low, high = mean_interval(known)
    return "not judged" if mean is None or len(known) < FEWEST else _below(mean, low, high, GAIN)


def _below(mean: float, low: float | None, high: float | None, limit: float) -> str:
    if low is None or high is None:
        return "unclear"
    if high <= limit:
        return "holds"
    return "fails" if low > limit else "unclear"


def summary(reports: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many probes got each verdict, in the order of `ORDER`; those that none got are left out."""
    counts = Counter(report["verdict"] for report in reports)
    return {verdict: counts[verdict] for verdict in ORDER if counts[verdict]}
