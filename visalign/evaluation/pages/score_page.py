# SPDX-License-Identifier: Apache-2.0
"""Page of scores: the distribution of each reward's values, the best and worst images, the failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import plain, render_page, short_names
from .plots import histogram_plot


def score_page(summary: Mapping[str, Any], images: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Render a `score_summary`; images as returned by `embedded`, None where unreadable."""
    rewards = []
    for reward in summary["rewards"]:
        histogram, unit, quantiles = reward["histogram"], reward["unit"], reward["quantiles"]
        rewards.append(reward | {"plot": histogram and histogram_plot(histogram, unit, quantiles["50"])})
    headlines = [
        (
            reward["label"],
            plain(reward["quantiles"].get("50")),
            reward["unit"] + ("" if reward["higher_is_better"] else ", lower is better"),
        )
        for reward in rewards
    ]
    names = [row["image"] for reward in rewards for side in ("best", "worst") for row in reward[side]]
    failed = [name for reward in rewards for entry in reward["failures"] for name in entry["images"]]
    return render_page(
        "score_page.html.j2",
        title="Scores",
        command="visalign score",
        banners=[f"{reward['label']}: {reward['warning']}" for reward in rewards if reward["warning"]],
        summary=summary,
        rewards=rewards,
        headlines=headlines,
        images=images,
        names=short_names([*names, *failed]),
        any_failed=any(reward["failed"] for reward in rewards),
        one_prompt=names and summary["prompts"] == 1,
    )
