# SPDX-License-Identifier: Apache-2.0
"""P(yes) of a chat model from the alternatives of its first token, as top_logprobs lists them.

The question of RewardDance (arXiv 2509.08826) and VQAScore through any server that gives top_logprobs:
log-odds = logsumexp over the yes tokens − logsumexp over the no tokens. Peers read one spelling and take 0 where it
is missing; here all count. Where one side is not listed the log-odds are undefined, not infinite: an unlisted token
has at most the probability of the last listed one, which bounds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.special import expit

from visalign.core.preference.yes_no import yes_no_answer
from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, read_request
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.template import Template, question
from visalign.rewards.vlm.yes_no import MIN_MASS

from .judge import ChatJudge
from .messages import Reply

_MIN_REMAINDER = 1e-7  # Log-probs come in float32, which cannot tell a smaller remainder from 0
_TOKEN_MARKS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})
"""Characters by which tokenizers spell blanks and line ends."""


@dataclass(frozen=True)
class ListedAnswer:
    """Yes against no by a list of first tokens."""

    log_odds: float  # ln P(yes) − ln P(no), in nats; NaN where one side is not listed, which leaves them undefined
    bound: float  # The log-odds; where one side is not listed, the nearest to 0 that they can be. Always finite
    mass: float  # Probability of the listed yes and no together
    missing: str | None = None  # The side that is not listed: "yes", "no" or None

    @property
    def prob(self) -> float:
        """P(yes) / (P(yes) + P(no)) = σ(log_odds); NaN where the log-odds are undefined."""
        return float(expit(self.log_odds))


def read_yes_no(
    log_probs: Mapping[str, float],
    *,
    yes: Sequence[str] = ("yes",),
    no: Sequence[str] = ("no",),
    min_mass: float = 0.0,
) -> ListedAnswer:
    """Add up the probabilities of the tokens that spell yes and no, ignoring case and blanks.

    `log_probs` are in nats. Below `min_mass` of both together, or with neither side listed, it is an AnswerError.
    """
    for token, value in log_probs.items():
        if math.isnan(value) or value > 1e-3:
            raise AnswerError(f"the log-prob of the first token {token!r} is {value:g}, which is none")
    spelled = [token.translate(_TOKEN_MARKS).strip().lower() for token in log_probs]
    sides = []
    for words in (yes, no):
        spellings = {word.strip().lower() for word in words}
        sides.append([index for index, word in enumerate(spelled) if word in spellings])
    log_prob = torch.tensor(list(log_probs.values()), dtype=torch.float64)
    answer = yes_no_answer(log_prob, *sides, normalised=True)
    log_yes, log_no, mass = float(answer.log_yes), float(answer.log_no), float(answer.mass)
    if log_yes == log_no == -math.inf:
        first = max(log_probs, key=lambda token: log_probs[token], default=None)
        raise AnswerError(f"neither yes nor no is among the {len(log_probs)} likeliest first tokens ({first!r} leads)")
    if not mass >= min_mass:
        raise AnswerError(
            f"the answer is neither yes nor no: both have probability {mass:.3g}, min_mass is {min_mass:g}"
        )
    if -math.inf not in (log_yes, log_no):
        return ListedAnswer(log_yes - log_no, log_yes - log_no, mass)
    probs = [math.exp(value) for value in log_probs.values()]
    unlisted = max(min(1 - math.fsum(probs), min(probs)), _MIN_REMAINDER)
    bound = max(log_yes, math.log(unlisted)) - max(log_no, math.log(unlisted))
    return ListedAnswer(math.nan, bound, mass, "no" if log_no == -math.inf else "yes")


def read_reply_yes_no(reply: Reply, template: Template, min_mass: float) -> ListedAnswer:
    """Read the first token of a reply, with the template's words for yes and no."""
    yes, no = template.words.get("yes", ("yes",)), template.words.get("no", ("no",))
    return read_yes_no(reply.first_token, yes=yes, no=no, min_mass=min_mass)


def check_reading(name: str, *, top_logprobs: int, min_mass: float) -> None:
    """Refuse options with which no first token can be read."""
    if top_logprobs < 2 or not 0 <= min_mass < 1:
        raise RewardError(
            f"{name}: top_logprobs is {top_logprobs} and min_mass {min_mass}; allowed are from 2, and [0, 1)."
        )


QUESTION = question(
    "yes_no_server",
    "Does this picture show what the following text describes, and show it well? Text: {prompt}\n"
    "Answer with one word, yes or no.",
    words={"yes": ("yes",), "no": ("no",)},
)


class YesNoServer(ChatJudge):
    """Log-odds of yes against no in nats.

    The parts hold "prob", P(yes) of the two, and "mass", the probability of both together. Where yes or no is not
    among the `top_logprobs` alternatives of the first token (OpenAI and vLLM allow 20 by default), or both have less
    than `min_mass`, the image has no score. Of a `Template` the words "yes" and "no" count.
    """

    name = "yes_no_server"
    unit = "log-odds of yes (nats)"
    range = (-math.inf, math.inf)
    default_template = QUESTION
    required_fields = ()
    default_max_new_tokens = 1

    def __init__(
        self, *address: str, top_logprobs: int = 20, min_mass: float = MIN_MASS, device: Any = "cpu", **options: Any
    ) -> None:
        check_reading(self.name, top_logprobs=top_logprobs, min_mass=min_mass)
        super().__init__(*address, device=device, **options)
        self.top_logprobs, self.min_mass = top_logprobs, min_mass
        self.identity = self.make_identity(top_logprobs=top_logprobs, min_mass=min_mass, **self.sampling)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images by their log-odds; metadata is ignored."""
        request = read_request(self.name, images, prompts, metadata)
        return self.score_answers(request, self._read, self.unit, top_logprobs=self.top_logprobs)

    def _read(self, reply: Reply) -> dict[str, float]:
        if not reply.first_token:
            raise AnswerError(
                f"the server gave no top_logprobs; start vLLM with --max-logprobs {self.top_logprobs} or more"
            )
        answer = read_reply_yes_no(reply, self.template, self.min_mass)
        if answer.missing:
            raise AnswerError(
                f"{answer.missing} is not among {len(reply.first_token)} likeliest tokens; raise top_logprobs"
            )
        return {"value": answer.log_odds, "prob": answer.prob, "mass": answer.mass}
