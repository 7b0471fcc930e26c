# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: signal, budgets, counts that add up, a loop that gets full batches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch

from visalign.core.advantages.group import group_advantages
from visalign.training import DynamicSettings
from visalign.training.loop.dynamic_groups import DynamicGroups, ScoredGroup

NAN = float("nan")


def new(count: int, **changes: Any) -> DynamicGroups:
    return DynamicGroups(count, DynamicSettings(**{"max_rounds": 10, **changes}))


def labels_of(groups: Sequence[ScoredGroup]) -> list[Hashable]:
    return [group.label for group in groups]


def feed(groups: DynamicGroups, rounds: dict[Any, list[float]], **options: Any) -> None:
    """Feed groups written as label -> rewards."""
    group = [label for label, values in rounds.items() for _ in values]
    groups.feed(group, torch.tensor([v for values in rounds.values() for v in values]), **options)


def test_groups_that_are_all_equal_are_replaced() -> None:
    groups = new(2, right_at=1.0)
    feed(groups, {"a": [0.0, 0.0], "b": [1.0, 0.0], "c": [1.0, 1.0]})
    assert groups.now == {"rounds": 1, "generated": 3, "kept": 1, "dropped_wrong": 1, "dropped_right": 1}
    assert groups.wants_more
    feed(groups, {"d": [0.0, 1.0, 1.0], "e": [1.0, 0.0]}, payload="second")
    assert not groups.wants_more
    selected = groups.take()
    assert labels_of(selected) == ["b", "d"]
    assert (selected[1].index.tolist(), selected[1].payload) == ([0, 1, 2], "second")
    assert [groups.last[name] for name in ("rounds", "generated", "surplus")] == [2, 5, 1]
    assert groups.wants_more and groups.round == 2


def test_samples_of_a_group_need_not_be_neighbours() -> None:
    groups = new(2)
    groups.feed(torch.tensor([7, 3, 7, 3]), torch.tensor([0.0, 1.0, 1.0, 2.0]))
    assert [(g.label, g.index.tolist()) for g in groups.take()] == [(7, [0, 2]), (3, [1, 3])]


def test_missing_rewards_are_no_signal_and_too_few_are_a_failure() -> None:
    groups = new(5, max_rounds=2)
    rewards = {"one left": [1.0, NAN], "equal but one": [1.0, 1.0, NAN], "kept": [1.0, 0.0, NAN], "masked": [0.0, 1.0]}
    feed(groups, rewards, valid=torch.tensor([True] * 8 + [True, False]))
    assert [groups.now[name] for name in ("failed", "dropped_flat", "kept")] == [2, 1, 1]
    feed(groups, {"infinite": [float("inf"), 1.0, 0.0]})
    selected = groups.take()
    assert labels_of(selected) == ["kept", "infinite"]
    assert [g.valid.tolist() for g in selected] == [[True, True, False], [False, True, True]]


@pytest.mark.parametrize(("rule", "labels", "wrong"), [("spread", ["shaped", "mixed"], 0), ("accuracy", ["mixed"], 1)])
def test_rules(rule: str, labels: list[str], wrong: int) -> None:
    """A shaped reward spreads although all samples are wrong; DAPO's rule looks at right and wrong."""
    groups = new(9, rule=rule, right_at=1.0, max_rounds=1)
    feed(groups, {"shaped": [-0.5, 0.0], "mixed": [-0.5, 1.0], "right": [1.0, 1.0, NAN]})
    assert labels_of(groups.take()) == labels
    assert (groups.last["dropped_right"], groups.last["dropped_wrong"]) == (1, wrong)


def test_a_spent_budget_takes_what_there_is() -> None:
    groups = new(3, max_rounds=2)
    while groups.wants_more:
        feed(groups, {f"flat {groups.round}": [0.0, 0.0], f"live {groups.round}": [0.0, 1.0]})
    assert labels_of(groups.take()) == ["live 0", "live 1"]
    nothing = new(2, max_rounds=1)
    feed(nothing, {"flat": [3.0, 3.0]})
    assert nothing.take() == []


def test_without_signal_means_exactly_advantage_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(2, (40, 3), generator=generator).float()
    group = torch.arange(40).repeat_interleave(3)
    groups = new(40, max_rounds=1)
    groups.feed(group, rewards.flatten())
    labels = set(labels_of(groups.take()))
    live = group_advantages(rewards.flatten(), group).view(40, 3).abs().sum(1) > 0
    assert labels == set(live.nonzero()[:, 0].tolist())
