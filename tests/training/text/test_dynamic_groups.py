# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: what carries signal, budgets, counts that add up, exact resume, and example loops."""

from __future__ import annotations

import io
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from visalign.core.advantages.group import group_advantages
from visalign.training.loop.sampler import PromptSampler
from visalign.training.text.dynamic_groups import BudgetSpent, DynamicGroups
from visalign.training.text.group_signal import Counts, ScoredGroup

NAN = float("nan")


def labels_of(groups: Sequence[ScoredGroup]) -> list[Hashable]:
    return [group.label for group in groups]


def feed(groups: DynamicGroups, rounds: dict[Any, list[float]], **given: Any) -> Counts:
    """Feed groups written as label -> rewards."""
    group = [label for label, values in rounds.items() for _ in values]
    return groups.feed(group, torch.tensor([v for values in rounds.values() for v in values]), **given)


def test_groups_that_are_all_equal_are_replaced() -> None:
    groups = DynamicGroups(2, right_at=1.0)
    assert (groups.wants_more, groups.missing, groups.request()) == (True, 2, 2)
    counts = feed(groups, {"a": [0.0, 0.0], "b": [1.0, 0.0], "c": [1.0, 1.0]})
    assert (counts.generated, counts.kept, counts.dropped_wrong, counts.dropped_right) == (3, 1, 1, 1)
    assert (groups.wants_more, groups.missing) == (True, 1)
    feed(groups, {"d": [0.0, 1.0, 1.0], "e": [1.0, 0.0]}, payload={"d": "images", "e": None})
    assert not groups.wants_more
    taken = groups.take()
    assert labels_of(taken) == ["b", "d"]
    assert (taken[1].rewards.tolist(), taken[1].index.tolist(), taken[1].payload) == (
        [0, 1, 1],
        [0, 1, 2],
        "images",
    )
    assert (taken[1].step, taken[1].round, taken[1].has_signal) == (0, 1, True)
    assert (groups.last.rounds, groups.last.samples, groups.last.surplus, groups.last.taken) == (2, 11, 1, 2)
    assert (groups.missing, groups.step, groups.round) == (2, 1, 2)


def test_samples_of_a_group_need_not_stand_together() -> None:
    groups = DynamicGroups(2)
    groups.feed(torch.tensor([7, 3, 7, 3]), torch.tensor([0.0, 1.0, 1.0, 2.0]))
    taken = groups.take()
    assert [(g.label, g.index.tolist()) for g in taken] == [(7, [0, 2]), (3, [1, 3])]


def test_missing_rewards_are_no_signal_and_too_few_are_a_failure() -> None:
    groups = DynamicGroups(5)
    counts = feed(
        groups,
        {
            "one left": [1.0, NAN],
            "equal but one": [1.0, 1.0, NAN],
            "kept": [1.0, 0.0, NAN],
            "masked": [0.0, 1.0],
        },
        valid=torch.tensor([True] * 8 + [True, False]),
    )
    assert (counts.failed, counts.dropped_flat, counts.kept, counts.failed_samples) == (2, 1, 1, 4)
    feed(groups, {"infinite": [float("inf"), 1.0, 0.0]})
    groups._settings["max_rounds"] = 1
    kept = groups.take()
    assert labels_of(kept) == ["kept", "infinite"]
    assert [g.valid.tolist() for g in kept] == [[True, True, False], [False, True, True]]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [("spread", ["shaped", "mixed"]), ("accuracy", ["mixed", "same reward"]), ("both", ["mixed"])],
)
def test_rules(rule: str, kept: list[str]) -> None:
    """A shaped reward spreads although all samples are wrong; DAPO's rule looks at right and wrong."""
    groups = DynamicGroups(9, rule=rule, max_rounds=1)
    rounds = {"shaped": [-0.5, 0.0], "mixed": [-0.5, 1.0], "same reward": [0.0, 0.0], "right": [1.0, 1.0]}
    counts = feed(groups, rounds, correct=torch.tensor([False, False, False, True, False, True, True, True]))
    assert labels_of(groups.take()) == kept
    assert counts.dropped_right == 1
    assert counts.dropped_wrong == (rule != "spread")


def test_samples_without_a_reward_are_neither_right_nor_wrong() -> None:
    groups = DynamicGroups(9, rule="accuracy", max_rounds=1)
    rewards = {"right": [1.0, 1.0, NAN], "wrong": [0.0, 0.0, NAN]}
    counts = feed(groups, rewards, correct=torch.tensor([True, True, False, False, False, True]))
    assert (counts.dropped_right, counts.dropped_wrong, counts.kept) == (1, 1, 0)


def test_tolerance_and_threshold() -> None:
    groups = DynamicGroups(9, tolerance=0.1, right_at=0.5, max_rounds=1)
    counts = feed(groups, {"a": [0.9, 1.0 - 1e-6], "b": [0.45, 0.54], "c": [0.0, 0.2], "d": [0.0, 0.0625]})
    assert (counts.dropped_right, counts.dropped_flat, counts.dropped_wrong) == (1, 1, 1)
    assert labels_of(groups.take()) == ["c"]


def test_a_spent_budget_takes_fills_or_stops() -> None:
    flat = {"failed": [NAN, NAN], "flat": [0.0, 0.0], "live": [0.0, 1.0]}

    def spent(**given: Any) -> DynamicGroups:
        groups = DynamicGroups(3, right_at=1.0, **given)
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
    stop = spent(max_rounds=None, max_samples=7, when_spent="stop")
    assert stop.round == 2
    with pytest.raises(
        BudgetSpent,
        match=r"Only 2 of 3 groups carry signal after 2 rounds of 12 samples: of 6 groups 0 were all right, "
        r"2 all wrong, 0 without difference, 2 failed\. Take prompts .* raise max_rounds or max_samples",
    ):
        stop.take()
    assert stop.missing == 1
    nothing = DynamicGroups(2, max_rounds=1)
    feed(nothing, {"flat": [3.0, 3.0]})
    assert nothing.take() == []


def test_surplus_is_dropped_or_carried_over_for_a_while() -> None:
    many = {name: [0.0, 1.0] for name in "abcdefg"}
    drop, carry = DynamicGroups(2), DynamicGroups(2, surplus="carry", max_age=2)
    for groups in (drop, carry):
        feed(groups, many)
        assert labels_of(groups.take()) == ["a", "b"]
    assert (drop.last.surplus, drop.missing) == (5, 2)
    assert (carry.last.surplus, carry.missing, carry.wants_more) == (0, 0, False)
    assert labels_of(carry.take()) == ["c", "d"]
    second = carry.take()
    assert labels_of(second) == ["e", "f"] and second[0].step == 0 and carry.step == 3
    assert carry.total.stale == 1 and carry.missing == 2


def test_the_request_follows_the_share_that_carries_signal() -> None:
    groups = DynamicGroups(4, max_rounds=None, max_samples=24)
    assert groups.request() == 4
    feed(groups, {i: [0.0, float(i == 0)] for i in range(7)})
    assert groups.request(most=100) == 5  # three missing, 2 of 8 kept: 12, but samples are left for 5
    assert groups.request() == 4
    feed(groups, {i: [0.0, 0.0] for i in range(10, 15)})
    assert not groups.wants_more and groups.request() == 1


rounds_of = st.lists(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=1, max_size=4), min_size=1, max_size=4),
    min_size=1,
    max_size=12,
)


def play(
    groups: DynamicGroups, rounds: list[list[list[float]]], resume_at: int = -1
) -> list[list[ScoredGroup]]:
    """Feed rounds of groups, take whenever a step is ready; save and load before round `resume_at`."""
    steps = []
    for number, values in enumerate(rounds):
        if number == resume_at:
            file = io.BytesIO()
            torch.save(groups.state_dict(), file)
            file.seek(0)
            groups = DynamicGroups(**groups._settings)
            groups.load_state_dict(torch.load(file, weights_only=True))
        named = {(number, i): v for i, v in enumerate(values)}
        feed(groups, named, payload={key: [key] for key in named})
        now = groups.now
        dropped = now.dropped_right + now.dropped_wrong + now.dropped_flat
        assert now.generated == now.kept + dropped + now.failed
        if not groups.wants_more:
            steps.append(groups.take())
    total = Counts()
    total.add(groups.total)
    total.add(groups.now)
    assert total.kept == total.taken + total.surplus + total.stale + len(groups._pool)
    assert total.generated == sum(map(len, rounds)) and total.rounds == len(rounds) == groups.round
    assert total.samples == sum(len(v) for values in rounds for v in values)
    return steps


@settings(deadline=None, max_examples=80)
@given(
    rounds=rounds_of,
    wanted=st.integers(1, 4),
    max_rounds=st.integers(1, 4),
    when_spent=st.sampled_from(["take", "fill"]),
    surplus=st.sampled_from(["drop", "carry"]),
    resume_at=st.integers(0, 11),
)
def test_invariants_and_exact_resume(
    rounds: list[list[list[float]]],
    wanted: int,
    max_rounds: int,
    when_spent: str,
    surplus: str,
    resume_at: int,
) -> None:
    def new() -> DynamicGroups:
        return DynamicGroups(
            wanted, right_at=1.0, max_rounds=max_rounds, when_spent=when_spent, surplus=surplus
        )

    whole = play(new(), rounds)
    handed: list[Hashable] = []
    for step, groups in enumerate(whole):
        assert len(groups) <= wanted
        handed += labels_of(groups)
        for group in groups:
            known = group.rewards[group.valid]
            assert group.has_signal == (known.unique().numel() > 1)
            assert group.payload == [group.label] and group.step in (step, step - 1)
            assert group.step == step or surplus == "carry"
    assert len(handed) == len(set(handed))
    resumed = play(new(), rounds, resume_at)
    assert [labels_of(groups) for groups in resumed] == [labels_of(groups) for groups in whole]
    for ours, theirs in zip(resumed, whole, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.rewards.nan_to_num(9.0), b.rewards.nan_to_num(9.0))
            assert (a.step, a.round, a.payload) == (b.step, b.round, b.payload)
            assert a.valid.equal(b.valid) and a.index.equal(b.index)


def test_without_signal_means_exactly_advantage_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(2, (40, 3), generator=generator).float()
    group = torch.arange(40).repeat_interleave(3)
    groups = DynamicGroups(40, max_rounds=1)
    groups.feed(group, rewards.flatten())
    kept = set(labels_of(groups.take()))
    live = group_advantages(rewards.flatten(), group).view(40, 3).abs().sum(1) > 0
    assert kept == set(live.nonzero()[:, 0].tolist())


def text_loop(groups: DynamicGroups, skill: Tensor, steps: int) -> list[float]:
    """A loop over prompts of very different difficulty; skill [prompts] is the chance of a right sample."""
    sampler = PromptSampler(len(skill), prompts_per_iteration=6, group_size=4, seed=0)
    shares = []
    while groups.step < steps:
        while groups.wants_more:
            batch = sampler.batch(groups.round)
            draw = torch.Generator().manual_seed(groups.round)
            right = torch.rand(len(batch), generator=draw) < skill[batch.prompt_index]
            rows = {int(label): batch.sample_id[batch.group_id == label] for label in batch.group_id.unique()}
            groups.feed(batch.group_id, right.float(), payload=rows)
        taken = groups.take()
        rewards = torch.cat([g.rewards for g in taken])
        label = [g.label for g in taken for _ in range(len(g.rewards))]
        shares.append(float((group_advantages(rewards, label) != 0).float().mean()))
        assert len(torch.cat([g.payload for g in taken]).unique()) == 4 * len(taken)
    return shares


def test_a_loop_over_hard_and_easy_prompts_gets_full_batches() -> None:
    skill = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5, 0.4, 0.0, 1.0])
    groups = DynamicGroups(6, right_at=1.0, max_rounds=20)
    assert text_loop(groups, skill, steps=5) == [1.0] * 5
    total = groups.total
    assert total.taken == 30 and total.spent == 0 and total.rounds > 10
    assert min(total.dropped_right, total.dropped_wrong) > 10


def test_a_loop_over_images_carries_their_latents() -> None:
    groups = DynamicGroups(2, surplus="carry", max_rounds=8)
    for step in range(3):
        while groups.wants_more:
            draw = torch.Generator().manual_seed(groups.round)
            latents = torch.randn(6, 4, 2, 2, generator=draw)
            reward = latents.mean(dim=(1, 2, 3)).clamp(min=0.0)
            group = torch.arange(3).repeat_interleave(2) + 3 * groups.round
            groups.feed(group, reward, payload={int(k): latents[group == k] for k in group.unique()})
        taken = groups.take()
        assert groups.step == step + 1
        for g in taken:
            assert torch.equal(g.payload.mean(dim=(1, 2, 3)).clamp(min=0.0), g.rewards)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wanted": 0}, r"wanted is 0; it must be at least 1"),
        ({"rule": "std"}, r"rule is 'std'; it must be one of spread, accuracy, both"),
        ({"when_spent": "x"}, r"when_spent is 'x'; it must be one of take, fill, stop"),
        ({"surplus": "keep"}, r"surplus is 'keep'; it must be one of drop, carry"),
        ({"min_valid": 1}, r"min_valid is 1; it must be at least 2"),
        ({"max_rounds": 0}, r"max_rounds is 0; it must be at least 1"),
        ({"tolerance": NAN}, r"tolerance is nan; it must be 0 or more"),
        ({"max_rounds": None}, r"max_rounds and max_samples are both None; .* Set one of them"),
    ],
)
def test_bad_settings_are_refused(given: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"wanted": 2} | given
    with pytest.raises(ValueError, match=message):
        DynamicGroups(**arguments)


def test_bad_rounds_are_refused() -> None:
    groups = DynamicGroups(2)
    with pytest.raises(ValueError, match=r"take\(\) with 0 of 2 groups and budget left"):
        groups.take()
    with pytest.raises(ValueError, match=r"rewards has shape \(2, 3\); one reward per sample .* Combine"):
        groups.feed([0, 0], torch.zeros(2, 3))
    with pytest.raises(
        ValueError, match=r"valid is torch\.float32 \(2,\); it must be bool .* rewards, \(2,\)"
    ):
        groups.feed([0, 0], torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match=r"group needs one label per sample, 2 in all; got 3 labels"):
        groups.feed([0, 0, 1], torch.zeros(2))
    feed(groups, {"a": [0.0, 1.0]})
    with pytest.raises(ValueError, match=r"group 'a' is held from an earlier round\. Feed a group whole"):
        feed(groups, {"a": [0.0, 1.0]})
    with pytest.raises(ValueError, match=r"payload has nothing for group 'b'"):
        feed(groups, {"b": [0.0, 1.0]}, payload={"a": 1})
    with pytest.raises(
        ValueError, match=r"rule 'both' needs to know which samples are right: give `correct`"
    ):
        feed(DynamicGroups(2, rule="both"), {"a": [0.0, 1.0]})
    assert groups.round == 1
    with pytest.raises(ValueError, match=r"saved dynamic groups have wanted 2, these 3; resume with the"):
        DynamicGroups(3).load_state_dict(groups.state_dict())
