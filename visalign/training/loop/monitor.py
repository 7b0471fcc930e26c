# SPDX-License-Identifier: Apache-2.0
"""The monitor of a reward while the policy moves: trends against the first iterations, a rule that warns and
one that stops.

Sources of the signs: rewards that are not trained on, Gao et al., arXiv 2210.10760 (gold against proxy); the
spread of the reward within groups, after RewardDance, arXiv 2509.08826 (there over training steps).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

from visalign.errors import UserError

from .optimizer import at_least
from .progress import TrainingProgress

KEY = "monitor"
"""Where the counters, and so a checkpoint, keep what was seen."""

FROM_ABOVE = ("judge_std_ratio", "feature_drift")
"""Limits that are crossed upwards; the others are crossed downwards."""


@dataclass(frozen=True, kw_only=True)
class MonitorLimits:
    """Numbers that a run is held against, each named as its metric; null: none."""

    agreement: float | None = None
    """Least rank agreement of a held-out reward with what is optimised, agreement/LABEL, as the mean of
    `window` iterations, the first ones too; −1 to 1. A reward of something else agrees with none."""
    agreement_change: float | None = None
    """Least change of a rank agreement, agreement/LABEL; −2 to 0."""
    recorded_change: float | None = None
    """Least change of a recorded reward's mean, recorded/LABEL, in its standard deviations within groups."""
    heldout_change: float | None = None
    """Least change since before training of a held-out reward (weight 0) or of the accuracy, in its standard
    errors over held-out prompts of the same seeds, heldout/change/LABEL."""
    group_std_ratio: float | None = None
    """Least share that is left of the reward's spread within groups, reward_group_std."""
    judge_std_ratio: float | None = None
    """How many times the judge's own standard deviation at first it may become."""
    diversity_ratio: float | None = None
    """Least share that is left of the diversity within groups."""
    feature_drift: float | None = None
    """How far held-out samples may get from those before training, heldout/feature_drift: 1 is as far as
    two samples of different prompts were from each other."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and not math.isfinite(value):
                raise UserError(f"monitor: the limit {limit.name} is {value}; give a number, or null.")


def default_warnings() -> MonitorLimits:
    """Wide limits: they are to miss a slow drift rather than to cry at an honest run, as
    tests/benchmarks/images/reward_hacking.py measures."""
    return MonitorLimits(
        agreement_change=-0.3,
        recorded_change=-0.3,
        heldout_change=-3.0,
        group_std_ratio=0.2,
        judge_std_ratio=2.0,
        diversity_ratio=0.4,
        feature_drift=1.0,
    )


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """What is watched while the policy moves, and when that warns or stops."""

    window: int = 5
    """Iterations that a trend is the mean of: the latest against the first."""
    warn: MonitorLimits = field(default_factory=default_warnings)
    """A warning, once for each metric. What the defaults saw: docs/evidence/claims.md."""
    stop: MonitorLimits = field(default_factory=MonitorLimits)
    """The end of the run after the iteration, as at its last one; it goes on with --resume and other
    limits."""

    def __post_init__(self) -> None:
        at_least("monitor.window", self.window, 1)

    def check(self, given: Mapping[str, tuple[bool, str]]) -> None:
        """Refuse to stop by what is never measured.

        Args:
            given: limit -> (whether it is measured, what to set where it is not).

        Raises:
            UserError: a limit of `stop` that could not be crossed.
        """
        for name, (there, remedy) in given.items():
            limit = getattr(self.stop, name)
            if limit is not None and not there:
                raise UserError(
                    f"monitor.stop.{name} is {limit:g}, and this run does not measure it. {remedy}"
                )


class Monitor:
    """Follows a run's records; what it has seen is kept in the counters, so that a resumed run goes on with
    it.

    Args:
        settings: None follows nothing.
        progress: that says what crosses a limit.
    """

    def __init__(self, settings: MonitorSettings | None, progress: TrainingProgress) -> None:
        self.settings, self.progress = settings, progress

    def follow(self, record: Mapping[str, Any], own: dict[str, Any]) -> dict[str, float]:
        """Trends up to an iteration, as metrics; says what crosses a limit that warns, once.

        Args:
            record: of the iteration.
            own: the counters that keep what was seen.
        """
        if self.settings is None:
            return {}
        seen = own.setdefault(KEY, {"first": {}, "latest": {}, "now": {}, "said": {}})
        window = seen.setdefault("window", self.settings.window)  # that of the run's beginning
        known = [key for key, value in record.items() if source_of(key) and math.isfinite(value)]
        for key in known:
            first = seen["first"].setdefault(key, [])
            if len(first) < window:
                first.append(record[key])
            else:
                seen["latest"][key] = [*seen["latest"].get(key, []), record[key]][-window:]
        latest = {key: seen["latest"][key] for key in known if key in seen["latest"]}
        trends = dict(_trends(seen["first"], latest, window))
        for key in known:
            recent = [*seen["first"][key], *seen["latest"].get(key, [])][-window:]
            if key.startswith("agreement/") and len(recent) == window:
                seen["now"][key] = fmean(recent)
        for key, value in record.items():
            if key == "heldout/feature_drift" or key.startswith("heldout/change/"):
                if math.isfinite(value):
                    name = key.removeprefix("heldout/").replace("change/", "heldout_change/", 1)
                    seen["now"][name] = value
        seen["now"] |= trends
        for key, message in crossed(seen["now"], self.settings.warn, "warn"):
            if key not in seen["said"]:
                seen["said"][key] = f"Iteration {record['iteration']}: {message}"
                self.progress.note(f"Warning: {message}")
        return trends

    def stops(self, own: dict[str, Any]) -> bool:
        """Whether what was seen last crosses a limit that stops; says which."""
        if self.settings is None or KEY not in own:
            return False
        found = dict(crossed(own[KEY]["now"], self.settings.stop, "stop"))
        for key, message in found.items():
            own[KEY]["said"][f"stop {key}"] = f"Stopped: {message}"
            self.progress.note(
                f"The monitor stops the run: {message} Go on with --resume and another monitor.stop."
            )
        return bool(found)


def monitor_messages(own: Mapping[str, Any]) -> list[str]:
    """What a run's monitor has said, in its order; empty where there was none."""
    return list(own.get(KEY, {}).get("said", {}).values())


def source_of(key: str) -> str:
    """The trend that a metric has, "" where it has none: the family, and the label after it."""
    family, _, label = key.partition("/")
    if family == "reward_part":
        owner = "reward" if label == "std" else label.removesuffix(".std")
        return f"judge_std_ratio/{owner}" if label == "std" or owner != label else ""
    known = {
        "reward_group_std": "group_std_ratio",
        "diversity": "diversity_ratio",
        "agreement": f"agreement_change/{label}",
        "recorded": f"recorded_change/{label}",
        "recorded_std": f"recorded_std/{label}",
    }
    return known.get(family, "")


def _trends(
    first: Mapping[str, list[float]], latest: Mapping[str, list[float]], window: int
) -> Iterator[tuple[str, float]]:
    for key, values in latest.items():
        name, began = source_of(key), fmean(first[key])
        if len(values) < window or name.startswith("recorded_std/"):
            continue
        if name.startswith("agreement_change/"):
            yield name, fmean(values) - began
            continue
        is_recorded = name.startswith("recorded_change/")
        unit = fmean(first[key.replace("recorded/", "recorded_std/", 1)]) if is_recorded else began
        if unit:
            yield name, (fmean(values) - (began if is_recorded else 0.0)) / unit


def crossed(now: Mapping[str, float], limits: MonitorLimits, rule: str) -> Iterator[tuple[str, str]]:
    """(metric, "KEY is VALUE, below monitor.RULE.LIMIT (NUMBER).") of what is beyond a limit.

    Args:
        now: metric -> latest value.
        limits: held against.
        rule: "warn" or "stop".
    """
    for key, value in now.items():
        name = key.partition("/")[0]
        limit = getattr(limits, name)
        if limit is None:
            continue
        above = name in FROM_ABOVE
        if value > limit if above else value < limit:
            side = "above" if above else "below"
            yield key, f"{key} is {value:.3g}, {side} monitor.{rule}.{name} ({limit:g})."
