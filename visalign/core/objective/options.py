# SPDX-License-Identifier: Apache-2.0
"""Looking up a choice of an objective's stage, with messages that name the nearest one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from visalign.errors import suggestion


@dataclass(frozen=True)
class Stage:
    """A choice of a stage."""

    function: Callable[..., Any]
    """The public function whose keyword arguments are the options."""
    apply: Callable[..., Any]
    """Feeds it."""
    needs: tuple[str, ...] = ()
    """Fields of `Trajectories` or `PolicyOutput` that must be there."""


TENSORS = {
    "decision_weight",
    "excluded",
    "kl",
    "last_value",
    "log_prob",
    "log_ratio",
    "valid",
    "weight",
}
"""Keyword arguments that are no options: the objective fills them."""


def pick(
    stage: str, name: str, table: Mapping[str, Stage], options: Mapping[str, Any], *, complete: bool = False
) -> Stage:
    """Look up a choice and check the names of its options.

    Args:
        stage: what is chosen, for messages.
        name: the choice.
        table: name -> choice.
        options: given.
        complete: refuse as well where an option without default is missing.

    Raises:
        ValueError: unknown, with the nearest name and all that are allowed.
    """
    if name not in table:
        raise ValueError(
            f"there is no {stage} {name!r}. {suggestion(name, table)}Choose one of: {', '.join(table)}."
        )
    chosen = table[name]
    allowed: set[str] = set()
    for function in (chosen.function, chosen.apply):
        kinds = inspect.signature(function).parameters.values()
        allowed |= {p.name for p in kinds if p.kind is inspect.Parameter.KEYWORD_ONLY}
    allowed -= TENSORS
    for option in options:
        if option not in allowed:
            raise ValueError(
                f"{stage} {name!r} has no option {option!r}. {suggestion(option, allowed)}Its options: "
                f"{', '.join(sorted(allowed)) or 'none'}."
            )
    kinds = inspect.signature(chosen.function).parameters.values()
    needed = [p.name for p in kinds if p.name in allowed and p.default is inspect.Parameter.empty]
    if complete and (missing := [option for option in needed if option not in options]):
        raise ValueError(
            f"{stage} {name!r} needs the options {', '.join(needed)}; missing: {', '.join(missing)}."
        )
    return chosen
