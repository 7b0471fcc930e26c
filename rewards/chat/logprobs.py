# SPDX-License-Identifier: Apache-2.0
"""P(yes) from a server's list of the most probable first tokens, with what the list does not say.

log-odds = logsumexp over the yes tokens − logsumexp over the no tokens (RewardDance, arXiv 2509.08826, reads
P("yes") at the decision token). A list has the top 20 or so alone: where one side is missing the log-odds are
undefined (not infinite: a token that is not listed has some probability), but that is below the last of the
list, which bounds them; where both are missing nothing is known, and it is a failure (Flow-Factory gives 0.0
there).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from visalign.core.preference.yes_no import yes_no_answer
from visalign.rewards.reading.numbers import AnswerError

_ROUNDING = 1e-7
"""Log-probs come in float32: a remainder below this is not told from 0."""
_MARKS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})
"""How tokenizers spell blanks and line ends."""


@dataclass(frozen=True)
class ListedAnswer:
    """What a list of first tokens says of yes and no."""

    log_odds: float
    """ln P(yes) − ln P(no), in nats; NaN where one side is not listed, which leaves them undefined."""
    bound: float
    """The log-odds; where one side is not listed, the nearest to 0 that they can be. Finite always."""
    mass: float
    """Probability of the listed yes and no together."""
    missing: str | None = None
    """The side that is not listed: "yes", "no" or None."""

    @property
    def prob(self) -> float:
        """P(yes) / (P(yes) + P(no)) = σ(log_odds); NaN where these are undefined."""
        return sigmoid(self.log_odds)

    @property
    def left_over(self) -> float:
        """Probability of everything else."""
        return max(0.0, 1 - self.mass)


def read_yes_no(
    listed: Mapping[str, float],
    *,
    yes: Sequence[str] = ("yes",),
    no: Sequence[str] = ("no",),
    min_mass: float = 0.0,
) -> ListedAnswer:
    """Add up the tokens that spell yes and those that spell no, whatever their case and blanks.

    Args:
        listed: token -> log-prob in nats.
        yes: words for yes.
        no: words for no.
        min_mass: smallest probability of both together that counts as an answer.

    Raises:
        AnswerError: neither side is listed, both together are too improbable, or a log-prob is no number or
            above 0.
    """
    for token, value in listed.items():
        if math.isnan(value) or value > 1e-3:
            raise AnswerError(f"the log-prob of the first token {token!r} is {value:g}, which is none")
    spelled = [token.translate(_MARKS).strip().lower() for token in listed]
    sides = []
    for words in (yes, no):
        wanted = {word.strip().lower() for word in words}
        sides.append([place for place, word in enumerate(spelled) if word in wanted])
    log_prob = torch.tensor(list(listed.values()), dtype=torch.float64)
    answer = yes_no_answer(log_prob, *sides, normalised=True)
    log_yes, log_no, mass = float(answer.log_yes), float(answer.log_no), float(answer.mass)
    if log_yes == log_no == -math.inf:
        first = max(listed, key=lambda token: listed[token], default=None)
        raise AnswerError(
            f"neither yes nor no is among the {len(listed)} likeliest first tokens ({first!r} leads)"
        )
    if not mass >= min_mass:
        raise AnswerError(
            f"the model answers neither yes nor no: both together have probability {mass:.3g}, "
            f"and min_mass is {min_mass:g}"
        )
    if -math.inf not in (log_yes, log_no):
        return ListedAnswer(log_yes - log_no, log_yes - log_no, mass)
    total = math.fsum(math.exp(value) for value in listed.values())
    unseen = max(min(1 - total, min(math.exp(value) for value in listed.values())), _ROUNDING)
    bound = max(log_yes, math.log(unseen)) - max(log_no, math.log(unseen))
    return ListedAnswer(math.nan, bound, mass, "no" if log_no == -math.inf else "yes")


def sigmoid(x: float) -> float:
    """1 / (1 + exp(−x)) without overflow; NaN of NaN."""
    return 1 / (1 + math.exp(-x)) if not x < 0 else math.exp(x) / (1 + math.exp(x))
