# SPDX-License-Identifier: Apache-2.0
"""Scores in judges' texts: UnifiedReward, VisualQuality-R1, LiFT, RationalRewards, DeepSeek-GRM.

Sources: UnifiedReward, Wang et al., arXiv 2503.05236; VisualQuality-R1, Wu et al., arXiv 2505.14460; LiFT, Wang et
al., arXiv 2412.04814; DeepSeek-GRM, Liu et al., arXiv 2504.02495. Peers turn a text that they cannot read into 0
(flow_grpo, verl-omni), the batch mean (Pref-GRPO), a random number (VisualQuality-R1) or "Good" (LiFT); here it is an
`AnswerError`, and its sample is masked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from .numbers import NUMBER, AnswerError, check_range, json_object, single_number, statement, without_emphasis

ASPECTS = ("alignment", "coherence", "style")  # UnifiedReward's three aspects, in the order in which it writes them
LIFT_VALUES = {"Good": 0.9, "Normal": 0.2, "Bad": 0.05}  # LiFT's value of each label (its released code)
RATIONAL_ASPECTS = {
    "text_faithfulness": "Text Faithfulness",
    "physical_quality": "Physical and Visual Quality",
    "text_rendering": "Text Rendering",
}
"""RationalRewards' aspects: key -> heading in the judgement."""
_FAITHFUL, *_OTHERS = RATIONAL_ASPECTS.items()
RATIONAL_EDIT_ASPECTS = dict((_FAITHFUL, ("image_faithfulness", "Image Faithfulness"), *_OTHERS))
"""Those of an edited image."""

_END = r"(?!\w|\.\d|,\d)"
_FINAL = re.compile(rf"Final Score:[\s*_]*(?P<number>{NUMBER}){_END}(?:\s*/\s*(?P<whole>\d+))?")
_ASPECT = re.compile(
    rf"(?P<name>Alignment|Coherence|Style)\s+Score\s*+(?:\(1-5\))?[\s*_]*+:[\s*_]*+(?P<number>{NUMBER}){_END}",
    re.IGNORECASE,
)
_LABEL = re.compile(r"(?<![\w-])(Good|Normal|Bad)(?![\w-])")
_NOT = r"(?:\b(?:not|never|nor|neither|no|hardly|scarcely|barely|without|cannot)\b|n['’]t\b)"
_SAYS = (
    r"(?:say|call|think|believe|consider|rate|describe|judge|label|regard|find|claim|agree|see|feel|deem"
    r"|conclude|argue)"
)
_NEGATED = re.compile(
    rf"(?:{_NOT}|\brather\s+than|\binstead\s+of|\bfar\s+from)(?:\s+[\w'’]+){{0,2}}\s*[\"'*]*$"
    # "I would not say that this image is Good" denies as "it is not Good" does
    rf"|(?:{_NOT}\s+(?:[\w'’]+\s+)?{_SAYS}|\b(?:doubt|deny|disagree))\b(?:\s+[\w'’]+){{0,7}}\s*[\"'*]*$",
    re.IGNORECASE,
)
_DENIAL = re.compile(rf"{_NOT}|\b(?:unless|if|whether)\b", re.IGNORECASE)
"""Words that may deny what stands further on in their clause."""
_MOST_LABELS, _LONGEST_CLAUSE = 200, 1000  # so that a judge that repeats itself takes no quadratic time
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


def final_score(text: str) -> float:
    """UnifiedReward's point score: the number after "Final Score:" (as spelled), once."""
    matches = list(_FINAL.finditer(without_emphasis(text)))
    if not matches:
        raise AnswerError("the judge's text has no 'Final Score:' with a number")
    if wrong := [match[0] for match in matches if match["whole"] and float(match["whole"]) != 5]:
        raise AnswerError(f"{wrong[0]!r} is not on the scale that ends at 5")
    return check_range(_one("Final Score", [float(match["number"]) for match in matches]), 1, 5)


def all_aspects(text: str) -> dict[str, float]:
    """Read UnifiedReward's scores for alignment, coherence and style; the scale "(1-5)" and the case may differ."""
    by_name: dict[str, list[float]] = {}
    for match in _ASPECT.finditer(without_emphasis(text)):
        by_name.setdefault(match["name"].lower(), []).append(float(match["number"]))
    if missing := [name for name in ASPECTS if name not in by_name]:
        raise AnswerError(f"the judge's text gives no score for {', '.join(missing)}")
    return {name: check_range(_one(name, by_name[name]), 1, 5) for name in ASPECTS}


def quality_score(text: str, *, low: float = 1.0, high: float = 5.0) -> float:
    """VisualQuality-R1's rating: the number in its last complete <answer>; never a random one."""
    return single_number(statement(text), low, high)


def lift_label(text: str) -> str:
    """Find the single label of LiFT's three that a text states as a word; "not Bad" does not state Bad."""
    labels: dict[str, str] = {}
    text = without_emphasis(text)
    matches = list(_LABEL.finditer(text))
    if len(matches) > _MOST_LABELS:
        raise AnswerError(f"the judge must state one label; it names {len(matches)}")
    for match in matches:
        clause = _clause(text[max(0, match.start() - _LONGEST_CLAUSE) : match.start()])
        if not _NEGATED.search(clause):
            doubtful = _DENIAL.search(clause) is not None
            labels[match[1]] = clause.strip() if doubtful else labels.get(match[1], "")
    if len(labels) != 1:
        listed = " and ".join(labels) if labels else "none"
        raise AnswerError(f"the judge must state one of {', '.join(LIFT_VALUES)}; it states {listed}")
    ((label, doubt),) = labels.items()
    if doubt:
        raise AnswerError(f"the judge may deny the label it names: {doubt:.60} {label}")
    return label


def rational_scores(text: str, aspects: Mapping[str, str] = RATIONAL_ASPECTS) -> dict[str, float | str | None]:
    """Read RationalRewards' aspect scores: a number, "N/A", or None where the text before "# Summary:" has none."""
    lines = without_emphasis(text).split("# Summary:")[0].splitlines()
    numbered = {key: re.compile(rf"\s*{n}\..*{name}") for n, (key, name) in enumerate(aspects.items(), 1)}
    plain = {key: re.compile(rf".*{name}:") for key, name in aspects.items()}
    has_numbers = any(form.match(line) for line in lines for form in numbered.values())
    headings = numbered if has_numbers else plain
    scores: dict[str, float | str | None] = dict.fromkeys(aspects)
    current = None
    for line in lines:
        current = next((key for key, form in headings.items() if form.match(line)), current)
        if current is not None and scores[current] is None:
            scores[current] = _rational_value(line)
    return scores


def rational_mean(scores: Mapping[str, float | str | None]) -> float:
    """(m − 1)/3 with m the mean of the numeric aspects, each clamped to [1, 4]."""
    numbers = [min(max(score, 1.0), 4.0) for score in scores.values() if isinstance(score, float)]
    if not numbers:
        raise AnswerError("the judgement gives no aspect a number")
    return (math.fsum(numbers) / len(numbers) - 1) / 3


def boxed_scores(text: str, *, count: int = 1, low: float = 1.0, high: float = 10.0) -> list[float]:
    r"""DeepSeek-GRM's scores: the `count` numbers in the last \boxed{...}, one per judged answer."""
    boxes = _BOXED.findall(statement(text).text)
    if not boxes:
        raise AnswerError(r"the judge's text has no \boxed{score}")
    parts = [part.strip() for part in boxes[-1].strip().strip("[]").split(",")]
    if len(parts) != count:
        raise AnswerError(f"the judge boxed {len(parts)} scores, {count} were asked for")
    if wrong := [part for part in parts if re.fullmatch(NUMBER, part) is None]:
        raise AnswerError(f"the judge boxed {wrong[0]!r}, which is no number")
    return [check_range(float(part), low, high) for part in parts]


def first_word(text: str) -> str:
    """The word that a judge's statement begins with, in small letters; "" where there is none."""
    return next(iter(re.findall(r"\w+", statement(text).text)), "").casefold()


def decision(text: str) -> float:
    """1 of a text that begins with yes, 0 of one that begins with no."""
    word = first_word(text)
    if word not in ("yes", "no"):
        raise AnswerError(f"the judge's text begins with {word!r:.40}, and neither with yes nor with no")
    return float(word == "yes")


def listed_scores(text: str, *, count: int = 2, low: float = 0.0, high: float = 25.0) -> list[float]:
    """The numbers of the list "score" in a JSON object, words around it allowed; so many, in the range."""
    score = json_object(text, "score")["score"]
    numbers = score if isinstance(score, list) else [score]
    if len(numbers) != count or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        raise AnswerError(f"the judge's score is {score!r:.60}; asked for is a list of {count} numbers")
    return [check_range(float(number), low, high) for number in numbers]


FORMS: dict[str, tuple[Callable[[str], float], float, float]] = {
    "answer": (quality_score, 1.0, 5.0),
    "boxed": (lambda text: boxed_scores(text)[0], 1.0, 10.0),
    "yes_no": (decision, 0.0, 1.0),
}
"""How a judge writes a score -> (its reader, smallest, largest): <answer>3</answer> as VisualQuality-R1,
\\boxed{7} as DeepSeek-GRM, or a decision with its reasons behind it as RewardDance."""


def _one(name: str, numbers: Sequence[float]) -> float:
    if len(set(numbers)) > 1:
        raise AnswerError(f"the judge gave {name} twice: {numbers[0]:g} and {numbers[-1]:g}")
    return numbers[0]


def _clause(before: str) -> str:
    """Return the text before a word in its clause; "and the quality is" begins another clause."""
    return re.split(
        r"[.;:!?,\n]|\bbut\b"
        r"|\b(?:and|so|because|thus|hence|yet|while|although|though|however)\b"
        r"(?=(?:\s+[\w'’]+){1,5}\s+(?:is|are|was|looks|seems|remains|appears)\b)",
        before,
    )[-1]


def _rational_value(line: str) -> float | str | None:
    match = re.search(r"Score\s*:\s*(.+)$", line.strip(), re.IGNORECASE)
    if match is None:
        return None
    words = match[1].strip(" *\t")
    if words == "N/A":
        return words
    number = re.match(r"\d+(?:\.\d+)?(?!\.?\d|,\d)", words)
    return None if number is None else float(number[0])
