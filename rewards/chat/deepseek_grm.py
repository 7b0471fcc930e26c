# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-GRM: K times principles, critique and points; votes are summed, a meta judge may filter them.

Source: Liu et al., "Inference-Time Scaling for Generalist Reward Modeling", arXiv 2504.02495, section 4:
pointwise scores of 1 to 10, k samples whose scores are added, and a meta reward model that keeps the k_meta
best samples. There answers of a language model are judged; here it is an image, by a served vision-language
model, and the meta judge is a model that is asked whether the critique is right, its log-odds of yes being
the meta score: that is a scalar head, the difference of two rows of the vocabulary, and `visalign
train-reward` with model.kind critique trains it by cross-entropy on which votes were right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, make_scores, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import FORMS
from visalign.rewards.vlm.requests import Query, requests
from visalign.rewards.vlm.template import Template
from visalign.rewards.vlm.yes_no import MIN_MASS

from .asking import ServedJudge, as_template, failed
from .local import LocalModel
from .messages import Reply, question
from .server import ChatServer
from .yes_no import read_yes_no

TOP_LOGPROBS = 20
TRAINED = (
    "{name}: meta is '{meta}' and k_meta {k_meta}. A trained meta judge keeps k_meta of the samples, and has "
    "its own model and question: set k_meta, and leave meta_server and meta_template out."
)

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


class DeepSeekGRM(ServedJudge):
    """Sum of the scores of K samples, or of the k_meta that a meta judge rates highest.

    Where samples cannot be read the sum is scaled to the full number, K·mean, so that a failure is no low
    vote; at least two must be readable. `std` is the standard error of that sum, K·s/√n. The parts hold
    "mean", the mean score; "votes", the samples that were summed; with a meta judge "meta", the mean log-
    odds of the kept ones.
    """

    name = "deepseek_grm"
    higher_is_better = True

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        answers: int = 8,
        reads: str = "boxed",
        k_meta: int | None = None,
        meta: str | Path | None = None,
        meta_server: ChatServer | LocalModel | None = None,
        meta_template: Template | str | None = None,
        min_mass: float = MIN_MASS,
        device: Any = "cpu",
        **asking: Any,
    ) -> None:
        """Say who is asked, and what.

        Args:
            base_url: see `ServedJudge`.
            model: see `ServedJudge`.
            answers: K samples of each image.
            reads: how a sample states its score, a row of `rewards.reading.ratings.FORMS`: "boxed", 1 to 10,
                or of judges that were taught another form "answer", 1 to 5, or "yes_no", 1 or 0.
            k_meta: samples that the meta judge keeps; None asks none.
            meta: folder of a trained meta judge, loaded here and asked as it was trained.
            meta_server: of an untrained one; the judge's own when None.
            meta_template: its question instead of ours, with {critique}.
            min_mass: smallest probability of yes and no together that counts as the meta judge's answer.
            device: see `ServedJudge`.
            **asking: of `ServedJudge`; the temperature is 1 and a sample has 2048 tokens.
        """
        if k_meta is not None and not 1 <= k_meta <= answers:
            raise RewardError(
                f"{self.name}: k_meta is {k_meta}; allowed are whole numbers from 1 to answers ({answers})."
            )
        if reads not in FORMS:
            raise RewardError(f"{self.name}: reads is {reads!r}; allowed are {', '.join(FORMS)}.")
        if not 0 <= min_mass < 1:
            raise RewardError(
                f"{self.name}: min_mass is {min_mass}; allowed are probabilities from 0 up to below 1."
            )
        asking = {"default": CRITIQUE, "temperature": 1.0, "max_new_tokens": 2048, **asking}
        super().__init__(base_url, model, answers=answers, device=device, **asking)
        if meta is not None:
            if k_meta is None or meta_server is not None or meta_template is not None:
                raise RewardError(TRAINED.format(name=self.name, meta=meta, k_meta=k_meta))
            meta_server = LocalModel(meta, device=device)
            meta_template = meta_server.engine.template(META.name, META)
        self.meta_server = meta_server or self.server
        self.meta_template = as_template(self.name, meta_template, META, needed=("critique",))
        self.k_meta, self.votes, self.min_mass = k_meta, k_meta or answers, min_mass
        self.reader, low, high = FORMS[reads]
        self.unit = f"sum of {self.votes} scores from {low:g} to {high:g}"
        self.range = (self.votes * low, self.votes * high)
        options: dict[str, Any] = {**self.drawing, "k_meta": k_meta, "reads": reads}
        if k_meta is not None:
            options |= {"meta_model": self.meta_server.model, "meta_template": self.meta_template.text}
            fields = self.meta_server.identity_fields(self.meta_template)
            options |= {"min_mass": min_mass, "meta": Identity(judge=META.name, **fields).digest}
        self.identity = self.identified(**options)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Summed votes per image; metadata is not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.template, reasons)
        drawn = self.server.ask(self.template, queries, read=self.read, **self.drawing)
        samples = [[said for said in row if not isinstance(said, AnswerError)] for row in drawn]
        for place, row in enumerate(rows):
            if len(samples[place]) < self.least:
                reasons[row] = failed(drawn[place])
                samples[place] = []
        metas = self._meta(queries, samples) if self.k_meta is not None else None
        size = len(request)
        columns = {name: torch.full((size,), torch.nan) for name in ("value", "std", "mean", "votes", "meta")}
        text = [""] * size
        for place, row in enumerate(rows):
            if reasons[row] is not None:
                continue
            kept, why = _kept(samples[place], None if metas is None else metas[place], self.votes)
            if not kept:
                reasons[row] = why
                continue
            text[row] = kept[0][1]
            for name, number in self._summed(kept).items():
                columns[name][row] = number
        return self._scores(columns, reasons, text)

    def read(self, reply: Reply) -> tuple[float, str]:
        """(score, text) of one sample."""
        return self.reader(reply.text), reply.text

    def _meta(
        self, queries: list[Query], samples: list[list[tuple[float, str]]]
    ) -> list[list[float | AnswerError]]:
        """The meta score of each readable sample."""
        questions = [
            replace(query, fields={"critique": text})
            for query, row in zip(queries, samples, strict=True)
            for _, text in row
        ]
        words = self.meta_template.words

        def read(reply: Reply) -> float:
            yes, no = words.get("yes", ("yes",)), words.get("no", ("no",))
            return read_yes_no(reply.first_token, yes=yes, no=no, min_mass=self.min_mass).bound

        found = iter(
            self.meta_server.ask(
                self.meta_template, questions, read=read, max_new_tokens=1, top_logprobs=TOP_LOGPROBS
            )
        )
        return [[next(found)[0] for _ in row] for row in samples]

    def _summed(self, kept: Sequence[tuple[float, str, float]]) -> dict[str, float]:
        count = len(kept)
        mean = math.fsum(score for score, _, _ in kept) / count
        found = {"value": self.votes * mean, "mean": mean, "votes": float(count)}
        found["meta"] = math.fsum(meta for _, _, meta in kept) / count
        if count > 1:
            spread = math.sqrt(math.fsum((score - mean) ** 2 for score, _, _ in kept) / (count - 1))
            found["std"] = self.votes * spread / math.sqrt(count)
        return found

    def _scores(self, columns: dict[str, torch.Tensor], reasons: list[str | None], text: list[str]) -> Scores:
        value, std, meta = columns.pop("value"), columns.pop("std"), columns.pop("meta")
        parts = columns if self.k_meta is None else {**columns, "meta": meta}
        spread = std if self.answers > 1 else None
        return make_scores(value, reasons, self.unit, std=spread, parts=parts, text=text)


def _kept(
    samples: Sequence[tuple[float, str]], metas: Sequence[float | AnswerError] | None, votes: int
) -> tuple[Sequence[tuple[float, str, float]], str]:
    """(score, text, meta score) of the samples that count, best first; or why there is none."""
    if metas is None:
        return [(score, text, math.nan) for score, text in samples], ""
    rated = [
        (score, text, meta)
        for (score, text), meta in zip(samples, metas, strict=True)
        if not isinstance(meta, AnswerError)
    ]
    if not rated:
        return [], f"the meta judge rated none of {len(samples)} samples: {failed(metas)}"
    return sorted(rated, key=lambda sample: -sample[2])[:votes], ""
