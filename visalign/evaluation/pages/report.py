# SPDX-License-Identifier: Apache-2.0
"""Report of a run: one HTML file that opens from disk, and the numbers as JSON, written atomically."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visalign.atomic import write_atomic
from visalign.config import flatten
from visalign.evaluation.heldout.comparison import compare
from visalign.evaluation.heldout.result import HeldoutResult

from . import wording
from .base import PIXELATED_SIDE, data_uri, render_page, setting
from .curves import known_curves, panels
from .entropy_fit import entropy_panels
from .samples import failures, galleries


def write_report(
    run_folder: Path,
    *,
    before: HeldoutResult,
    after: HeldoutResult,
    metrics: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any] | Any,
    versions: Mapping[str, str],
    costs: Mapping[str, Any],
    title: str,
    load_code: str,
    resume_command: str,
    start: Mapping[str, float] | None = None,
    main_rewards: Sequence[str] = (),
    trained_prompts: int | None = None,
    warnings: Sequence[str] = (),
    over_time: Sequence[tuple[int, Path]] = (),
) -> Path:
    """Write `report.html` into a run's folder, atomically, and return its path.

    `before` and `after` are held-out evaluations of the same samples, `metrics` rows of metrics.jsonl, `start` values
    before training, `costs` optional numbers under their names. The first of `main_rewards` is the headline without
    verdicts; `trained_prompts` counts held-out prompts that were trained on; `over_time` are (iterations, PNG).
    """
    comparison, kind = compare(before, after), wording.kind_of(after)
    order = [*main_rewards, *after.scores]
    rewards = tuple(sorted(comparison.rewards, key=lambda row: order.index(row.name)))
    comparison = dataclasses.replace(comparison, rewards=rewards)
    phases = sorted((costs.get("phases") or {}).items(), key=lambda phase: -phase[1])  # the longest first
    other_rewards = [row for row in comparison.rewards if not row.repeats_accuracy]
    height, width = after.images.shape[1:3]
    banners = wording.void_notes(before, after, trained_prompts)
    settings, name = flatten(config), run_folder.name
    start_model = str(settings.get("model.path") or "MODEL")
    curves, at_zero = panels(metrics, known_curves(metrics), start=start)
    page = render_page(
        "report.html.j2",
        before=before,
        kind=kind,
        comparison=comparison,
        summary=wording.headline(before, after, comparison, trained_prompts=trained_prompts),
        rows=(comparison.overall, *comparison.categories),
        other_rewards=other_rewards,
        reward_note=wording.reward_note(other_rewards, kind),
        galleries=galleries(before, after, comparison),
        failures=failures(after),
        has_accuracy=bool(before.judged.any() or after.judged.any()),
        pixelated=kind is wording.IMAGES and max(height, width) <= PIXELATED_SIDE,
        image_height=round(256 * height / width),
        title=title,
        panels=(*curves, *entropy_panels(metrics)),
        at_zero=at_zero,
        banners=banners,
        warnings=[warning for warning in warnings if warning not in banners],
        has_heldout_curve=any(panel.curve.keys[0].startswith("heldout/") for panel in curves),
        over_time=[(number, data_uri(np.asarray(Image.open(path)))) for number, path in over_time],
        config=[(key, setting(value)) for key, value in settings.items()],
        versions=versions,
        costs=wording.cost_rows(costs),
        phases=[(name, seconds, seconds / (phases[0][1] or 1.0)) for name, seconds in phases],
        load_code=load_code,
        resume_command=resume_command,
        bench_command=shlex.join(["visalign", "bench", start_model, name, "--suite", "world", "-o", f"{name}/bench"]),
    )
    return write_atomic(run_folder / "report.html", page.encode("utf-8"))


def write_summary(
    path: Path,
    *,
    before: HeldoutResult,
    after: HeldoutResult,
    costs: Mapping[str, Any],
    config: Mapping[str, Any] | Any,
    versions: Mapping[str, str],
) -> Path:
    """Write `summary.json`, atomically; numbers that are not finite are null.

    Keys: `before`, `after`, `gain` (of the accuracy, with its paired interval), `changes` per category and reward, all
    of `costs` (null where unknown), `config`, `versions`.
    """
    comparison = compare(before, after)
    nulls = dict.fromkeys(("seconds", "forward_equivalents_per_image", "peak_memory_bytes"))
    content = {
        "before": before.to_dict(),
        "after": after.to_dict(),
        "gain": comparison.overall.change.to_dict(),
        "changes": comparison.to_dict(),
        **nulls,
        **costs,
        "config": config,
        "versions": versions,
    }
    return write_atomic(path, summary_json(content))


def summary_json(summary: Any) -> str:
    """Format a summary as indented JSON; a number that is not finite becomes null."""
    return json.dumps(json_values(summary), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def json_values(value: Any) -> Any:
    """Convert to plain JSON values; paths and other objects as text, NaN and infinities as None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return json_values(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): json_values(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_values(entry) for entry in value]
    if isinstance(value, np.generic):
        return json_values(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
