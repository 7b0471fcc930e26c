# SPDX-License-Identifier: Apache-2.0
"""P(yes) from a server's list of the most probable first tokens, with what the list does not say.

log-odds = logsumexp over the yes tokens − logsumexp over the no tokens (RewardDance, arXiv 2509.08826, reads
P("yes") at the decision token). A list has the top 20 or so alone: where one side is missing its probability
is below the last of the list, which bounds the log-odds; where both are missing nothing is known, and it is a
failure (Flow-Factory gives 0.0 there).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .judge_text import AnswerError

_ROUNDING = 1e-7
"""Log-probs come in float32: a remainder below this is not told from 0."""
_MARKS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})
"""How tokenizers spell blanks and line ends."""


@dataclass(frozen=True)
class YesNo:
    """What a list of first tokens says."""

    log_odds: float
    """Of yes against no, in nats, by the list alone: infinite where it has one side only."""
    bound: float
    """The same, finite always: where one side is missing, the log-odds are at least this far from 0."""
    is_bound: bool
    """Whether one side was missing."""
    mass: float
    """Probability of yes and no together."""
    left_over: float
    """Probability of everything else."""

    @property
    def prob(self) -> float:
        """P(yes) / (P(yes) + P(no)), by the list alone."""
        return _sigmoid(self.log_odds)


def read_yes_no(
    listed: Mapping[str, float], *, yes: Sequence[str] = ("yes",), no: Sequence[str] = ("no",)
) -> YesNo:
    """Add up the tokens that spell yes and those that spell no, whatever their case and blanks.

    Args:
        listed: token -> log-prob in nats.
        yes: words for yes.
        no: words for no.

    Raises:
        AnswerError: neither side is listed, or a log-prob is no number or above 0.
    """
    for token, value in listed.items():
        if math.isnan(value) or value > 1e-3:
            raise AnswerError(f"the log-prob of the first token {token!r} is {value:g}, which is none")
    spelled = {token: token.translate(_MARKS).strip().lower() for token in listed}
    sides = []
    for words in (yes, no):
        wanted = {word.strip().lower() for word in words}
        sides.append(_logsumexp([listed[token] for token, word in spelled.items() if word in wanted]))
    log_yes, log_no = sides
    if log_yes == log_no == -math.inf:
        first = max(listed, key=lambda token: listed[token], default=None)
        raise AnswerError(
            f"neither yes nor no is among the {len(listed)} likeliest first tokens ({first!r} leads)"
        )
    mass = math.exp(log_yes) + math.exp(log_no)
    total = math.fsum(math.exp(value) for value in listed.values())
    unseen = max(min(1 - total, min(math.exp(value) for value in listed.values())), _ROUNDING)
    cap = math.log(unseen)
    bound = max(log_yes, cap) - max(log_no, cap) if -math.inf in sides else log_yes - log_no
    return YesNo(
        log_odds=log_yes - log_no,
        bound=bound,
        is_bound=-math.inf in sides,
        mass=mass,
        left_over=max(0.0, 1 - mass),
    )


def _logsumexp(values: Sequence[float]) -> float:
    top = max(values, default=-math.inf)
    return top if top == -math.inf else top + math.log(math.fsum(math.exp(value - top) for value in values))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
