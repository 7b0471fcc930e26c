# SPDX-License-Identifier: Apache-2.0
"""P(yes) of a served vision-language model, from the alternatives of its first token; the rest is reported.

The question of RewardDance (arXiv 2509.08826) and VQAScore through any server that gives top_logprobs. Peers
read one spelling and take 0 where it is missing; here all spellings count, and an answer is masked that is
neither yes nor no, or of which one side is not listed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.template import Template
from visalign.rewards.vlm.yes_no import MIN_MASS

from .asking import Drawing, as_template, connect, rate
from .logprobs import read_yes_no, sigmoid
from .messages import question
from .replies import Reply
from .server import ChatServer

QUESTION = question(
    "yes_no_server",
    "Does this picture show what the following text describes, and show it well? Text: {prompt}\n"
    "Answer with one word, yes or no.",
    words={"yes": ("yes",), "no": ("no",)},
)


class YesNoServer:
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
        server: ChatServer | None = None,
        template: Template | str | None = None,
        top_logprobs: int = 20,
        min_mass: float = MIN_MASS,
        one_sided: Literal["invalid", "bound"] = "invalid",
        **server_options: Any,
    ) -> None:
        """Say who is asked, and what; nothing is sent yet.

        Args:
            base_url: address of an OpenAI-compatible server; VISALIGN_JUDGE_URL in the environment if None.
            model: the name under which it serves the model; VISALIGN_JUDGE_MODEL if None.
            server: a `ChatServer` instead of the two.
            template: instead of ours: a `Template`, whose words "yes" and "no" count, or the text alone.
            top_logprobs: alternatives of the first token to ask for; 20 is what OpenAI and vLLM allow
                by default.
            min_mass: smallest probability of yes and no together that counts as an answer.
            one_sided: where yes or no is not among the alternatives, so that the log-odds are undefined:
                "invalid" masks the image, "bound" takes the nearest to 0 that the list allows.
            **server_options: of `ChatServer`.

        Raises:
            RewardError: options that cannot be used.
        """
        if not 2 <= top_logprobs or not 0 <= min_mass < 1:
            raise RewardError(
                f"{self.name}: top_logprobs is {top_logprobs} and min_mass {min_mass}; allowed are "
                "whole numbers from 2, and probabilities from 0 up to below 1."
            )
        if one_sided not in ("invalid", "bound"):
            raise RewardError(f"{self.name}: one_sided is {one_sided!r}; allowed are 'invalid' and 'bound'.")
        self.server = connect(self.name, server, base_url, model, server_options)
        self.template = as_template(self.name, template, QUESTION, needed=())
        self.top_logprobs, self.min_mass, self.one_sided = top_logprobs, min_mass, one_sided
        options = {"top_logprobs": top_logprobs, "min_mass": min_mass, "one_sided": one_sided}
        self.identity = Identity(judge=self.name, **self.server.identity_fields(self.template, **options))

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Log-odds per image; metadata is not looked at."""
        return rate(
            self.server,
            self.template,
            read_request(self.name, images, prompts, metadata),
            self._read,
            unit=self.unit,
            drawing=Drawing(max_new_tokens=1),
            top_logprobs=self.top_logprobs,
        )

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
