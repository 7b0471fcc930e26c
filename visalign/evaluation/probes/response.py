# SPDX-License-Identifier: Apache-2.0
"""Response of a reward to a probe: mean with its interval at each level, and a verdict.

With v the score of a sample, v′ the score after the change, s the standard deviation of v over the reference
samples, and d = ±1 the reward's direction, the response of a sample is r = d (v′ − v) / s: what an optimizer
gains by the change, in units in which good and bad images of the reference differ.

A pairwise reward gives the log-odds ℓ(a, b) of a over b, the mean of both orders. As differences of scores
(Bradley-Terry) their root mean square over pairs of reference images is √2 standard deviations of the scores:
s = √(mean ℓ² / 2), r = ℓ(changed, unchanged) / s, and the same limits hold.
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

LEVEL = 0.95
"""Confidence level of the intervals."""
GAIN = 0.1
"""Mean rise in spreads up to which a score counts as not raised."""
LIMITS = {"gain": GAIN, "move": 0.2, "same": 0.02, "loss": 0.25, "consistent": 0.9, "circles": 0.5}
"""Limits of the verdicts, as the page and the JSON name them.

- `gain`: spreads by which a score may rise on average where it should not
- `move`: spreads by which scores may move on average, either way, where they should stay
- `same`: spreads by which any single score may differ where it must be the same; bfloat16 rounds below that
- `loss`: spreads by which a score must fall on average where the content is gone
- `consistent`: share of pairs whose winner must be the same in both orders
- `circles`: cycles among three images, as a share of those that chance gives
"""
FEWEST = 3
"""Samples with a score below which a mean says nothing."""
ROUNDING = 1e-6
"""Spreads by which equal answers differ."""

ORDER = ("fails", "unclear", "not judged", "holds", "shown")
"""Verdicts, the worst first."""

Array = NDArray[np.float64]


def level_report(
    label: str, x: float | None, response: Array, reasons: Sequence[str | None], *, left_out: int = 0
) -> dict[str, Any]:
    """Summarise the responses [N] of samples to a level, JSON-able; it does not apply to `left_out`.

    Returns mean, low, high, size (mean of |r|) with its ends, largest |r|, share that rose, counts.
    """
    valid = response[np.isfinite(response)]
    counts = Counter(reason for reason in reasons if reason)
    report: dict[str, Any] = {"label": label, "x": x, "judged": len(valid), "left_out": left_out}
    report |= {"failed": len(response) - len(valid), "reasons": dict(counts.most_common(3))}
    report |= dict(zip(("mean", "low", "high"), mean_interval(valid), strict=True))
    report |= dict(zip(("size", "size_low", "size_high"), mean_interval(np.abs(valid)), strict=True))
    report["largest"] = float(np.abs(valid).max()) if len(valid) else None
    report["rose"] = float((valid > GAIN).mean()) if len(valid) else None
    return report


def mean_interval(values: Array) -> tuple[float | None, float | None, float | None]:
    """Return the mean of [N] finite values and the ends of Student's t interval; None without enough values.

    Student's t has no width where all N values are equal up to rounding. The reach is then 1 − ((1 − LEVEL) /
    2)^(1/N), the largest share of images that N draws would miss (Clopper and Pearson), each of them one unit away.
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
    """Return the mean probability with its interval, cut to [0, 1]: `win`, `win_low`, `win_high`."""
    mean, low, high = mean_interval(values[np.isfinite(values)])
    return {
        "win": mean,
        "win_low": None if low is None else max(low, 0.0),
        "win_high": None if high is None else min(high, 1.0),
    }


def share_report(
    label: str, hits: ArrayLike, reasons: Sequence[str | None], *, chance: float | None, left_out: int = 0
) -> dict[str, Any]:
    """Summarise a level whose answer is a share of `hits` [N], as `level_report`; `chance` is that without content."""
    cases = np.asarray(hits, dtype=bool)
    report = level_report(label, None, np.zeros(0), reasons, left_out=left_out)
    share = wilson_interval(int(cases.sum()), len(cases), level=LEVEL).to_dict()
    return report | {
        "judged": len(cases),
        "failed": sum(1 for reason in reasons if reason),
        "share": share["estimate"],
        "share_low": share["low"],
        "share_high": share["high"],
        "chance": chance,
    }


def circle_chance(ties: float) -> float:
    """Compute how often three random pairwise answers, a share t of them ties, contradict each other.

    That is (1 − t)³ / 4 of three decided answers, and half of 3 t (1 − t)² with one tie.
    """
    return (1 - ties) ** 3 / 4 + 1.5 * ties * (1 - ties) ** 2


def is_cycle(first: Array, second: Array, third: Array) -> NDArray[np.bool_]:
    """Find cycles in log-odds [N] of a over b, b over c, c over a; one of them may be 0, a tie."""
    signs = np.sign(np.stack([first, second, third]))
    return (np.abs(signs.sum(0)) >= 2) & ((signs >= 0).all(0) | (signs <= 0).all(0))


def reference_counts(reasons: Sequence[str | None], size: int) -> dict[str, Any]:
    """Count the unchanged samples, or their pairs, that have a score, and why the others have none."""
    counts = Counter(reason for reason in reasons if reason)
    return {
        "size": size,
        "judged": size - counts.total(),
        "failed": counts.total(),
        "reasons": dict(counts.most_common(3)),
    }


def probe_report(probe: Probe, table: Sequence[tuple[Array, dict[str, Any]]]) -> dict[str, Any]:
    """Summarise a probe by its levels and the worst verdict; `table`: level -> (responses [N], report)."""
    levels = []
    for number, (response, report) in enumerate(table):
        verdict = level_verdict(probe.wanted, report)
        if probe.wanted == "falling" and number and verdict == "holds":
            step = response - table[number - 1][0]  # the stronger level must be scored no higher than the weaker
            step = step[np.isfinite(step)]
            verdict = "not judged" if len(step) < FEWEST else _below(*mean_interval(step)[1:], GAIN)
        levels.append({**report, "verdict": verdict})
    verdicts = {entry["verdict"] for entry in levels}
    verdicts = verdicts - {"not judged"} or verdicts
    return {
        "name": probe.name,
        "title": probe.title,
        "wanted": probe.wanted,
        "why": probe.why,
        "x_name": probe.x_name,
        "neutral": probe.neutral,
        "verdict": min(verdicts, key=ORDER.index),
        "levels": levels,
        "judged": sum(entry["judged"] for entry in levels),
        "failed": sum(entry["failed"] for entry in levels),
    }


def level_verdict(wanted: str, report: Mapping[str, Any]) -> str:
    """Judge a level: "holds", "fails", or "unclear" where the interval contains the limit."""
    if wanted == "same" and report["judged"] + report["failed"]:
        return "holds" if not report["failed"] and report["largest"] <= LIMITS["same"] else "fails"
    if report["judged"] < FEWEST:
        return "not judged"
    if wanted == "shown":
        return "shown"
    if wanted == "consistent":
        low, high = (1 - report[key] for key in ("share_high", "share_low"))
        return _below(low, high, 1 - LIMITS["consistent"])
    if wanted == "acyclic":
        return _below(report["share_low"], report["share_high"], LIMITS["circles"] * report["chance"])
    if wanted == "steady":
        return _below(report["size_low"], report["size_high"], LIMITS["move"])
    if wanted == "loss":
        return _below(report["low"], report["high"], -LIMITS["loss"])
    return _below(report["low"], report["high"], GAIN)


def _below(low: float | None, high: float | None, limit: float) -> str:
    if low is None or high is None:
        return "unclear"
    if high <= limit:
        return "holds"
    return "fails" if low > limit else "unclear"


def summary(reports: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count the probes with each verdict, in the order of `ORDER`; verdicts without a probe are left out."""
    counts = Counter(report["verdict"] for report in reports)
    return {verdict: counts[verdict] for verdict in ORDER if counts[verdict]}
