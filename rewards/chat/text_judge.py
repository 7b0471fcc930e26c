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
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, get_args

import torch

from visalign.interfaces import Metadata, Preferences, Prompt, RewardCapabilities, Scores
from visalign.rewards.base.contract import GROUP_KEY, check_choices, check_rules, make_scores
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import boxed_scores
from visalign.rewards.reading.verdicts import verdict
from visalign.rewards.text.contract import read_text_request
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import escape, question
from visalign.rewards.vlm.yes_no import MIN_MASS
from visalign.text.messages import prompt_text

from .deepseek_grm import MetaJudge, Vote, check_meta
from .judge import ChatJudge
from .language import load_language_model
from .messages import Reply

Form = Literal["point", "pair", "list"]
Values = tuple[float, ...]  # Scores of the completions of a question
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


REFUSAL = re.compile(
    r"\W*(?:i['’]?m\s+sorry|i\s+am\s+sorry|sorry,|i\s+(?:must|have\s+to)\s+decline|i\s+(?:can(?:no|['’])t"
    r"|am\s+(?:unable|not\s+able)\s+to|won['’]t|refuse\s+to)\s*(?:judge|rate|score|evaluate|compare|assess|assist|help"
    r"|answer|comply|provide|do\s+(?:this|that))\b(?!\s+but\b)(?![^.!?\n]*\b(?:above|below|higher|lower)\b))",
    re.IGNORECASE,
)
"""Beginning of an answer that refuses; "I cannot fault it" and "I cannot rate it above 3" do not."""


class TextJudge(ChatJudge):
    """Score or preference of a language model that reads the request and the completions.

    "point" asks about each completion alone, "list" about up to `size` completions of a group in one prompt; both
    give each a score from 1 to 10, and the value is the sum of the K scores. "pair" asks which of two is better; the
    value is the win rate against the group's other distinct completions. A group is the completions of one
    `metadata["group_id"]`, else of one prompt. An answer that is unreadable, refuses, or is written in another script
    than the question counts as failed. `std` is the standard error over K answers, `text` the first of them.

    Args:
        form: "point", "pair" or "list".
        size: most completions in one prompt, with "list".
        both_orders: ask pairs and lists in the reverse order, too.
        principles: have the judge write principles first, as DeepSeek-GRM.
        answers: K to each question, at temperature 1 unless it is set; two at least must be readable.
        k_meta: votes that the meta judge keeps, not with "pair"; None asks no meta judge.
        meta: folder of a meta judge; the judge itself when None.
        min_mass: smallest probability of yes and no together that counts as the meta judge's answer.
        **options: of `ChatJudge`, as is the address; a model in this process is a causal language model. A template
            has {prompt} and {responses}, and may have {count}, {principles} and {scores}.
    """

    name = "text_judge"
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
        device: Any = "cpu",
        **options: Any,
    ) -> None:
        check_choices(self.name, form=(form, get_args(Form)))
        check_meta(self.name, answers, k_meta, meta, min_mass)
        needless = f"k_meta is {k_meta}, and with form 'pair' there are no scores to add; leave it out"
        few = f"size is {size}; a list has at least 2 completions"
        check_rules(self.name, {few: form != "list" or size >= 2, needless: form != "pair" or k_meta is None})
        self.default_template = PAIR if form == "pair" else SCORES
        self.default_temperature = 1.0 if answers > 1 else 0.0
        super().__init__(*address, answers=answers, device=device, **options)
        self.form, self.size = form, size if form == "list" else 1
        self.both_orders, self.principles = both_orders, PRINCIPLES if principles else ""
        self.meta_judge = MetaJudge(self, k_meta, meta, META, min_mass, device)
        self.votes = 1 if form == "pair" else k_meta or answers
        self.capabilities = RewardCapabilities(needs_group=form != "point", both_orders=both_orders)
        scale = "score from 1 to 10" if self.votes == 1 else f"sum of {self.votes} scores from 1 to 10"
        self.unit = "win rate" if form == "pair" else scale
        self.range = (0.0, 1.0) if form == "pair" else (1.0 * self.votes, 10.0 * self.votes)
        fields: dict[str, Any] = {"form": form, "size": size, "both_orders": both_orders, "k_meta": k_meta}
        if k_meta is not None:
            server, template = self.meta_judge.server, self.meta_judge.template
            fields |= {"meta": server.identity_fields(template), "min_mass": min_mass}
        self.identity = self.make_identity(**self.sampling, principles=principles, **fields)

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Score B completions; equal ones of a group are asked about once. Of the metadata only group_id is read."""
        request = read_text_request(self.name, completions, prompts, metadata)
        groups: dict[Hashable, dict[str, list[int]]] = {}
        for row, text in enumerate(request.completions):
            group = repr((request.metadata[row] or {}).get(GROUP_KEY, 0)), repr(request.prompts[row])
            groups.setdefault(group, {}).setdefault(text, []).append(row)
        lists = [rows for distinct in groups.values() for rows in self._split([*distinct.values()])]
        texts = [(request.prompts[rows[0][0]], [request.completions[same[0]] for same in rows]) for rows in lists]
        results: list[list[tuple[float, float, float]]] = [[] for _ in request.completions]  # value, std, meta
        reasons: list[str | None] = ["its group has no other completion to compare it with"] * len(request)
        remarks = [""] * len(request)
        both_orders = self.both_orders and self.form != "point"
        for rows, orders in zip(lists, self._ask(texts, both_orders=both_orders), strict=True):
            for position, row in ((position, row) for position, same in enumerate(rows) for row in same):
                if isinstance(orders, AnswerError):
                    reasons[row] = str(orders)
                    continue
                # each order counts alike, or the one with more readable votes would leave its bias of position
                scores = [[values[position] for values, _, _ in votes] for votes in orders]
                meta = fmean(part.get("meta", math.nan) for votes in orders for _, _, part in votes)
                results[row].append((fmean(map(fmean, scores)), _error(scores), meta))
                remarks[row] = remarks[row] or orders[0][0][1]
        for (copies,) in [[*distinct.values()] for distinct in groups.values() if len(distinct) == 1]:
            if self.form == "pair" and len(copies) > 1:  # copies of one text tie
                for row in copies:
                    results[row].append((0.5, math.nan, math.nan))
        reasons = [None if result else reason for result, reason in zip(results, reasons, strict=True)]
        means = [[fmean(column) for column in zip(*row, strict=True)] or [math.nan] * 3 for row in results]
        value, std, meta = torch.tensor(means).reshape(-1, 3).unbind(1)
        parts = {} if self.meta_judge.k_meta is None else {"meta": meta}
        std = None if self.form == "pair" or std.isnan().all() else self.votes * std
        return make_scores(self.votes * value, reasons, self.unit, std=std, parts=parts, text=remarks)

    def compare(
        self, left: Sequence[str], right: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare B pairs of completions; with "point" and "list" by their scores in one answer."""
        first = read_text_request(self.name, left, prompts, metadata)
        second = read_text_request(self.name, right, prompts, metadata)
        pairs = list(zip(first.completions, second.completions, strict=True))
        table = torch.full((len(first), 2), torch.nan, dtype=torch.float64)  # P(left better) in each order
        reasons: list[str | None] = [None] * len(first)
        answers = self._ask(list(zip(first.prompts, pairs, strict=True)), both_orders=self.both_orders, rated=False)
        for row, orders in enumerate(answers):
            if isinstance(orders, AnswerError):
                reasons[row] = str(orders)
                continue
            for number, votes in enumerate(orders):
                table[row, number] = fmean((1 + (a > b) - (a < b)) / 2 for (a, b), _, _ in votes)
        bias = {"position_bias": ((table[:, 0] - table[:, 1]) / 2).float()} if self.both_orders else {}
        valid = torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
        return Preferences(prob=table.nanmean(1).float(), valid=valid, parts=bias, reason=reasons)

    def _split(self, texts: list[list[int]]) -> list[Sequence[list[int]]]:
        """Split the distinct completions of a group into the lists that are answers about."""
        if self.form == "pair":
            return list(combinations(texts, 2))
        parts = math.ceil(len(texts) / self.size)  # even parts: 5 completions are 3 and 2, not 4 and 1
        return [texts[a:b] for a, b in pairwise(round(part * len(texts) / parts) for part in range(parts + 1))]

    def _ask(
        self, lists: Sequence[tuple[Prompt, Sequence[str]]], *, both_orders: bool, rated: bool = True
    ) -> list[list[list[Vote[Values]]] | AnswerError]:
        """Return the votes on each list of completions in each order, scores in the list's order; or a failure."""
        results: list[list[Any]] = [[] for _ in lists]
        queries: dict[int, list[tuple[int, int, Query]]] = {}
        for number, (prompt, texts) in enumerate(lists):
            if prompt_text(prompt) != prompt_text(prompt, images=False):
                results[number].append(AnswerError("its prompt shows images, which a judge of texts does not see"))
                continue
            for order in (1, -1)[: min(len(texts), 1 + both_orders)]:  # a text alone has no order
                fields = question_fields(texts[::order], self.principles)
                query = Query(images=[], prompt=transcript(prompt), fields=fields)
                queries.setdefault(len(texts), []).append((number, order, query))
        for size, entries in queries.items():
            size_queries = [query for *_, query in entries]
            read = partial(self._read, size=size)
            answers = self.server.ask(self.template, size_queries, read=read, **self.sampling)
            checked = [[self._check_script(v, q) for v in row] for row, q in zip(answers, size_queries, strict=True)]
            chosen = self.meta_judge.choose(size_queries, checked, rated=rated)
            for (number, order, _), votes in zip(entries, chosen, strict=True):
                if not isinstance(votes, AnswerError):
                    votes = [(scores[::order], text, part) for scores, text, part in votes]
                results[number].append(votes)
        return [next((votes for votes in orders if isinstance(votes, AnswerError)), orders) for orders in results]

    def _read(self, reply: Reply, size: int) -> tuple[Values, str]:
        if REFUSAL.match(reply.text):
            raise AnswerError(f"the judge refused: {reply.text.strip()[:120]}")
        if self.form == "pair":
            first = {1: 1.0, 2: 0.0}.get(verdict(reply.text, options=OPTIONS), 0.5)
            return (first, 1 - first), reply.text
        return tuple(boxed_scores(reply.text, count=size)), reply.text

    def _check_script(self, vote: Any, query: Query) -> Any:
        """Turn a vote that is written in another script than its question into a failure."""
        if isinstance(vote, AnswerError):
            return vote
        alphabet = scripts(" ".join((self.template.text, query.prompt, *query.fields.values())))
        letters = scripts(vote[1])
        other = {script: count for script, count in letters.items() if script not in alphabet}
        if 2 * sum(other.values()) <= letters.total():
            return vote
        script = max(other, key=lambda script: other[script])
        error = AnswerError(f"the judge answered in {script} script, in which nothing was asked")
        self.server.alarm.note(str(error))
        return error


def _error(orders: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean of the orders' means; of one vote an order that of the orders, of one vote NaN."""
    if min(map(len, orders)) > 1:
        return math.sqrt(sum(stdev(votes) ** 2 / len(votes) for votes in orders)) / len(orders)
    votes = [vote for votes in orders for vote in votes]
    return stdev(votes) / math.sqrt(len(votes)) if len(votes) > 1 else math.nan


def question_fields(texts: Sequence[str], principles: str = PRINCIPLES) -> dict[str, str]:
    """Return what fills the question about completions, besides the prompt."""
    box = ", ".join(["score"] if len(texts) == 1 else [f"score {number}" for number in range(1, len(texts) + 1)])
    count = "response" if len(texts) == 1 else f"{len(texts)} responses"
    safe = [escape(text, ("[Response", "[End of response")) for text in texts]  # none can spell these marks
    blocks = [f"[Response {number}]\n{text}\n[End of response {number}]" for number, text in enumerate(safe, 1)]
    return {"responses": "\n\n".join(blocks), "count": count, "principles": principles, "scores": box}


def write_question(text: str | None, prompt: Prompt, texts: Sequence[str]) -> str:
    """Write the question about completions as a prompt to train a judge on; None for the judge's own text."""
    template = SCORES if text is None else question("text_judge", text, images=())
    (message,) = template.filled({"prompt": transcript(prompt), **question_fields(texts)})
    return message["content"][-1]["text"]


def transcript(prompt: Prompt) -> str:
    """Write a prompt as one text; a conversation of several turns with its roles."""
    if isinstance(prompt, str) or len(prompt) == 1:
        return prompt_text(prompt)
    return "\n".join(f"{str(message['role']).capitalize()}: {prompt_text([message])}" for message in prompt)


def scripts(text: str) -> Counter[str]:
    """Count letters by script, the first word of their Unicode names."""
    letters = Counter(filter(str.isalpha, text))
    counts: Counter[str] = Counter()
    for letter, count in letters.items():
        counts[unicodedata.name(letter, "UNKNOWN").split()[0]] += count
    return counts
