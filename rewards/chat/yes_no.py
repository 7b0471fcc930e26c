# SPDX-License-Identifier: Apache-2.0
"""P(yes) of a served vision-language model, from the alternatives of its first token; the rest is reported.

The question of RewardDance (arXiv 2509.08826) and VQAScore through any server that gives top_logprobs:
log-odds = logsumexp over the yes tokens − logsumexp over the no tokens. Peers read one spelling and take 0
where it is missing; here all spellings count, and an answer is masked that is neither yes nor no, or of which
one side is not listed.

A list has the top 20 or so alone: where one side is missing the log-odds are undefined (not infinite: a token
that is not listed has some probability), but that is below the last of the list, which bounds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from visalign.core.preference.yes_no import yes_no_answer
from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, read_request
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.template import Template
from visalign.rewards.vlm.yes_no import MIN_MASS

from .asking import ServedJudge, connect
from .local import LocalModel
from .messages import Reply, question
from .server import ChatServer

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


QUESTION = question(
    "yes_no_server",
    "Does this picture show what the following text describes, and show it well? Text: {prompt}\n"
    "Answer with one word, yes or no.",
    words={"yes": ("yes",), "no": ("no",)},
)


class YesNoServer(ServedJudge):
    """Log-odds of yes against no in nats.

    The parts hold "prob", P(yes) of the two, σ of the value; "mass", the probability of both together;
    "left_over", that of everything else; "is_bound", 1 where the list holds one side only and the value is
    the smallest distance from 0 that the list allows (`one_sided="bound"`).
    """

    name = "yes_no_server"
    unit = "log-odds of yes (nats)"
    range = (-math.inf, math.inf)
    higher_is_better = True

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        server: ChatServer | LocalModel | None = None,
        device: Any = "cpu",
        template: Template | str | None = None,
        top_logprobs: int = 20,
        min_mass: float = MIN_MASS,
        one_sided: Literal["invalid", "bound"] = "invalid",
        **server_options: Any,
    ) -> None:
        """Say who is asked, and what.

        Args:
            base_url: see `ServedJudge`.
            model: see `ServedJudge`.
            server: see `ServedJudge`.
            device: see `ServedJudge`.
            template: instead of ours: a `Template`, whose words "yes" and "no" count, or the text alone.
            top_logprobs: alternatives of the first token to ask for; 20 is what OpenAI and vLLM allow
                by default.
            min_mass: smallest probability of yes and no together that counts as an answer.
            one_sided: where yes or no is not among the alternatives, so that the log-odds are undefined:
                "invalid" masks the image, "bound" takes the nearest to 0 that the list allows.
            **server_options: of `ChatServer` or `LocalModel`.
        """
        if not 2 <= top_logprobs or not 0 <= min_mass < 1:
            raise RewardError(
                f"{self.name}: top_logprobs is {top_logprobs} and min_mass {min_mass}; allowed are "
                "whole numbers from 2, and probabilities from 0 up to below 1."
            )
        if one_sided not in ("invalid", "bound"):
            raise RewardError(f"{self.name}: one_sided is {one_sided!r}; allowed are 'invalid' and 'bound'.")
        server = connect(self.name, server, base_url, model, server_options, device=device)
        super().__init__(server=server, template=template, default=QUESTION, needed=(), max_new_tokens=1)
        self.top_logprobs, self.min_mass, self.one_sided = top_logprobs, min_mass, one_sided
        self.identity = self.identified(top_logprobs=top_logprobs, min_mass=min_mass, one_sided=one_sided)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Log-odds per image; metadata is not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        return self.rate(request, self._read, self.unit, top_logprobs=self.top_logprobs)

    def _read(self, reply: Reply) -> dict[str, float]:
        if not reply.first_token:
            raise AnswerError(
                "the server gave no top_logprobs; start vLLM with --max-logprobs of at least "
                f"{self.top_logprobs}, or use one that gives them"
            )
        words = self.template.words
        said = read_yes_no(
            reply.first_token,
            yes=words.get("yes", ("yes",)),
            no=words.get("no", ("no",)),
            min_mass=self.min_mass,
        )
        if said.missing and self.one_sided == "invalid":
            raise AnswerError(
                f"{said.missing} is not among the {len(reply.first_token)} likeliest first tokens, so the "
                "log-odds are undefined; ask for more top_logprobs, or take one_sided='bound'"
            )
        return {
            "value": said.bound,
            "prob": sigmoid(said.bound),
            "mass": said.mass,
            "left_over": said.left_over,
            "is_bound": float(said.missing is not None),
        }
