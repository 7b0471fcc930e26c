# SPDX-License-Identifier: Apache-2.0
"""Kinds of text tasks: drawing, wording and working of problems, and their right answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import workings
from .workings import Problem, Rng, Working, draw_numbers, draw_operands, draw_repeating

LEVELS = (1, 2, 3)  # Difficulty: larger numbers, longer lists


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of task."""

    draw: Callable[[Rng, int], Problem]  # Draws a problem of a level, which `valid` may refuse
    wordings: tuple[str, ...]  # Prompts of the same meaning with {0}, {1}, … for the entries of the problem
    work: Callable[[Problem, Rng], Working]  # Returns a right (working, answer), drawn where several are right
    answer: Literal["integer", "integers", "symbol"] = "integer"  # Type of the answer in the box
    accepts: Callable[[Problem, list[int]], bool] | None = None
    """Check of the numbers in the box, for kinds with several right answers; else None."""
    unordered_answer: bool = False  # The order of the numbers in the box carries no meaning
    unordered_problem: bool = False
    """The order of the numbers in the problem carries no meaning: 3 + 5 is the problem 5 + 3."""
    valid: Callable[[Problem], bool] = lambda problem: True  # Check that the problem has an answer


def _one_list(draw: Callable[[Rng, int], list[int]]) -> Callable[[Rng, int], Problem]:
    return lambda rng, level: [draw(rng, level)]


# fmt: off
ARITHMETIC = {
    "add": Kind(wordings=("What is {0} + {1}?", "Add {0} and {1}."), work=workings.add_working,
        draw=draw_operands(((2, 99), (2, 9)), ((10, 99), (10, 99)), ((100, 999), (10, 999))),
        unordered_problem=True),
    "subtract": Kind(wordings=("What is {0} - {1}?", "Take {1} from {0}."), work=workings.subtract_working,
        draw=draw_operands(
            ((10, 30), (1, 9)), ((20, 99), (10, 99)), ((100, 999), (10, 999)), descending=True)),
    "multiply": Kind(wordings=("What is {0} * {1}?", "Multiply {0} by {1}."), work=workings.multiply_working,
        draw=draw_operands(((2, 20), (2, 9)), ((12, 99), (2, 9)), ((12, 99), (12, 99))),
        unordered_problem=True),
    "two_step": Kind(wordings=("What is {0}?", "Work out {0}."), work=workings.two_step_working,
        draw=workings.draw_two_step, valid=lambda p: workings.two_step_result(*p) >= 0),
    "modulo": Kind(work=workings.modulo_working,
        wordings=("What is {0} mod {1}?", "What is left when {0} is divided by {1}?"),
        draw=draw_operands(((5, 30), (2, 5)), ((10, 99), (3, 9)), ((100, 399), (3, 19))),
        valid=lambda p: p[1] >= 2),
    "compare": Kind(work=workings.compare_working, answer="symbol",
        wordings=("Compare {0} + {1} with {2}.", "Put <, = or > between {0} + {1} and {2}."),
        draw=workings.draw_compare, valid=lambda p: p[2] >= 0),
}
"""Numbers in, one right answer out."""

LISTS = {
    "sort": Kind(wordings=("Sort {0}.", "Put {0} in order, smallest first."), work=workings.sort_working,
        draw=_one_list(draw_numbers), answer="integers"),
    "reverse": Kind(wordings=("Reverse {0}.", "Write {0} backwards."), work=workings.reverse_working,
        draw=_one_list(draw_numbers), answer="integers"),
    "largest": Kind(wordings=("What is the largest of {0}?", "Find the largest number in {0}."),
        work=workings.extreme_working(max), draw=_one_list(draw_numbers), unordered_problem=True),
    "smallest": Kind(wordings=("What is the smallest of {0}?", "Find the smallest number in {0}."),
        work=workings.extreme_working(min), draw=_one_list(draw_numbers), unordered_problem=True),
    "sum": Kind(wordings=("What is the sum of {0}?", "Add up {0}."), work=workings.sum_working,
        draw=_one_list(draw_numbers), unordered_problem=True),
    "count": Kind(wordings=("How many times does {0} occur in {1}?", "Count {0} in {1}."),
        work=workings.count_working, draw=workings.draw_count),
    "unique": Kind(wordings=("Remove the repeats from {0}.", "Keep the first of each number in {0}."),
        work=workings.unique_working, draw=_one_list(draw_repeating), answer="integers"),
    "nth": Kind(wordings=("What is number {0} of {1}?", "Give the number at place {0} of {1}."),
        work=workings.nth_working, draw=workings.draw_nth, valid=lambda p: 1 <= p[0] <= len(p[1])),
    "evens": Kind(wordings=("Keep the even numbers of {0}.", "Which of {0} are even?"),
        work=workings.evens_working, draw=_one_list(draw_numbers), answer="integers",
        valid=lambda p: any(n % 2 == 0 for n in p[0])),
}
"""A list in, one right answer out."""

MANY_ANSWERS = {
    "two_addends": Kind(work=workings.two_addends_working, answer="integers", unordered_answer=True,
        wordings=("Give two whole numbers above 0 that add up to {0}.",
                  "Split {0} into two whole numbers above 0."),
        draw=draw_operands(((5, 20),), ((20, 99),), ((100, 400),)), valid=lambda p: p[0] >= 2,
        accepts=lambda p, numbers: len(numbers) == 2 and min(numbers) >= 1 and sum(numbers) == p[0]),
    "three_addends": Kind(work=workings.three_addends_working, answer="integers", unordered_answer=True,
        wordings=("Give three different whole numbers above 0 that add up to {0}.",
                  "Split {0} into three different whole numbers above 0."),
        draw=draw_operands(((8, 20),), ((20, 60),), ((60, 200),)), valid=lambda p: p[0] >= 6,
        accepts=lambda p, numbers: (
            len(numbers) == len(set(numbers)) == 3 and min(numbers) >= 1 and sum(numbers) == p[0])),
    "any_order": Kind(wordings=("Write {0} in another order.", "Shuffle {0}."), answer="integers",
        work=workings.any_order_working, draw=_one_list(draw_numbers), valid=lambda p: len(set(p[0])) >= 2,
        accepts=lambda p, numbers: numbers != p[0] and sorted(numbers) == sorted(p[0])),
    "multiple_between": Kind(work=workings.multiple_working, draw=workings.draw_multiple,
        wordings=("Give a multiple of {0} that is more than {1} and less than {2}.",
                  "Name a multiple of {0} strictly between {1} and {2}."),
        accepts=lambda p, numbers: numbers[0] % p[0] == 0 and p[1] < numbers[0] < p[2],
        valid=lambda p: p[0] >= 2 and (p[2] - 1) // p[0] > p[1] // p[0] + 1),
}
"""Tasks with several right answers, for which the diversity of right answers can be measured."""
# fmt: on

KINDS: dict[str, Kind] = ARITHMETIC | LISTS | MANY_ANSWERS
