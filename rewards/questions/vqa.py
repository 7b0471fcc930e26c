# SPDX-License-Identifier: Apache-2.0
"""VQAScore's one question about the prompt, and questions about its parts: GenEval 2's (Soft-TIFA), DPG-Bench's graph.

Sources: VQAScore, Lin et al., arXiv 2404.01291: P("Yes" | image, question) over the whole vocabulary. GenEval 2,
Kamath et al., arXiv 2512.16853: Soft-TIFA, the geometric (the benchmark's) or arithmetic mean over the questions of a
prompt of the probability of the right answer. github.com/facebookresearch/GenEval2, evaluation.py: its own question
for VQAScore, and the spellings, of which it adds the first tokens, repeats included: of a tokenizer that splits " 4"
it counts the space, and of "seventy" the word "other". The graph of questions: Davidsonian Scene Graph, Cho et al.,
arXiv 2310.18235, as DPG-Bench, Hu et al., arXiv 2403.05135, uses it (github.com/TencentQQGYLab/ELLA,
dpg_bench/compute_dpg_bench.py, which drops the first row of its table).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, check_choices, check_rules, make_scores, read_request
from visalign.rewards.vlm.engine import EngineJudge
from visalign.rewards.vlm.requests import Query, requests
from visalign.rewards.vlm.template import Template, question

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

DENIED = ("No", "no", " no", " No")
AFFIRMED = ("Yes", "yes", " yes", " Yes")  # Spellings of yes in GenEval 2's code
SHOWS = question("vqa_score", 'Does this figure show "{prompt}"? Please answer Yes or No.')
GENEVAL2 = question("vqa_score", 'Does this image show "{prompt}"? Answer the question with Yes or No.')
ONE_WORD = question("soft_tifa", "{question} Answer in one word.")
YES_OR_NO = question("question_graph", "{question} Please answer Yes or No.")


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
        """Score B images for their prompts; metadata is ignored."""
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
        mean: "geometric" (Soft-TIFA GM) or "arithmetic" (AM).
        spellings: "tokens" (see above), or "published" for those of GenEval 2's code: first tokens with repeats, and
            Yes as the answer of all that does not begin with "How many".
        template: replaces the folder's "soft_tifa", or ours; has {question}.
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
        **loading: Any,
    ) -> None:
        check_choices(self.name, mean=(mean, ("geometric", "arithmetic")))
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
        for row, image in request.images.readable():
            try:
                questions = _read_questions(request.metadata[row])
                ids = [self._spellings(wording, answer) for wording, answer in questions]
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
            # (Π p)^(1/n), or Σ p / n
            value[row] = probs.log().mean().exp() if self.mean == "geometric" else probs.mean()
            text[row] = f"least probable: {min(row_answers)[1]} ({min(row_answers)[0]:.3g})"
        return make_scores(value, reasons, self.unit, text=text)

    def _spellings(self, wording: str, answer: str) -> list[int]:
        """Return the tokens that give an answer."""
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
    if not isinstance(pairs, Sequence) or isinstance(pairs, str) or not pairs:
        raise ValueError('its record has no "vqa_list", a list of [question, answer]')
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(p, str) and p.strip() for p in pair):
            raise ValueError(f'its "vqa_list" holds {pair!r:.60}, which is no [question, answer]')
    return [(wording, answer) for wording, answer in pairs]


class QuestionGraph(_NextWordJudge):
    """Share of a record's questions that are answered yes; one below a question that is answered no counts as no.

    The questions are the record's "question_graph", [{"id", "question", "parents": [ids]}, ...], as `visalign bench`
    reads them from DPG-Bench's table. A question is answered yes where Yes is likelier than No. `text` names the first
    that counts as no.

    Args:
        template: replaces the folder's "question_graph", or ours; has {question}.
    """

    name = "question_graph"

    def __init__(
        self, model: Any, *, template: Template | None = None, device: str | torch.device = "cpu", **loading: Any
    ) -> None:
        super().__init__(model, YES_OR_NO, template, device=device, **loading)
        self._yes, self._no = (self.engine.token_ids(words, skip_missing=True) for words in (AFFIRMED, DENIED))
        self.options = {}

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images by their records; the prompt is ignored."""
        request = read_request(self.name, images, prompts, metadata)
        reasons, queries = list(request.images.reasons), list[Query]()
        graphs: dict[int, dict[int, tuple[str, list[int]]]] = {}
        for row, image in request.images.readable():
            try:
                graphs[row] = _read_graph(request.metadata[row])
            except ValueError as error:
                reasons[row] = str(error)
                continue
            queries += [
                Query(images=[image], prompt=text, fields={"question": text}) for text, _ in graphs[row].values()
            ]
        prob, answer_reasons = self._probabilities(queries, [*self._yes, *self._no])
        yes, no = (part.sum(1) for part in prob.split((len(self._yes), len(self._no)), 1))
        answers = zip((yes > no).tolist(), answer_reasons, strict=True)
        value, texts = torch.full((len(request),), torch.nan), [""] * len(request)
        for row, graph in graphs.items():
            is_yes, graph_reasons = zip(*(next(answers) for _ in graph), strict=True)
            counts = dict(zip(graph, is_yes, strict=True))
            for _ in graph:  # a no reaches the last of a chain of parents after as many rounds as it is long
                counts = {key: counts[key] and all(counts[parent] for parent in graph[key][1]) for key in graph}
            reasons[row] = next(filter(None, graph_reasons), None)
            value[row] = sum(counts.values()) / len(counts)
            texts[row] = next((f"no: {graph[key][0]}" for key in graph if not counts[key]), "")
        return make_scores(value, reasons, self.unit, text=texts)


def _read_graph(record: Mapping[str, Any] | None) -> dict[int, tuple[str, list[int]]]:
    """Return id -> (question, parents) of a record; ValueError with the reason if it has none."""
    try:
        graph = {e["id"]: (str(e["question"]), list(e.get("parents") or ())) for e in (record or {})["question_graph"]}
    except (KeyError, TypeError, AttributeError, ValueError):
        graph = {}
    if not graph:
        raise ValueError('its record has no "question_graph", a list of {"id", "question", "parents"}')
    if missing := {parent for _, parents in graph.values() for parent in parents} - graph.keys():
        raise ValueError(f'its "question_graph" lacks the parents {sorted(map(str, missing))}')
    return graph
