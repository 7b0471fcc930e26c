# SPDX-License-Identifier: Apache-2.0
"""Page of samples: a row per prompt, a column per seed; it lies in the folder of its files."""

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
    """Render the result of `visalign sample`, with links to images; rows of a prompt's seeds lie together.

    The size is (width, height), `rewards` label -> unit, `facts` the settings.
    """
    columns = len({row["seed"] for row in rows})
    headlines = []
    for name, unit in rewards.items():
        values = [row[name] for row in rows if row[name] is not None]
        caption = f"{unit}, mean" + (f"; {len(rows) - len(values)} failed" if len(values) < len(rows) else "")
        headlines.append((name, plain(sum(values) / len(values) if values else None), caption))
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
