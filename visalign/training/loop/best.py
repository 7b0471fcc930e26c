# SPDX-License-Identifier: Apache-2.0
"""Keep the weights of the best held-out evaluation (`run.best_by`) as the run's result.

One reward is trained on, another selects the result (decoupled approval).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from visalign.errors import UserError, suggestion

BEST = "best"  # File stem of the best weights in a checkpoint, and their entry in `Counters.own`


def update_best(by: str, evaluated: Mapping[str, Any], iteration: int, own: dict[str, Any]) -> bool:
    """Return True where an evaluation is better than all before it, and record it in `own` (`Counters.own`).

    The highest value wins, with a "-" before the metric's name the lowest; of equals the first, NaN never.

    Raises:
        UserError: the evaluation has no such metric.
    """
    name, sign = by.removeprefix("-"), -1.0 if by.startswith("-") else 1.0
    if name not in evaluated:
        raise UserError(
            f"run.best_by is {by!r}, which no evaluation during training has. {suggestion(name, evaluated)}"
            f"They have {', '.join(evaluated) or 'nothing'}; with a '-' in front the lowest is the best."
        )
    value = float(evaluated[name])
    if math.isnan(value) or (BEST in own and not sign * value > sign * own[BEST]["value"]):
        return False
    own[BEST] = {"by": by, "value": value, "iteration": iteration}
    return True


def best_summary(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return metric, value and iteration of the best evaluation; {} where the last weights are the result."""
    return {BEST: own[BEST]} if BEST in own else {}


def best_checkpoint_note(by: str | None, own: Mapping[str, Any]) -> list[str]:
    """Describe which weights are the result, where `run.best_by` selects them."""
    if best := own.get(BEST):
        return [
            f"The result has the weights of iteration {best['iteration']}, selected by run.best_by: "
            f"{best['by']} was {best['value']:.4g} there."
        ]
    if by is None:
        return []
    return [f"Warning: no evaluation had a number for run.best_by, {by}: keeping the last weights."]
