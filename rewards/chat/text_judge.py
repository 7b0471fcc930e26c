# SPDX-License-Identifier: Apache-2.0
r"""Language model that judges completions: each alone, in pairs, or n in one prompt.

Sources: LLM-as-a-judge, Zheng et al., arXiv 2306.05685, for pairs in both orders; DeepSeek-GRM, Liu et al., arXiv
2504.02495, for principles, critique and whole scores of 1 to 10 of all n responses in one \boxed{...}, K votes that
are added, and a meta judge that chooses those that count. The questions are in our words and suit any model.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from visalign.core import win_rates
from visalign.interfaces import Metadata, Preferences, Prompt, RewardCapabilities, Scores
from visalign.rewards.base.contract import GROUP_KEY, check_choices, check_rules, make_scores
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import boxed_scores
from visalign.rewards.reading.verdicts import verdict
from visalign.rewards.text.contract import TextRequest, read_text_request
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import escape, question
from visalign.rewards.vlm.yes_no import MIN_MASS
from visalign.text.messages import prompt_text

from .deepseek_grm import ask_meta, best_votes, check_k_meta, connect_meta
from .judge import ChatJudge, failure_reason
from .language import load_language_model
from .messages import Reply
from .unified_reward_pairs import combine_orders
from .yes_no import check_reading

Form = Literal["point", "pair", "list"]
Groups = Sequence[Sequence[list[int]]]
"""For each group the rows of each distinct completion."""
Vote = tuple[tuple[float, ...], str]
"""Scores of the completions of one question, and the judge's text."""
OPTIONS = ("Response 1 is better", "Response 2 is better")
PRINCIPLES = (
    "First write the principles by which such a response should be judged, with a weight in percent for each. "
)
SCORES = question(
    "text_judge",
    "Judge the {count} below to this request:\n{prompt}\n\n{responses}\n\n{principles}Write a critique of each "
    "response. At the end give each a whole score from 1 to 10, higher for better, in the order shown and all in one "
    r"box: \boxed{{scores}}",
    images=(),
)
PAIR = question(
    "text_judge_pair",
    "Compare the {count} below to this request:\n{prompt}\n\n{responses}\n\n{principles}Write a critique of each "
    f"response. End with your decision: <answer>{OPTIONS[0]}</answer>, <answer>{OPTIONS[1]}</answer> or "
    "<answer>a tie</answer>.",
    images=(),
)
META = question(
    "text_judge_meta",
    "To this request:\n{prompt}\n\nthere are these {count}:\n{responses}\n\nA judge wrote of them:\n{critique}\n\nAre "
    "the judge's principles fitting, its statements true, and its scores just? Answer with one word, yes or no.",
    images=(),
    words={"yes": ("yes",), "no": ("no",)},
)
_REFUSAL = re.compile(
    r"\W*(?:i['’]?m\s+sorry|i\s+am\s+sorry|sorry,|as\s+an\s+ai\b|i\s+(?:must|have\s+to)\s+decline|i\s+(?:can(?:no|['’])t"
    r"|am\s+(?:unable|not\s+able)\s+to|won['’]t|refuse\s+to)\s*(?:judge|rate|score|evaluate|compare|assess|assist|help"
    r"|answer|comply|provide|do\s+(?:this|that))\b)",
    re.IGNORECASE,
)
"""Beginning of an answer that refuses; "I cannot fault it" does not."""


class TextJudge(ChatJudge):
    """Score or preference of a language model that reads the request and the completions.

    "point" asks about each completion alone, "list" about up to `size` completions of a group in one prompt; both
    give each a score from 1 to 10, and the value is the sum of the K scores. "pair" asks which of two is better; the
    value is the win rate in the group. A group is the completions of one `metadata["group_id"]`, else of one prompt.
    Pairs and lists are asked in both orders. An answer that is unreadable, refuses, or is written in another script
    than the question counts as failed. The parts hold "readable", the share of readable answers, and with a meta
    judge "meta"; `std` is the standard error over K answers, `text` the first of them.

    Args:
        form: see above.
        size: most completions in one prompt, with "list".
        both_orders: ask pairs and lists in the reverse order, too; one order is half the calls and keeps the
            position bias.
        principles: have the judge write principles first, as DeepSeek-GRM.
        answers: K to each question, by temperature 1 unless it is set; two at least must be readable.
        k_meta: votes that the meta judge keeps, not with "pair"; None asks no meta judge.
        meta: folder of a meta judge; the judge itself when None.
        min_mass: smallest probability of yes and no together that counts as the meta judge's answer.
        **options: of `ChatJudge`, as is the address; a model in this process is a causal language model. A template
            has {prompt} and {responses}, and may have {count} and {principles}.
    """

    name = "text_judge"
    higher_is_better = True
    required_fields = ("prompt", "responses")
    default_max_new_tokens = 2048
    load_local = staticmethod(load_language_model)

    def __init__(
        self,
        *address: str,
        form: Form = "point",
        size: int = 4,
        both_orders: bool = True,
        principles: bool = True,
        answers: int = 1,
        k_meta: int | None = None,
        meta: str | Path | None = None,
        min_mass: float = MIN_MASS,
        temperature: float | None = None,
        device: Any = "cpu",
        **options: Any,
    ) -> None:
        check_choices(self.name, form=(form, get_args(Form)))
        check_k_meta(self.name, k_meta, answers)
        rules = {
            f"size is {size}; a list has at least 2 completions": form != "list" or size >= 2,
            f"k_meta is {k_meta}, and with form 'pair' there are no scores to add; leave it out": form != "pair"
            or k_meta is None,
        }
        check_rules(self.name, rules)
        check_reading(self.name, top_logprobs=2, min_mass=min_mass)
        self.default_template = PAIR if form == "pair" else SCORES
        self.default_temperature = 1.0 if answers > 1 else 0.0
        super().__init__(*address, answers=answers, temperature=temperature, device=device, **options)
        self.form, self.size, self.k_meta, self.min_mass = form, size if form == "list" else 1, k_meta, min_mass
        self.both_orders = both_orders and form != "point"
        self.principles = PRINCIPLES if principles else ""
        self.meta_server, self.meta_template = connect_meta(self, meta, k_meta, META, device)
        self.votes = k_meta or answers
        self.capabilities = RewardCapabilities(needs_group=form != "point", both_orders=both_orders)
        scale = "score from 1 to 10" if self.votes == 1 else f"sum of {self.votes} scores from 1 to 10"
        self.unit = "win rate" if form == "pair" else scale
        self.range = (0.0, 1.0) if form == "pair" else (1.0 * self.votes, 10.0 * self.votes)
        fields: dict[str, Any] = {"form": form, "size": size, "both_orders": both_orders, "k_meta": k_meta}
        if k_meta is not None:
            fields |= {"meta": self.meta_server.identity_fields(self.meta_template), "min_mass": min_mass}
        self.identity = self.make_identity(**self.sampling, principles=principles, **fields)

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Score B completions; equal ones of a group are asked about once. Of the metadata only group_id is read."""
        request = read_text_request(self.name, completions, prompts, metadata)
        reasons = [image_problem(prompt) for prompt in request.prompts]
        groups: dict[Hashable, dict[str, list[int]]] = {}
        for row, text in enumerate(request.completions):
            if reasons[row] is None:
                group = (request.metadata[row] or {}).get(GROUP_KEY, 0), repr(request.prompts[row])
                groups.setdefault(group, {}).setdefault(text, []).append(row)
        rows = [list(texts.values()) for texts in groups.values()]
        return (self._win_rates if self.form == "pair" else self._sums)(request, reasons, rows)

    def compare(
        self, left: Sequence[str], right: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare B pairs of completions; with "point" and "list" by their scores in one answer."""
        first = read_text_request(self.name, left, prompts, metadata)
        second = read_text_request(self.name, right, prompts, metadata)
        return self._compare(list(zip(first.prompts, first.completions, second.completions, strict=True)))

    def _compare(self, pairs: Sequence[tuple[Prompt, str, str]]) -> Preferences:
        reasons = [image_problem(prompt) for prompt, *_ in pairs]
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        both_orders = self.capabilities.both_orders
        _, votes = self._votes([(pairs[row][0], pairs[row][1:]) for row in rows], both_orders=both_orders)

        def first_better(vote: Vote | AnswerError, is_swapped: bool) -> Any:
            """P(first shown is better) and the text."""
            if isinstance(vote, AnswerError):
                return vote
            first, second = vote[0][::-1] if is_swapped else vote[0]
            return {"prob": (1 + (first > second) - (first < second)) / 2}, vote[1]

        answers = [[first_better(vote, n >= len(rows)) for vote in row] for n, row in enumerate(votes)]
        options: dict[str, Any] = {"both_orders": both_orders, "min_readable": self.min_readable}
        return combine_orders(rows, reasons, answers, noun="response", **options)

    def _win_rates(self, request: TextRequest, reasons: list[str | None], groups: Groups) -> Scores:
        """Score by the win rate in the group; equal completions tie."""
        pairs = [pair for texts in groups for pair in combinations(texts, 2)]
        texts = request.completions
        answer = self._compare([(request.prompts[a[0]], texts[a[0]], texts[b[0]]) for a, b in pairs])
        index = [pair for rows in groups for copies in rows for pair in combinations(copies, 2)]
        prob = [0.5] * len(index)
        failures: dict[int, str | None] = {}
        for (a, b), p, reason in zip(pairs, answer.prob.tolist(), answer.reason or [], strict=True):
            index += product(a, b)
            prob += [p] * (len(a) * len(b))
            failures |= {row: failures.get(row) or reason for row in (*a, *b)}
        pair_index = torch.tensor(index, dtype=torch.int64).reshape(-1, 2)
        rates = win_rates(pair_index, torch.tensor(prob, dtype=torch.float64), len(request)).float()
        for row in (row for rows in groups for copies in rows for row in copies if rates[row].isnan()):
            reasons[row] = failures.get(row) or "its group has no other completion to compare it with"
        return make_scores(rates, reasons, self.unit)

    def _sums(self, request: TextRequest, reasons: list[str | None], groups: Groups) -> Scores:
        """Score by the sum of K scores, of each completion alone or of lists."""
        lists: list[Sequence[list[int]]] = []
        for texts in groups:
            parts = math.ceil(len(texts) / self.size)  # even parts: 5 completions are 3 and 2, not 4 and 1
            cuts = [round(part * len(texts) / parts) for part in range(parts + 1)]
            lists += [texts[start:end] for start, end in pairwise(cuts)]
        asked = [(request.prompts[rows[0][0]], [request.completions[copies[0]] for copies in rows]) for rows in lists]
        queries, votes = self._votes(asked, both_orders=self.both_orders)
        readable = [[vote for vote in row if not isinstance(vote, AnswerError)] for row in votes]
        metas: list[Any] = [[] for _ in votes]
        if self.k_meta is not None:
            texts = [[text for _, text in row] for row in readable]
            metas = ask_meta(self.meta_server, self.meta_template, queries, texts, self.min_mass)
        columns = {name: torch.full((len(request),), torch.nan) for name in ("value", "std", "readable", "meta")}
        remarks = [""] * len(request)
        for number, rows in enumerate(lists):
            orders = range(number, len(votes), len(lists))
            failed = next((votes[i] for i in orders if len(readable[i]) < self.min_readable), None)
            reason = None if failed is None else failure_reason(failed)
            if reason is None:
                rated = None if self.k_meta is None else [meta for i in orders for meta in metas[i]]
                chosen = best_votes([vote for i in orders for vote in readable[i]], rated, self.votes)
                reason = str(chosen) if isinstance(chosen, AnswerError) else None
            for position, row in ((position, row) for position, copies in enumerate(rows) for row in copies):
                reasons[row] = reason
                if reason is None:
                    scores = torch.tensor([vote[0][position] for vote, _ in chosen], dtype=torch.float64)
                    columns["value"][row] = self.votes * scores.mean()
                    if len(scores) > 1:
                        columns["std"][row] = self.votes * scores.std() / math.sqrt(len(scores))
                    columns["readable"][row] = sum(len(readable[i]) for i in orders) / sum(
                        len(votes[i]) for i in orders
                    )
                    columns["meta"][row] = math.fsum(m.get("meta", math.nan) for _, m in chosen) / len(chosen)
                    remarks[row] = chosen[0][0][1]
        value, std, meta = (columns.pop(name) for name in ("value", "std", "meta"))
        parts = columns if self.k_meta is None else {**columns, "meta": meta}
        several = self.votes > 1 or (self.both_orders and self.k_meta is None)
        return make_scores(value, reasons, self.unit, std=std if several else None, parts=parts, text=remarks)

    def _votes(
        self, lists: Sequence[tuple[Prompt, Sequence[str]]], *, both_orders: bool
    ) -> tuple[list[Query], list[list[Vote | AnswerError]]]:
        """Ask about lists of completions in their order, then about all in reverse order.

        Returns:
            The queries and the K votes on each; scores are in the order of the list.
        """
        orders = (1, -1) if both_orders else (1,)
        queries = [self._query(prompt, texts[::order]) for order in orders for prompt, texts in lists]
        votes: list[list[Vote | AnswerError]] = [[] for _ in queries]
        sizes = [len(texts) for _, texts in lists] * len(orders)
        for size in sorted({*sizes}):

            def read(reply: Reply, size: int = size) -> Vote:
                if self.form == "pair":
                    side = verdict(reply.text, options=OPTIONS)
                    return (float(side != 2), float(side != 1)), reply.text
                return tuple(boxed_scores(reply.text, count=size)), reply.text

            rows = [row for row, count in enumerate(sizes) if count == size]
            answers = self.server.ask(self.template, [queries[row] for row in rows], read=read, **self.sampling)
            for row, answer in zip(rows, answers, strict=True):
                votes[row] = [self._refuse(vote, queries[row]) for vote in answer]
        for row in range(len(lists), len(queries)):
            votes[row] = [v if isinstance(v, AnswerError) else (v[0][::-1], v[1]) for v in votes[row]]
        return queries, votes

    def _query(self, prompt: Prompt, texts: Sequence[str]) -> Query:
        """Fill the question about completions of a prompt."""
        box = ", ".join(["score"] if len(texts) == 1 else [f"score {number}" for number in range(1, len(texts) + 1)])
        count = "response" if len(texts) == 1 else f"{len(texts)} responses"
        fields = {"responses": numbered(texts), "count": count, "principles": self.principles, "scores": box}
        return Query(images=[], prompt=transcript(prompt), fields=fields)

    def _refuse(self, vote: Vote | AnswerError, query: Query) -> Vote | AnswerError:
        """Turn a vote whose text refuses, or is in another script than the question, into a failure."""
        if isinstance(vote, AnswerError):
            return vote
        failure = None
        if _REFUSAL.match(vote[1]):
            failure = AnswerError(f"the judge refused: {vote[1].strip()[:120]}")
        else:
            asked = scripts(" ".join((self.template.text, query.prompt, *query.fields.values())))
            answered = scripts(vote[1])
            other = {script: count for script, count in answered.items() if script not in asked}
            if 2 * sum(other.values()) > answered.total():
                script = max(other, key=lambda script: other[script])
                failure = AnswerError(f"the judge answered in {script} script, in which nothing was asked")
        if failure is not None:
            self.server.alarm.note(str(failure))
        return vote if failure is None else failure


def numbered(texts: Sequence[str]) -> str:
    """Write completions one below the other between marks that none of them can spell."""
    safe = [escape(text, ("[Response", "[End of response")) for text in texts]
    return "\n\n".join(
        f"[Response {number}]\n{text}\n[End of response {number}]" for number, text in enumerate(safe, 1)
    )


def transcript(prompt: Prompt) -> str:
    """Write a prompt as one text; a conversation of several turns with its roles."""
    if isinstance(prompt, str) or len(prompt) == 1:
        return prompt_text(prompt)
    return "\n".join(f"{str(message['role']).capitalize()}: {prompt_text([message])}" for message in prompt)


def image_problem(prompt: Prompt) -> str | None:
    """Return why a prompt cannot be judged as a text; None if it can."""
    shows_images = prompt_text(prompt) != prompt_text(prompt, images=False)
    return "its prompt shows images, which a judge of texts does not see" if shows_images else None


def scripts(text: str) -> Counter[str]:
    """Count letters by script, the first word of their Unicode names."""
    letters = Counter(filter(str.isalpha, text))
    counts: Counter[str] = Counter()
    for letter, count in letters.items():
        counts[unicodedata.name(letter, "UNKNOWN").split()[0]] += count
    return counts
