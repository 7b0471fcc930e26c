# SPDX-License-Identifier: Apache-2.0
"""Verifiable answers: 1 where the completion's answer equals the ground truth, else 0.

An answer is extracted (`extract`) from the completion, parsed, and compared (`compare`) with the ground truth
of the metadata. A completion without an answer scores 0 and its remark says why; a sample without a readable
ground truth is invalid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from visalign.data.text_tasks.tasks import TASKS, check_answer
from visalign.rewards.base.contract import check_choices

from .contract import TextRule, TextVerdict, after_marker, shortened
from .parsing import EXTRACTORS, NORMALISERS, names_differ, parse_list, parse_number
from .symbolic import is_installed, symbolically_equal

COMPARISONS = ("exact", "number", "list", "auto", "math")
LONGEST_LIST = 256
"""Most items of a list that is compared."""


class VerifiableAnswer(TextRule):
    """Compare the answer of a completion with the ground truth of its metadata.

    Comparisons:

    - "exact": equal after the normalisation;
    - "number": |answer - truth| ≤ max(absolute, relative · |truth|), in exact arithmetic; forms as in
      `parse_number`;
    - "list": as many items, each equal to its counterpart as a number or else as normalised text;
    - "auto": numbers where both are numbers, else exact; of x = 1 and y = 1 the names count;
    - "math": as "auto", and where they are not both numbers, equal as mathematics: by math-verify where it is
      installed (`pip install visalign[math]`), else as "auto". Decimals are exact: 0.333 is not 1/3.

    For all but "list" the ground truth may be a list of alternatives, of which one must match.
    """

    unit = "1 = correct"

    def __init__(
        self,
        *,
        extract: str = "whole",
        compare: str = "exact",
        field: str = "answer",
        pattern: str | None = None,
        after: str | None = None,
        conflict: str = "last",
        normalise: str = "text",
        absolute: float = 0.0,
        relative: float = 0.0,
        percent: str = "hundredth",
        units: Sequence[str] = (),
        ordered: bool = True,
        name: str = "verifiable_answer",
    ) -> None:
        """Choose how the answer is extracted and compared.

        Args:
            extract: "whole", "last_line", "boxed" (\\boxed{…} or \\fbox{…}), "answer_tag"
                (<answer>…</answer>), "last_number", or "pattern".
            compare: see the class.
            field: metadata field with the ground truth.
            pattern: regular expression whose only group is the answer. Avoid nested repetitions: a policy can
                write text on which they take for ever.
            after: only the text behind the last occurrence of this marker counts, e.g. "</think>".
            conflict: of several answers "last" takes the last; "refuse" scores 0 unless all are equal.
            normalise: "text", "latex" or "none", see `visalign.rewards.text.parsing`.
            absolute: tolerance in the unit of the answer; 0 compares exactly, so 0.333 is not 1/3.
            relative: tolerance as a share of the ground truth.
            percent: "hundredth" reads 50% as 0.5, "ignore" as 50.
            units: endings of numbers that are ignored, e.g. ["cm"].
            ordered: True if the order of a list's items counts.
            name: for messages and logs.
        """
        check_choices(
            name,
            extract=(extract, (*EXTRACTORS, "pattern")),
            compare=(compare, COMPARISONS),
            conflict=(conflict, ("last", "refuse")),
            normalise=(normalise, NORMALISERS),
            percent=(percent, ("hundredth", "ignore")),
        )
        for key, tolerance in (("absolute", absolute), ("relative", relative)):
            if not (math.isfinite(tolerance) and tolerance >= 0):
                raise ValueError(f"{name}: {key} is {tolerance}; allowed are finite numbers of at least 0.")
        if (absolute or relative) and compare == "exact":
            raise ValueError(f"{name}: compare='exact' has no tolerance; choose 'number', 'list' or 'auto'.")
        self.name = name
        self._pattern = _compiled(name, extract, pattern)
        self._extract, self._compare, self._field, self._after = extract, compare, field, after
        self._conflict, self._ordered = conflict, ordered
        self._normalise = NORMALISERS[normalise]
        self._absolute, self._relative = Fraction(str(absolute)), Fraction(str(relative))
        self._percent, self._units = percent, tuple(units)

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        """Compare; the remark shows the answer, or why there is none."""
        truth = record.get(self._field)
        if truth is None:
            return TextVerdict(reason=f"its metadata has no {self._field!r}")
        if problem := self._truth_problem(truth):
            return TextVerdict(reason=f"the ground truth {self._field!r} is {shortened(truth)}, {problem}")
        text = after_marker(completion, self._after)
        if text is None:
            return TextVerdict(value=0.0, remark=f"no {self._after}")
        answers, absent = self._answers(text)
        if not answers:
            return TextVerdict(value=0.0, remark=absent)
        answer = answers[-1].strip()
        if not answer:
            return TextVerdict(value=0.0, remark="the answer is empty")
        if self._conflict == "refuse" and (other := self._conflicting(answers)) is not None:
            return TextVerdict(
                value=0.0, remark=f"conflicting answers {shortened(other)} and {shortened(answer)}"
            )
        correct, note = self._matches(answer, truth)
        return TextVerdict(value=float(correct), remark=note or f"answer {shortened(answer)}")

    def _answers(self, text: str) -> tuple[list[str], str]:
        """All answers in order, and the remark when there is none."""
        if self._pattern is not None:
            return [hit[1] or "" for hit in self._pattern.finditer(text)], "no match of the pattern"
        find, absent = EXTRACTORS[self._extract]
        return find(text), absent

    def _conflicting(self, answers: list[str]) -> str | None:
        """Return an answer that differs from the last one, or None."""
        last = answers[-1].strip()
        return next((other for other in answers[:-1] if not self._matches(other.strip(), last)[0]), None)

    def _truth_problem(self, truth: Any) -> str | None:
        """Reason why a ground truth cannot be read, or None."""
        if self._compare == "list":
            items = parse_list(truth)
            if items is None:
                return "which is no list"
            return f"longer than {LONGEST_LIST} items" if len(items) > LONGEST_LIST else None
        alternatives = truth if isinstance(truth, list | tuple) else [truth]
        if not alternatives:
            return "which is an empty list of alternatives"
        for value in alternatives:
            if not isinstance(value, str | int | float | Fraction) or (
                isinstance(value, float) and not math.isfinite(value)
            ):
                return "which is neither text nor a finite number"
            if self._compare == "number" and self._number(value) is None:
                return "which is no number that can be read"
        return None

    def _matches(self, answer: str, truth: Any) -> tuple[bool, str]:
        """(True if the answer is right, remark where it cannot be read)."""
        if self._compare == "list":
            return self._lists_equal(answer, parse_list(truth) or [])
        alternatives = truth if isinstance(truth, list | tuple) else [truth]
        if self._compare == "number" and self._number(answer) is None:
            return False, f"no number: {shortened(answer)}"
        return any(self._equal(answer, alternative) for alternative in alternatives), ""

    def _lists_equal(self, answer: str, truth: list[Any]) -> tuple[bool, str]:
        items = parse_list(answer) or []
        if len(items) != len(truth):
            return False, f"{len(items)} items, {len(truth)} are right"
        if self._ordered:
            return all(map(self._items_equal, items, truth)), ""
        if not items:
            return True, ""
        from scipy.optimize import linear_sum_assignment

        costs = [[float(not self._items_equal(item, right)) for right in truth] for item in items]
        rows, columns = linear_sum_assignment(costs)
        return not any(costs[row][column] for row, column in zip(rows, columns, strict=True)), ""

    def _items_equal(self, item: Any, truth: Any) -> bool:
        """Compare items of lists, which may be lists themselves."""
        if isinstance(item, list | tuple) and isinstance(truth, list | tuple):
            return len(item) == len(truth) and all(map(self._items_equal, item, truth))
        return self._equal(item, truth)

    def _equal(self, answer: Any, truth: Any) -> bool:
        if self._compare != "exact":
            left, right = self._number(answer), self._number(truth)
            if left is not None and right is not None and not names_differ(answer, truth):
                return abs(left - right) <= max(self._absolute, self._relative * abs(right))
            if self._compare == "number":
                return False
        left, right = self._normalise(str(answer)), self._normalise(str(truth))
        if left == right or self._compare != "math" or not is_installed():
            return left == right
        return symbolically_equal(left, right)

    def _number(self, value: Any) -> Fraction | None:
        return parse_number(value, percent=self._percent, units=self._units)


def _compiled(name: str, extract: str, pattern: str | None) -> re.Pattern[str] | None:
    """Compile the user's pattern, which goes with extract='pattern' and has one group."""
    if (extract == "pattern") != (pattern is not None):
        raise ValueError(
            f"{name}: extract is {extract!r} and pattern {pattern!r}; a pattern goes with extract='pattern', "
            "and only there."
        )
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{name}: pattern {pattern!r} is no regular expression ({error}).") from error
    if compiled.groups != 1:
        raise ValueError(
            f"{name}: pattern {pattern!r} has {compiled.groups} groups; put the answer into one group, and "
            "write the others as (?:…)."
        )
    return compiled


class TaskAnswer(TextRule):
    """1 for a right boxed answer to a text task, 0 for a wrong or missing one.

    The metadata is the task's record (`visalign.data.text_tasks.tasks`); tasks with several right answers
    accept each of them. Other records are invalid.
    """

    name = "task_answer"
    unit = "1 = correct"

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        """Apply the task's exact checker; the remark says what is wrong."""
        missing = [key for key in ("task", "problem", "answer") if key not in record]
        if missing:
            reason = f"the metadata lacks {', '.join(missing)}, so it is no text task's record"
            return TextVerdict(reason=reason)
        if record["task"] not in TASKS:
            return TextVerdict(reason=f"there is no text task {record['task']!r}")
        right, remark = check_answer(completion, record)
        return TextVerdict(value=float(right), remark=remark)
