# SPDX-License-Identifier: Apache-2.0
"""Alignment by asking: VQAScore's one question about the prompt, and GenEval 2's questions about its parts.

Sources: VQAScore, Lin et al., arXiv 2404.01291: P("Yes" | image, question) over the whole vocabulary.
GenEval 2, Kamath et al., arXiv 2512.16853: Soft-TIFA, the mean of the probabilities that the right answers
have, over the questions of a prompt: geometric for the benchmark's score, arithmetic as the milder one.
github.com/facebookresearch/GenEval2, evaluation.py: which spellings it counts, and its own question for
VQAScore. It adds the probability of the first token of each spelling, repeats included: of a tokenizer that
splits " 4" it counts the space, and of "seventy" the word "other".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, make_scores, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.vlm.engine import engine_of
from visalign.rewards.vlm.requests import Query, requests
from visalign.rewards.vlm.template import Template, question

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


AFFIRMED = ("Yes", "yes", " yes", " Yes")
"""What counts as yes in GenEval 2's code."""
SHOWS = question("vqa_score", 'Does this figure show "{prompt}"? Please answer Yes or No.')
GENEVAL2 = question("vqa_score", 'Does this image show "{prompt}"? Answer the question with Yes or No.')
ONE_WORD = question("soft_tifa", "{question} Answer in one word.")


def _choice(judge: str, name: str, given: str, allowed: tuple[str, str]) -> None:
    if given not in allowed:
        raise ValueError(f"{judge}: {name} is {given!r}; allowed are {allowed[0]!r} and {allowed[1]!r}.")


class _Asked:
    """What both judges share: a model, a question, the probability of words as the next one."""

    name: str
    unit = "probability"
    range = (0.0, 1.0)
    higher_is_better = True

    def __init__(
        self, model: Any, template: Template, *, device: Any, precision: str, loading: Mapping[str, Any]
    ) -> None:
        self.engine = engine_of(model, self.name, device=device, precision=precision, **loading)
        self.template = self.engine.template(template.name, template)

    def _identified(self, **options: Any) -> Identity:
        return Identity(judge=self.name, **self.engine.identity_fields(self.template, **options))

    def _first_tokens(self, words: Sequence[str]) -> list[int]:
        """The first token of each word, as GenEval 2's code takes it."""
        tokenizer = self.engine.processor.tokenizer
        return [tokenizer.encode(word, add_special_tokens=False)[0] for word in words]

    def _probabilities(self, queries: Sequence[Query], ids: Sequence[int]) -> tuple[Tensor, list[str | None]]:
        """([N, K] float64 probabilities of tokens as the next one, over the whole vocabulary; reasons)."""
        reply = self.engine.answer_logits(self.template, queries, ids, left_over=True)
        total = reply.log_total
        assert total is not None
        return (reply.logits.double() - total.double()[:, None]).exp(), list(reply.reasons)


class VqaScore(_Asked):
    """P("Yes") over the whole vocabulary to the question whether the image shows the prompt."""

    name = "vqa_score"

    def __init__(
        self,
        model: Any = "shapes-vlm",
        *,
        answer: str | None = None,
        rule: Literal["vqascore", "geneval2"] = "vqascore",
        template: Template | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        **loading: Any,
    ) -> None:
        """Load the model.

        Args:
            model: folder, hub id or packaged name; or a loaded `rewards.vlm.VisionLanguageEngine`.
            answer: the word whose probability is the score, one token of the model; "Yes", or the template's
                words for it, when None.
            rule: "vqascore", or "geneval2" for the question and the spellings of Yes of that benchmark's
                code, whatever the folder says.
            template: instead of the folder's "vqa_score" or "yes_no", or the published question.
            device: where the model runs.
            precision: of its weights, as in `engine_of`.
            **loading: of `engine_of`: attention, device_map, quantization, max_tokens_per_batch, ...
        """
        _choice(self.name, "rule", rule, ("vqascore", "geneval2"))
        super().__init__(model, SHOWS, device=device, precision=precision, loading=loading)
        if rule == "geneval2":
            template = template or GENEVAL2
        elif template is None and self.template is SHOWS:
            template = self.engine.template("yes_no", SHOWS)
        self.template = template or self.template
        words = self.template.words.get("yes", ("Yes",)) if answer is None else (answer,)
        if rule == "geneval2" and answer is None:
            words, self._ids = AFFIRMED, self._first_tokens(AFFIRMED)
        else:
            self._ids = self.engine.token_ids(list(words))
        self.identity = self._identified(answer=list(words))

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score per (image, prompt); metadata is not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.template, reasons)
        value = torch.full((len(request),), torch.nan)
        found, said = self._probabilities(queries, self._ids)
        for row, prob, reason in zip(rows, found.sum(1).tolist(), said, strict=True):
            value[row], reasons[row] = prob, reason
        return make_scores(value, reasons, self.unit)


class SoftTifa(_Asked):
    """Mean over a record's questions of the probability that the right answer is the next word.

    The questions are the record's "vqa_list", [[question, answer], ...], as GenEval 2 gives them. An answer
    counts in its usual spellings that are one token, a number also as a digit, each token once. `text` names
    the question whose answer is least probable.
    """

    name = "soft_tifa"

    def __init__(
        self,
        model: Any,
        *,
        mean: Literal["geometric", "arithmetic"] = "geometric",
        spellings: Literal["tokens", "published"] = "tokens",
        template: Template | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        **loading: Any,
    ) -> None:
        """Load the model.

        Args:
            model: as for `VqaScore`, with the other options.
            mean: "geometric" (Soft-TIFA GM) or "arithmetic" (AM).
            spellings: "tokens" (see the class), or "published" for those of GenEval 2's code: first tokens
                with repeats, and Yes as the answer of all that does not begin with "How many".
            template: instead of the folder's "soft_tifa", or ours; has {question}.
            device: where the model runs.
            precision: of its weights.
            **loading: of `engine_of`.
        """
        _choice(self.name, "mean", mean, ("geometric", "arithmetic"))
        _choice(self.name, "spellings", spellings, ("tokens", "published"))
        super().__init__(model, ONE_WORD, device=device, precision=precision, loading=loading)
        self.template = template or self.template
        if "question" not in self.template.fields:
            raise RewardError(
                f"The template {self.template.name!r} has no {{question}}; write it into its text."
            )
        self.mean, self.spellings = mean, spellings
        self.identity = self._identified(mean=mean, spellings=spellings)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score per image and its record; the prompt is not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        queries, of_row, words = [], [], []
        for row, image in request.images.readable():
            try:
                asked = _questions(request.metadata[row])
                ids = [self._spellings(question, answer) for question, answer in asked]
            except ValueError as error:
                reasons[row] = str(error)
                continue
            for (wording, _), own in zip(asked, ids, strict=True):
                queries.append(Query(images=[image], prompt=wording, fields={"question": wording}))
                of_row.append(row)
                words.append(own)
        union = sorted({token for own in words for token in own})
        value, text = torch.full((len(request),), torch.nan), [""] * len(request)
        told: dict[int, list[tuple[float, str]]] = {}
        if queries:
            found, said = self._probabilities(queries, union)
            for place, row in enumerate(of_row):
                columns = [union.index(token) for token in words[place]]
                reasons[row] = reasons[row] or said[place]
                told.setdefault(row, []).append((float(found[place, columns].sum()), queries[place].prompt))
        for row, answers in told.items():
            probs = torch.tensor([prob for prob, _ in answers], dtype=torch.float64).clamp(max=1.0)
            # (Π p)^(1/n), or Σ p / n
            value[row] = probs.log().mean().exp() if self.mean == "geometric" else probs.mean()
            text[row] = f"least probable: {min(answers)[1]} ({min(answers)[0]:.3g})"
        return make_scores(value, reasons, self.unit, text=text)

    def _spellings(self, question: str, answer: str) -> list[int]:
        """Tokens that give an answer."""
        plain = answer.strip()
        if self.spellings == "published":
            if not question.startswith("How many"):
                return self._first_tokens(AFFIRMED)
            digit = str(_NUMBERS.index(answer)) if answer in _NUMBERS[1:] else "other"
            one_by_one = (answer, answer.capitalize(), f" {answer}", f" {answer.capitalize()}")
            return self._first_tokens((*one_by_one, digit, f" {digit}"))
        forms = [plain, plain.lower(), plain.capitalize()]
        if plain.lower() in _NUMBERS:
            forms.append(str(_NUMBERS.index(plain.lower())))
        spelled = list(dict.fromkeys(form for one in forms for form in (one, f" {one}")))
        try:
            return list(dict.fromkeys(self.engine.token_ids(spelled, skip_missing=True)))
        except RewardError as error:
            raise ValueError(f"the answer {plain!r} is no single token of this model") from error


def _questions(record: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The questions and answers of a record."""
    given = (record or {}).get("vqa_list")
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ValueError('its record has no "vqa_list", a list of [question, answer]')
    for pair in given:
        if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(p, str) and p.strip() for p in pair):
            raise ValueError(f'its "vqa_list" holds {pair!r:.60}, which is no [question, answer]')
    return [(question, answer) for question, answer in given]
