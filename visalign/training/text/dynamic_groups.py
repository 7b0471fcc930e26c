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

It holds no model or process group, so it fits any loop, for text as for images. With several processes each
feeds the rewards of all and its own payload: all decide alike.

Where paper and published code leave it open:
* an update takes the first groups that carry signal, in the order they were fed; taking whatever finishes
  first would favour short samples;
* groups beyond `wanted` are dropped (as in verl's recipe).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from visalign.core.groups.labels import Labels
from visalign.errors import UserError

from .settings import DynamicSettings

MIN_VALID = 2
"""Fewest rewards that tell whether a group carries signal."""


class BudgetSpent(UserError):
    """Too few groups carry signal when the rounds are used up."""


@dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    """Group of scored samples."""

    label: Hashable
    index: Tensor
    """[G] int64, positions of its samples in the round."""
    valid: Tensor
    """[G] bool; False where the reward is missing."""
    has_signal: bool
    payload: Any
    """The round's payload, as it was fed."""


@dataclass(kw_only=True)
class Counts:
    """Counts of groups; generated = kept + dropped_* + failed, and over a run kept = taken + surplus."""

    rounds: int = 0
    samples: int = 0
    failed_samples: int = 0
    """Samples without a reward."""
    generated: int = 0
    kept: int = 0
    """Groups with signal."""
    dropped_right: int = 0
    """Groups without signal, all samples right."""
    dropped_wrong: int = 0
    """Groups without signal, all samples wrong."""
    dropped_flat: int = 0
    """Groups without signal, neither all right nor all wrong, or no `right_at` is set."""
    failed: int = 0
    """Groups with fewer than two rewards."""
    taken: int = 0
    """Groups with signal that were handed out."""
    filled: int = 0
    """Groups without signal that were handed out."""
    surplus: int = 0
    """Groups with signal beyond `wanted`."""
    spent: int = 0
    """Updates short of groups when the rounds were used up."""

    def add(self, other: Counts) -> None:
        """Add the counts of another."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


class DynamicGroups:
    """Collector of groups with signal for one update after another.

    Args:
        wanted: groups per update.
        settings: condition for signal, most rounds, and the action when they are used up.
    """

    def __init__(self, wanted: int, settings: DynamicSettings) -> None:
        self.wanted, self.settings = wanted, settings
        self.step = 0
        """Updates handed out so far."""
        self.now, self.last, self.total = Counts(), Counts(), Counts()
        """Counts of the present update, of the last one, and of the run up to that one."""
        self._pool: list[ScoredGroup] = []
        self._spare: list[ScoredGroup] = []

    @property
    def round(self) -> int:
        """Rounds fed in the whole run: a new number for a prompt sampler, the same after a resume."""
        return self.total.rounds + self.now.rounds

    @property
    def wants_more(self) -> bool:
        """True while groups are missing and rounds are left."""
        return len(self._pool) < self.wanted and self.now.rounds < self.settings.max_rounds

    def feed(
        self, group: Labels, rewards: Tensor, valid: Tensor | None = None, *, payload: Any = None
    ) -> Counts:
        """Add a round of scored samples; groups may have any sizes, and come whole.

        Args:
            group: B labels, a new one for each group (as `PromptSampler.group_id`).
            rewards: [B]; a value that is not finite is a missing one.
            valid: [B] bool, False where the reward is missing.
            payload: anything, handed out again with the groups of this round.

        Returns:
            The counts of this round.
        """
        rewards = rewards.cpu().double()
        present = rewards.isfinite() if valid is None else valid.cpu() & rewards.isfinite()
        positions: dict[Hashable, list[int]] = {}
        for position, label in enumerate(group.tolist() if isinstance(group, Tensor) else group):
            positions.setdefault(label, []).append(position)
        counts = Counts(rounds=1, samples=len(rewards), failed_samples=int((~present).sum()))
        for label, members in positions.items():
            index = torch.tensor(members)
            outcome = self._outcome(rewards[index][present[index]])
            counts.generated += 1
            setattr(counts, outcome, getattr(counts, outcome) + 1)
            scored = ScoredGroup(
                label=label,
                index=index,
                valid=present[index],
                has_signal=outcome == "kept",
                payload=payload,
            )
            if scored.has_signal:
                self._pool.append(scored)
            elif self.settings.when_spent == "fill" and outcome != "failed":
                self._spare.append(scored)
        self.now.add(counts)
        return counts

    def take(self) -> list[ScoredGroup]:
        """Return the groups of the update, at most `wanted`, and begin the next one.

        Raises:
            BudgetSpent: groups are missing and `when_spent` is "stop".
        """
        missing = max(0, self.wanted - len(self._pool))
        if missing and self.settings.when_spent == "stop":
            n = self.now
            raise BudgetSpent(
                f"Only {n.kept} of {self.wanted} groups carry signal after {n.rounds} rounds of {n.samples} "
                f"samples: of {n.generated} groups {n.dropped_right} were all right, {n.dropped_wrong} all "
                f"wrong, {n.dropped_flat} without difference, {n.failed} failed. Take prompts of fitting "
                "difficulty or larger groups, raise max_rounds, or set when_spent to 'take' or 'fill'."
            )
        taken, filled = self._pool[: self.wanted], self._spare[:missing]
        self.now.surplus = len(self._pool) - len(taken)
        self.now.taken, self.now.filled, self.now.spent = len(taken), len(filled), int(missing > 0)
        self.total.add(self.now)
        self.last, self.now, self._pool, self._spare = self.now, Counts(), [], []
        self.step += 1
        return taken + filled

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two updates, as JSON values."""
        settings = {"wanted": self.wanted, **_plain(self.settings)}
        return {
            "settings": settings,
            "step": self.step,
            "last": asdict(self.last),
            "total": asdict(self.total),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            UserError: the state was saved under other settings.
        """
        for name, value in {"wanted": self.wanted, **_plain(self.settings)}.items():
            if state["settings"].get(name) != value:
                raise UserError(
                    f"the saved dynamic groups have {name} {state['settings'].get(name)!r}, these {value!r}; "
                    "resume with the settings that the run began with."
                )
        self.step = state["step"]
        self.last, self.total = (
            Counts(**{f.name: state[name][f.name] for f in fields(Counts)}) for name in ("last", "total")
        )

    def _outcome(self, rewards: Tensor) -> str:
        """Name the count that a group with these valid rewards belongs to."""
        if len(rewards) < MIN_VALID:
            return "failed"
        rule, right_at = self.settings.rule, self.settings.right_at
        spreads = bool(rewards.max() > rewards.min())
        share = None if right_at is None else float((rewards >= right_at).double().mean())
        mixed = share is not None and 0.0 < share < 1.0  # eq. 11
        if {"spread": spreads, "accuracy": mixed, "both": spreads and mixed}[rule]:
            return "kept"
        return {1.0: "dropped_right", 0.0: "dropped_wrong"}.get(share, "dropped_flat")  # type: ignore[arg-type]


def _plain(settings: DynamicSettings) -> dict[str, Any]:
    names = ("rule", "right_at", "max_rounds", "when_spent")
    return {name: getattr(settings, name) for name in names}
