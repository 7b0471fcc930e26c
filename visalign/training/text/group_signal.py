# SPDX-License-Identifier: Apache-2.0
"""Whether a group of scored samples carries signal, the counts of those that do, and the rules allowed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from visalign.core.groups.labels import Labels, group_index
from visalign.errors import UserError

RULES = ("spread", "accuracy", "both")
WHEN_SPENT = ("take", "fill", "stop")
SURPLUS = ("drop", "carry")


@dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    """One group of samples and what they were worth."""

    label: Hashable
    rewards: Tensor
    """[G]."""
    valid: Tensor
    """[G] bool; False where the reward is missing."""
    index: Tensor
    """[G] int64: where its samples stood in the batch that was fed."""
    step: int
    """The step it was sampled in; less than the step it is used in where it was carried over."""
    round: int
    """The `feed` it came with, counted from the beginning of the run."""
    has_signal: bool
    """False for a group that only fills up a step."""
    payload: Any
    """What the caller gave, untouched."""


@dataclass(kw_only=True)
class Counts:
    """What happened to the groups.

    generated = kept + dropped_* + failed; over a run kept = taken + surplus + stale + those held now.
    """

    rounds: int = 0
    samples: int = 0
    failed_samples: int = 0
    """Samples without a reward."""
    generated: int = 0
    kept: int = 0
    """Groups with signal."""
    dropped_right: int = 0
    """Without signal, all samples right."""
    dropped_wrong: int = 0
    """Without signal, all samples wrong."""
    dropped_flat: int = 0
    """Without signal, neither: equal rewards and no notion of right, or not enough spread."""
    failed: int = 0
    """Groups with fewer than `min_valid` rewards."""
    taken: int = 0
    """Groups with signal that were handed out."""
    filled: int = 0
    """Groups without signal that were handed out."""
    surplus: int = 0
    """Groups with signal beyond `wanted`, dropped."""
    stale: int = 0
    """Groups with signal that were carried over for too long, dropped."""
    spent: int = 0
    """Steps that ended by the budget, short of groups."""

    def add(self, other: Counts) -> None:
        """Add the counts of another."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def whole_groups(
    group: Labels, rewards: Tensor, valid: Tensor | None, correct: Tensor | None
) -> dict[Hashable, Tensor]:
    """label -> positions [G] of its samples, in the order in which the labels first occur.

    Args:
        group: B labels.
        rewards: [B].
        valid: [B] bool or None.
        correct: [B] bool or None.

    Raises:
        UserError: shapes or dtypes that do not fit.
    """
    if rewards.ndim != 1:
        raise UserError(
            f"rewards has shape {tuple(rewards.shape)}; one reward per sample is wanted, [B]. "
            "Combine several rewards first (visalign.core.advantages.combine)."
        )
    for name, given in (("valid", valid), ("correct", correct)):
        if given is not None and (given.shape != rewards.shape or given.dtype != torch.bool):
            raise UserError(
                f"{name} is {given.dtype} {tuple(given.shape)}; it must be bool and have the shape of "
                f"rewards, {tuple(rewards.shape)}."
            )
    try:
        group_index(group, len(rewards))
    except ValueError as error:
        raise UserError(str(error)) from error
    places: dict[Hashable, list[int]] = {}
    for i, label in enumerate(group.tolist() if isinstance(group, Tensor) else group):
        places.setdefault(label, []).append(i)
    return {label: torch.tensor(index, dtype=torch.int64) for label, index in places.items()}


def outcome_of(
    rewards: Tensor,
    valid: Tensor,
    right: Tensor | None,
    *,
    rule: str,
    tolerance: float,
    min_valid: int,
) -> str:
    """The name of the count that a group belongs to: "kept", "failed" or "dropped_…".

    Args:
        rewards: [G] float64.
        valid: [G] bool.
        right: [G] bool, or None where nobody knows.
        rule: one of RULES; "accuracy" and "both" need `right`.
        tolerance: largest difference of rewards that counts as none.
        min_valid: fewest rewards to judge by.
    """
    known = rewards[valid]
    if len(known) < min_valid:
        return "failed"
    spreads = bool(known.max() - known.min() > tolerance)
    share = None if right is None else float(right[valid].double().mean())
    mixed = share is not None and 0.0 < share < 1.0
    if {"spread": spreads, "accuracy": mixed, "both": spreads and mixed}[rule]:
        return "kept"
    if share == 1.0:
        return "dropped_right"
    return "dropped_wrong" if share == 0.0 else "dropped_flat"


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings of `DynamicGroups` that cannot be.

    Raises:
        UserError: a value that is not allowed, or no budget at all.
    """
    for name, allowed in (("rule", RULES), ("when_spent", WHEN_SPENT), ("surplus", SURPLUS)):
        if settings[name] not in allowed:
            raise UserError(f"{name} is {settings[name]!r}; it must be one of {', '.join(allowed)}.")
    for name, least in (
        ("wanted", 1),
        ("min_valid", 2),
        ("max_rounds", 1),
        ("max_samples", 1),
        ("max_age", 1),
    ):
        if settings[name] is not None and settings[name] < least:
            raise UserError(f"{name} is {settings[name]}; it must be at least {least}.")
    if not settings["tolerance"] >= 0 or math.isinf(settings["tolerance"]):
        raise UserError(f"tolerance is {settings['tolerance']}; it must be 0 or more, and finite.")
    if settings["max_rounds"] is None and settings["max_samples"] is None:
        raise UserError(
            "max_rounds and max_samples are both None; without a budget a step without signal would sample "
            "for ever. Set one of them."
        )
