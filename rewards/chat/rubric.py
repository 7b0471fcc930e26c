# SPDX-License-Identifier: Apache-2.0
"""Rubric: a model writes a checklist for the prompt, then each of its questions is asked about the image.

The idea is that of RubricRM, arXiv 2608.26956, and AutoRubric-T2I, arXiv 2605.17602; both questions are in our words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from scipy.special import expit

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import prompt_problem, read_request
from visalign.rewards.reading.numbers import AnswerError, statement
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import question
from visalign.rewards.vlm.yes_no import MIN_MASS

from .deepseek_grm import TOP_LOGPROBS
from .judge import Answer, ChatJudge, failure_reason
from .messages import Reply
from .yes_no import check_reading, read_reply_yes_no

WRITING = question(
    "rubric_writing",
    "A picture will be generated from this caption: {prompt}\n"
    "Write the questions by which it is to be checked: one for each thing, number, attribute, relation and "
    "text that the caption asks for, and one or two for the picture's quality. Each is answered by yes where "
    "the picture is right, and can be answered by looking at the picture alone. Write 3 to 10 of them as a "
    "numbered list, one line each, and nothing else.",
    images=(),
)
ASKING = question(
    "rubric",
    "This picture was generated from the caption: {prompt}\n{question}\nAnswer with one word, yes or no.",
    words={"yes": ("yes",), "no": ("no",)},
)
MAX_QUESTIONS = 20  # Largest number of questions of a checklist that is written; a longer one is a failure
_LIST_ITEM = re.compile(r"^\s*(?:\d+\s*[.)]|[-*•])\s+(?P<text>\S.*?)\s*$", re.MULTILINE)


class Rubric(ChatJudge):
    """Mean over a checklist of the probability of yes, from 0 to 1; the checklist is written for each prompt.

    The checklist is the record's "checklist", [question, ...], if it has one. Else it is written once from the prompt,
    by greedy decoding, and remembered for all images of the prompt. The parts hold "questions", their number, and
    "least", the smallest probability; `text` has a line for each question. An image with an unanswered question has no
    score.

    Args:
        min_mass: smallest probability of yes and no together that counts as an answer.
        **options: of `ChatJudge`, as is the address; a template has {question}. max_new_tokens is for the checklist.
    """

    name = "rubric"
    unit = "probability"
    range = (0.0, 1.0)
    default_template = ASKING
    required_fields = ("question",)

    def __init__(self, *address: str, min_mass: float = MIN_MASS, device: Any = "cpu", **options: Any) -> None:
        check_reading(self.name, top_logprobs=TOP_LOGPROBS, min_mass=min_mass)
        super().__init__(*address, device=device, **options)
        self.min_mass = min_mass
        self._written: dict[str, list[str]] = {}
        fields = {"max_questions": MAX_QUESTIONS, "top_logprobs": TOP_LOGPROBS, "min_mass": min_mass}
        self.identity = self.make_identity(writing=WRITING.text, **fields, **self.sampling)

    def checklists(self, prompts: Sequence[str]) -> dict[str, list[str] | AnswerError]:
        """Return prompt -> its questions, or why there are none; each prompt's list is written only once."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._written]
        queries = [Query(images=[], prompt=prompt) for prompt in new]
        length = self.sampling["max_new_tokens"]
        answers = self.server.ask(WRITING, queries, read=self._read_checklist, max_new_tokens=length)
        written = {prompt: answer for prompt, (answer,) in zip(new, answers, strict=True)}
        self._written |= {p: answer for p, answer in written.items() if not isinstance(answer, AnswerError)}
        return self._written | written

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images for their prompts; of the metadata only a "checklist" is read."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        readable = dict(request.images.readable())
        recorded = {k: r["checklist"] for k, r in enumerate(request.metadata) if r and r.get("checklist") is not None}
        for row in readable:
            reasons[row] = prompt_problem(request.prompts[row])
        unwritten = [row for row in readable if reasons[row] is None and row not in recorded]
        written = self.checklists([request.prompts[row] for row in unwritten])
        checklists: dict[int, list[str]] = {}
        for row in readable:
            checklist = recorded.get(row, written.get(request.prompts[row]))
            if isinstance(checklist, AnswerError):
                reasons[row] = f"its checklist: {checklist}"
            elif not _is_checklist(checklist):
                reasons[row] = reasons[row] or f'its "checklist" is {checklist!r:.60}; needed is a list of questions'
            elif reasons[row] is None:
                checklists[row] = list(checklist)
        rows = list(checklists)
        queries = [
            Query(images=[readable[row]], prompt=request.prompts[row], fields={"question": wording})
            for row in rows
            for wording in checklists[row]
        ]
        options = {"top_logprobs": TOP_LOGPROBS, "max_new_tokens": 1}
        answers = iter(self.server.ask(self.template, queries, read=self._read_probability, **options))
        results = [[_mean_answer(checklists[row], [next(answers)[0] for _ in checklists[row]])] for row in rows]
        return self.average_answers(request, rows, results, reasons, self.unit)

    def _read_checklist(self, reply: Reply) -> list[str]:
        items = _LIST_ITEM.finditer(statement(reply.text).text)
        questions = list(dict.fromkeys(item["text"] for item in items))
        if not 1 <= len(questions) <= MAX_QUESTIONS:
            raise AnswerError(f"the model wrote {len(questions)} questions; allowed are 1 to {MAX_QUESTIONS}")
        return questions

    def _read_probability(self, reply: Reply) -> float:
        return float(expit(read_reply_yes_no(reply, self.template, self.min_mass).bound))


def _is_checklist(checklist: Any) -> bool:
    is_list = isinstance(checklist, Sequence) and not isinstance(checklist, str) and len(checklist) > 0
    return is_list and all(isinstance(item, str) and item.strip() for item in checklist)


def _mean_answer(questions: Sequence[str], answers: Sequence[float | AnswerError]) -> Answer | AnswerError:
    probs = [answer for answer in answers if not isinstance(answer, AnswerError)]
    if len(probs) < len(questions):
        return AnswerError(failure_reason(answers))
    text = "\n".join(f"{prob:.3f} {wording}" for prob, wording in zip(probs, questions, strict=True))
    return {"value": sum(probs) / len(probs), "questions": float(len(probs)), "least": min(probs)}, text
