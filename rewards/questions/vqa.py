# SPDX-License-Identifier: Apache-2.0
"""VQAScore's one question about the prompt, and GenEval 2's questions about its parts (Soft-TIFA).

Sources: VQAScore, Lin et al., arXiv 2404.01291: P("Yes" | image, question) over the whole vocabulary. GenEval 2,
Kamath et al., arXiv 2512.16853: Soft-TIFA, the geometric (the benchmark's) or arithmetic mean over the questions of a
prompt of the probability of the right answer. github.com/facebookresearch/GenEval2, evaluation.py: its own question
for VQAScore, and the spellings, of which it adds the first tokens, repeats included: of a tokenizer that splits " 4"
it counts the space, and of "seventy" the word "other". Questions that depend on others: Davidsonian Scene Graph, Cho
et al., arXiv 2310.18235, by whose rule DPG-Bench, Hu et al., arXiv 2403.05135, scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.rewards.base.contract import RewardError, check_choices, check_rules, make_scores, read_request
from visalign.rewards.vlm.engine import EngineJudge
from visalign.rewards.vlm.requests import Query, requests
from visalign.rewards.vlm.template import Template, question

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

AFFIRMED = ("Yes", "yes", " yes", " Yes")  # Spellings of yes in GenEval 2's code
SHOWS = question("vqa_score", 'Does this figure show "{prompt}"? Please answer Yes or No.')
GENEVAL2 = question("vqa_score", 'Does this image show "{prompt}"? Answer the question with Yes or No.')
ONE_WORD = question("soft_tifa", "{question} Answer in one word.")


class _NextWordJudge(EngineJudge):
    """Model, question, and the probability of words as the next one."""

    unit = "probability"
    range = (0.0, 1.0)
    higher_is_better = True

    def _first_tokens(self, words: Sequence[str]) -> list[int]:
        """Return the first token of each word, as GenEval 2's code."""
        tokenizer = self.engine.processor.tokenizer
        return [tokenizer.encode(word, add_special_tokens=False)[0] for word in words]

    def _probabilities(self, queries: Sequence[Query], ids: Sequence[int]) -> tuple[Tensor, list[str | None]]:
        """([N, K] float64 probabilities of tokens as the next one, over the whole vocabulary; reasons)."""
        answer = self.engine.answer_logits(self.template, queries, ids, left_over=True)
        return (answer.logits.double() - answer.log_total.double()[:, None]).exp(), list(answer.reasons)


class VqaScore(_NextWordJudge):
    """P("Yes") over the whole vocabulary when asked if the image shows the prompt.

    Args:
        answer: the word whose probability is the score, one token of the model; "Yes", or the template's words for it,
            when None.
        rule: "vqascore", or "geneval2" for the question and the spellings of Yes of that benchmark's code, whatever
            the folder says.
        template: replaces the folder's "vqa_score" or "yes_no", or the published question.
    """

    name = "vqa_score"

    def __init__(
        self,
        model: Any = "shapes-vlm",
        *,
        answer: str | None = None,
        rule: Literal["vqascore", "geneval2"] = "vqascore",
        template: Template | None = None,
        device: str | torch.device = "cpu",
        **loading: Any,
    ) -> None:
        check_choices(self.name, rule=(rule, ("vqascore", "geneval2")))
        if rule == "geneval2":
            template = template or GENEVAL2
        super().__init__(model, SHOWS, template, device=device, **loading)
        if self.template is SHOWS:
            self.template = self.engine.template("yes_no", SHOWS)
        words = self.template.words.get("yes", ("Yes",)) if answer is None else (answer,)
        if rule == "geneval2" and answer is None:
            words, self._ids = AFFIRMED, self._first_tokens(AFFIRMED)
        else:
            self._ids = self.engine.token_ids(list(words))
        self.options = {"answer": list(words)}

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.template, reasons)
        value = torch.full((len(request),), torch.nan)
        prob, answer_reasons = self._probabilities(queries, self._ids)
        for row, row_prob, reason in zip(rows, prob.sum(1).tolist(), answer_reasons, strict=True):
            value[row], reasons[row] = row_prob, reason
        return make_scores(value, reasons, self.unit)


class SoftTifa(_NextWordJudge):
    """Mean over a record's questions of the probability that the right answer is the next word.

    The questions are the record's "vqa_list", [[question, answer], ...], as GenEval 2 gives them. An answer counts in
    its usual spellings that are one token, a number also as a digit, each token once. `text` names the question whose
    answer is least probable.

    Args:
        mean: "geometric" (Soft-TIFA GM), "arithmetic" (AM), or "graph": the share of questions whose right answer has
            probability ½ or more, as have those of all parents, lists of indices in the record's "vqa_parents".
        spellings: "tokens" (see above), or "published" for those of GenEval 2's code: first tokens with repeats, and
            Yes as the answer of all that does not begin with "How many".
        template: replaces the folder's "soft_tifa", or ours; has {question}.
    """

    name = "soft_tifa"
    capabilities = RewardCapabilities(needs_prompt=False, takes_gpu_images=True)

    def __init__(
        self,
        model: Any,
        *,
        mean: Literal["geometric", "arithmetic", "graph"] = "geometric",
        spellings: Literal["tokens", "published"] = "tokens",
        template: Template | None = None,
        device: str | torch.device = "cpu",
        **loading: Any,
    ) -> None:
        check_choices(self.name, mean=(mean, ("geometric", "arithmetic", "graph")))
        check_choices(self.name, spellings=(spellings, ("tokens", "published")))
        super().__init__(model, ONE_WORD, template, device=device, **loading)
        message = f"the template {self.template.name!r} has no {{question}}; write it into its text"
        check_rules(self.name, {message: "question" in self.template.fields})
        self.mean, self.spellings = mean, spellings
        self.options = {"mean": mean, "spellings": spellings}

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images by their records; the prompt is ignored."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        queries: list[Query] = []
        query_rows: list[int] = []
        answer_ids: list[list[int]] = []
        parents: dict[int, list[list[int]]] = {}
        for row, image in request.images.readable():
            try:
                questions = _read_questions(request.metadata[row])
                ids = [self._spellings(wording, answer) for wording, answer in questions]
                parents[row] = _read_parents(request.metadata[row], len(questions)) if self.mean == "graph" else []
            except ValueError as error:
                reasons[row] = str(error)
                continue
            queries += [Query(images=[image], prompt=w, fields={"question": w}) for w, _ in questions]
            query_rows += [row] * len(questions)
            answer_ids += ids
        all_ids = sorted({token for ids in answer_ids for token in ids})
        value, text = torch.full((len(request),), torch.nan), [""] * len(request)
        answers: dict[int, list[tuple[float, str]]] = {}
        prob, answer_reasons = self._probabilities(queries, all_ids)
        for index, row in enumerate(query_rows):
            columns = [all_ids.index(token) for token in answer_ids[index]]
            reasons[row] = reasons[row] or answer_reasons[index]
            answers.setdefault(row, []).append((float(prob[index, columns].sum()), queries[index].prompt))
        for row, row_answers in answers.items():
            probs = torch.tensor([prob for prob, _ in row_answers], dtype=torch.float64).clamp(max=1.0)
            if self.mean == "graph":
                probs = _after_parents(probs >= 0.5, parents[row]).double()
            # (Π p)^(1/n), or Σ p / n
            value[row] = probs.log().mean().exp() if self.mean == "geometric" else probs.mean()
            text[row] = f"least probable: {min(row_answers)[1]} ({min(row_answers)[0]:.3g})"
        return make_scores(value, reasons, self.unit, text=text)

    def _spellings(self, wording: str, answer: str) -> list[int]:
        if self.spellings == "published":
            if not wording.startswith("How many"):
                return self._first_tokens(AFFIRMED)
            digit = str(_NUMBERS.index(answer)) if answer in _NUMBERS[1:] else "other"
            words = (answer, answer.capitalize(), f" {answer}", f" {answer.capitalize()}")
            return self._first_tokens((*words, digit, f" {digit}"))
        plain = answer.strip()
        forms = [plain, plain.lower(), plain.capitalize()]
        if plain.lower() in _NUMBERS:
            forms.append(str(_NUMBERS.index(plain.lower())))
        spellings = list(dict.fromkeys(spelling for form in forms for spelling in (form, f" {form}")))
        try:
            return list(dict.fromkeys(self.engine.token_ids(spellings, skip_missing=True)))
        except RewardError as error:
            raise ValueError(f"the answer {plain!r} is no single token of this model") from error


def _read_questions(record: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return the questions and answers of a record; ValueError with the reason if it has none."""
    pairs = (record or {}).get("vqa_list")
    if not isinstance(pairs, list | tuple) or not pairs:
        raise ValueError('its record has no "vqa_list", a list of [question, answer]')
    for pair in pairs:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not all(isinstance(p, str) and p.strip() for p in pair):
            raise ValueError(f'its "vqa_list" holds {pair!r:.60}, which is no [question, answer]')
    return [(wording, answer) for wording, answer in pairs]


def _read_parents(record: Mapping[str, Any] | None, count: int) -> list[list[int]]:
    """Return the parents of each question of a record; ValueError if they are not lists of indices, one for each."""
    parents = (record or {}).get("vqa_parents")
    if not isinstance(parents, list) or len(parents) != count or not all(isinstance(p, list) for p in parents):
        raise ValueError(f'its record has no "vqa_parents", {count} lists of indices into "vqa_list"')
    if wrong := [p for indices in parents for p in indices if type(p) is not int or p not in range(count)]:
        raise ValueError(f'its "vqa_parents" name question {wrong[0]!r}; there are {count}, from 0')
    return parents


def _after_parents(right: Tensor, parents: Sequence[Sequence[int]]) -> Tensor:
    """Count an answer [n] as wrong where that of a parent is."""
    for _ in parents:  # a wrong answer reaches the end of a chain after as many rounds as it is long
        right = torch.stack([right[[k, *indices]].all() for k, indices in enumerate(parents)])
    return right
