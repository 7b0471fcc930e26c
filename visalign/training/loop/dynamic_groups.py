# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: groups without signal are replaced until an update has enough groups.

DAPO (arXiv 2503.14476, section 3.2, eq. 11, algorithm 1). A group whose samples are all right or all wrong
has advantage zero; the more of them there are, the fewer samples an update learns from.

    groups = DynamicGroups(32, DynamicSettings(max_rounds=10))
    for step in range(steps):
        while groups.wants_more:
            labels, rewards, valid, samples = sample_and_score(groups.round)
            groups.feed(labels, rewards, valid, payload=samples)
        update(groups.take())

With several processes each feeds the rewards of all and its own payload: all decide alike. An update takes the first
groups that carry signal, in the order they were fed, since taking whatever finishes first would favour short samples;
groups beyond `wanted` are dropped, as in verl's recipe. When the rounds are used up it takes the groups there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core.groups.labels import Labels
from visalign.errors import UserError
from visalign.settings import Count, Finite, settings

GROUP_COUNTS = ("rounds", "generated", "kept", "dropped_right", "dropped_wrong", "dropped_flat", "surplus")
"""Counts of `DynamicGroups` that are logged."""


@settings("dynamic")
class DynamicSettings:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): sample on until enough groups carry signal."""

    enabled: bool = False
    """Replace groups without signal by new ones."""
    max_rounds: Count = 4
    """Most rounds of P prompts for one iteration; then it trains on the groups there are."""
    rule: Literal["spread", "accuracy"] = "spread"
    """Condition for signal: spread (rewards differ) or accuracy (0 < share of right samples < 1)."""
    right_at: Finite | None = None
    """Reward from which a sample is right; for the rule accuracy and the counts."""

    def __post_init__(self) -> None:
        if self.rule != "spread" and self.right_at is None:
            raise UserError(
                f"dynamic.rule={self.rule} asks which samples are right, and dynamic.right_at is null. Set it to the "
                "reward of a right sample, for example 1.0."
            )


@dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    """Group of scored samples with signal."""

    label: Hashable
    index: Tensor  # [G] int64, positions of its samples in the round
    valid: Tensor  # [G] bool; False where the reward is missing
    payload: Any  # The round's payload, as it was fed


class DynamicGroups:
    """Collector of groups with signal, `wanted` for one update after another."""

    def __init__(self, wanted: int, settings: DynamicSettings) -> None:
        self.wanted, self.settings = wanted, settings
        self.round = 0  # Rounds fed in the whole run: a new number for a prompt sampler, the same after a resume
        self.now, self.last = Counter[str](), Counter[str]()
        """Counts of the present update and of the one before: rounds; groups generated = kept + dropped_right (no
        signal, all samples right) + dropped_wrong + dropped_flat (neither, or no `right_at`) + failed (fewer than two
        rewards); surplus, kept ones beyond `wanted`."""
        self._pool: list[ScoredGroup] = []

    @property
    def wants_more(self) -> bool:
        """True while groups are missing and rounds are left."""
        return len(self._pool) < self.wanted and self.now["rounds"] < self.settings.max_rounds

    def metrics(self) -> dict[str, float]:
        """Return the counts of the last update."""
        return {f"groups/{name}": float(self.last[name]) for name in GROUP_COUNTS}

    def feed(self, group: Labels, rewards: Tensor, valid: Tensor | None = None, *, payload: Any = None) -> None:
        """Add a round of scored samples; groups may have any sizes, and come whole, under labels never used before.

        A reward that is not valid or not finite is a missing one. `payload` is handed out again with the groups.
        """
        rewards = rewards.cpu().double()
        present = rewards.isfinite() if valid is None else valid.cpu() & rewards.isfinite()
        positions: dict[Hashable, list[int]] = {}
        for position, label in enumerate(group.tolist() if isinstance(group, Tensor) else group):
            positions.setdefault(label, []).append(position)
        self.round += 1
        self.now["rounds"] += 1
        for label, members in positions.items():
            index = torch.tensor(members)
            outcome = self._outcome(rewards[index][present[index]])
            self.now.update(["generated", outcome])
            if outcome == "kept":
                self._pool.append(ScoredGroup(label=label, index=index, valid=present[index], payload=payload))

    def take(self) -> list[ScoredGroup]:
        """Return the groups of the update, at most `wanted`, and begin the next one."""
        taken = self._pool[: self.wanted]
        self.now["surplus"] = len(self._pool) - len(taken)
        self.last, self.now, self._pool = self.now, Counter(), []
        return taken

    def _outcome(self, rewards: Tensor) -> str:
        if len(rewards) < 2:
            return "failed"
        right_at = self.settings.right_at
        share = math.nan if right_at is None else float((rewards >= right_at).double().mean())
        is_spread = bool(rewards.max() > rewards.min())
        if is_spread if self.settings.rule == "spread" else 0.0 < share < 1.0:  # eq. 11
            return "kept"
        return {1.0: "dropped_right", 0.0: "dropped_wrong"}.get(share, "dropped_flat")
