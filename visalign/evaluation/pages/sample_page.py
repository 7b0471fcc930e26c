# SPDX-License-Identifier: Apache-2.0
"""The page of samples: a row for each prompt, a column for each seed; it lies in the folder of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .base import PIXELATED_SIDE, plain, render_page


def sample_page(
    rows: Sequence[Mapping[str, Any]],
    *,
    size: tuple[int, int],
    rewards: Mapping[str, str],
    facts: Sequence[tuple[str, Any]],
) -> str:
    """The page of what `visalign sample` made; images are linked by their names, and videos play.

    Args:
        rows: of images.jsonl: the seeds of a prompt side by side, as many of each.
        size: width and height in pixels.
        rewards: label -> unit.
        facts: (name, value) of how they were made.
    """
    columns = len({row["seed"] for row in rows})
    headlines = []
    for name, unit in rewards.items():
        known = [row[name] for row in rows if row[name] is not None]
        told = f"{unit}, mean" + (f"; {len(rows) - len(known)} failed" if len(known) < len(rows) else "")
        headlines.append((name, plain(sum(known) / len(known) if known else None), told))
    return render_page(
        "sample_page.html.j2",
        title="Samples",
        command="visalign sample",
        seeds=[row["seed"] for row in rows[:columns]],
        prompts=[rows[first : first + columns] for first in range(0, len(rows), columns)],
        size=size,
        pixelated=max(size) <= PIXELATED_SIDE,
        rewards=list(rewards),
        headlines=headlines,
        facts=facts,
    )
