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


def check_best_by(by: str | None, evaluated: Mapping[str, Any]) -> None:
    """Refuse a name that an evaluation on the way does not have; `evaluated` is what it says.

    Raises:
        UserError: says which there are.
    """
    if by is None or by.removeprefix("-") in evaluated:
        return
    near, known = suggestion(by.removeprefix("-"), evaluated), ", ".join(evaluated)
    raise UserError(
        f"run.best_by is {by!r}, which the evaluations on the way do not say. {near}They say "
        f"{known or 'nothing, as nothing is held out'}; behind a '-' the lowest is the best."
    )


def leads(by: str, evaluated: Mapping[str, Any], iteration: int, own: dict[str, Any]) -> bool:
    """Whether an evaluation is better than all before it; if so, `own` gets to know it.

    Args:
        by: name of a metric, the highest wins; behind "-" the lowest. NaN never wins, of equals the first.
        evaluated: its numbers.
        iteration: after which it was.
        own: numbers of the run, in checkpoints.
    """
    name, sign = by.removeprefix("-"), -1.0 if by.startswith("-") else 1.0
    value = float(evaluated[name])
    if math.isnan(value) or (BEST in own and not sign * value > sign * own[BEST]["value"]):
        return False
    own[BEST] = {"by": by, "value": value, "iteration": iteration}
    return True


def best_of(own: Mapping[str, Any]) -> dict[str, Any]:
    """For a summary: by what, where and how good the best was; nothing where the last weights are the
    result."""
    return {BEST: own[BEST]} if BEST in own else {}


def best_checkpoint_note(by: str | None, own: Mapping[str, Any]) -> list[str]:
    """For people: which weights are the result, where they were to be those of the best evaluation."""
    if by is not None and BEST not in own:
        return [
            f"Warning: no evaluation on the way had a number for run.best_by, {by}: the last weights stay."
        ]
    return [
        f"The run leaves the weights of iteration {best['iteration']}, by run.best_by: {best['by']} was "
        f"{best['value']:.4g} there."
        for best in best_of(own).values()
    ]
