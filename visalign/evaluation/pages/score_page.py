# SPDX-License-Identifier: Apache-2.0
"""The page of scores: how each reward's values are spread, the best and worst images, what failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import plain, render_page, short_names
from .plots import histogram_plot


def score_page(summary: Mapping[str, Any], images: Mapping[str, Mapping[str, Any] | None]) -> str:
    """The page of a `score_summary`; images as `embedded` gives them, None where one cannot be read."""
    rewards = [dict(reward) | {"plot": _plot(reward)} for reward in summary["rewards"]]
    headlines = [
        (
            reward["label"],
            plain(reward["quantiles"].get("50")),
            reward["unit"] + ("" if reward["higher_is_better"] else ", lower is better"),
        )
        for reward in rewards
    ]
    shown = [row["image"] for reward in rewards for side in ("best", "worst") for row in reward[side]]
    failed = [name for reward in rewards for entry in reward["failures"] for name in entry["images"]]
    return render_page(
        "score_page.html.j2",
        title="Scores",
        command="visalign score",
        summary=summary,
        rewards=rewards,
        headlines=headlines,
        images=images,
        names=short_names([*shown, *failed]),
        any_failed=any(reward["failed"] for reward in rewards),
        one_prompt=shown and summary["prompts"] == 1,
    )


def _plot(reward: Mapping[str, Any]) -> Any:
    if reward["histogram"] is None:
        return None
    return histogram_plot(reward["histogram"], reward["unit"], reward["quantiles"]["50"])
