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
    singular: str
    plural: str
    verb: str  # Participle for a prompt, such as "drawn"
    same: str  # Common ground of before and after
    pairing: str  # The same as a sentence


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
    return COMPLETIONS if result.completions else IMAGES


FEW = 20
"""Prompts below which a page asks for caution."""


def headline(
    before: HeldoutResult, after: HeldoutResult, comparison: Comparison, *, trained_prompts: int | None = None
) -> dict[str, Any]:
    """Summarize a run by accuracy, or the first reward; `direction` is "up", "down" or "flat"."""
    kind, prompts, row, is_higher_better = kind_of(before), len(set(before.keys)), comparison.overall, True
    counted = f"{prompts} prompts{_trained_on(prompts, trained_prompts)}"
    if math.isfinite(row.change.estimate):
        form, label = points, "Held-out accuracy"
        sides = share(row.before.estimate), share(row.after.estimate), f"{points(row.change.estimate)} points"
        seeds = len(set(before.seeds.tolist()))
        times = {1: "once", 2: "twice"}.get(seeds, f"{seeds} times")
        first = (
            f"{counted}, each {kind.verb} {times} {kind.same} before and after: {row.correct[0]} of {row.judged[0]} "
            f"{kind.plural} were correct before training, {row.correct[1]} of {row.judged[1]} after it."
        )
    elif comparison.rewards:
        row, form = comparison.rewards[0], change
        is_higher_better = row.higher_is_better
        label = f"{words(row.name)} ({row.unit}), held-out mean"
        sides = number(row.before), number(row.after), change(row.change.estimate)
        first = (
            f"{len(before)} {kind.plural} of {counted}, {kind.same} before and after. No reward of this run "
            "says correct or wrong, so there is no accuracy."
        )
    else:
        form, label = points, "Held-out evaluation"
        sides = MISSING, MISSING, "nothing to compare"
        first = f"No {kind.singular} has a verdict and no reward was evaluated."
    direction = "flat"
    if row.change.excludes_zero:
        direction = "up" if (row.change.estimate > 0) == is_higher_better else "down"
    sentences = [first, *_judgement(row.change, direction)]
    if prompts < FEW:
        sentences.append(
            f"Only {prompts} prompts: one lucky prompt moves the numbers. Evaluate on more (data.heldout) "
            "before you believe them."
        )
    missing = int((~before.judged).sum()), int((~after.judged).sum())
    if form is points and any(missing):
        sentences.append(
            f"{missing[0]} {kind.plural} before and {missing[1]} after have no verdict; they are left out, "
            "not counted as wrong."
        )
    level = f"{100 * row.change.level:g}\u00a0% interval "
    return {
        "label": label,
        "before": sides[0],
        "after": sides[1],
        "change": sides[2],
        "interval": level + span(row.change, form) if math.isfinite(row.change.low) else "no interval",
        "direction": direction,
        "sentences": sentences,
    }


def unchanged_note(before: HeldoutResult, after: HeldoutResult) -> str:
    """Warn of a result that equals its start; empty for any other."""
    if not before.has_same_samples(after):
        return ""
    return (
        f"The result equals its start: all held-out {kind_of(after).plural} and their scores are those of before "
        "training. Train longer, or with a higher optimizer.lr."
    )


def void_notes(before: HeldoutResult, after: HeldoutResult, trained_prompts: int | None) -> list[str]:
    """Say why the headline of a report means nothing, for its banners."""
    memory = trained_prompts is not None and trained_prompts >= len(set(before.keys))
    notes = (
        unchanged_note(before, after),
        "Every held-out prompt was trained on, so the numbers say nothing about new prompts. Set data.heldout."
        if memory
        else "",
    )
    return [note for note in notes if note]


def _trained_on(count: int, trained_prompts: int | None) -> str:
    if trained_prompts is None:
        return ""
    if trained_prompts == 0:
        return " the model was not trained on"
    return f", {'all' if trained_prompts >= count else trained_prompts} of which the model was also trained on"


def _judgement(interval: Interval, direction: str) -> list[str]:
    if not math.isfinite(interval.estimate):
        return []
    if not math.isfinite(interval.low):
        return ["There are too few prompts for an interval of the change."]
    if direction != "flat":
        meaning = {"up": "other such prompts would very likely show a gain too", "down": "the model became worse"}
        return [f"The whole interval lies {'above' if interval.low > 0 else 'below'} zero: {meaning[direction]}."]
    return ["The interval contains zero: this evaluation shows no change. Use more prompts, or train longer."]


def reward_note(rows: Sequence[RewardRow], kind: SampleKind) -> str:
    """Say which rewards moved in the wrong direction."""
    worse = ", ".join(words(row.name) for row in rows if row.worse)
    unclear = [words(row.name) for row in rows if row.verdict == "not measured"]
    notes = (
        (worse, f"{worse} moved in the wrong direction, beyond the interval. Look at the {kind.plural}."),
        (not worse and len(unclear) < len(rows), "No reward moved in the wrong direction beyond its interval."),
        (unclear, f"Not measured on both sides: {', '.join(unclear)}."),
    )
    return " ".join(note for holds, note in notes if holds)


def cost_rows(costs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, amount) of everything in `costs` but the phases."""
    rows = []
    for name, value in costs.items():
        if name == "phases" or value is None:
            continue
        if name == "peak_memory_bytes":
            parts = value.items() if isinstance(value, Mapping) else [("", value)]
            rows += [(f"Peak memory {kind}".strip(), f"{size / 1e9:.2f} GB") for kind, size in parts]
        elif name == "seconds":
            rows.append(("Time in all", duration(value)))
        elif name == "forward_equivalents_per_image":
            rows.append(("Forward-equivalents per training image", number(value)))
        elif isinstance(value, int) and not isinstance(value, bool):
            rows.append((words(name).capitalize(), f"{value:,}".replace(",", "\u202f")))
        else:
            rows.append((words(name).capitalize(), number(value) if isinstance(value, float) else setting(value)))
    return rows
