# SPDX-License-Identifier: Apache-2.0
"""Verifiable answers: 1 where the completion's answer equals the ground truth, else 0.

A completion without an answer scores 0 and its remark says why; a sample without a readable ground truth is invalid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from visalign.data.text_tasks.tasks import TASKS, canonical_answer, check_answer
from visalign.interfaces import RewardCapabilities
from visalign.rewards.base.contract import check_choices, check_rules

from .contract import TextRule, TextVerdict, after_marker, regular_expression, shortened
from .parsing import EXTRACTORS, NORMALISERS, boxed_answers, names_differ, normalise_latex, parse_list, parse_number
from .symbolic import is_installed, symbolically_equal

_FINAL_LINE = re.compile(r"####[ \t]*([^\n#]*[^\s#])\s*\Z")
_MEASURED = re.compile(r"\\(?:\$|text|mathrm|mbox)|[€£¥]")  # An amount or a unit: $5 is not 5%
COMPARISONS = ("exact", "number", "list", "math")


class VerifiableAnswer(TextRule):
    r"""Compare the answer of a completion with the ground truth of its metadata.

    - "exact": equal after the normalisation;
    - "number": |answer - truth| ≤ max(absolute, relative · |truth|), in exact arithmetic; forms as in `parse_number`,
      and one percent sign may be missing from 1% on (50% is 0.5 and 50);
    - "list": as many items, each equal to its counterpart as a number or else as normalised text;
    - "math": as "number" where both are numbers (of x = 1 and y = 1 the names count), else equal as mathematics: by
      math-verify where it is installed (`pip install visalign[math]`), else as "exact" but for the case of words.
      Decimals are exact: 0.333 is not 1/3.

    For all but "list" the ground truth may be a list of alternatives, of which one must match. A worked solution is a
    ground truth too: its answer stands behind a last "####" (GSM8K), or where `extract` "boxed" or "answer_tag" finds
    it.

    Args:
        extract: "whole", "last_line", "boxed" (\\boxed{…} or \\fbox{…}), "answer_tag" (<answer>…</answer>),
            "last_number", or "pattern".
        field: metadata field with the ground truth.
        pattern: regular expression whose only group is the answer. Avoid nested repetitions: a policy can write text
            on which they take for ever.
        after: only the text behind the last occurrence of this marker counts, e.g. "</think>".
        normalise: "text", "latex" or "none", see `visalign.rewards.text.parsing`.
        absolute: tolerance in the unit of the answer; 0 compares exactly.
        relative: tolerance as a share of the ground truth.
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
        normalise: str = "text",
        absolute: float = 0.0,
        relative: float = 0.0,
        name: str = "verifiable_answer",
    ) -> None:
        extracts = (*EXTRACTORS, "pattern")
        check_choices(name, extract=(extract, extracts), compare=(compare, COMPARISONS))
        check_choices(name, normalise=(normalise, NORMALISERS))
        self.name, self._pattern = name, regular_expression(name, pattern)
        bounds = f"absolute is {absolute} and relative {relative}; allowed are finite numbers of at least 0"
        needless = "compare='exact' has no tolerance; choose 'number', 'list' or 'math'"
        misfit = f"extract is {extract!r} and pattern {pattern!r}; one group goes with extract='pattern'"
        groups = 0 if self._pattern is None else self._pattern.groups
        rules = {bounds: 0 <= absolute < math.inf and 0 <= relative < math.inf}
        rules[needless] = compare != "exact" or not (absolute or relative)
        rules[misfit] = groups == 1 if extract == "pattern" else self._pattern is None
        check_rules(name, rules)
        self._extract, self._compare, self._field, self._after = extract, compare, field, after
        self._normalise = NORMALISERS[normalise]
        self._absolute, self._relative = Fraction(str(absolute)), Fraction(str(relative))
        self.capabilities = RewardCapabilities(read_answer=self._read_answer)

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        truth = record.get(self._field)
        if truth is None:
            return TextVerdict(reason=f"its metadata has no {self._field!r}")
        truth = list(map(self._stated, truth)) if isinstance(truth, list | tuple) else self._stated(truth)
        if problem := self._truth_problem(truth):
            return TextVerdict(reason=f"the ground truth {self._field!r} is {shortened(truth)}, {problem}")
        answer, problem = self._find_answer(completion)
        if problem:
            return TextVerdict(value=0.0, remark=problem)
        if self._compare == "list":
            items, target = parse_list(answer) or [], parse_list(truth) or []
            if len(items) != len(target):
                return TextVerdict(value=0.0, remark=f"{len(items)} items, {len(target)} are right")
            correct = self._lists_equal(items, target)
        else:
            alternatives = truth if isinstance(truth, list) else [truth]
            correct = any(self._equal(answer, alternative) for alternative in alternatives)
        return TextVerdict(value=float(correct), remark=f"answer {shortened(answer)}")

    def _read_answer(self, completion: str, record: Mapping[str, Any]) -> str | None:
        answer, problem = self._find_answer(completion)
        number = None if self._compare == "exact" else parse_number(answer)
        return None if problem else self._normalise(answer) if number is None else str(number)

    def _find_answer(self, completion: str) -> tuple[str, str]:
        """Return the last answer and "", or the remark why there is none."""
        text = after_marker(completion, self._after)
        if text is None:
            return "", f"no {self._after}"
        if self._pattern is not None:
            answers, missing = [hit[1] or "" for hit in self._pattern.finditer(text)], "no match of the pattern"
        else:
            find, missing = EXTRACTORS[self._extract]
            answers = find(text)
        if not answers:
            return "", missing
        answer = answers[-1].strip()
        if answer and self._compare == "number" and parse_number(answer) is None:
            return "", f"no number: {shortened(answer)}"
        return answer, "" if answer else "the answer is empty"

    def _stated(self, truth: Any) -> Any:
        if not isinstance(truth, str):
            return truth
        answers = _FINAL_LINE.findall(truth)
        if not answers and self._extract in ("boxed", "answer_tag"):
            answers = EXTRACTORS[self._extract][0](truth)
        return answers[-1] if answers else truth

    def _truth_problem(self, truth: Any) -> str | None:
        if self._compare == "list":
            return "which is no list" if parse_list(truth) is None else None
        if truth == []:
            return "which is an empty list of alternatives"
        for value in truth if isinstance(truth, list) else [truth]:
            is_finite = not isinstance(value, float) or math.isfinite(value)
            if not isinstance(value, str | int | float | Fraction) or not is_finite:
                return "which is neither text nor a finite number"
            if self._compare == "number" and parse_number(value) is None:
                return "which is no number that can be read"
        return None

    def _lists_equal(self, items: Any, truth: Any) -> bool:
        if isinstance(items, list | tuple) and isinstance(truth, list | tuple):
            return len(items) == len(truth) and all(map(self._lists_equal, items, truth))
        return self._equal(items, truth)

    def _equal(self, answer: Any, truth: Any) -> bool:
        if self._compare != "exact":
            left, right = parse_number(answer), parse_number(truth)
            if left is not None and right is not None and not names_differ(answer, truth):
                # a percent sign may be left out: 50% is 0.5 and 50
                scaled = left * Fraction(100) ** (("%" in str(answer)) - ("%" in str(truth)))
                is_bare = max(abs(left), abs(scaled)) >= 1 and not _MEASURED.search(f"{answer} {truth}")
                values = (left, scaled) if is_bare else (left,)
                tolerance = max(self._absolute, self._relative * abs(right))
                return any(abs(value - right) <= tolerance for value in values)
            if self._compare == "number":
                return False
        left, right = self._normalise(str(answer)), self._normalise(str(truth))
        if left == right or self._compare != "math":
            return left == right
        # AB and ab are products, words are long or in \text
        is_word = left.isalpha() and (len(left) > 3 or "\\" in str(truth)) and left.casefold() == right.casefold()
        return is_word or (is_installed() and symbolically_equal(left, right))


class TaskAnswer(TextRule):
    """1 for a right boxed answer to a text task (`visalign.data.text_tasks.tasks`), 0 for a wrong or missing one."""

    name = "task_answer"
    unit = "1 = correct"

    def __init__(self) -> None:
        self.capabilities = RewardCapabilities(read_answer=self._read_answer)

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        if missing := [key for key in ("task", "problem", "answer") if key not in record]:
            return TextVerdict(reason=f"the metadata lacks {', '.join(missing)}, so it is no text task's record")
        if record["task"] not in TASKS:
            return TextVerdict(reason=f"there is no text task {record['task']!r}")
        right, remark = check_answer(completion, record)
        return TextVerdict(value=float(right), remark=remark)

    def _read_answer(self, completion: str, record: Mapping[str, Any]) -> str | None:
        boxes = boxed_answers(completion)
        return canonical_answer(completion, record) or (normalise_latex(boxes[-1]) if boxes else None)
