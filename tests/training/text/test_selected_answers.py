# SPDX-License-Identifier: Apache-2.0
"""Selection of sampled completions and what they are worth, by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from visalign.errors import UserError
from visalign.training.text.sampling_grid import Completions, GridPoint, grid_points, with_hint
from visalign.training.text.selection import (
    accepted_completions,
    best_of_group,
    statistics,
    worth_learning,
)

NAN = math.nan
ALL = torch.ones(40, dtype=torch.bool)


def test_best_of_each_group():
    reward = torch.tensor([0.1, 0.9, 0.5, NAN, -2.0, -1.0, NAN])
    group = ["a", "a", "b", "b", "c", "c", "d"]
    assert best_of_group(reward, group, seed=0, valid=ALL[:7]) == [1, 2, 5]
    valid = torch.tensor([True, False, True, True, True, True, True])
    assert best_of_group(reward, group, seed=0, valid=valid) == [0, 2, 5]


def test_ties_are_drawn_by_lot_of_the_seed_and_the_group_alone():
    reward = torch.tensor([1.0, 0.0, 1.0, 1.0])
    drawn = Counter(best_of_group(reward, ["a"] * 4, seed=s, valid=ALL[:4])[0] for s in range(600))
    assert set(drawn) == {0, 2, 3} and min(drawn.values()) > 150
    for seed in range(5):
        selected = best_of_group(reward, ["a"] * 4, seed=seed, valid=ALL[:4])
        both = torch.cat([torch.ones(3), reward])
        beside = best_of_group(both, ["b"] * 3 + ["a"] * 4, seed=seed, valid=ALL[:7])
        assert beside[1:] == [index + 3 for index in selected]
    tied = torch.ones(40)
    groups = [i // 2 for i in range(40)]
    first = [index % 2 for index in best_of_group(tied, groups, seed=1, valid=ALL)]
    assert 0 < sum(first) < 20  # each group draws its own lot


def test_accepted_completions_reach_the_threshold_and_no_group_has_more_than_its_share():
    reward = torch.tensor([1.0, 0.4, 0.5, 1.0, 1.0, NAN, 0.7])
    group = [0, 0, 0, 0, 1, 1, 2]
    text = ["a", "b", "c", "d", "e", "f", "g"]

    def accepted(threshold=0.5, per_group=None, seed=0, valid=ALL[:7]):
        return accepted_completions(
            reward, group, text, threshold=threshold, per_group=per_group, seed=seed, valid=valid
        )

    assert accepted() == [0, 2, 3, 4, 6] and accepted(threshold=1.5) == []
    assert accepted(valid=torch.arange(7) > 0) == [2, 3, 4, 6]
    for seed in range(20):
        two = accepted(per_group=2, seed=seed)
        assert len(two) == 4 and two[2:] == [4, 6] and set(two[:2]) < {0, 2, 3}
    drawn = Counter(index for seed in range(300) for index in accepted(per_group=1, seed=seed))
    assert drawn[4] == drawn[6] == 300 and min(drawn[i] for i in (0, 2, 3)) > 60  # the reward plays no part


def test_different_completions_go_before_repeats():
    text = ["1 + 1 = 2", "1 + 1  = 2", "two", "1 + 1 =\n2", "2"]
    options: dict[str, Any] = {"threshold": 1.0, "valid": ALL[:5]}
    for seed in range(20):
        three = accepted_completions(torch.ones(5), [0] * 5, text, per_group=3, seed=seed, **options)
        assert {" ".join(text[i].split()) for i in three} == {"1 + 1 = 2", "two", "2"}
        four = accepted_completions(torch.ones(5), [0] * 5, text, per_group=4, seed=seed, **options)
        assert len(four) == 4 and {2, 4} < set(four)  # the repeat fills up


def test_a_grid_is_every_combination():
    points = grid_points([0.5, 1.0], [0.9, 1.0], [0, 7])
    assert len(points) == len(set(points)) == 8
    assert [(p.temperature, p.top_p, p.seed) for p in points[:3]] == [(0.5, 0.9, 0), (0.5, 0.9, 7), (0.5, 1.0, 0)]
    with pytest.raises(UserError, match=r"temperatures is \[1.0, 1.0\].*each number once"):
        grid_points([1.0, 1.0], [1.0], [0])


def _completions() -> Completions:
    """Two prompts, four completions each; one judgement failed, one completion was cut off."""
    point = GridPoint(temperature=1.0, top_p=1.0, seed=0)
    return Completions(
        prompt=[0, 0, 0, 0, 1, 1, 1, 1],
        number=[0, 1, 2, 3] * 2,
        point=[point] * 8,
        text=["a", "a ", "b", "c", "d", "e", "f", "g"],
        reward=torch.tensor([1.0, 1.0, 0.0, 0.5, 0.0, NAN, 1.0, 0.0]),
        tokens=[1, 2, 3, 4, 5, 6, 7, 8],
        truncated=torch.tensor([False] * 6 + [True, False]),
        reason=[None] * 5 + ["judge died"] + [None] * 2,
        answers=[()] * 8,
        unread=[()] * 8,
        completed_prompt=[None] * 8,
    )


def test_hints_stand_in_where_nothing_was_right_and_what_is_solved_may_go():
    """Prompt 0 solved, 1 partly right, 2 never, 3 never judged without a hint."""
    plain = GridPoint(temperature=1.0, top_p=1.0, seed=0)
    hinted = GridPoint(temperature=1.0, top_p=1.0, seed=0, hinted=True)
    reward = [1.0, 1.0, NAN, 1.0, 0.0, 0.0, NAN]
    completions = Completions(
        prompt=[0, 0, 0, 1, 1, 2, 3, 0, 1, 2, 3],
        number=[0] * 11,
        point=[plain] * 7 + [hinted] * 4,
        text=["a"] * 11,
        reward=torch.tensor([*reward, 1.0, 1.0, 1.0, 0.0]),
        tokens=[1] * 11,
        truncated=torch.zeros(11, dtype=torch.bool),
        reason=[None] * 11,
        answers=[()] * 11,
        unread=[()] * 11,
        completed_prompt=[None] * 11,
    )
    worthwhile = worth_learning(completions, completions.scored, threshold=1.0)
    assert worthwhile.tolist() == [True] * 7 + [False, False, True, True]
    harder = worth_learning(completions, completions.scored, threshold=1.0, skip_solved=True)
    assert harder.tolist() == [False] * 3 + [True] * 4 + [False, False, True, True]
    assert worth_learning(completions, completions.scored, threshold=2.0, skip_solved=True).all()
    cut = completions.scored & (torch.arange(11) > 1)  # prompt 0 is right, and not to be learnt from
    assert worth_learning(completions, cut, threshold=1.0).tolist() == [True] * 8 + [False, True, True]
    easy = worth_learning(completions, cut, threshold=1.0, skip_solved=True)
    assert not easy[[0, 1, 2, 7]].any(), "it is solved all the same"


def test_a_hint_stands_behind_the_prompt_with_the_records_fields():
    record = {"prompt": "2 + 2?", "answer": 4}
    assert with_hint(record, "It is {answer}.") == "2 + 2?\nIt is 4."
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    prompt = with_hint({**record, "prompt": messages}, "It is {answer}.")
    assert prompt == [messages[0], {"role": "user", "content": "2 + 2?\nIt is 4."}]
    multimodal = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    prompt = with_hint({**record, "prompt": multimodal}, "{answer}")
    content = [*multimodal[0]["content"], {"type": "text", "text": "\n4"}]
    assert prompt == [{"role": "user", "content": content}] and len(multimodal[0]["content"]) == 1
    with pytest.raises(UserError, match=r"names the field 'anwser', which a record lacks: .*prompt, answer"):
        with_hint(record, "It is {anwser}.")


def test_statistics_by_hand():
    completions = _completions()
    free = completions.scored & ~completions.truncated
    summary = statistics(completions, free, threshold=1.0)
    assert (summary["completions"], summary["judged"], summary["failed"], summary["truncated"]) == (8, 7, 1, 1)
    assert summary["accepted"] == 2 and summary["acceptance_rate"] == pytest.approx(2 / 7)
    assert summary["prompts_accepted"] == 0.5 and summary["reward_mean"] == pytest.approx(3.5 / 7)
    assert summary["length_mean"] == 4.5
    assert summary["distinct_completions"] == (3 + 3) / 2 and summary["distinct_accepted"] == 0.5
    # prompt 0: 2 of 4; prompt 1: 0 of 3, which says nothing of four attempts
    assert summary["pass_at_k"] == pytest.approx({1: 0.25, 2: (1 - 1 / 6) / 2, 4: 1.0})
    best = {n: row["reward"] for n, row in summary["best_of_n"].items()}
    # prompt 0: mean 0.625, pairs (5·1 + 0.5)/6; prompt 1: mean 1/3, pairs 2/3
    assert best == pytest.approx({1: (0.625 + 1 / 3) / 2, 2: (5.5 / 6 + 2 / 3) / 2, 4: 1.0})
    bounds = [row["kl_bound"] for row in summary["best_of_n"].values()]
    assert bounds == pytest.approx([0.0, math.log(2) - 1 / 2, math.log(4) - 3 / 4])
