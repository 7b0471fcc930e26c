# SPDX-License-Identifier: Apache-2.0
"""Drawing and working of the problems of the text tasks.

A problem is a list of whole numbers, lists of them, or (for `two_step`) an expression's form: plain JSON. A
working is drawn among several right ones where there are several ways, and so is the answer where several
are right. `draw_*` take (generator, level); `*_working` take (problem, generator), return (working, answer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

Problem = list[Any]
Rng = np.random.Generator
Working = tuple[str, str]


def listed(numbers: Sequence[int]) -> str:
    """Numbers as they are written in prompts and answers: "5, 3, 9"."""
    return ", ".join(map(str, numbers))


def _between(rng: Rng, low: int, high: int) -> int:
    return int(rng.integers(low, high + 1))


def _some(rng: Rng, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def draw_operands(*levels: Sequence[tuple[int, int]], descending: bool = False) -> Callable[[Rng, int], Problem]:
    """Numbers within the bounds of a level; with `descending` the larger one first below level 3."""

    def draw(rng: Rng, level: int) -> Problem:
        numbers = [_between(rng, low, high) for low, high in levels[level - 1]]
        return sorted(numbers, reverse=True) if descending and level < 3 else numbers

    return draw


def draw_numbers(rng: Rng, level: int) -> list[int]:
    """A list of 3 to 7 numbers."""
    length = _between(rng, *((3, 4), (4, 5), (5, 7))[level - 1])
    return [_between(rng, 0, (9, 20, 99)[level - 1]) for _ in range(length)]


def draw_repeating(rng: Rng, level: int) -> list[int]:
    """A list in which some numbers occur more than once."""
    values = draw_numbers(rng, level)
    palette = values[: max(2, len(values) // 2)]
    return [_some(rng, palette) for _ in range(len(values) + 1)]


def _place_values(number: int) -> list[int]:
    """347 as 300, 40, 7; zeros left out."""
    digits = str(number)
    parts = [int(digit) * 10 ** (len(digits) - 1 - i) for i, digit in enumerate(digits)]
    return [part for part in parts if part] or [0]


def _columns(a: int, b: int) -> str:
    """Column addition from the ones upwards, carries written out."""
    steps, carry = [], 0
    for i in range(max(len(str(a)), len(str(b)))):
        terms = [n // 10**i % 10 for n in (a, b) if n >= 10**i or i == 0]
        terms += [carry] if carry else []
        total = sum(terms)
        carry = total // 10
        steps.append(" + ".join(map(str, terms)) + (f" = {total}" if len(terms) > 1 else ""))
    return ", ".join(steps) + "."


def _by_parts(a: int, b: int, sign: str, rng: Rng) -> str:
    """a ± b by the place values of b, largest or smallest first."""
    parts, steps = _place_values(b), []
    for part in parts if rng.random() < 0.5 else parts[::-1]:
        after = a + part if sign == "+" else a - part
        steps.append(f"{a} {sign} {part} = {after}")
        a = after
    return ", ".join(steps) + "."


def add_working(p: Problem, rng: Rng) -> Working:
    """By columns or by place values."""
    a, b = p
    return (_columns(a, b) if rng.random() < 0.5 else _by_parts(a, b, "+", rng)), str(a + b)


def subtract_working(p: Problem, rng: Rng) -> Working:
    """By place values, the larger number first; a negative result gets its sign in the box."""
    large, small = max(p), min(p)
    return _by_parts(large, small, "-", rng), str(p[0] - p[1])


def multiply_working(p: Problem, rng: Rng) -> Working:
    """Place values times the other factor, then their sum."""
    a, b = p
    split, other = (b, a) if b > 9 else (a, b)  # split the second factor of two long ones, else the first
    parts = _place_values(split)
    parts = parts if rng.random() < 0.5 else parts[::-1]
    steps = [f"{part} * {other} = {part * other}" for part in parts]
    if len(parts) > 1:
        steps.append(" + ".join(str(part * other) for part in parts) + f" = {a * b}")
    return ", ".join(steps) + ".", str(a * b)


TWO_STEP_FORMS = ("({a} + {b}) * {c}", "{a} * {c} + {b}", "{a} * {c} - {b}")
_TWO_STEP_RANGES = (((1, 9), (1, 9), (2, 5)), ((2, 20), (2, 20), (2, 9)), ((10, 60), (10, 60), (2, 9)))


def draw_two_step(rng: Rng, level: int) -> Problem:
    """[form, a, b, c]."""
    return [_some(rng, TWO_STEP_FORMS), *draw_operands(*_TWO_STEP_RANGES)(rng, level)]


def two_step_result(form: str, a: int, b: int, c: int) -> int:
    """The value of the expression."""
    if form == TWO_STEP_FORMS[0]:
        return (a + b) * c
    return a * c + (b if form == TWO_STEP_FORMS[1] else -b)


def two_step_working(p: Problem, rng: Rng) -> Working:
    """Write one step after the other."""
    form, a, b, c = p
    result = two_step_result(*p)
    if form == TWO_STEP_FORMS[0]:
        return f"{a} + {b} = {a + b}, {a + b} * {c} = {result}.", str(result)
    sign = "+" if form == TWO_STEP_FORMS[1] else "-"
    return f"{a} * {c} = {a * c}, {a * c} {sign} {b} = {result}.", str(result)


def modulo_working(p: Problem, rng: Rng) -> Working:
    """The multiple below, then what is left."""
    a, b = p
    times = a // b
    return f"{times} * {b} = {times * b}, {a} - {times * b} = {a % b}.", str(a % b)


def draw_compare(rng: Rng, level: int) -> Problem:
    """[a, b, c] with c below, at and above a + b equally often."""
    low, high = ((1, 9), (10, 49), (100, 499))[level - 1]
    a, b = _between(rng, low, high), _between(rng, low, high)
    return [a, b, a + b + _some(rng, (-1, 0, 1)) * _between(rng, 1, 4 + a // 4)]


def compare_working(p: Problem, rng: Rng) -> Working:
    """a + b, then its relation to c."""
    a, b, c = p
    symbol = "<" if a + b < c else ">" if a + b > c else "="
    return f"{a} + {b} = {a + b}, {a + b} {symbol} {c}.", symbol


def sort_working(p: Problem, rng: Rng) -> Working:
    """The order written as a chain."""
    order = sorted(p[0])
    links = (f" {'<' if a < b else '='} {b}" for a, b in pairwise(order))
    return f"{order[0]}{''.join(links)}.", listed(order)


def reverse_working(p: Problem, rng: Rng) -> Working:
    """The ends, then the list."""
    return f"The last is {p[0][-1]}, the first is {p[0][0]}.", listed(p[0][::-1])


def extreme_working(pick: Callable[[int, int], int]) -> Callable[[Problem, Rng], Working]:
    """The largest or smallest, by what is the largest or smallest so far; from either end."""

    def work(p: Problem, rng: Rng) -> Working:
        extremes = list(accumulate(p[0] if rng.random() < 0.5 else p[0][::-1], pick))
        return "So far " + listed(extremes) + ".", str(extremes[-1])

    return work


def sum_working(p: Problem, rng: Rng) -> Working:
    """Running totals from either end."""
    numbers = p[0] if rng.random() < 0.5 else p[0][::-1]
    totals = list(accumulate(numbers))
    steps = [f"{t} + {n} = {t + n}" for t, n in zip(totals, numbers[1:], strict=False)]
    return ", ".join(steps) + ".", str(totals[-1])


def count_working(p: Problem, rng: Rng) -> Working:
    """The places of the number."""
    positions = [i for i, n in enumerate(p[1], start=1) if n == p[0]]
    return (f"At places {listed(positions)}." if positions else "Nowhere."), str(len(positions))


def draw_count(rng: Rng, level: int) -> Problem:
    """[number, list]."""
    numbers = draw_repeating(rng, level)
    return [_some(rng, numbers), numbers]


def unique_working(p: Problem, rng: Rng) -> Working:
    """Name the repeated numbers, then the list."""
    distinct = list(dict.fromkeys(p[0]))
    again = [n for n in distinct if p[0].count(n) > 1]
    return (f"Repeated: {listed(again)}." if again else "None repeated."), listed(distinct)


def draw_nth(rng: Rng, level: int) -> Problem:
    """[place, list]."""
    numbers = draw_numbers(rng, level)
    return [_between(rng, 1, len(numbers)), numbers]


def nth_working(p: Problem, rng: Rng) -> Working:
    """The list counted up to the place."""
    position, numbers = p
    before = [f"{i}: {n}" for i, n in enumerate(numbers[:position], start=1)]
    return ", ".join(before) + ".", str(numbers[position - 1])


def evens_working(p: Problem, rng: Rng) -> Working:
    """Each number marked."""
    marks = [f"{n} {'odd' if n % 2 else 'even'}" for n in p[0]]
    return ", ".join(marks) + ".", listed([n for n in p[0] if n % 2 == 0])


def two_addends_working(p: Problem, rng: Rng) -> Working:
    """A first number, then what is missing."""
    first = _between(rng, 1, p[0] - 1)
    return f"{p[0]} - {first} = {p[0] - first}.", listed([first, p[0] - first])


def three_addends_working(p: Problem, rng: Rng) -> Working:
    """Two numbers, then what is missing; all different."""
    while True:
        a = _between(rng, 1, p[0] - 3)
        b = _between(rng, 1, p[0] - a - 1)
        rest = p[0] - a - b
        if len({a, b, rest}) == 3:
            return f"{p[0]} - {a} = {p[0] - a}, {p[0] - a} - {b} = {rest}.", listed([a, b, rest])


def any_order_working(p: Problem, rng: Rng) -> Working:
    """Any order but the given one."""
    order = list(p[0])
    while order == p[0]:
        order = [p[0][i] for i in rng.permutation(len(p[0]))]
    return f"Begin with {order[0]}.", listed(order)


def draw_multiple(rng: Rng, level: int) -> Problem:
    """[k, low, high]."""
    (k_low, k_high), (low, high), (smallest_gap, largest_gap) = (
        ((2, 5), (5, 20), (12, 20)),
        ((6, 9), (10, 50), (20, 40)),
        ((11, 19), (50, 150), (40, 80)),
    )[level - 1]
    start = _between(rng, low, high)
    return [_between(rng, k_low, k_high), start, start + _between(rng, smallest_gap, largest_gap)]


def multiple_working(p: Problem, rng: Rng) -> Working:
    """Any multiple of k strictly between low and high."""
    k, low, high = p
    times = _between(rng, low // k + 1, (high - 1) // k)
    return f"{times} * {k} = {times * k}.", str(times * k)
