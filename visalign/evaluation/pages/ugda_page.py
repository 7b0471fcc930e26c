# SPDX-License-Identifier: Apache-2.0
"""Page of UGDA rounds: labels, errors of the ensemble, accuracy of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .base import render_page, share


def ugda_page(rounds: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]]) -> str:
    """Render the records of `round.json` so far, and pairs of the last round with their prompt and images."""
    first, last = rounds[0]["policy"]["before"], rounds[-1]["policy"]["after"]
    headlines = [("Labelled pairs", str(rounds[-1]["pairs"]), f"in {len(rounds)} rounds")]
    if first.get("accuracy") is not None:
        more = f"{share(first['accuracy'])} before, both on held-out prompts"
        headlines.append(("Right images", share(last["accuracy"]), more))
    return render_page(
        "ugda_page.html.j2",
        title="Rounds of reward and policy",
        command="visalign train",
        rounds=rounds,
        headlines=headlines,
        pairs=pairs,
    )
