# SPDX-License-Identifier: Apache-2.0
"""Sentences of a report, derived from its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from visalign.evaluation.heldout.comparison import Comparison, RewardRow
from visalign.evaluation.heldout.result import HeldoutResult
from visalign.evaluation.statistics.intervals import Interval

from .base import MISSING, change, duration, number, points, setting, share, span, words


@dataclass(frozen=True, kw_only=True)
class SampleKind:
    """Words for the samples of a model."""

    singular: str
    plural: str
    verb: str
    """Participle for a prompt, such as "drawn"."""
    same: str
    """Common ground of before and after."""
    pairing: str
    """The same as a sentence."""


IMAGES = SampleKind(
    singular="image",
    plural="images",
    verb="drawn",
    same="from the same noise",
    pairing="Same prompt, same seed, same starting noise; only the weights differ.",
)
COMPLETIONS = SampleKind(
    singular="completion",
    plural="completions",
    verb="completed",
    same="with the same seeds",
    pairing="Same prompt, same seed; only the weights differ.",
)


def kind_of(result: HeldoutResult) -> SampleKind:
    """Return the kind of samples of an evaluation."""
    return COMPLETIONS if result.completions else IMAGES


@dataclass(frozen=True, kw_only=True)
class Headline:
    """Top of the page."""

    label: str
    before: str
    after: str
    change: str
    interval: str
    """Interval of the change in words, e.g. "95 % interval +9.9 to +17.6"."""
    direction: str
    """"up", "down" or "flat"."""
    sentences: tuple[str, ...]


def headline(
    before: HeldoutResult, after: HeldoutResult, comparison: Comparison, *, trained_prompts: int | None = None
) -> Headline:
    """Summarize a run in one line and a few sentences."""
    row, kind = comparison.overall, kind_of(before)
    if not math.isfinite(row.change.estimate):
        return _reward_headline(before, comparison, trained_prompts)
    n_prompts, n_seeds = len(set(before.keys)), len(set(before.seeds.tolist()))
    times = {1: "once", 2: "twice"}.get(n_seeds, f"{n_seeds} times")
    counted = (
        f"{_prompts(n_prompts, trained_prompts)}, each {kind.verb} {times} {kind.same} before and after: "
        f"{row.correct[0]} of {row.judged[0]} {kind.plural} were correct before training, "
        f"{row.correct[1]} of {row.judged[1]} after it."
    )
    sentences = [counted, _judgement(row.change), *_caution(before)]
    missing = len(before) - row.judged[0], len(after) - row.judged[1]
    if any(missing):
        sentences.append(
            f"{missing[0]} {kind.plural} before and {missing[1]} after have no verdict; they are left out, "
            "not counted as wrong."
        )
    return Headline(
        label="Held-out accuracy",
        before=share(row.before.estimate),
        after=share(row.after.estimate),
        change=f"{points(row.change.estimate)} points",
        interval=_interval(row.change, points),
        direction=_direction(row.change),
        sentences=tuple(sentences),
    )


def _prompts(count: int, trained_prompts: int | None) -> str:
    """Count the prompts, and those that the model knows from training."""
    if trained_prompts is None:
        return f"{count} prompts"
    if trained_prompts == 0:
        return f"{count} prompts the model was not trained on"
    overlap = "all" if trained_prompts >= count else trained_prompts
    return f"{count} prompts, {overlap} of which the model was also trained on"


def _reward_headline(before: HeldoutResult, comparison: Comparison, trained_prompts: int | None) -> Headline:
    """Summarise by the first reward where there are no verdicts."""
    kind = kind_of(before)
    if not comparison.rewards:
        return Headline(
            label="Held-out evaluation",
            before=MISSING,
            after=MISSING,
            change="nothing to compare",
            interval="no interval",
            direction="flat",
            sentences=(f"No {kind.singular} has a verdict and no reward was evaluated.",),
        )
    row = comparison.rewards[0]
    return Headline(
        label=f"{words(row.name)} ({row.unit}), held-out mean",
        before=number(row.before),
        after=number(row.after),
        change=change(row.change.estimate),
        interval=_interval(row.change, change),
        direction=_direction(row.change),
        sentences=(
            f"{len(before)} {kind.plural} of {_prompts(len(set(before.keys)), trained_prompts)}, {kind.same} "
            "before and after. No reward of this run says correct or wrong, so there is no accuracy.",
            _judgement(row.change),
            *_caution(before),
        ),
    )


FEW = 20
"""Prompts below which a page asks for caution."""


def _caution(before: HeldoutResult) -> list[str]:
    count = len(set(before.keys))
    if count >= FEW:
        return []
    return [
        f"Only {count} prompts: one lucky prompt moves the numbers. Evaluate on more (data.heldout) before "
        "you believe them."
    ]


def _judgement(interval: Interval) -> str:
    if not math.isfinite(interval.low):
        return "There are too few prompts for an interval of the change."
    if interval.low > 0:
        return "The whole interval lies above zero: other such prompts would very likely show a gain too."
    if interval.high < 0:
        return "The whole interval lies below zero: the model became worse."
    return "The interval contains zero: this evaluation shows no change. Use more prompts, or train longer."


def reward_note(rows: Sequence[RewardRow], kind: SampleKind) -> str:
    """Say which rewards moved in the wrong direction."""
    worse = [words(row.name) for row in rows if row.worse]
    unclear = [words(row.name) for row in rows if row.verdict == "not measured"]
    parts = []
    if worse:
        parts.append(
            f"{', '.join(worse)} moved in the wrong direction, beyond the interval. "
            f"Look at the {kind.plural}."
        )
    elif len(unclear) < len(rows):
        parts.append("No reward moved in the wrong direction beyond its interval.")
    if unclear:
        parts.append(f"Not measured on both sides: {', '.join(unclear)}.")
    return " ".join(parts)


def cost_rows(costs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, amount) of everything in `costs` but the phases."""
    known = ((name, value) for name, value in costs.items() if name != "phases" and value is not None)
    return [row for name, value in known for row in _cost(name, value)]


def _cost(name: str, value: Any) -> list[tuple[str, str]]:
    if name == "peak_memory_bytes":
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        return [(f"Peak memory {kind}".strip(), f"{size / 1e9:.2f} GB") for kind, size in parts]
    if name == "seconds":
        return [("Time in all", duration(value))]
    if name == "forward_equivalents_per_image":
        return [("Forward-equivalents per training image", number(value))]
    if isinstance(value, int) and not isinstance(value, bool):
        return [(words(name).capitalize(), f"{value:,}".replace(",", "\u202f"))]
    return [(words(name).capitalize(), number(value) if isinstance(value, float) else setting(value))]


def _interval(interval: Interval, form: Any) -> str:
    if not math.isfinite(interval.low):
        return "no interval"
    return f"{100 * interval.level:g}\u00a0% interval {span(interval, form)}"


def _direction(interval: Interval) -> str:
    if not interval.excludes_zero:
        return "flat"
    return "up" if interval.low > 0 else "down"
