# SPDX-License-Identifier: Apache-2.0
"""The answers to several requests as one: columns joined and spread over the rows asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Preferences, Scores
from visalign.rewards.base.contract import scatter


def unknown_scores(size: int, why: str, unit: str) -> Scores:
    """Scores of which none is valid.

    Args:
        size: B.
        why: the reason of each row.
        unit: of the scores.
    """
    nothing = torch.full((size,), torch.nan)
    return Scores(value=nothing, valid=torch.zeros(size, dtype=torch.bool), unit=unit, reason=[why] * size)


def unknown_preferences(size: int, why: str) -> Preferences:
    """Preferences of which none is valid.

    Args:
        size: B.
        why: the reason of each row.
    """
    return Preferences(
        prob=torch.full((size,), torch.nan), valid=torch.zeros(size, dtype=torch.bool), reason=[why] * size
    )


def _columns(found: Sequence[Any], name: str, rows: Sequence[int], size: int) -> Tensor | None:
    if all(getattr(answer, name) is None for answer in found):
        return None
    own = [
        torch.full((len(answer),), torch.nan) if getattr(answer, name) is None else getattr(answer, name)
        for answer in found
    ]
    return scatter(torch.cat(own), rows, size)


def _parts(found: Sequence[Any], rows: Sequence[int], size: int) -> dict[str, Tensor]:
    names = dict.fromkeys(name for answer in found for name in answer.parts)
    empty = torch.nan
    return {
        name: scatter(torch.cat([a.parts.get(name, torch.full((len(a),), empty)) for a in found]), rows, size)
        for name in names
    }


def _words(found: Sequence[Any], name: str, rows: Sequence[int], size: int) -> list[Any]:
    said = [word for answer in found for word in (getattr(answer, name) or [None] * len(answer))]
    full: list[Any] = [None] * size
    for row, word in zip(rows, said, strict=True):
        full[row] = word
    return full


def _merged(found: Sequence[Any], rows: Sequence[int], reasons: Sequence[str | None]) -> dict[str, Any]:
    """What scores and preferences have in common, spread over all rows."""
    size = len(reasons)
    valid = torch.zeros(size, dtype=torch.bool)
    said = _words(found, "reason", rows, size)
    if rows:
        valid[torch.tensor(rows)] = torch.cat([answer.valid for answer in found])
    text = _words(found, "text", rows, size)
    return {
        "valid": valid,
        "std": _columns(found, "std", rows, size) if found else None,
        "parts": _parts(found, rows, size),
        "text": [word or "" for word in text] if any(text) else None,
        "reason": [own or other for own, other in zip(reasons, said, strict=True)],
    }


def spread_scores(
    found: Sequence[Scores], rows: Sequence[int], reasons: Sequence[str | None], unit: str
) -> Scores:
    """Scores of all rows.

    Args:
        found: the answers, in order; of all the rows together.
        rows: which were asked about.
        reasons: why each of the others was not; sets B.
        unit: of the scores.
    """
    value = _columns(found, "value", rows, len(reasons)) if found else None
    value = torch.full((len(reasons),), torch.nan) if value is None else value
    return Scores(value=value, unit=unit, **_merged(found, rows, reasons))


def spread_preferences(
    found: Sequence[Preferences], rows: Sequence[int], reasons: Sequence[str | None]
) -> Preferences:
    """Preferences of all rows.

    Args:
        found: the answers, in order; of all the rows together.
        rows: which were asked about.
        reasons: why each of the others was not; sets B.
    """
    prob = _columns(found, "prob", rows, len(reasons)) if found else None
    prob = torch.full((len(reasons),), torch.nan) if prob is None else prob
    log_odds = _columns(found, "log_odds", rows, len(reasons)) if found else None
    return replace(Preferences(prob=prob, **_merged(found, rows, reasons)), log_odds=log_odds)
