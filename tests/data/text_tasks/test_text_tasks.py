# SPDX-License-Identifier: Apache-2.0
"""The text tasks: right by hand, the same from a seed, held out by content, checked exactly."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest

from visalign.data.text_tasks import workings
from visalign.data.text_tasks.kinds import KINDS, MANY_ANSWERS
from visalign.data.text_tasks.tasks import (
    HELDOUT_SHARE,
    TASKS,
    canonical_answer,
    check_answer,
    heldout_tasks,
    is_heldout,
    make_record,
    problem_key,
    task_record,
    text_tasks,
)
from visalign.errors import UserError

HAND: list[tuple[str, list[Any], str]] = [
    ("add", [47, 38], "85"),
    ("subtract", [12, 30], "-18"),
    ("multiply", [27, 38], "1026"),
    ("two_step", [workings.TWO_STEP_FORMS[0], 4, 7, 3], "33"),
    ("two_step", [workings.TWO_STEP_FORMS[1], 4, 7, 3], "19"),
    ("two_step", [workings.TWO_STEP_FORMS[2], 4, 7, 3], "5"),
    ("modulo", [17, 5], "2"),
    ("compare", [12, 7, 20], "<"),
    ("compare", [12, 8, 20], "="),
    ("compare", [12, 9, 20], ">"),
    ("sort", [[5, 13, 2, 5]], "2, 5, 5, 13"),
    ("reverse", [[5, 13, 2]], "2, 13, 5"),
    ("smallest", [[5, 13, 2]], "2"),
    ("sum", [[5, 13, 2]], "20"),
    ("count", [5, [5, 13, 5]], "2"),
    ("unique", [[5, 13, 5, 2, 13]], "5, 13, 2"),
    ("nth", [3, [5, 13, 2]], "2"),
    ("evens", [[5, 12, 0, 3]], "12, 0"),
]

EQUATION = re.compile(r"(\d+(?: [-+*] \d+)+) = (\d+)")


def record(task: str, problem: list[Any], seed: int = 0) -> dict[str, Any]:
    return make_record(task, problem, 1, np.random.default_rng(seed))


def boxed(text: object) -> str:
    return f"so \\boxed{{{text}}}"


@pytest.mark.parametrize(("task", "problem", "answer"), HAND)
def test_answers_by_hand(task: str, problem: list[Any], answer: str) -> None:
    for seed in range(6):
        row = record(task, problem, seed)
        assert row["answer"] == answer
        assert row["solution"].endswith(f" \\boxed{{{answer}}}")
        assert check_answer(row["solution"], row) == (True, "correct")


def test_workings_by_hand() -> None:
    solutions = {record("add", [47, 138], seed)["solution"] for seed in range(30)}
    assert solutions == {
        "7 + 8 = 15, 4 + 3 + 1 = 8, 1. \\boxed{185}",
        "47 + 100 = 147, 147 + 30 = 177, 177 + 8 = 185. \\boxed{185}",
        "47 + 8 = 55, 55 + 30 = 85, 85 + 100 = 185. \\boxed{185}",
    }
    assert record("sort", [[3, 1, 3]])["solution"] == "1 < 3 = 3. \\boxed{1, 3, 3}"
    assert record("nth", [2, [9, 4, 7]])["solution"] == "1: 9, 2: 4. \\boxed{4}"


@pytest.mark.parametrize("task", TASKS)
def test_every_equation_of_every_working_holds(task: str) -> None:
    for number in range(150):
        row = task_record(number, seed=3, tasks=[task])
        for left, right in EQUATION.findall(row["solution"].rsplit(" \\boxed", 1)[0]):
            assert eval(left) == int(right), row
        assert check_answer(row["solution"], row)[0]
        assert json.loads(json.dumps(row)) == row
        assert KINDS[task].valid(row["problem"])


def test_a_record_is_a_function_of_seed_and_number() -> None:
    late = task_record(77, seed=5)
    assert [task_record(n, seed=5) for n in range(78)][77] == late
    assert task_record(77, seed=6) != late
    assert text_tasks(40, seed=2) == text_tasks(40, seed=2) != text_tasks(40, seed=3)
    assert [r["task"] for r in text_tasks(len(TASKS))] == list(TASKS)


def test_train_and_heldout_share_no_problem() -> None:
    heldout = {problem_key(r["task"], r["problem"]) for r in heldout_tasks(15)}
    train = {problem_key(r["task"], r["problem"]) for r in (task_record(n, seed=1) for n in range(4000))}
    assert len(heldout) == 15 * len(TASKS)
    assert not heldout & train
    everything = list(itertools.product(range(10, 100), range(2, 100)))
    share = np.mean([is_heldout("subtract", list(pair)) for pair in everything])
    assert abs(share - HELDOUT_SHARE) < 0.02


def test_the_split_is_by_content() -> None:
    assert problem_key("add", [3, 5]) == problem_key("add", [5, 3]) == "add [3, 5]"
    assert problem_key("subtract", [3, 5]) != problem_key("subtract", [5, 3])
    assert problem_key("largest", [[3, 5, 1]]) == problem_key("largest", [[1, 3, 5]])
    assert problem_key("sort", [[3, 5, 1]]) != problem_key("sort", [[1, 3, 5]])
    # frozen: a change of the hash would move problems between the splits of published models
    assert [n for n in range(10, 22) if is_heldout("add", [n, 5])] == [14, 16, 21]


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("7 + 8 = 15", "no \\boxed{…} in the completion; exactly one is wanted"),
        ("\\boxed{85} \\boxed{85}", "2 \\boxed{…} in the completion; exactly one is wanted"),
        ("\\boxed{85", "the \\boxed{ is not closed"),
        ("\\boxed{085}", "the box holds '085', which is not a plainly written whole number"),
        ("\\boxed{}", "the box holds '', which is not a plainly written whole number"),
        ("\\boxed{85, 85}", "the box holds 2 numbers; one is wanted"),
        ("\\boxed{ 85 } and on", "correct"),
    ],
)
def test_the_box_is_wanted_once_and_plain(completion: str, reason: str) -> None:
    assert check_answer(completion, record("add", [47, 38])) == (reason == "correct", reason)


def test_symbols_are_checked() -> None:
    row = record("compare", [12, 7, 20])
    assert check_answer(boxed("="), row) == (False, "= is not the answer <")
    assert check_answer(boxed("less"), row) == (False, "the box holds 'less'; one of <, =, > is wanted")


def test_all_right_answers_are_taken_and_no_others() -> None:
    pair = record("two_addends", [6])
    right = [a for a in itertools.product(range(-2, 9), repeat=2) if check_answer(boxed(f"{a[0]}, {a[1]}"), pair)[0]]
    assert right == [(1, 5), (2, 4), (3, 3), (4, 2), (5, 1)]
    assert {canonical_answer(boxed(f"{a}, {b}"), pair) for a, b in right} == {"1, 5", "2, 4", "3, 3"}
    triple = record("three_addends", [8])
    triples = [
        t for t in itertools.product(range(9), repeat=3) if check_answer(boxed(", ".join(map(str, t))), triple)[0]
    ]
    assert {tuple(sorted(t)) for t in triples} == {(1, 2, 5), (1, 3, 4)} and len(triples) == 12
    order = record("any_order", [[1, 2, 2]])
    texts = [", ".join(map(str, p)) for p in set(itertools.permutations([1, 2, 2]))]
    assert {canonical_answer(boxed(t), order) for t in texts} == {None, "2, 1, 2", "2, 2, 1"}
    between = record("multiple_between", [7, 14, 35])
    assert [n for n in range(60) if check_answer(boxed(n), between)[0]] == [21, 28]
    assert check_answer(boxed("5, 2"), pair)[1] == f"2, 5 is not right; {pair['answer']} would be, for example"
    assert canonical_answer(boxed("5, 2"), pair) is None


@pytest.mark.parametrize("task", MANY_ANSWERS)
def test_reference_solutions_vary_where_several_answers_are_right(task: str) -> None:
    problem = task_record(0, seed=0, tasks=[task], levels=[2])["problem"]
    rows = [record(task, problem, seed) for seed in range(40)]
    assert len({canonical_answer(r["solution"], rows[0]) for r in rows}) >= 2


def test_what_is_not_there_is_said() -> None:
    message = r"tasks is \['sorted'\].* Did you mean 'sort'\? Allowed: train or heldout; some"
    with pytest.raises(UserError, match=message):
        text_tasks(1, tasks=["sorted"])
    with pytest.raises(UserError, match=r"'two_addends' has 5 heldout problems of levels \[1\] for 99"):
        text_tasks(99, split="heldout", tasks=["two_addends"], levels=[1])
    with pytest.raises(UserError, match=r"the record lacks answer, problem"):
        check_answer("", {"task": "add"})
