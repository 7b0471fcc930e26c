# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-GRM: sums K sampled scores with principles and critique; a meta judge may filter the samples.

Source: Liu et al., "Inference-Time Scaling for Generalist Reward Modeling", arXiv 2504.02495, section 4:
pointwise scores of 1 to 10, k samples whose scores are added, and a meta reward model that keeps the k_meta
best samples. The paper judges a language model's answers, as `text_judge` does; here a vision-language model judges
an image, and the meta judge is a model that is asked whether the critique is right. Its log-odds of yes are the
meta score: a scalar head, the difference of two rows of the vocabulary. `visalign train-reward` with model.kind
critique trains it by cross-entropy on which votes were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, check_choices, read_request
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

    Where samples are unreadable the sum is scaled to the full number, K·mean, so that a failure is no low
    vote; at least two must be readable. `std` is the standard error of that sum, K·s/√n. The parts hold,
    beside those of `average_answers`, "mean", the mean score; "votes", the number of samples summed; with a
    meta judge "meta", the mean log-odds of the samples summed.

    Args:
        answers: K samples of each image.
        reads: how a sample states its score, a key of `rewards.reading.ratings.FORMS`: "boxed", 1 to 10, or
            for judges that were taught another form "answer", 1 to 5, or "yes_no", 1 or 0.
        k_meta: samples that the meta judge keeps; None asks no meta judge.
        meta: folder of a trained meta judge, loaded here and asked as it was trained; the judge itself,
            untrained, when None.
        min_mass: smallest probability of yes and no together that counts as the meta judge's answer.
    """

    name = "deepseek_grm"
    higher_is_better = True
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
        check_k_meta(self.name, k_meta, answers)
        check_choices(self.name, reads=(reads, FORMS))
        check_reading(self.name, top_logprobs=TOP_LOGPROBS, min_mass=min_mass)
        super().__init__(*address, answers=answers, device=device, **options)
        self.meta_server, self.meta_template = connect_meta(self, meta, k_meta, META, device)
        self.k_meta, self.votes, self.min_mass = k_meta, k_meta or answers, min_mass
        self.reader, low, high = FORMS[reads]
        self.unit = f"sum of {self.votes} scores from {low:g} to {high:g}"
        self.range = (self.votes * low, self.votes * high)
        fields: dict[str, Any] = {**self.sampling, "k_meta": k_meta, "reads": reads}
        if k_meta is not None:
            fields |= {"meta_model": self.meta_server.model, "meta_template": self.meta_template.text}
            meta_fields = self.meta_server.identity_fields(self.meta_template)
            fields |= {"min_mass": min_mass, "meta": Identity(judge=META.name, **meta_fields).digest}
        self.identity = self.make_identity(**fields)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Sum the votes for each of B images; metadata is ignored."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.template, reasons)
        answers = self.server.ask(self.template, queries, read=self._read, **self.sampling)
        samples = [[answer for answer in row if not isinstance(answer, AnswerError)] for row in answers]
        samples = [row if len(row) >= self.min_readable else [] for row in samples]
        metas = [None] * len(rows) if self.k_meta is None else self._ask_meta(queries, samples)
        votes = [
            self._select_votes(row_samples, row_meta) if row_samples else [AnswerError(failure_reason(row))]
            for row, row_samples, row_meta in zip(answers, samples, metas, strict=True)
        ]
        return self.average_answers(request, rows, votes, reasons, self.unit, min_readable=1)

    def _read(self, reply: Reply) -> tuple[float, str]:
        return self.reader(reply.text), reply.text

    def _ask_meta(
        self, queries: list[Query], samples: list[list[tuple[float, str]]]
    ) -> list[list[float | AnswerError]]:
        texts = [[text for _, text in row] for row in samples]
        return ask_meta(self.meta_server, self.meta_template, queries, texts, self.min_mass)

    def _select_votes(
        self, samples: Sequence[tuple[float, str]], metas: Sequence[float | AnswerError] | None
    ) -> list[Answer | AnswerError]:
        """Return the samples that count, best first, as K times their scores, whose mean is the sum."""
        chosen = best_votes(samples, metas, self.votes)
        if isinstance(chosen, AnswerError):
            return [chosen]
        return [
            ({"value": self.votes * score, "mean": score, "votes": float(len(chosen)), **meta}, text)
            for (score, text), meta in chosen
        ]


def ask_meta(
    server: Any, template: Template, queries: Sequence[Query], texts: Sequence[Sequence[str]], min_mass: float
) -> list[list[float | AnswerError]]:
    """Ask a meta judge about each written answer to each query: log-odds of yes."""
    meta_queries = [
        replace(query, fields={**query.fields, "critique": text})
        for query, row in zip(queries, texts, strict=True)
        for text in row
    ]

    def read(reply: Reply) -> float:
        return read_reply_yes_no(reply, template, min_mass).bound

    options = {"max_new_tokens": 1, "top_logprobs": TOP_LOGPROBS}
    answers = iter(server.ask(template, meta_queries, read=read, **options))
    return [[next(answers)[0] for _ in row] for row in texts]


def best_votes(
    samples: Sequence[T], metas: Sequence[float | AnswerError] | None, count: int
) -> list[tuple[T, dict[str, float]]] | AnswerError:
    """Return the `count` samples that the meta judge rates highest, best first; all of them without one."""
    if metas is None:
        return [(sample, {}) for sample in samples]
    pairs = zip(samples, metas, strict=True)
    rated: list[tuple[T, dict[str, float]]] = [(s, {"meta": m}) for s, m in pairs if not isinstance(m, AnswerError)]
    if not rated:
        return AnswerError(f"the meta judge rated none of {len(samples)} samples: {failure_reason(metas)}")
    return sorted(rated, key=lambda sample: -sample[1]["meta"])[:count]


def check_k_meta(name: str, k_meta: int | None, answers: int) -> None:
    """Refuse a number of samples to keep that is not among the K answers."""
    if k_meta is not None and not 1 <= k_meta <= answers:
        raise RewardError(f"{name}: k_meta is {k_meta}; allowed are whole numbers from 1 to answers ({answers}).")


def connect_meta(
    judge: ChatJudge, meta: str | Path | None, k_meta: int | None, template: Template, device: Any
) -> tuple[Any, Template]:
    """Load the meta judge of a folder, asked as it was trained; without one the judge is asked itself."""
    if meta is None:
        return judge.server, template
    if k_meta is None:
        raise RewardError(f"{judge.name}: meta is '{meta}' and k_meta None; set how many samples it keeps.")
    server = judge.load_local(meta, device=device)
    return server, server.engine.template(template.name, template)
