# SPDX-License-Identifier: Apache-2.0
"""Parse which of two images a judge's text prefers: UnifiedReward's answers, thinking or not, and Flex.

Source: UnifiedReward, Wang et al., arXiv 2503.05236, and successors. Pref-GRPO looks for the first option as a
substring ("I do not agree that Image 1 is better" counts for image 1) and takes unreadable answers for ties.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .numbers import NUMBER, AnswerError, json_object, statement

OPTIONS = ("Image 1 is better", "Image 2 is better")  # The two sentences that UnifiedReward writes

_CLAUSE = re.compile(r"(.*?)([.;:!?\n,]|\b(?:but|however|while|whereas|although|though|and)\b|$)", re.IGNORECASE)
"""A clause and what ends it."""
_OVERALL = re.compile(r"\b(?:overall|all\s+in\s+all|in\s+total|in\s+conclusion|therefore|finally)\b", re.IGNORECASE)
_DOUBT = re.compile(
    r"\b(?:not|never|no(?!\s+doubt\b)|neither|nor|hardly|scarcely|cannot|disagree|deny|(?<!no\s)(?<!without\s)doubt|whether|if|unless"
    r"|unclear|unsure|wrong|false"
    r"|thought|initially|at\s+first)\b|n['’]t\b",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(
    r"\b(?:in|by)\s+no\s+(?:\w+\s+)?(?:respects?|ways?|aspects?|sense|regards?|means|measure|point)\b"
    r"|\bin\s+nothing\b|\bnowhere\b|\bat\s+nothing\b|\bonly\s+if\b|\bunless\b"
    r"|^\s*(?:is|was|would\s+be|seems|sounds)\s+(?:\w+\s+)?(?:wrong|false|untrue|incorrect|mistaken"
    r"|a\s+mistake)\b",
    re.IGNORECASE,
)
"""What takes back, behind an option, what the clause began to assert."""
_BETTER = r"(?:better|best|superior|preferable|preferred|stronger|the\s+winner|the\s+better\s+\w+)"
_WORSE = r"(?:worse|worst|inferior|weaker)"
_IS = (
    r"(?:is|was|looks|seems|appears|remains)(?:\s+to\s+be)?"
    r"(?:\s+[\w-]+ly|\s+(?:much|far|slightly|overall|still|also|the))*"
)
_TIE = re.compile(
    r"\bequally\b|\bequal\b|\ba\s+(?:tie|draw)\b|\bno\s+(?:clear\s+)?difference\b|\bindistinguishable\b"
    r"|\bneither\b.*\bbetter\b|\bof\s+(?:the\s+)?same\s+quality\b|^\s*(?:tie|draw)\s*$"
    r"|\bare\s+(?:both\s+)?(?:just\s+)?(?:the\s+same|identical|comparable)\b",
    re.IGNORECASE,
)
_ORDINAL = {1: "first", 2: "second"}
_SIDE = {side: re.compile(rf"\b(?:video|image|picture)\s*{side}\b", re.IGNORECASE) for side in (1, 2)}
_ASPECT = re.compile(r"^[ \t*#-]*+(\w++)[ \t]++score[ \t*]*+:[ \t\r*]*$", re.IGNORECASE | re.MULTILINE)
"""A heading of UnifiedReward 2.0 over the two scores of one aspect."""
_LONGEST_CLAUSE = 1000  # Characters of the longest clause that is read, since some patterns take quadratic time
_EITHER = re.compile(r"\b1\s*(?:/|or|\|)\s*2\b", re.IGNORECASE)
_TIE_WORD = re.compile(r"\s*(?:a\s+)?(?:tie|draw|equal|both|none)\s*\.?\s*", re.IGNORECASE)


def verdict(text: str, *, options: Sequence[str] = OPTIONS) -> int:
    """Parse a judge's text as a careful reader does: 1 first better, 2 second better, 0 a tie.

    `options` are the two sentences that were asked for, "NAME is better". Clauses that deny or doubt an option, or
    ask, assert nothing: "Image 2 is not better" leaves a tie open. "Image 1 is worse" asserts the other one, and "the
    first image" is the first option's. Where both are asserted, what is said "overall" counts.
    """
    answer = statement(text)
    names = [_subject(option, side) for side, option in enumerate(options, 1)]
    bare = answer.text.strip(" \t\r\n.*\"'`")
    for side, name in enumerate(names, 1):
        if re.fullmatch(rf"(?:the\s+)?{name}", bare, re.IGNORECASE):
            return side
    clauses = [c for c, end in _CLAUSE.findall(answer.text) if end != "?" and c.strip() and len(c) <= _LONGEST_CLAUSE]
    sides = {side for clause in clauses for side in _asserted(clause, names)}
    if len(sides) == 2:  # "Image 1 in colour, but overall Image 2" is clear, with a comma behind it too
        befores = ["", *clauses]
        summed_up = [
            clause
            for before, clause in zip(befores, clauses, strict=False)
            if _OVERALL.search(clause) or _OVERALL.fullmatch(before.strip(" *_"))
        ]
        sides = {side for clause in summed_up for side in _asserted(clause, names)} or sides
    ties = [(clause, _TIE.search(clause)) for clause in clauses]
    tied = any(tie is not None and not _DOUBT.search(clause[: tie.start()]) for clause, tie in ties)
    if sides and tied:
        raise AnswerError("the judge calls one picture better and both equal")
    if len(sides) == 1:
        return sides.pop()
    if tied:
        return 0
    if sides:
        raise AnswerError("the judge calls both pictures better")
    forms = [re.compile(rf"{name}\s+{_IS}", re.IGNORECASE) for name in names]
    denied = any(form.search(clause) for form in forms for clause in clauses)
    doubt = ": it denies or doubts one, which leaves a tie open" if denied else ""
    raise AnswerError(f"the judge's answer asserts neither {options[0]!r} nor {options[1]!r}{doubt}")


def pair_scores(text: str) -> tuple[float, float]:
    """Read the two scores of a pair, each after "Image 1" or "Image 2", which add up to 1 within 0.02."""
    answer = statement(text).text
    scores = []
    for name in ("Image 1", "Image 2"):
        words = name.replace(" ", r"\s*")
        form = rf"\b{words}\b(?:\s*+['’]s)?\s*+(?:score)?[\s*_]*+[:=][\s*_]*+({NUMBER})(?!\w|\.\d|,\d)"
        numbers = {float(number) for number in re.findall(form, answer, re.IGNORECASE)}
        if len(numbers) != 1:
            count = "no score" if not numbers else "several scores"
            raise AnswerError(f"the judge's text gives {count} for {name}")
        scores.append(numbers.pop())
    if not min(scores) >= 0 or not abs(sum(scores) - 1) <= 0.02:
        raise AnswerError(f"the judge's scores {scores[0]:g} and {scores[1]:g} do not add up to 1")
    return scores[0], scores[1]


def aspect_pair_scores(text: str) -> dict[str, tuple[float, float]]:
    """UnifiedReward 2.0's scores of a pair: name of an aspect in small letters ("alignment", "coherence",
    "style") -> the scores of both images, which add up to 1. {} where the text has no such headings.

    >>> aspect_pair_scores("Style Score:\\n Image 1: 0.4\\n Image 2: 0.6")
    {'style': (0.4, 0.6)}
    """
    answer = statement(text).text
    headings = list(_ASPECT.finditer(answer))
    pairs: dict[str, tuple[float, float]] = {}
    for number, heading in enumerate(headings):
        name = heading[1].lower()
        last = number + 1 == len(headings)
        scores = pair_scores(answer[heading.end() : None if last else headings[number + 1].start()])
        if pairs.setdefault(name, scores) != scores:
            raise AnswerError(f"the judge gave {name} twice, with other scores")
    return pairs


@dataclass(frozen=True)
class FlexAnswer:
    """UnifiedReward-Flex's judgement of a pair."""

    winner: int  # 1, 2, or 0 for a tie
    categories: Mapping[str, int | None]  # Category -> 1, 2, 0, or None where its winner cannot be read

    def preference(self, *, first: int | None = None) -> float:
        """Probability that the first is better, ties ½: mean of the overall winner and the categories' mean.

        Only the `first` categories count, 3 in Pref-GRPO's code; all when None.
        """
        prob = {1: 1.0, 2: 0.0, 0: 0.5}
        sides = list(self.categories.values())[:first]
        rated = [prob[side] for side in sides if side is not None]
        overall = prob[self.winner]
        return (overall + math.fsum(rated) / len(rated)) / 2 if rated else overall


def flex_winner(text: Any) -> int:
    """1 or 2 for the image that a "winner" field names, 0 for a tie."""
    if isinstance(text, str):
        if _TIE_WORD.fullmatch(text):
            return 0
        sides = [side for side, form in _SIDE.items() if form.search(text)]
        if len(sides) == 1 and not _EITHER.search(text):
            return sides[0]
    raise AnswerError(f"the winner is {text!r:.60}, which names not exactly one of the two pictures")


def flex_answer(text: str) -> FlexAnswer:
    """Read a Flex judgement: a JSON object with "winner" and "categories", words around it allowed."""
    content = json_object(text, "winner")
    listed = content.get("categories", [])
    categories: dict[str, int | None] = {}
    for number, category in enumerate(listed if isinstance(listed, list) else [], 1):
        if not isinstance(category, dict):
            continue
        name = str(category.get("name") or f"category {number}").strip()
        try:
            categories[name] = flex_winner(category.get("cat_winner"))
        except AnswerError:
            categories[name] = None
    return FlexAnswer(flex_winner(content["winner"]), categories)


def _subject(option: str, side: int) -> str:
    """A pattern of the image's name in "NAME is better", or of "the first NOUN"."""
    name = re.split(r"\s+is\s+", option, maxsplit=1)[0]
    written = r"\s*".join(map(re.escape, name.split()))
    noun = re.escape(name.split()[0])
    return rf"(?:{written}|{_ORDINAL[side]}\s+(?:{noun}|one|picture|image))(?!\w)"


def _asserted(clause: str, names: Sequence[str]) -> set[int]:
    """Sides that a clause calls better."""
    sides = set()
    for side, name in enumerate(names, 1):
        if not re.search(name, clause, re.IGNORECASE):
            continue
        chosen = rf"\b(?:prefer|choose|pick|winner\s+is|better\s+(?:one|image|video)\s+is)\s+(?:the\s+)?{name}"
        for form, wins in (
            (rf"\b{name}\s+{_IS}\s+{_BETTER}\b", side),
            (rf"\b{name}\s+{_IS}\s+{_WORSE}\b", 3 - side),
            (chosen, side),
        ):
            match = re.search(form, clause, re.IGNORECASE)
            doubted = match is None or _DOUBT.search(clause[: match.end()])
            if match and not doubted and not _TAKEN_BACK.search(clause[match.end() :]):
                sides.add(wins)
    return sides
