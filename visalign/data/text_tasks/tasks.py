# SPDX-License-Identifier: Apache-2.0
"""Text tasks for a very small language model: arithmetic and lists, with an exact checker.

A solution is a short visible working and the answer in `\\boxed{…}`, the form that verifiers of mathematical
answers read. The box is closed on both sides, so that an unfinished completion is recognised as such.

A record is `{"task", "level", "prompt", "answer", "solution", "problem"}`, all plain JSON. Kinds with several
right answers (`MANY_ANSWERS`) have one of them as "answer"; `check_answer` takes every right one and
`canonical_answer` says which of them are the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from visalign.errors import UserError, suggestion

from .kinds import KINDS, LEVELS
from .workings import Problem, listed

Record = dict[str, Any]
Split = Literal["train", "heldout"]

TASKS = tuple(KINDS)  # Names of the kinds

HELDOUT_SHARE = 0.2  # Share of the problems of each kind that no training record contains

HELDOUT_PER_TASK = 15

_OPEN = "\\boxed{"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,99}")  # int() refuses thousands of digits
_PATIENCE = 20_000  # Draws in a row without a new problem after which there is taken to be none


def problem_key(task: str, problem: Problem) -> str:
    """Identify a problem, equally for every wording, and in any order of operands where it is irrelevant."""
    if KINDS[task].unordered_problem:
        problem = [sorted(problem[0])] if isinstance(problem[0], list) else sorted(problem)
    return f"{task} {json.dumps(problem)}"


def is_heldout(task: str, problem: Problem) -> bool:
    """Check if the problem is held out, a fixed function of `problem_key`."""
    digest = hashlib.sha256(problem_key(task, problem).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELDOUT_SHARE


def make_record(task: str, problem: Problem, level: int, rng: np.random.Generator) -> Record:
    """Make the record of a problem; wording, working and, among several right ones, the answer are drawn."""
    kind = KINDS[task]
    wording = kind.wordings[int(rng.integers(len(kind.wordings)))]
    if task == "two_step":
        form, a, b, c = problem
        parts = [form.format(a=a, b=b, c=c)]
    else:
        parts = [listed(entry) if isinstance(entry, list) else str(entry) for entry in problem]
    working, answer = kind.work(problem, rng)
    return {
        "task": task,
        "level": level,
        "prompt": wording.format(*parts),
        "answer": answer,
        "solution": f"{working} {_OPEN}{answer}}}",
        "problem": problem,
    }


def task_record(
    number: int, *, seed: int, split: Split = "train", tasks: Sequence[str] = TASKS, levels: Sequence[int] = LEVELS
) -> Record:
    """Make record `number` of an endless feed, a function of its arguments alone; the kinds take turns."""
    _check(split, tasks, levels)
    rng = np.random.default_rng([seed, number])
    task = tasks[number % len(tasks)]
    for _ in range(_PATIENCE):
        level = int(levels[int(rng.integers(len(levels)))])
        problem = KINDS[task].draw(rng, level)
        if KINDS[task].valid(problem) and is_heldout(task, problem) == (split == "heldout"):
            return make_record(task, problem, level, rng)
    raise UserError(f"task {task!r} has no {split} problem of levels {list(levels)}; allow more levels.")


def misread(record: Record, rng: np.random.Generator) -> Record:
    """Return the record with the solution of another problem: one number changed by up to 3, or by tens."""
    task, problem = record["task"], record["problem"]
    changed = problem
    while problem_key(task, changed) == problem_key(task, problem) or not KINDS[task].valid(changed):
        changed = _one_changed(problem, rng)
    return record | {"solution": make_record(task, changed, record["level"], rng)["solution"]}


def _one_changed(problem: Problem, rng: np.random.Generator) -> Problem:
    """Replace one of the numbers, at any depth, by another of as many digits or one near it."""
    positions = [
        (i, j)
        for i, entry in enumerate(problem)
        if not isinstance(entry, str)
        for j in (range(len(entry)) if isinstance(entry, list) else [None])
    ]
    i, j = positions[int(rng.integers(len(positions)))]
    old = problem[i] if j is None else problem[i][j]
    step = int(rng.integers(1, 4)) * (10 if old >= 10 and rng.random() < 0.5 else 1)
    new = old + step if rng.random() < 0.5 or old - step < 1 else old - step
    if j is None:
        return [*problem[:i], new, *problem[i + 1 :]]
    return [*problem[:i], [*problem[i][:j], new, *problem[i][j + 1 :]], *problem[i + 1 :]]


def text_tasks(
    count: int, *, seed: int = 0, split: Split = "train", tasks: Sequence[str] = TASKS, levels: Sequence[int] = LEVELS
) -> list[Record]:
    """Make the first `count` records with distinct problems, the kinds in turn; splits are disjoint."""
    _check(split, tasks, levels)
    records: list[Record] = []
    keys: set[str] = set()
    number = 0
    for index in range(count):
        task = tasks[index % len(tasks)]
        for _ in range(_PATIENCE // 10):
            record = task_record(number, seed=seed, split=split, tasks=[task], levels=levels)
            number += 1
            key = problem_key(task, record["problem"])
            if key not in keys:
                keys.add(key)
                records.append(record)
                break
        else:
            raise UserError(
                f"task {task!r} has {len(records)} {split} problems of levels {list(levels)} for {count} records, "
                "without repeats. Ask for fewer, or allow more levels or tasks."
            )
    return records


def heldout_tasks(
    per_task: int = HELDOUT_PER_TASK, *, tasks: Sequence[str] = TASKS, levels: Sequence[int] = LEVELS
) -> list[Record]:
    """Select held-out problems, always the same: `per_task` distinct ones of each kind."""
    return text_tasks(per_task * len(tasks), seed=0, split="heldout", tasks=tasks, levels=levels)


def wrong_solutions(tasks: Sequence[Mapping[str, Any]]) -> list[tuple[Record, str]]:
    """Pair each task, whose solution becomes "chosen", with the next solution that does not answer it."""
    pairs = []
    for index, task in enumerate(tasks):
        following = (*tasks[index + 1 :], *tasks[:index])
        rejected = next((t["solution"] for t in following if not check_answer(t["solution"], task)[0]), None)
        if rejected is None:
            raise UserError("all tasks have one answer, so no solution is wrong; raise data.size.")
        pairs.append(({**task, "chosen": task["solution"]}, rejected))
    return pairs


def check_answer(completion: str, record: Mapping[str, Any]) -> tuple[bool, str]:
    """Check if a completion answers a record's problem.

    The completion must hold `\\boxed{…}` exactly once, with whole numbers written plainly ("7", "-3", no leading
    zeros or signs), lists separated by commas. Text around the box is ignored. The reason is "correct" or the fault.

    >>> check_answer("2 + 3 = 5. \\\\boxed{5}", {"task": "add", "problem": [2, 3], "answer": "5"})
    (True, 'correct')
    """
    _, reason = _judge(completion, record)
    return reason == "correct", reason


def canonical_answer(completion: str, record: Mapping[str, Any]) -> str | None:
    """Write a right answer in one form, so that equal answers are equal texts ("5, 7" and "7,5" split 12); None if
    wrong.

    Counting them measures the diversity of right answers (FlowRL, arXiv 2509.15207).
    """
    return _judge(completion, record)[0]


def _judge(completion: str, record: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return (the canonical answer or None, reason)."""
    if missing := {"task", "problem", "answer"} - set(record):
        raise UserError(f"the record lacks {', '.join(sorted(missing))}; a record of a text task is needed.")
    kind = KINDS[record["task"]]
    content, reason = _boxed(completion)
    if content is None:
        return None, reason
    if kind.answer == "symbol":
        if content not in ("<", "=", ">"):
            return None, f"the box holds {content!r:.40}; one of <, =, > is wanted"
        return _compared(content, content == record["answer"], record)
    pieces = [piece.strip() for piece in content.split(",")]
    if odd := [piece for piece in pieces if not _INTEGER.fullmatch(piece)]:
        return None, f"the box holds {odd[0]!r:.40}, which is not a plainly written whole number"
    if kind.answer == "integer" and len(pieces) > 1:
        return None, f"the box holds {len(pieces)} numbers; one is wanted"
    numbers = [int(piece) for piece in pieces]
    if kind.accepts is not None:
        right = kind.accepts(record["problem"], numbers)
    else:
        right = listed(numbers) == record["answer"]
    return _compared(listed(sorted(numbers) if kind.unordered_answer else numbers), right, record)


def _compared(answer: str, right: bool, record: Mapping[str, Any]) -> tuple[str | None, str]:
    if right:
        return answer, "correct"
    if KINDS[record["task"]].accepts is not None:
        return None, f"{answer} is not right; {record['answer']} would be, for example"
    return None, f"{answer} is not the answer {record['answer']}"


def _boxed(completion: str) -> tuple[str | None, str]:
    """Return the content of the only box, or None with the reason."""
    boxes = completion.count(_OPEN)
    if boxes != 1:
        return None, f"{boxes or 'no'} \\boxed{{…}} in the completion; exactly one is wanted"
    inside, closed, _ = completion.split(_OPEN)[1].partition("}")
    return (inside.strip(), "") if closed else (None, "the \\boxed{ is not closed")


def _check(split: str, tasks: Sequence[str], levels: Sequence[int]) -> None:
    unknown = next((task for task in tasks if task not in KINDS), "")
    if split not in ("train", "heldout") or not tasks or unknown or not levels or not set(levels) <= set(LEVELS):
        raise UserError(
            f"split is {split!r}, tasks is {list(tasks)}, levels is {list(levels)}. "
            f"{suggestion(unknown, TASKS)}Allowed: train or heldout; some of {', '.join(TASKS)}; some of "
            f"{', '.join(map(str, LEVELS))}."
        )
