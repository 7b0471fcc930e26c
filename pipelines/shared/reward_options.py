# SPDX-License-Identifier: Apache-2.0
"""Rewards of a command: their `--option` items, loading, the cache around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from visalign.config import UNREADABLE, parse_value
from visalign.errors import UserError, excerpt, suggestion
from visalign.interfaces import PointwiseReward, with_capabilities
from visalign.precision import check_device

from .run_folder import check_place


def parse_options(items: list[str], option: str = "--option") -> dict[str, Any]:
    """Parse `NAME=VALUE` items, the values as YAML.

    >>> parse_options(["quality=90", "prefer=smaller", "tolerance=1e-3"])
    {'quality': 90, 'prefer': 'smaller', 'tolerance': 0.001}
    """
    options: dict[str, Any] = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign or not name.isidentifier():
            raise UserError(f"{option} is {excerpt(item)}; write NAME=VALUE, e.g. {option} quality=90.")
        try:
            options[name] = parse_value(value)
        except UNREADABLE as error:
            raise UserError(f"{option} {excerpt(item)}: the value cannot be read ({error}). Quote it.") from error
    return options


def reward_options(items: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse `LABEL.NAME=VALUE` items (`NAME=VALUE` for a single reward) into label -> options.

    >>> reward_options(["jpeg_size.quality=90"], ["jpeg_size", "sharpness"])
    {'jpeg_size': {'quality': 90}, 'sharpness': {}}
    """
    items_of: dict[str, list[str]] = {name: [] for name in names}
    longest_first = sorted(items_of, key=len, reverse=True)  # a label may be the beginning of another
    for item in items:
        label = next((name for name in longest_first if item.startswith(name + ".")), None)
        if label is not None:
            items_of[label].append(item[len(label) + 1 :])
        elif len(items_of) == 1 and "." not in item.partition("=")[0]:
            items_of[names[0]].append(item)
        else:
            hint = f"{suggestion(item.split('.')[0], items_of)}Write LABEL.NAME=VALUE, LABEL: {', '.join(items_of)}."
            raise UserError(f"--option is {excerpt(item)}, which names none of the rewards. {hint}")
    return {name: parse_options(entries) for name, entries in items_of.items()}


def load_each(names: Sequence[str], options: Sequence[str], load: Any, device: str | None) -> dict[str, Any]:
    """Load each reward once with its options (as `reward_options` takes them), on the device where they name none.

    The error stream says where each computes.
    """
    from .places import place_of, say_places

    if device is not None:
        check_device(device)
        if device.startswith("cuda:"):
            torch.cuda.set_device(device)  # images that are decoded ahead go to the current one
    chosen = reward_options(options, list(dict.fromkeys(names)))
    rewards = {name: with_capabilities(load(name, run_device=device, **options)) for name, options in chosen.items()}
    say_places({name: place_of(reward, {"device": device, **chosen[name]}) for name, reward in rewards.items()})
    return rewards


def check_columns(columns: Sequence[str], rewards: Sequence[str], lower_is_better: Sequence[str]) -> None:
    """Refuse a column of scores under a reward's name, and a direction of no column."""
    if twice := [name for name in columns if name in rewards]:
        raise UserError(f"{twice[0]} is a reward and a column. Name the column: --scores stored={twice[0]}.")
    if unknown := ", ".join(sorted({*lower_is_better} - {*columns})):
        raise UserError(f"--lower-is-better names {unknown}, which is no --scores column.")


def need_prompts(rewards: Mapping[str, Any]) -> bool:
    return any(reward.capabilities.needs_prompt for reward in rewards.values())


def needed_prompt(prompt: str | None, rewards: Mapping[str, Any]) -> str:
    """Return the prompt, empty if none was given and no reward reads it."""
    if prompt is None and need_prompts(rewards):
        raise UserError("Missing option '--prompt' / '-p': the text that the images should show.")
    return prompt or ""


def with_cache(rewards: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Wrap rewards or judges with the cache in a folder; None: no cache."""
    if folder is None:
        return rewards
    from visalign.rewards.cache.reward import CachedJudge, CachedReward
    from visalign.rewards.cache.store import ScoreCache

    if folder.exists() and not folder.is_dir():
        raise UserError(f"The cache '{folder}' is a file. Give a folder with --cache.")
    check_place(folder)
    cache = ScoreCache(folder)
    return {
        label: CachedReward(reward, cache) if isinstance(reward, PointwiseReward) else CachedJudge(reward, cache)
        for label, reward in rewards.items()
    }
