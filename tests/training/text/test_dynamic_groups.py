# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: signal, budgets, counts that add up, exact resume, an example loop."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from visalign.core.advantages.group import group_advantages
from visalign.training import DynamicSettings
from visalign.training.loop.sampler import PromptSampler
from visalign.training.text.dynamic_groups import BudgetSpent, Counts, DynamicGroups, ScoredGroup

NAN = float("nan")


def new(wanted: int, **changes: Any) -> DynamicGroups:
    return DynamicGroups(wanted, DynamicSettings(**{"max_rounds": 10, **changes}))


def labels_of(groups: Sequence[ScoredGroup]) -> list[Hashable]:
    return [group.label for group in groups]


def feed(groups: DynamicGroups, rounds: dict[Any, list[float]], **options: Any) -> Counts:
    """Feed groups written as label -> rewards."""
    group = [label for label, values in rounds.items() for _ in values]
    return groups.feed(group, torch.tensor([v for values in rounds.values() for v in values]), **options)


def test_groups_that_are_all_equal_are_replaced() -> None:
    groups = new(2, right_at=1.0)
    counts = feed(groups, {"a": [0.0, 0.0], "b": [1.0, 0.0], "c": [1.0, 1.0]})
    assert (counts.generated, counts.kept, counts.dropped_wrong, counts.dropped_right) == (3, 1, 1, 1)
    assert groups.wants_more
    feed(groups, {"d": [0.0, 1.0, 1.0], "e": [1.0, 0.0]}, payload="second")
    assert not groups.wants_more
    taken = groups.take()
    assert labels_of(taken) == ["b", "d"]
    assert (taken[1].index.tolist(), taken[1].payload, taken[1].has_signal) == ([0, 1, 2], "second", True)
    assert (groups.last.rounds, groups.last.samples, groups.last.surplus, groups.last.taken) == (2, 11, 1, 2)
    assert groups.wants_more and (groups.step, groups.round) == (1, 2)


def test_samples_of_a_group_need_not_be_neighbours() -> None:
    groups = new(2)
    groups.feed(torch.tensor([7, 3, 7, 3]), torch.tensor([0.0, 1.0, 1.0, 2.0]))
    assert [(g.label, g.index.tolist()) for g in groups.take()] == [(7, [0, 2]), (3, [1, 3])]


def test_missing_rewards_are_no_signal_and_too_few_are_a_failure() -> None:
    groups = new(5, max_rounds=2)
    rewards = {
        "one left": [1.0, NAN],
        "equal but one": [1.0, 1.0, NAN],
        "kept": [1.0, 0.0, NAN],
        "masked": [0.0, 1.0],
    }
    counts = feed(groups, rewards, valid=torch.tensor([True] * 8 + [True, False]))
    assert (counts.failed, counts.dropped_flat, counts.kept, counts.failed_samples) == (2, 1, 1, 4)
    feed(groups, {"infinite": [float("inf"), 1.0, 0.0]})
    kept = groups.take()
    assert labels_of(kept) == ["kept", "infinite"]
    assert [g.valid.tolist() for g in kept] == [[True, True, False], [False, True, True]]


@pytest.mark.parametrize(
    ("rule", "kept", "wrong"),
    [("spread", ["shaped", "mixed"], 0), ("accuracy", ["mixed"], 1), ("both", ["mixed"], 1)],
)
def test_rules(rule: str, kept: list[str], wrong: int) -> None:
    """A shaped reward spreads although all samples are wrong; DAPO's rule looks at right and wrong."""
    groups = new(9, rule=rule, right_at=1.0, max_rounds=1)
    counts = feed(groups, {"shaped": [-0.5, 0.0], "mixed": [-0.5, 1.0], "right": [1.0, 1.0, NAN]})
    assert labels_of(groups.take()) == kept
    assert (counts.dropped_right, counts.dropped_wrong) == (1, wrong)


def test_a_spent_budget_takes_fills_or_stops() -> None:
    flat = {"failed": [NAN, NAN], "flat": [0.0, 0.0], "live": [0.0, 1.0]}

    def spent(**changes: Any) -> DynamicGroups:
        groups = new(3, right_at=1.0, **changes)
        while groups.wants_more:
            feed(groups, {f"{name} {groups.round}": values for name, values in flat.items()})
        return groups

    take = spent(max_rounds=1)
    assert labels_of(take.take()) == ["live 0"]
    assert take.last.spent == 1
    fill = spent(max_rounds=2, when_spent="fill")
    taken = fill.take()
    assert labels_of(taken) == ["live 0", "live 1", "flat 0"]
    assert [g.has_signal for g in taken] == [True, True, False]
    assert (fill.last.taken, fill.last.filled) == (2, 1)
    with pytest.raises(
        BudgetSpent,
        match=r"Only 2 of 3 groups carry signal after 2 rounds of 12 samples: of 6 groups 0 were all right, "
        r"2 all wrong, 0 without difference, 2 failed\. Take prompts .* raise max_rounds",
    ):
        spent(max_rounds=2, when_spent="stop").take()
    nothing = new(2, max_rounds=1)
    feed(nothing, {"flat": [3.0, 3.0]})
    assert nothing.take() == []


def play(
    groups: DynamicGroups, rounds: list[list[list[float]]], resume_at: int = -1
) -> list[list[ScoredGroup]]:
    """Feed rounds, take whenever an update is ready; save and load after `resume_at` updates."""
    steps = []
    for number, values in enumerate(rounds):
        named = {(number, i): v for i, v in enumerate(values)}
        feed(groups, named, payload=number)
        now = groups.now
        dropped = now.dropped_right + now.dropped_wrong + now.dropped_flat
        assert now.generated == now.kept + dropped + now.failed
        if not groups.wants_more:
            steps.append(groups.take())
            if len(steps) == resume_at:
                saved = groups.state_dict()
                groups = DynamicGroups(groups.wanted, groups.settings)
                groups.load_state_dict(saved)
    total = Counts()
    total.add(groups.total)
    assert total.kept == total.taken + total.surplus
    total.add(groups.now)
    assert total.generated == sum(map(len, rounds)) and total.rounds == len(rounds) == groups.round
    assert total.samples == sum(len(v) for values in rounds for v in values)
    return steps


@settings(deadline=None, max_examples=60)
@given(
    rounds=st.lists(
        st.lists(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=1, max_size=4), min_size=1, max_size=4),
        min_size=1,
        max_size=12,
    ),
    wanted=st.integers(1, 4),
    max_rounds=st.integers(1, 4),
    when_spent=st.sampled_from(["take", "fill"]),
    resume_at=st.integers(1, 6),
)
def test_invariants_and_exact_resume(rounds, wanted, max_rounds, when_spent, resume_at) -> None:
    changes = {"right_at": 1.0, "max_rounds": max_rounds, "when_spent": when_spent}
    whole = play(new(wanted, **changes), rounds)
    taken = [label for groups in whole for label in labels_of(groups)]
    assert all(len(groups) <= wanted for groups in whole) and len(taken) == len(set(taken))
    for group in [group for groups in whole for group in groups]:
        number, i = group.label  # type: ignore[misc]
        valid = [value for value in rounds[number][i] if value == value]
        assert group.has_signal == (len(set(valid)) > 1) and group.payload == number
    resumed = play(new(wanted, **changes), rounds, resume_at)
    assert [labels_of(groups) for groups in resumed] == [labels_of(groups) for groups in whole]


def test_without_signal_means_exactly_advantage_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(2, (40, 3), generator=generator).float()
    group = torch.arange(40).repeat_interleave(3)
    groups = new(40, max_rounds=1)
    groups.feed(group, rewards.flatten())
    kept = set(labels_of(groups.take()))
    live = group_advantages(rewards.flatten(), group).view(40, 3).abs().sum(1) > 0
    assert kept == set(live.nonzero()[:, 0].tolist())


def test_a_loop_over_hard_and_easy_prompts_gets_full_batches() -> None:
    skill = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5, 0.4, 0.0, 1.0])
    groups = new(6, right_at=1.0, max_rounds=20)
    sampler = PromptSampler(len(skill), prompts_per_iteration=6, group_size=4, seed=0)
    for _ in range(5):
        while groups.wants_more:
            batch = sampler.batch(groups.round)
            draw = torch.Generator().manual_seed(groups.round)
            right = (torch.rand(len(batch), generator=draw) < skill[batch.prompt_index]).float()
            groups.feed(batch.group_id, right, payload=(batch.sample_id, right))
        taken = groups.take()
        rewards = torch.cat([g.payload[1][g.index] for g in taken])
        label = [g.label for g in taken for _ in g.index]
        assert bool((group_advantages(rewards, label) != 0).all())
        assert len(torch.cat([g.payload[0][g.index] for g in taken]).unique()) == 4 * len(taken)
    total = groups.total
    assert total.taken == 30 and total.spent == 0 and total.rounds > 10
    assert min(total.dropped_right, total.dropped_wrong) > 10


def test_a_resume_under_other_settings_is_refused() -> None:
    with pytest.raises(ValueError, match=r"saved dynamic groups have wanted 2, these 3; resume with the"):
        new(3).load_state_dict(new(2).state_dict())
