# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: groups without signal are left out and replaced, until a step has enough.

DAPO (arXiv 2503.14476, section 3.2, eq. 11, algorithm 1). A group whose samples are all right or all wrong
has advantage zero; the more of them there are, the fewer samples an update learns from.

    groups = DynamicGroups(wanted=32, max_rounds=10)
    for step in range(steps):
        while groups.wants_more:
            labels, rewards, valid, payload = sample_and_score(groups.request())
            groups.feed(labels, rewards, valid, payload=payload)
        update(groups.take())

It holds no model, tensor of a policy or process group, so it fits any loop, for text as for images. With
several processes each feeds the rewards of all, gathered, and keeps its own payload: all decide alike.

Stated, where paper and published code leave it open:
* the groups of a step are the first that carry signal, in the order they were fed; a loop that feeds whatever
  is finished first would favour short samples;
* what a round gives beyond `wanted` is dropped by default (as in verl's recipe), or carried over to the next
  step, where it is off-policy by one update: then use log-probabilities of the rollout in the ratio;
* the budget counts what is sampled for one step, is checked between rounds, and may be overrun by one round.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import asdict, fields
from typing import Any

from torch import Tensor

from visalign.core.groups.labels import Labels
from visalign.errors import UserError

from .group_signal import Counts, ScoredGroup, check_settings, outcome_of, whole_groups


class BudgetSpent(UserError):
    """The budget of a step is spent and too few groups carry signal."""


class DynamicGroups:
    """Collects groups with signal for one step after another.

    Args:
        wanted: groups per step.
        rule: which groups carry signal. "spread": their rewards differ by more than `tolerance`. "accuracy":
            0 < share of right samples < 1 (DAPO's eq. 11, for rewards with more in them than right and
            wrong). "both".
        tolerance: largest difference of rewards that counts as none.
        right_at: a sample of at least this reward is right, unless `feed` is told otherwise. None: rewards
            say nothing of right and wrong.
        min_valid: fewest rewards that a group is judged by; below, it has failed and is never handed out.
        max_rounds: budget of a step in calls of `feed`; None for no such limit.
        max_samples: budget of a step in samples; None for no such limit.
        when_spent: what `take` does when the budget is spent. "take": hand out what there is, perhaps
            nothing: skip the update then. "fill": fill up with groups without signal. "stop": raise.
        surplus: "drop" or "carry" to the next step.
        max_age: steps after which a carried group is dropped.

    Raises:
        UserError: a value that is not allowed, or no budget at all.
    """

    def __init__(
        self,
        wanted: int,
        *,
        rule: str = "spread",
        tolerance: float = 0.0,
        right_at: float | None = None,
        min_valid: int = 2,
        max_rounds: int | None = 10,
        max_samples: int | None = None,
        when_spent: str = "take",
        surplus: str = "drop",
        max_age: int = 1,
    ) -> None:
        self._settings: dict[str, Any] = {
            "wanted": wanted,
            "rule": rule,
            "tolerance": tolerance,
            "right_at": right_at,
            "min_valid": min_valid,
            "max_rounds": max_rounds,
            "max_samples": max_samples,
            "when_spent": when_spent,
            "surplus": surplus,
            "max_age": max_age,
        }
        check_settings(self._settings)
        self.wanted = wanted
        self.step = 0
        """Steps handed out so far."""
        self.now, self.last, self.total = Counts(), Counts(), Counts()
        """Counts of the step under way, of the one handed out last, and of the run up to that one."""
        self._pool: list[ScoredGroup] = []
        self._spare: list[ScoredGroup] = []

    @property
    def round(self) -> int:
        """Calls of `feed` in the whole run: a new number for a prompt sampler, the same after a resume."""
        return self.total.rounds + self.now.rounds

    @property
    def missing(self) -> int:
        """Groups with signal that the step still lacks."""
        return max(0, self.wanted - len(self._pool))

    @property
    def is_spent(self) -> bool:
        """Whether the budget of the step is used up."""
        rounds, samples = self._settings["max_rounds"], self._settings["max_samples"]
        return (rounds is not None and self.now.rounds >= rounds) or (
            samples is not None and self.now.samples >= samples
        )

    @property
    def wants_more(self) -> bool:
        """Whether to sample another round: groups are missing and there is budget left."""
        return self.missing > 0 and not self.is_spent

    def request(self, most: int | None = None) -> int:
        """How many groups to sample next, judged by the share that carried signal so far; at least 1."""
        kept = self.total.kept + self.now.kept
        generated = self.total.generated + self.now.generated
        count = min(math.ceil(self.missing * (generated + 1) / (kept + 1)), most or self.wanted)
        limit = self._settings["max_samples"]
        if limit is not None and generated:
            size = (self.total.samples + self.now.samples) / generated
            count = min(count, int((limit - self.now.samples) / size))
        return max(1, count)

    def feed(
        self,
        group: Labels,
        rewards: Tensor,
        valid: Tensor | None = None,
        *,
        correct: Tensor | None = None,
        payload: Mapping[Any, Any] | None = None,
    ) -> Counts:
        """Take in a round of scored samples; groups may have any sizes, and come whole.

        Args:
            group: B labels, a new one for each group (as `PromptSampler.group_id`).
            rewards: [B]; a value that is not finite is a missing one.
            valid: [B] bool, False where the reward is missing.
            correct: [B] bool, which samples are right, for `rule` and counts; by default by `right_at`.
            payload: label -> anything, handed out again with the group.

        Returns:
            The counts of this round.

        Raises:
            UserError: shapes that do not fit, a label that is held already, a label without payload, or a
                rule that needs to know what is right and cannot.
        """
        found = whole_groups(group, rewards, valid, correct)
        self._check_feed(found, correct, payload)
        present = rewards.isfinite() if valid is None else valid & rewards.isfinite()
        counts = Counts(rounds=1, samples=len(rewards), failed_samples=int((~present).sum()))
        number = self.round
        for label, index in found.items():
            outcome = self._outcome(index, rewards, present, correct)
            counts.generated += 1
            setattr(counts, outcome, getattr(counts, outcome) + 1)
            fills = self._fills and outcome != "failed" and len(self._spare) < self.wanted
            if outcome != "kept" and not fills:
                continue
            (self._pool if outcome == "kept" else self._spare).append(
                ScoredGroup(
                    label=label,
                    rewards=rewards[index.to(rewards.device)],
                    valid=present[index.to(rewards.device)],
                    index=index,
                    step=self.step,
                    round=number,
                    has_signal=outcome == "kept",
                    payload=None if payload is None else payload[label],
                )
            )
        self.now.add(counts)
        return counts

    def take(self) -> list[ScoredGroup]:
        """The groups of the step, at most `wanted`; the next step begins.

        Raises:
            UserError: groups are missing and there is budget left.
            BudgetSpent: groups are missing, the budget is spent, and `when_spent` is "stop". The state stays.
        """
        if self.wants_more:
            raise UserError(
                f"take() with {len(self._pool)} of {self.wanted} groups and budget left; feed() rounds while "
                "wants_more is true."
            )
        lacking = self.missing
        if lacking and self._settings["when_spent"] == "stop":
            raise BudgetSpent(self._spent_message())
        taken, rest = self._pool[: self.wanted], self._pool[self.wanted :]
        filled = self._spare[:lacking] if self._fills else []
        self._pool, self._spare = [], []
        if self._settings["surplus"] == "carry":
            self._pool = [g for g in rest if self.step + 1 - g.step <= self._settings["max_age"]]
            self.now.stale += len(rest) - len(self._pool)
        else:
            self.now.surplus += len(rest)
        self.now.taken, self.now.filled, self.now.spent = len(taken), len(filled), int(lacking > 0)
        self.total.add(self.now)
        self.last, self.now = self.now, Counts()
        self.step += 1
        return taken + filled

    def state_dict(self) -> dict[str, Any]:
        """All of the state, in plain containers and tensors; payloads as they are, not copied."""
        return {
            "settings": dict(self._settings),
            "step": self.step,
            **{name: asdict(getattr(self, name)) for name in ("now", "last", "total")},
            "pool": [_plain(group) for group in self._pool],
            "spare": [_plain(group) for group in self._spare],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, within a step too.

        Raises:
            UserError: the state was made under other settings.
        """
        for name, value in self._settings.items():
            if state["settings"].get(name) != value:
                raise UserError(
                    f"the saved dynamic groups have {name} {state['settings'].get(name)!r}, these {value!r}; "
                    "resume with the settings that the run began with."
                )
        self.step = state["step"]
        self.now, self.last, self.total = (Counts(**state[name]) for name in ("now", "last", "total"))
        self._pool = [ScoredGroup(**group) for group in state["pool"]]
        self._spare = [ScoredGroup(**group) for group in state["spare"]]

    @property
    def _fills(self) -> bool:
        return self._settings["when_spent"] == "fill"

    def _outcome(self, index: Tensor, rewards: Tensor, present: Tensor, correct: Tensor | None) -> str:
        at = index.to(rewards.device)
        values, right_at = rewards[at].double(), self._settings["right_at"]
        right = None if right_at is None else values >= right_at
        if correct is not None:
            right = correct[index.to(correct.device)].to(rewards.device)
        settings = {name: self._settings[name] for name in ("rule", "tolerance", "min_valid")}
        return outcome_of(values, present[at], right, **settings)

    def _check_feed(
        self, found: Mapping[Hashable, Tensor], correct: Tensor | None, payload: Mapping[Any, Any] | None
    ) -> None:
        if held := [g.label for g in (*self._pool, *self._spare) if g.label in found]:
            raise UserError(
                f"group {held[0]!r} is held from an earlier round. Feed a group whole, in one call, and give "
                "each group a label of its own, also when a prompt comes again."
            )
        if payload is not None and (without := [label for label in found if label not in payload]):
            raise UserError(
                f"payload has nothing for group {without[0]!r}; give one entry per label, or no payload."
            )
        if self._settings["rule"] != "spread" and correct is None and self._settings["right_at"] is None:
            raise UserError(
                f"rule {self._settings['rule']!r} needs to know which samples are right: give `correct` [B] "
                "to feed(), or set right_at."
            )

    def _spent_message(self) -> str:
        n = self.now
        return (
            f"Only {len(self._pool)} of {self.wanted} groups carry signal after {n.rounds} rounds of "
            f"{n.samples} samples: of {n.generated} groups {n.dropped_right} were all right, "
            f"{n.dropped_wrong} all wrong, {n.dropped_flat} without difference, {n.failed} failed. Take "
            "prompts of fitting difficulty or larger groups, raise max_rounds or max_samples, or set "
            "when_spent to 'take' or 'fill'."
        )


def _plain(group: ScoredGroup) -> dict[str, Any]:
    return {field.name: getattr(group, field.name) for field in fields(group)}
