# SPDX-License-Identifier: Apache-2.0
"""Monitor reward hacking during training: trends against the first iterations, limits that warn or stop.

The best held-out evaluation (`run.best_by`) may select the result: one reward is trained on, another selects
(checkpoint selection).

Sources of the signs: rewards that are not trained on, Gao et al., arXiv 2210.10760 (gold against proxy); the
spread of the reward within groups, after RewardDance, arXiv 2509.08826 (there over training steps).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from statistics import fmean
from typing import Any

from visalign.errors import UserError, suggestion
from visalign.settings import Count, Finite, settings

from .progress import TrainingProgress

KEY = "monitor"  # Entry of `Counters.own`, and so of checkpoints, with the monitor's state
BEST = "best"  # File stem of the best weights in a checkpoint, and their entry in `Counters.own`

UPPER_LIMITS = ("judge_std_ratio", "gradient_ratio", "feature_drift")
"""Limits that are crossed upwards; the others are crossed downwards."""


@settings("monitor")
class MonitorLimits:
    """Limits of metrics, each named as its metric; null: none."""

    agreement: Finite | None = None
    """Least rank agreement of a held-out reward with the optimized one, agreement/LABEL, as the mean of
    `window` iterations, the first ones too; −1 to 1. A reward of something else agrees with none."""
    agreement_change: Finite | None = None
    """Least change of a rank agreement, agreement/LABEL; −2 to 0."""
    recorded_change: Finite | None = None
    """Least change of a recorded reward's mean, recorded/LABEL, in its standard deviations within groups."""
    heldout_change: Finite | None = None
    """Least change since before training of a held-out reward (weight 0) or of the accuracy, in its standard
    errors over held-out prompts of the same seeds, heldout/change/LABEL."""
    group_std_ratio: Finite | None = None
    """Least share that is left of the reward's spread within groups, reward_group_std."""
    judge_std_ratio: Finite | None = None
    """Largest ratio of the reward's own standard deviation to that of the first iterations."""
    gradient_ratio: Finite | None = None
    """Largest ratio of the gradient's norm, grad_norm, to that of the first iterations: a run that breaks."""
    diversity_ratio: Finite | None = None
    """Least share that is left of the diversity within groups."""
    feature_drift: Finite | None = None
    """Largest distance of held-out samples from those before training, heldout/feature_drift: 1 is the
    distance of two samples of different prompts."""


def default_warnings() -> MonitorLimits:
    """Return wide limits that rather miss a slow drift than warn of an honest run (measured by tests/benchmarks)."""
    return MonitorLimits(
        agreement_change=-0.3,
        recorded_change=-0.3,
        heldout_change=-3.0,
        group_std_ratio=0.2,
        judge_std_ratio=2.0,
        gradient_ratio=4.0,
        diversity_ratio=0.4,
        feature_drift=1.0,
    )


@settings("monitor")
class MonitorSettings:
    """Monitor of the policy's changes."""

    window: Count = 5
    """Iterations that a trend averages: the latest against the first."""
    warn: MonitorLimits = field(default_factory=default_warnings)
    """Limits that warn, once for each metric. What the defaults detected: docs/evidence/claims.md."""
    stop: MonitorLimits = field(default_factory=MonitorLimits)
    """Limits that end the run after the iteration, as at its last one; it continues with --resume and other limits."""

    def check(self, measured: Mapping[str, tuple[bool, str]]) -> None:
        """Refuse to stop by a metric that is never measured: limit -> (is measured, what to set where it is not)."""
        for name, (is_measured, remedy) in measured.items():
            limit = getattr(self.stop, name)
            if limit is not None and not is_measured:
                raise UserError(f"monitor.stop.{name} is {limit:g}, and this run does not measure it. {remedy}")


class Monitor:
    """Follows a run's records; its state is in the counters, so that a resumed run continues with it."""

    def __init__(self, settings: MonitorSettings | None, progress: TrainingProgress) -> None:
        self.settings, self.progress = settings, progress

    def follow(self, record: Mapping[str, Any], own: dict[str, Any]) -> dict[str, float]:
        """Compute trends up to an iteration, as metrics; warn of a crossed limit, once. `own` is `Counters.own`."""
        if self.settings is None:
            return {}
        state = own.setdefault(KEY, {"first": {}, "latest": {}, "now": {}, "said": {}})
        window = state.setdefault("window", self.settings.window)  # of the run's start, also after a resume
        keys = [key for key, value in record.items() if trend_of(key) and math.isfinite(value)]
        for key in keys:
            first = state["first"].setdefault(key, [])
            if len(first) < window:
                first.append(record[key])
            else:
                state["latest"][key] = [*state["latest"].get(key, []), record[key]][-window:]
        latest = {key: state["latest"][key] for key in keys if key in state["latest"]}
        trends = dict(_trends(state["first"], latest, window))
        for key in keys:
            recent = [*state["first"][key], *state["latest"].get(key, [])][-window:]
            if key.startswith("agreement/") and len(recent) == window:
                state["now"][key] = fmean(recent)
        for key, value in record.items():
            is_heldout = key == "heldout/feature_drift" or key.startswith("heldout/change/")
            if is_heldout and math.isfinite(value):
                state["now"][key.removeprefix("heldout/").replace("change/", "heldout_change/", 1)] = value
        state["now"] |= trends
        for key, message in crossed_limits(state["now"], self.settings.warn, "warn"):
            if key not in state["said"]:
                state["said"][key] = f"Iteration {record['iteration']}: {message}"
                self.progress.note(f"Warning: {message}")
        return trends

    def stops(self, own: dict[str, Any]) -> bool:
        """Return True where the latest metrics cross a limit that stops; print which."""
        if self.settings is None or KEY not in own:
            return False
        crossed = dict(crossed_limits(own[KEY]["now"], self.settings.stop, "stop"))
        for key, message in crossed.items():
            own[KEY]["said"][f"stop {key}"] = f"Stopped: {message}"
            self.progress.note(
                f"The monitor stops the run: {message} Continue with --resume and another monitor.stop."
            )
        return bool(crossed)


def monitor_messages(own: Mapping[str, Any]) -> list[str]:
    """Return the messages of a run's monitor in order; empty where there was none."""
    return list(own.get(KEY, {}).get("said", {}).values())


def trend_of(key: str) -> str:
    """Name the trend that is computed from a metric, family and label; "" where there is none."""
    family, _, label = key.partition("/")
    if family == "reward_part":
        owner = "reward" if label == "std" else label.removesuffix(".std")
        return f"judge_std_ratio/{owner}" if label == "std" or owner != label else ""
    trends = {
        "reward_group_std": "group_std_ratio",
        "grad_norm": "gradient_ratio",
        "diversity": "diversity_ratio",
        "agreement": f"agreement_change/{label}",
        "recorded": f"recorded_change/{label}",
        "recorded_std": f"recorded_std/{label}",
    }
    return trends.get(family, "")


def _trends(
    first: Mapping[str, list[float]], latest: Mapping[str, list[float]], window: int
) -> Iterator[tuple[str, float]]:
    for key, values in latest.items():
        name, start = trend_of(key), fmean(first[key])
        if len(values) < window or name.startswith("recorded_std/"):
            continue
        if name.startswith("agreement_change/"):
            yield name, fmean(values) - start
            continue
        is_recorded = name.startswith("recorded_change/")
        unit = fmean(first[key.replace("recorded/", "recorded_std/", 1)]) if is_recorded else start
        if unit:
            yield name, (fmean(values) - (start if is_recorded else 0.0)) / unit


def crossed_limits(values: Mapping[str, float], limits: MonitorLimits, rule: str) -> Iterator[tuple[str, str]]:
    """Yield (metric, "KEY is VALUE, below monitor.RULE.LIMIT (NUMBER).") of the values beyond a limit."""
    for key, value in values.items():
        name = key.partition("/")[0]
        limit = getattr(limits, name)
        if limit is None:
            continue
        is_upper = name in UPPER_LIMITS
        if value > limit if is_upper else value < limit:
            side = "above" if is_upper else "below"
            yield key, f"{key} is {value:.3g}, {side} monitor.{rule}.{name} ({limit:g})."


def update_best(by: str, evaluated: Mapping[str, Any], iteration: int, own: dict[str, Any]) -> bool:
    """Return True where an evaluation is better than all before it, and record it in `own` (`Counters.own`).

    The highest value wins, with a "-" before the metric's name the lowest; of equals the first, NaN never.
    """
    name, sign = by.removeprefix("-"), -1.0 if by.startswith("-") else 1.0
    if name not in evaluated:
        raise UserError(
            f"run.best_by is {by!r}, which no evaluation during training has. {suggestion(name, evaluated)}"
            f"They have {', '.join(evaluated) or 'nothing'}; with a '-' in front the lowest is the best."
        )
    value = float(evaluated[name])
    if math.isnan(value) or (BEST in own and not sign * value > sign * own[BEST]["value"]):
        return False
    own[BEST] = {"by": by, "value": value, "iteration": iteration}
    return True


def best_checkpoint_note(by: str | None, own: Mapping[str, Any]) -> list[str]:
    """Describe which weights are the result, where `run.best_by` selects them."""
    if best := own.get(BEST):
        return [
            f"The result has the weights of iteration {best['iteration']}, selected by run.best_by: "
            f"{best['by']} was {best['value']:.4g} there."
        ]
    if by is None:
        return []
    return [f"Warning: no evaluation had a number for run.best_by, {by}: keeping the last weights."]
