# SPDX-License-Identifier: Apache-2.0
"""Page of runs while they train: state, curves, sample grids, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .base import data_uri, number, render_page, span
from .curves import known_curves, panels

STATES = {
    "waiting": "Not begun",
    "training": "Training",
    "finished": "Finished",
    "interrupted": "Interrupted",
    "failed": "Failed",
    "ended": "Ended without a result",
    "unknown": "Without a configuration",
}


def watch_page(runs: Sequence[Mapping[str, Any]], *, reload: int) -> str:
    """Render runs as read by `visalign.pipelines.watch`; the page reloads every `reload` seconds, 0: never."""
    names = [run["folder"] for run in runs]
    sections = []
    for run in runs:
        curves, at_zero = panels(run["metrics"], known_curves(run["metrics"]))
        grids = [(iteration, _grid(path)) for iteration, path in run["grids"]]
        values = {"panels": curves, "at_zero": at_zero, "grids": grids, "latest": _latest(run["metrics"])}
        sections.append({**run, **values, "word": STATES[run["state"]]})
    failed = [f"{run['folder']} failed: {run['sentence']}" for run in sections if run["state"] == "failed"]
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    return render_page("watch_page.html.j2", title=title, banners=failed, runs=sections, reload=reload)


def _grid(path: Path) -> str:
    with Image.open(path) as image:
        return data_uri(np.asarray(image.convert("RGB")))


def _latest(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return (name, value, detail) of the newest reward or loss, and of the newest held-out numbers."""
    values = {key: (row[key], row) for row in metrics for key in row if row[key] is not None}
    entries = []
    first = next((key for key in ("reward_mean", "loss") if key in values), None)
    if first is not None:
        entries.append(({"reward_mean": "Reward", "loss": "Loss"}[first], number(values[first][0]), "last iteration"))
    lows = [key.removesuffix(".low") for key in values if key.startswith("heldout/") and key.endswith(".low")]
    for key in [key for key in dict.fromkeys(("heldout/accuracy", *lows)) if key in values]:
        value, row = values[key]
        sign = "_" if key == "heldout/accuracy" else "."
        ends = {end: row.get(f"{key}{sign}{end}") for end in ("low", "high")}
        detail = f"iteration {row['iteration']}"
        detail = f"{span(ends, number)}, {detail}" if ends["low"] is not None else detail
        entries.append((f"Held-out {key.removeprefix('heldout/').replace('_', ' ')}", number(value), detail))
    return entries
