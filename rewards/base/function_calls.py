# SPDX-License-Identifier: Apache-2.0
"""What functions as rewards share, of pictures and of text: signatures, arguments by name, answers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .contract import RewardError

Parameters = Mapping[str, inspect.Parameter]


def read_signature(name: str, function: Callable[..., Any], *, forms: str, wrapped: str) -> Parameters:
    """The parameters of a user's function.

    Args:
        name: of the reward.
        function: what the user gave.
        forms: the calls that are allowed, for the messages.
        wrapped: how a coroutine function is wrapped, for the message.

    Raises:
        TypeError: not a function, a coroutine function, or without a readable signature.
    """
    if not callable(function):
        raise TypeError(f"Reward {name!r} is a {type(function).__name__}, not a function. Allowed: {forms}.")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # the method of an object, not whether there is one
    ):
        raise TypeError(f"Reward {name!r} is a coroutine function; wrap it: {wrapped}.")
    try:
        return inspect.signature(function).parameters
    except ValueError as error:
        raise TypeError(
            f"Reward {name!r} has no readable signature; wrap it into a Python function: {forms}."
        ) from error


def pick_arguments(
    name: str, parameters: Parameters, offered: dict[str, Any], known: Sequence[str]
) -> dict[str, Any]:
    """What the signature asks for out of what there is; all of it with `**kwargs`.

    Args:
        name: of the reward.
        parameters: of the function.
        offered: argument -> value; those that are not in `known` are columns of the metadata.
        known: the names that are always there, for the message.

    Raises:
        RewardError: a parameter without default that nothing is offered for.
    """
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return offered
    missing = [
        key
        for key, one in parameters.items()
        if key not in offered and one.default is one.empty and one.kind is not one.VAR_POSITIONAL
    ]
    if missing:
        keys = [key for key in offered if key not in known]
        raise RewardError(
            f"Reward {name!r} asks for {', '.join(missing)}, which is neither one of {', '.join(known)} nor "
            f"a key of the metadata (keys: {', '.join(keys) or 'none'}). Rename the parameter, give it a "
            "default, or put the key into the prompts' metadata."
        )
    return {key: offered[key] for key in parameters if key in offered}


def read_numbers(name: str, answer: Any, size: int, *, noun: str, place: str) -> list[float]:
    """What a function returned for a batch, NaN where None.

    Args:
        name: of the reward.
        answer: list, array or tensor.
        size: how many numbers there must be.
        noun: what a sample is, "image" or "completion".
        place: what stands before the index of a wrong entry, such as "at position".

    Raises:
        RewardError: no list, another number of entries, or one that is no number.
    """
    if isinstance(answer, Tensor | np.ndarray):
        answer = answer.tolist() if answer.ndim == 1 else [answer.tolist()]
    if isinstance(answer, str) or not isinstance(answer, Sequence):
        raise RewardError(
            f"Reward {name!r} returned a {type(answer).__name__}; needed is a list of {size} numbers, one "
            f"per {noun}."
        )
    if len(answer) != size:
        raise RewardError(
            f"Reward {name!r} returned {len(answer)} scores for {size} {noun}s; return one number per {noun}"
            ", None where it could not judge."
        )
    return [read_number(name, item, f"{place} {index}") for index, item in enumerate(answer)]


def read_number(name: str, item: Any, place: str) -> float:
    """One number of a function, NaN for None.

    Raises:
        RewardError: no number.
    """
    if isinstance(item, Tensor | np.ndarray | np.generic) and item.ndim == 0:
        item = item.item()
    if item is not None and not isinstance(item, int | float):
        raise RewardError(
            f"Reward {name!r} returned {item!r} ({type(item).__name__}) {place}; needed is a number, or None "
            "for one that it could not judge."
        )
    return math.nan if item is None else float(item)


def unjudged(name: str, number: float, range: tuple[float, float]) -> str | None:
    """Why a number is no score.

    Returns:
        The reason, None for a score.

    Raises:
        RewardError: a number outside the range.
    """
    if not math.isfinite(number):
        return f"{name} returned {'None or NaN' if math.isnan(number) else number} for it"
    if not range[0] <= number <= range[1]:
        raise RewardError(
            f"Reward {name!r} returned {number:g}, outside its declared range {range}; correct the function "
            "or declare the true range."
        )
    return None
