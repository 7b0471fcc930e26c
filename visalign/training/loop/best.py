# SPDX-License-Identifier: Apache-2.0
"""Which of a run's weights are its result where a held-out number decides: one judge is learnt from, another
approves of what was learnt (decoupled approval)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from visalign.errors import UserError, suggestion

BEST = "best"
"""Of the best weights among a checkpoint's tensors, and of what is known of them among its numbers."""


def check_best_by(by: str | None, named: Mapping[str, Any]) -> None:
    """Refuse a name that the evaluations on the way do not have; `named` has their metrics.

    Raises:
        UserError: says which there are.
    """
    if by is None or by.removeprefix("-") in named:
        return
    known = [name for name in named if name.startswith("heldout/")]
    near = suggestion(by.removeprefix("-"), known)
    raise UserError(
        f"run.best_by is {by!r}, which the evaluations on the way do not say. {near}They say "
        f"{', '.join(known)}; behind a '-' the lowest is the best."
    )


def leads(by: str, record: Mapping[str, Any], own: dict[str, Any]) -> bool:
    """Whether a record's evaluation is better than all before it; if so, `own` gets to know it.

    Args:
        by: name of a metric, the highest wins; behind "-" the lowest. NaN never wins, of equals the first.
        record: with "iteration".
        own: numbers of the run, in checkpoints.
    """
    name, sign = by.removeprefix("-"), -1.0 if by.startswith("-") else 1.0
    value, best = float(record[name]), own.get(BEST, {})
    if math.isnan(value) or (best.get("by") == by and not sign * value > sign * best["value"]):
        return False
    own[BEST] = {"by": by, "value": value, "iteration": record["iteration"]}
    return True


def best_of(by: str | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """For a summary: by what, where and how good the best was; nothing where the last weights are the
    result."""
    return {BEST: own[BEST]} if by is not None and BEST in own else {}


def said_of_best(by: str | None, own: Mapping[str, Any]) -> list[str]:
    """For people: which weights are the result, where that are not the last ones."""
    return [
        f"The run leaves the weights of iteration {best['iteration']}, by run.best_by: {best['by']} was "
        f"{best['value']:.4g} there."
        for best in best_of(by, own).values()
    ]
