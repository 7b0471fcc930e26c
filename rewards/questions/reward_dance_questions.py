# SPDX-License-Identifier: Apache-2.0
"""RewardDance's questions in our own words, its units, and the reasons behind a decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from visalign.rewards.vlm.template import Template
from visalign.rewards.vlm.yes_no import Odds

Value = Literal["log_odds", "prob"]
UNITS: dict[str, tuple[str, tuple[float, float]]] = {
    "log_odds": ("log-odds of yes", (float("-inf"), float("inf"))),
    "prob": ("probability of yes", (0.0, 1.0)),
}


def _question(name: str, pictures: int, text: str) -> Template:
    content = [*({"type": "image"} for _ in range(pictures)), {"type": "text", "text": text}]
    return Template(name=name, messages=[{"role": "user", "content": content}])


_ONE = (
    "A text-to-image model made this picture for the caption below.\nCaption: {prompt}{instruction}\n"
    "Judge whether it shows all that the caption asks for, and nothing that contradicts it. "
)
_TWO = (
    "A text-to-image model made both pictures for the caption below. The first one is the reference.\n"
    "Caption: {prompt}{instruction}\nJudge whether the second picture is better than the first. "
)
_WORD, _REASON = "Answer yes or no.", "Answer yes or no first, then give your reasons in a few sentences."
YES_NO = _question("yes_no", 1, _ONE + _WORD)
EXPLAIN = _question("explain", 1, _ONE + _REASON)
PAIR = _question("pair", 2, _TWO + _WORD)
PAIR_EXPLAIN = _question("pair_explain", 2, _TWO + _REASON)


def reasons_behind(
    engine: Any, template: Template, asks: Sequence[Any], odds: Odds, max_new_tokens: int
) -> list[str]:
    """What the model writes behind its decision, decision included, without chance; "" where it made none."""
    texts = [""] * len(asks)
    rows = [row for row, reason in enumerate(odds.reasons) if reason is None]
    decided = [replace(asks[row], continuation=odds.decision[row]) for row in rows]
    reply = engine.generate(template, decided, answers=1, temperature=0.0, max_new_tokens=max_new_tokens)
    for row, answers in zip(rows, reply.texts, strict=True):
        texts[row] = odds.decision[row] + (answers[0] if answers else "")
    return texts


def check_options(name: str, value: str, decision_first: bool, reasons: bool) -> None:
    """Refuse an unknown unit, and reasons that the question does not ask for, by ValueError."""
    if value not in UNITS:
        raise ValueError(f"{name}: value is {value!r}; allowed are {', '.join(UNITS)}.")
    if reasons and not decision_first:
        raise ValueError(
            f"{name}: write_reasons without decision_first: the question then asks for one word. Set both."
        )
