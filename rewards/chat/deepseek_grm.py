# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-GRM: sums K sampled scores with principles and critique; a meta judge may filter the samples.

Source: Liu et al., "Inference-Time Scaling for Generalist Reward Modeling", arXiv 2504.02495, section 4. The paper
judges a language model's answers, as `text_judge` does; here a vision-language model judges an image. The meta judge
is asked whether a critique is right; its score is the log-odds of yes, a scalar head made of two rows of the
vocabulary. `visalign train-reward` with model.kind critique trains it by cross-entropy on which votes were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import check_choices, check_rules, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import FORMS
from visalign.rewards.vlm.requests import Query, requests
from visalign.rewards.vlm.template import Template, question
from visalign.rewards.vlm.yes_no import MIN_MASS

from .judge import Answer, ChatJudge, failure_reason
from .messages import Reply
from .yes_no import check_reading, read_reply_yes_no

T = TypeVar("T")
Vote = tuple[T, str, dict[str, float]]
"""Score, or scores, of a written answer, its text, and its part "meta" where a meta judge rated it."""
TOP_LOGPROBS = 20

CRITIQUE = question(
    "deepseek_grm",
    "This picture was generated from the caption: {prompt}\n"
    "First write the principles by which it should be judged, with a weight in percent for each. "
    "Then write a critique of the picture by each of them. At the end give one whole score from 1 to 10 for "
    r"the picture, higher for better, as \boxed{score}.",
)
META = question(
    "deepseek_grm_meta",
    "This picture was generated from the caption: {prompt}\nA judge wrote of it:\n{critique}\n"
    "Are the judge's principles fitting, its statements about the picture true, and its score just? Answer "
    "with one word, yes or no.",
    words={"yes": ("yes",), "no": ("no",)},
)


class DeepSeekGRM(ChatJudge):
    """Sum of the scores of K samples, or of the k_meta that a meta judge rates highest.

    Where samples are unreadable the sum is K·mean, so that a failure is no low vote; at least two must be readable.
    `std` is the standard error of that sum, K·s/√n. Further parts are "mean", the mean score; "votes", the number of
    samples summed; with a meta judge "meta", their mean log-odds.

    Args:
        reads: how a sample states its score, a key of `rewards.reading.ratings.FORMS`: "boxed", 1 to 10, or
            for judges that were taught another form "answer", 1 to 5, or "yes_no", 1 or 0.
        k_meta: samples that the meta judge keeps; None asks no meta judge.
        meta: folder of a trained meta judge; the judge itself, untrained, when None.
        min_mass: smallest probability of yes and no together that counts as the meta judge's answer.
    """

    name = "deepseek_grm"
    default_template = CRITIQUE
    default_temperature = 1.0
    default_max_new_tokens = 2048

    def __init__(
        self,
        *address: str,
        answers: int = 8,
        reads: str = "boxed",
        k_meta: int | None = None,
        meta: str | Path | None = None,
        min_mass: float = MIN_MASS,
        device: Any = "cpu",
        **options: Any,
    ) -> None:
        check_meta(self.name, answers, k_meta, meta, min_mass)
        check_choices(self.name, reads=(reads, FORMS))
        super().__init__(*address, answers=answers, device=device, **options)
        self.meta_judge = MetaJudge(self, k_meta, meta, META, min_mass, device)
        self.votes = k_meta or answers
        self.reader, low, high = FORMS[reads]
        self.unit = f"sum of {self.votes} scores from {low:g} to {high:g}"
        self.range = (self.votes * low, self.votes * high)
        fields: dict[str, Any] = {**self.sampling, "k_meta": k_meta, "reads": reads}
        if k_meta is not None:
            server, template = self.meta_judge.server, self.meta_judge.template
            fields |= {"meta_model": server.model, "meta_template": template.text, "min_mass": min_mass}
            fields["meta"] = Identity(judge=META.name, **server.identity_fields(template)).digest
        self.identity = self.make_identity(**fields)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Sum the votes for each of B images; metadata is ignored."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.template, reasons)
        answers = self.server.ask(self.template, queries, read=self._read, **self.sampling)
        votes = [self._scaled(chosen) for chosen in self.meta_judge.choose(queries, answers)]
        return self.average_answers(request, rows, votes, reasons, self.unit, min_readable=1)

    def _read(self, reply: Reply) -> tuple[float, str]:
        return self.reader(reply.text), reply.text

    def _scaled(self, chosen: list[Vote[float]] | AnswerError) -> list[Answer | AnswerError]:
        if isinstance(chosen, AnswerError):
            return [chosen]
        count = float(len(chosen))
        return [
            ({"value": self.votes * score, "mean": score, "votes": count, **part}, text)
            for score, text, part in chosen
        ]


class MetaJudge:
    """Judge of a judge's written answers, which keeps the `k_meta` best of K; all count where that is None.

    It is the model of a folder, asked as it was trained; without one the judge itself.
    """

    def __init__(
        self,
        judge: ChatJudge,
        k_meta: int | None,
        folder: str | Path | None,
        template: Template,
        min_mass: float,
        device: Any,
    ) -> None:
        self.k_meta, self.min_mass, self.min_readable = k_meta, min_mass, judge.min_readable
        self.server: Any = judge.server
        self.template = template
        if folder is not None:
            self.server = judge.load_local(folder, device=device)
            self.template = self.server.engine.template(template.name, template)

    def rate(self, queries: Sequence[Query], texts: Sequence[Sequence[str]]) -> list[list[float | AnswerError]]:
        """Ask about each written answer to each query: log-odds of yes."""
        critiques = [
            replace(query, fields={**query.fields, "critique": text})
            for query, row in zip(queries, texts, strict=True)
            for text in row
        ]

        def read(reply: Reply) -> float:
            return read_reply_yes_no(reply, self.template, self.min_mass).bound

        options = {"max_new_tokens": 1, "top_logprobs": TOP_LOGPROBS}
        answers = iter(self.server.ask(self.template, critiques, read=read, **options))
        return [[next(answers)[0] for _ in row] for row in texts]

    def choose(
        self, queries: Sequence[Query], answers: Sequence[Sequence[tuple[T, str] | AnswerError]], *, rated: bool = True
    ) -> list[list[Vote[T]] | AnswerError]:
        """Return the answers to each query that count, the best first, or why there are none; all unless `rated`."""
        readable = [[answer for answer in row if not isinstance(answer, AnswerError)] for row in answers]
        readable = [row if len(row) >= self.min_readable else [] for row in readable]
        rated = rated and self.k_meta is not None
        metas: list[Any] = [()] * len(queries)
        if rated:
            metas = self.rate(queries, [[text for _, text in row] for row in readable])
        chosen: list[list[Vote[T]] | AnswerError] = []
        for row, row_answers, row_metas in zip(readable, answers, metas, strict=True):
            if not row:
                chosen.append(AnswerError(failure_reason(row_answers)))
            elif not rated:
                chosen.append([(*answer, {}) for answer in row])
            else:
                pairs = zip(row, row_metas, strict=True)
                votes = [(*answer, {"meta": meta}) for answer, meta in pairs if not isinstance(meta, AnswerError)]
                votes.sort(key=lambda vote: -vote[2]["meta"])
                lost = f"the meta judge rated none of {len(row)} samples: "
                chosen.append(votes[: self.k_meta] or AnswerError(lost + failure_reason(row_metas)))
        return chosen


def check_meta(name: str, answers: int, k_meta: int | None, meta: str | Path | None, min_mass: float) -> None:
    """Refuse options with which a meta judge cannot choose among K answers."""
    counts = f"k_meta is {k_meta}; allowed are whole numbers from 1 to answers ({answers})"
    needless = f"meta is '{meta}' and k_meta None; set how many samples it keeps"
    rules = {counts: k_meta is None or 1 <= k_meta <= answers, needless: meta is None or k_meta is not None}
    check_rules(name, rules)
    check_reading(name, top_logprobs=TOP_LOGPROBS, min_mass=min_mass)
