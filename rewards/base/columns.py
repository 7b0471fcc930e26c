# SPDX-License-Identifier: Apache-2.0
"""Scores and preferences as named columns, for those who join, split, send or keep answers of either kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from visalign.interfaces import Preferences, Scores


def columns_of(answer: Scores | Preferences) -> dict[str, Tensor]:
    """The numbers of an answer by name, but for "valid"."""
    found = {"std": answer.std, **{f"part.{name}": part for name, part in answer.parts.items()}}
    if isinstance(answer, Scores):
        found["main"] = answer.value
    else:
        found |= {"main": answer.prob, "log_odds": answer.log_odds}
    return {name: column for name, column in found.items() if column is not None}


def answer_of(
    columns: Mapping[str, Tensor],
    valid: Tensor,
    unit: str | None,
    text: Sequence[str] | None,
    reason: Sequence[str | None] | None,
) -> Scores | Preferences:
    """The reverse of `columns_of`: scores where there is a unit, else preferences."""
    parts = {name.removeprefix("part."): part for name, part in columns.items() if name.startswith("part.")}
    shared: dict[str, Any] = {"valid": valid, "parts": parts, "text": text, "reason": reason}
    shared["std"] = columns.get("std")
    if unit is not None:
        return Scores(value=columns["main"], unit=unit, **shared)
    return Preferences(prob=columns["main"], log_odds=columns.get("log_odds"), **shared)
