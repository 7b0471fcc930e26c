# SPDX-License-Identifier: Apache-2.0
"""Rewards for text by name: one dict, and dotted paths for a user's own classes, objects and functions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from visalign.interfaces import TextReward
from visalign.rewards.base.contract import RewardError
from visalign.rewards.catalogue import check_options, find_target, nearest_name

_ANSWERS = "visalign.rewards.text.verifiable:VerifiableAnswer"

TEXT_CATALOGUE: dict[str, tuple[str, Mapping[str, Any]]] = {
    "exact_answer": (_ANSWERS, {"compare": "exact", "name": "exact_answer"}),
    "numeric_answer": (
        _ANSWERS,
        {"compare": "number", "extract": "last_number", "name": "numeric_answer"},
    ),
    "boxed_answer": (
        _ANSWERS,
        {"compare": "auto", "extract": "boxed", "normalise": "latex", "name": "boxed_answer"},
    ),
    "list_answer": (_ANSWERS, {"compare": "list", "extract": "last_line", "name": "list_answer"}),
    "text_format": ("visalign.rewards.text.format:TextFormat", {}),
    "json_format": ("visalign.rewards.text.format:JsonFormat", {}),
    "task_answer": ("visalign.rewards.text.tasks:TaskAnswer", {}),
    "length": ("visalign.rewards.text.length:LengthReward", {}),
    "repetition": ("visalign.rewards.text.length:RepetitionPenalty", {}),
    "code_tests": ("visalign.rewards.code.reward:CodeTests", {}),
    "reward_model": ("visalign.rewards.text.reward_model:RewardModel", {}),
    "process_reward": ("visalign.rewards.text.process_reward:ProcessRewardModel", {}),
}
"""name -> (module:class, its options, which a caller's override). A module is imported at its first use."""


def load_text_reward(name: str, **options: Any) -> TextReward:
    """The reward for text of that name, or the user's own.

    Args:
        name: a name of the catalogue; `package.module:Name`; or `path/to/file.py:Name`. The latter two may
            name a class or an object with the contract (`visalign.interfaces.TextReward`), or a
            function in one of the forms of `visalign.rewards.text.callables`.
        **options: arguments of the class; for a function those of `TextFunctionReward` (unit, range, ...).

    Returns:
        An object with the contract.

    Raises:
        RewardError: unknown name, module or attribute; wrong options; or what was found is no such reward.

    Example:
        >>> load_text_reward("boxed_answer", conflict="refuse").unit
        '1 = correct'
    """
    if name not in TEXT_CATALOGUE and ":" not in name:
        nearest = nearest_name(name, TEXT_CATALOGUE)
        raise RewardError(
            f"There is no text reward {name!r}.{nearest} Allowed: {', '.join(TEXT_CATALOGUE)}, or your own "
            "as 'package.module:Name' or 'path/to/file.py:Name'."
        )
    path, preset = TEXT_CATALOGUE.get(name, (name, {}))
    found, options = find_target(path), {**preset, **options}
    if isinstance(found, type):
        check_options(name, found, options)
        found = found(**options)
    elif callable(found) and not hasattr(found, "score"):
        return _wrap(name, found, options)
    elif options:
        raise RewardError(
            f"Text reward {name!r} is an object already, so it takes no options; given: "
            f"{', '.join(options)}. Name its class instead."
        )
    return _checked(name, found)


def _wrap(name: str, function: Any, options: dict[str, Any]) -> TextReward:
    from .callables import TextFunctionReward

    options = {"name": name.rpartition(":")[2], **options}
    check_options(name, TextFunctionReward, {"function": function, **options})
    return TextFunctionReward(function, **options)


def _checked(name: str, found: Any) -> TextReward:
    """Refuse what lacks a part of the contract, and what judges images."""
    needed = ("name", "unit", "range", "higher_is_better", "score")
    if missing := [key for key in needed if not hasattr(found, key)]:
        raise RewardError(
            f"{name!r} is a {type(found).__name__} without {', '.join(missing)}, so it is no text reward. "
            "Add these (visalign.interfaces.TextReward says what they are), or name a function."
        )
    if next(iter(inspect.signature(found.score).parameters), "") == "images":
        raise RewardError(
            f"{name!r} judges images: its score() takes them first. Name a reward for text "
            f"({', '.join(TEXT_CATALOGUE)}), or load it with visalign.rewards.load_reward."
        )
    return found
