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
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, get_args

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

from .deepseek_grm import ask_meta, best_votes, check_k_meta, connect_meta
from .judge import ChatJudge, failure_reason
from .language import load_language_model
from .messages import Reply
from .yes_no import check_reading

Form = Literal["point", "pair", "list"]
RESULTS = ("value", "std", "meta")
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


class Vote(NamedTuple):
    """Readable answer of a judge."""

    scores: tuple[float, ...]
    """Of the completions of its question, in the order of the list."""
    text: str
    query: Query


Ballot = Sequence[Vote | AnswerError]
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
        form: see above.
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
        device: Any = "cpu",
        **options: Any,
    ) -> None:
        check_choices(self.name, form=(form, get_args(Form)))
        check_k_meta(self.name, k_meta, answers)
        needless = f"k_meta is {k_meta}, and with form 'pair' there are no scores to add; leave it out"
        few = f"size is {size}; a list has at least 2 completions"
        check_rules(self.name, {few: form != "list" or size >= 2, needless: form != "pair" or k_meta is None})
        check_reading(self.name, top_logprobs=2, min_mass=min_mass)
        self.default_template = PAIR if form == "pair" else SCORES
        self.default_temperature = 1.0 if answers > 1 else 0.0
        super().__init__(*address, answers=answers, device=device, **options)
        self.form, self.size, self.k_meta, self.min_mass = form, size if form == "list" else 1, k_meta, min_mass
        self.both_orders, self.principles = both_orders, PRINCIPLES if principles else ""
        self.meta_server, self.meta_template = connect_meta(self, meta, k_meta, META, device)
        self.votes = 1 if form == "pair" else k_meta or answers
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
        groups: dict[Hashable, dict[str, list[int]]] = {}
        for row, text in enumerate(request.completions):
            group = repr((request.metadata[row] or {}).get(GROUP_KEY, 0)), repr(request.prompts[row])
            groups.setdefault(group, {}).setdefault(text, []).append(row)
        lists = [rows for distinct in groups.values() for rows in self._split([*distinct.values()])]
        texts = [(request.prompts[rows[0][0]], [request.completions[same[0]] for same in rows]) for rows in lists]
        ballots = self._ask(texts, both_orders=self.both_orders and self.form != "point")
        metas = self._rate([vote for orders in ballots for votes in orders for vote in votes])
        results: list[list[dict[str, float]]] = [[] for _ in request.completions]
        reasons: list[str | None] = ["its group has no other completion to compare it with"] * len(request)
        remarks = [""] * len(request)
        for rows, orders in zip(lists, ballots, strict=True):
            counted = [self._choose(votes, metas) for votes in orders]
            error = next((votes for votes in counted if isinstance(votes, AnswerError)), None)
            for position, row in ((position, row) for position, same in enumerate(rows) for row in same):
                if error is not None:
                    reasons[row] = str(error)
                    continue
                # each order counts alike, or the one with more readable votes would leave its bias of position
                scores = [[vote.scores[position] for vote, _ in votes] for votes in counted]
                rated = fmean(meta.get("meta", math.nan) for votes in counted for _, meta in votes)
                results[row].append({"value": fmean(map(fmean, scores)), "std": _error(scores), "meta": rated})
                remarks[row] = remarks[row] or counted[0][0][0].text
        for (copies,) in [[*distinct.values()] for distinct in groups.values() if len(distinct) == 1]:
            if self.form == "pair" and len(copies) > 1:  # copies of one text tie
                for row in copies:
                    results[row].append({"value": 0.5, "std": math.nan, "meta": math.nan})
        reasons = [None if result else reason for result, reason in zip(results, reasons, strict=True)]
        columns = {name: [fmean(r[name] for r in row) if row else math.nan for row in results] for name in RESULTS}
        value, std, meta = (torch.tensor(column) for column in columns.values())
        parts = {} if self.k_meta is None else {"meta": meta}
        std = None if self.form == "pair" or std.isnan().all() else self.votes * std
        return make_scores(self.votes * value, reasons, self.unit, std=std, parts=parts, text=remarks)

    def compare(
        self, left: Sequence[str], right: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare B pairs of completions; with "point" and "list" by their scores in one answer."""
        first = read_text_request(self.name, left, prompts, metadata)
        second = read_text_request(self.name, right, prompts, metadata)
        pairs = zip(first.completions, second.completions, strict=True)
        ballots = self._ask(list(zip(first.prompts, pairs, strict=True)), both_orders=self.both_orders)
        table = torch.full((len(first), 2), torch.nan, dtype=torch.float64)  # P(left better) in each order
        reasons: list[str | None] = [None] * len(first)
        for row, orders in enumerate(ballots):
            counted = [self._choose(votes, {}) for votes in orders]
            if error := next((votes for votes in counted if isinstance(votes, AnswerError)), None):
                reasons[row] = str(error)
                continue
            for number, votes in enumerate(orders):
                scores = [vote.scores for vote in votes if isinstance(vote, Vote)]
                table[row, number] = fmean((1 + (a > b) - (a < b)) / 2 for a, b in scores)
        bias = {"position_bias": ((table[:, 0] - table[:, 1]) / 2).float()} if self.both_orders else {}
        valid = torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
        return Preferences(prob=table.nanmean(1).float(), valid=valid, parts=bias, reason=reasons)

    def _split(self, texts: list[list[int]]) -> list[Sequence[list[int]]]:
        """Split the distinct completions of a group into the lists that are asked about."""
        if self.form == "pair":
            return list(combinations(texts, 2))
        parts = math.ceil(len(texts) / self.size)  # even parts: 5 completions are 3 and 2, not 4 and 1
        return [texts[a:b] for a, b in pairwise(round(part * len(texts) / parts) for part in range(parts + 1))]

    def _ask(self, lists: Sequence[tuple[Prompt, Sequence[str]]], *, both_orders: bool) -> list[list[Ballot]]:
        """Return K votes on each list of completions in each order; scores are in the order of the list."""
        orders = (1, -1) if both_orders else (1,)
        # a text alone has no order
        ballots: list[list[Ballot]] = [[[] for _ in orders[: len(texts)]] for _, texts in lists]
        queries: dict[int, list[tuple[int, int, Query]]] = {}
        for number, (prompt, texts) in enumerate(lists):
            for index, order in enumerate(orders[: len(texts)]):
                if prompt_text(prompt) != prompt_text(prompt, images=False):
                    ballots[number][index] = [
                        AnswerError("its prompt shows images, which a judge of texts does not see")
                    ]
                else:
                    queries.setdefault(len(texts), []).append((number, index, self._query(prompt, texts[::order])))
        for size, entries in queries.items():

            def read(reply: Reply, size: int = size) -> Any:
                if REFUSAL.match(reply.text):
                    raise AnswerError(f"the judge refused: {reply.text.strip()[:120]}")
                if self.form == "pair":
                    first = {1: 1.0, 2: 0.0}.get(verdict(reply.text, options=OPTIONS), 0.5)
                    return (first, 1 - first), reply.text
                return tuple(boxed_scores(reply.text, count=size)), reply.text

            answers = self.server.ask(self.template, [query for *_, query in entries], read=read, **self.sampling)
            for (number, index, query), row in zip(entries, answers, strict=True):
                votes = [v if isinstance(v, AnswerError) else Vote(v[0][:: orders[index]], v[1], query) for v in row]
                ballots[number][index] = [self._check_script(vote) for vote in votes]
        return ballots

    def _rate(self, votes: Ballot) -> dict[int, float | AnswerError]:
        """Ask the meta judge about the readable votes: id of a vote -> its log-odds."""
        readable = [vote for vote in votes if isinstance(vote, Vote)]
        if self.k_meta is None or not readable:
            return {}
        queries, texts = [vote.query for vote in readable], [[vote.text] for vote in readable]
        metas = ask_meta(self.meta_server, self.meta_template, queries, texts, self.min_mass)
        return {id(vote): meta for vote, (meta,) in zip(readable, metas, strict=True)}

    def _choose(self, votes: Ballot, metas: Mapping[int, Any]) -> Any:
        """Return the votes that count, each with its part "meta"; an AnswerError if too few are readable."""
        readable = [vote for vote in votes if isinstance(vote, Vote)]
        if len(readable) < self.min_readable:
            return AnswerError(failure_reason(votes))
        return best_votes(readable, [metas[id(vote)] for vote in readable] if metas else None, self.votes)

    def _query(self, prompt: Prompt, texts: Sequence[str]) -> Query:
        """Fill the question about completions of a prompt."""
        return Query(images=[], prompt=transcript(prompt), fields=question_fields(texts, self.principles))

    def _check_script(self, vote: Vote | AnswerError) -> Vote | AnswerError:
        """Turn a vote that is written in another script than its question into a failure."""
        if isinstance(vote, Vote):
            alphabet = scripts(" ".join((self.template.text, vote.query.prompt, *vote.query.fields.values())))
            other = {script: count for script, count in scripts(vote.text).items() if script not in alphabet}
            if 2 * sum(other.values()) > scripts(vote.text).total():
                script = max(other, key=lambda script: other[script])
                vote = AnswerError(f"the judge answered in {script} script, in which nothing was asked")
                self.server.alarm.note(str(vote))
        return vote


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
    return {"responses": numbered(texts), "count": count, "principles": principles, "scores": box}


def write_question(text: str | None, prompt: Prompt, texts: Sequence[str]) -> str:
    """Write the question about completions as a prompt to train a judge on; None for the judge's own text."""
    template = SCORES if text is None else question("text_judge", text, images=())
    (message,) = template.filled({"prompt": transcript(prompt), **question_fields(texts)})
    return message["content"][-1]["text"]


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


def scripts(text: str) -> Counter[str]:
    """Count letters by script, the first word of their Unicode names."""
    letters = Counter(filter(str.isalpha, text))
    counts: Counter[str] = Counter()
    for letter, count in letters.items():
        counts[unicodedata.name(letter, "UNKNOWN").split()[0]] += count
    return counts
