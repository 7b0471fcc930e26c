# SPDX-License-Identifier: Apache-2.0
"""Share of the verifiable constraints of a record that a completion meets (IFEval)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from visalign.errors import suggestion
from visalign.rewards.base.contract import RewardError, check_choices

from .contract import TextRule, TextVerdict
from .format import JsonFormat, TextFormat
from .length import LengthReward

IDS, OPTIONS = "instruction_id_list", "kwargs"
"""Columns of google/IFEval: kinds of a record's constraints, and the arguments of each."""


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.MULTILINE | re.IGNORECASE))


def _holds(number: int, relation: str, limit: int) -> bool:
    return number < limit if relation == "less than" else number >= limit


def _parts(text: str, mark: str) -> list[str]:
    """Split at marks; what is empty before the first and behind the last one is no part."""
    parts = [part.strip() for part in text.split(mark)]
    return parts[not parts[0] : len(parts) - (len(parts) > 1 and not parts[-1])]


def _first_word(text: str, number: int) -> tuple[int, str]:
    """Return the number of paragraphs, and the first word of one of them."""
    words = [part.split()[0] for part in text.split("\n\n") if part.strip()]
    return len(words), "".join(words[number - 1 : number]).strip("\"'.,?!").lower()


def _rule(rule: Any) -> Callable[[str, Any], bool]:
    return lambda text, a: rule(**a).score([text], [""]).value.item() == rule.range[1]


_is_json = _rule(JsonFormat)
_ANSWERS = "My answer is yes.", "My answer is no.", "My answer is maybe."
# fmt: off
KINDS: dict[str, Callable[[str, Any], bool]] = {
    "keywords:existence": lambda t, a: all(_count(re.escape(word), t) for word in a["keywords"]),
    "keywords:frequency": lambda t, a: _holds(_count(re.escape(a["keyword"]), t), a["relation"], a["frequency"]),
    "keywords:forbidden_words": lambda t, a: not any(
        _count(rf"(?<!\w){re.escape(word)}(?!\w)", t) for word in a["forbidden_words"]),
    "keywords:letter_frequency": lambda t, a: _holds(
        _count(re.escape(a["letter"]), t), a["let_relation"], a["let_frequency"]),
    "length_constraints:number_words": lambda t, a: _holds(_count(r"\w+", t), a["relation"], a["num_words"]),
    "length_constraints:number_sentences": lambda t, a: _holds(
        _count(r"\w[^.!?]*([.!?]+(?=\s|$)|\Z)", t), a["relation"], a["num_sentences"]),
    "length_constraints:number_paragraphs": lambda t, a: (
        len(parts := _parts(t, "***")) == a["num_paragraphs"] and all(parts)),
    "length_constraints:nth_paragraph_first_word": lambda t, a: (
        _first_word(t, a["nth_paragraph"]) == (a["num_paragraphs"], a["first_word"].lower())),
    "detectable_content:number_placeholders": lambda t, a: _count(r"\[.*?\]", t) >= a["num_placeholders"],
    "detectable_content:postscript": lambda t, a: bool(_count(r"\s?".join(map(re.escape, a["postscript_marker"])), t)),
    "detectable_format:number_bullet_lists": lambda t, a: _count(r"^\s*(\*[^*]|-).*$", t) == a["num_bullets"],
    "detectable_format:number_highlighted_sections": lambda t, a: (
        _count(r"\*\*[^\n*]*[^\s*][^\n*]*\*\*|\*[^\n*]*[^\s*][^\n*]*\*", t) >= a["num_highlights"]),
    "detectable_format:multiple_sections": lambda t, a: (
        len(re.findall(rf"{re.escape(a['section_spliter'])}\s?\d+", t)) >= a["num_sections"]),
    "detectable_format:constrained_response": lambda t, a: any(answer in t for answer in _ANSWERS),
    "detectable_format:json_format": lambda t, a: _is_json(re.sub(r"(?i)^```(json)?|```$", "", t.strip()), {}),
    "detectable_format:title": lambda t, a: _count(r"<<[^\n]*[^\s<>][^\n]*>>", t) > 0,
    "combination:two_responses": lambda t, a: len(set(p := _parts(t, "******"))) == len(p) == 2 and all(p),
    "combination:repeat_prompt": lambda t, a: t.strip().lower().startswith(a["prompt_to_repeat"].strip().lower()),
    "startend:end_checker": lambda t, a: t.strip().strip('"').lower().endswith(a["end_phrase"].strip().lower()),
    "startend:quotation": lambda t, a: bool(re.fullmatch(r'\s*".*"\s*', t, re.DOTALL)),
    "change_case:capital_word_frequency": lambda t, a: _holds(
        sum(word.isupper() for word in re.findall(r"\w+", t)), a["capital_relation"], a["capital_frequency"]),
    "change_case:english_capital": lambda t, a: t.isupper(),
    "change_case:english_lowercase": lambda t, a: t.islower(),
    "punctuation:no_comma": lambda t, a: "," not in t,
    **{name: _rule(rule) for name, rule in [("text_format", TextFormat), ("length", LengthReward)]},
    "json_format": _is_json,
}
# fmt: on
"""Kind -> function of a text and the kind's arguments. IFEval's, and the rewards text_format, json_format and length,
which are met at their highest value."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


_TEXTS = "keyword|letter|first_word|postscript_marker|section_spliter|prompt_to_repeat|end_phrase"
_ARGUMENTS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("keywords|forbidden_words|tags", lambda v: isinstance(v, list) and v and all(map(_is_text, v)), "list of texts"),
    (_TEXTS, _is_text, "text that is not blank"),
    (r"(\w+_)?relation", lambda v: v in ("at least", "less than"), "choice of: at least, less than"),
    (r"num_\w+|(\w+_)?frequency", lambda v: type(v) is int and v >= 0, "whole number from 0"),
    ("nth_paragraph|max_length|cache", lambda v: type(v) is int and v > 0, "whole number from 1"),
]
"""Names of arguments, what they must meet, and how it is called."""


class Constraints(TextRule):
    """Share of the constraints of its record that a completion meets, or 1 where it meets all and else 0.

    The record has the columns of google/IFEval: `instruction_id_list`, names of KINDS, and `kwargs`, a mapping of
    arguments for each (null arguments are left out). Each kind is a part: 1 met, 0 not. As a reward of RL the share is
    denser than all or nothing (Light-IF, arXiv 2508.03178). Zhou et al., IFEval, arXiv 2311.07911, table 1, strict;
    without response_language, and with sentences and words found by patterns.

    Args:
        rule: "share" or "all".
    """

    unit = "share of constraints met"

    def __init__(self, rule: str = "share", *, name: str = "constraints") -> None:
        check_choices(name, rule=(rule, ("share", "all")))
        self.name, self._rule = name, rule

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        """Check the constraints of the record; the remark lists those that are not met."""
        kinds, options = record.get(IDS), record.get(OPTIONS)
        if not isinstance(kinds, list | tuple) or not kinds:
            return TextVerdict(reason=f"no list {IDS!r} of constraints, as google/IFEval has it, but {kinds!r:.60}")
        options, met = [{}] * len(kinds) if options is None else options, dict[str, list[bool]]()
        if not isinstance(options, list | tuple) or not all(isinstance(entry, Mapping | None) for entry in options):
            return TextVerdict(reason=f"its record's {OPTIONS!r} is {options!r:.60}; needed is a list of mappings")
        if len(options) != len(kinds):
            why = f"its record has {len(kinds)} constraints and {len(options)} {OPTIONS}; give one mapping for each"
            return TextVerdict(reason=why)
        for kind, arguments in zip(kinds, options, strict=True):
            if not isinstance(kind, str) or kind not in KINDS:
                why = f"there is no constraint {kind!r}. {suggestion(str(kind), KINDS)}Known: {', '.join(KINDS)}"
                return TextVerdict(reason=why)
            arguments = {str(key): value for key, value in (arguments or {}).items() if value is not None}
            for names, is_right, needed in _ARGUMENTS:
                for name, value in arguments.items():
                    if re.fullmatch(names, name) and not is_right(value):
                        why = f"the constraint {kind} has {name}={value!r:.60}; needed is a {needed}"
                        return TextVerdict(reason=why)
            try:  # a blank completion meets nothing
                met.setdefault(kind, []).append(KINDS[kind](completion, arguments) and bool(completion.strip()))
            except (KeyError, TypeError, ValueError, AttributeError, RewardError) as error:
                problem = f"it needs {error}" if isinstance(error, KeyError) else str(error)
                return TextVerdict(reason=f"the constraint {kind} has the arguments {arguments}: {problem}")
        share = fmean(fmean(results) for results in met.values() for _ in results)
        unmet = ", ".join(kind for kind, results in met.items() if not all(results))
        return TextVerdict(
            value=float(share == 1) if self._rule == "all" else share,
            remark=unmet and f"not met: {unmet}",
            parts={kind: fmean(results) for kind, results in met.items()},
        )
