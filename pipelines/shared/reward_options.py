# SPDX-License-Identifier: Apache-2.0
"""`--option` of commands that take several rewards: which options go to which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from visalign.errors import UserError, suggestion

from .option_items import parse_options


def reward_options(items: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by reward.

    Args:
        items: `LABEL.NAME=VALUE` as typed; `NAME=VALUE` where there is one reward alone. Values are YAML.
        names: The rewards' names as given, which are their labels.

    Returns:
        name -> options, for every name.

    Raises:
        UserError: An item names none of the rewards, or is no NAME=VALUE.

    >>> reward_options(["jpeg_size.quality=90"], ["jpeg_size", "sharpness"])
    {'jpeg_size': {'quality': 90}, 'sharpness': {}}
    """
    found: dict[str, list[str]] = {name: [] for name in names}
    for item in items:
        owner = next(
            (name for name in sorted(found, key=len, reverse=True) if item.startswith(name + ".")), ""
        )
        if owner:
            found[owner].append(item[len(owner) + 1 :])
        elif len(found) == 1 and "." not in item.partition("=")[0]:
            found[names[0]].append(item)
        else:
            hint = suggestion(item.split(".")[0], found)
            raise UserError(
                f"--option is {item!r}, which names none of the rewards. {hint}Write LABEL.NAME=VALUE with "
                f"LABEL one of {', '.join(found)}."
            )
    return {name: parse_options(own) for name, own in found.items()}


def load_each(names: Sequence[str], options: Sequence[str], load: Callable[..., Any]) -> dict[str, Any]:
    """Load rewards by name with their options.

    Args:
        names: As given.
        options: As `reward_options` takes them.
        load: `visalign.rewards.catalogue.load_reward` or `load_judge`.

    Returns:
        name -> reward, each name once.
    """
    unique = list(dict.fromkeys(names))
    chosen = reward_options(options, unique)
    return {name: load(name, **chosen[name]) for name in unique}


def with_cache(rewards: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """The same rewards, asked only for what the cache in that folder does not know.

    Args:
        rewards: label -> reward or pairwise judge.
        folder: Of the cache; None changes nothing.

    Raises:
        RewardError: A reward has no identity, or scores images against their group.
    """
    if folder is None:
        return rewards
    from visalign.interfaces import PointwiseReward
    from visalign.rewards.cache.reward import CachedJudge, CachedReward
    from visalign.rewards.cache.store import ScoreCache

    cache = ScoreCache(folder)
    return {
        label: CachedReward(reward, cache)
        if isinstance(reward, PointwiseReward)
        else CachedJudge(reward, cache)
        for label, reward in rewards.items()
    }


def new_file(path: Path | None, *, endings: Sequence[str] = ()) -> None:
    """Refuse an output that exists, or that ends in none of the allowed endings.

    Args:
        path: As given; None is the screen.
        endings: Allowed endings; none allows all.

    Raises:
        UserError: It cannot be used.
    """
    if path is None:
        return
    if endings and path.suffix.lower() not in endings:
        raise UserError(
            f"'{path}' ends in '{path.suffix}'; what is written there ends in {' or '.join(endings)}."
        )
    if path.exists():
        raise UserError(f"'{path}' exists, and nothing is overwritten. Give another name or remove it.")
