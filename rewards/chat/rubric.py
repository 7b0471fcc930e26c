# SPDX-License-Identifier: Apache-2.0
"""Rubric: a model writes what an image of the prompt must show; then each point is asked of the image.

Sources: RubricRM, arXiv 2608.26956, and AutoRubric-T2I, arXiv 2605.17602, of which the idea is taken, a
list of criteria for each input before anything is scored. Both questions are worded here, for any model;
nothing is known here of those papers' checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, prompt_problem, read_request
from visalign.rewards.reading.numbers import AnswerError, statement
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import Template
from visalign.rewards.vlm.yes_no import MIN_MASS

from .asking import ServedJudge, as_template, failed
from .local import LocalModel
from .messages import Reply, question
from .server import ChatServer
from .yes_no import read_yes_no, sigmoid

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
_POINT = re.compile(r"^\s*(?:\d+\s*[.)]|[-*•])\s+(?P<text>\S.*?)\s*$", re.MULTILINE)


class Rubric(ServedJudge):
    """Mean over a checklist of the probability of yes, from 0 to 1; the checklist is written for each prompt.

    The list is the record's "checklist", [question, ...], where it has one. Else it is written once from the
    prompt, without an image, by the likeliest words, and remembered, so that all images of a prompt are
    held against the same list. The parts hold "questions", their number, and "least", the smallest
    probability; `text` has a line for each question. An image of which one question has no answer has no
    score, nor have those whose prompt no list could be written for.
    """

    name = "rubric"
    unit = "probability"
    range = (0.0, 1.0)
    higher_is_better = True

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        writer: ChatServer | LocalModel | None = None,
        writing_template: Template | str | None = None,
        most: int = 20,
        top_logprobs: int = 20,
        min_mass: float = MIN_MASS,
        device: Any = "cpu",
        **asking: Any,
    ) -> None:
        """Say who is asked, and what.

        Args:
            base_url: see `ServedJudge`.
            model: see `ServedJudge`.
            writer: writes the checklists, a language model does; the judge itself when None.
            writing_template: instead of our question for a checklist; holds {prompt} and no image.
            most: questions of a checklist; a longer one is a failure.
            top_logprobs: alternatives of the first token to ask for.
            min_mass: smallest probability of yes and no together that counts as an answer.
            device: see `ServedJudge`.
            **asking: of `ServedJudge`; the template holds {question}, a checklist has 1024 tokens.
        """
        if most < 1 or not 2 <= top_logprobs or not 0 <= min_mass < 1:
            raise RewardError(
                f"{self.name}: most is {most}, top_logprobs {top_logprobs}, min_mass {min_mass}; allowed are "
                "whole numbers from 1, from 2, and probabilities from 0 up to below 1."
            )
        asking = {"default": ASKING, "needed": ("question",), **asking}
        super().__init__(base_url, model, device=device, **asking)
        self.writer = writer or self.server
        self.writing = as_template(self.name, writing_template, WRITING)
        self.most, self.top_logprobs, self.min_mass = most, top_logprobs, min_mass
        self._written: dict[str, list[str]] = {}
        told = {"writer": self.writer.model, "writing": self.writing.text, "most": most, "min_mass": min_mass}
        self.identity = self.identified(top_logprobs=top_logprobs, **told, **self.drawing)

    def checklists(self, prompts: Sequence[str]) -> dict[str, list[str] | AnswerError]:
        """prompt -> its questions, or why there are none; what was written before is not asked for again."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._written]
        asked = [Query(images=[], prompt=prompt) for prompt in new]
        length = self.drawing["max_new_tokens"]
        answers = self.writer.ask(self.writing, asked, read=self._points, max_new_tokens=length)
        found: dict[str, list[str] | AnswerError] = dict(self._written)
        for prompt, (said,) in zip(new, answers, strict=True):
            found[prompt] = said
            if not isinstance(said, AnswerError):
                self._written[prompt] = said
        return found

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score per (image, prompt); of the metadata a "checklist" is looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        lists: dict[int, list[str]] = {}
        shown = dict(request.images.readable())
        for row in shown:
            record = request.metadata[row] or {}
            reasons[row] = prompt_problem(request.prompts[row])
            if reasons[row] is None and "checklist" in record:
                lists[row], reasons[row] = _given(record)
        missing = [row for row in shown if reasons[row] is None and row not in lists]
        written = self.checklists([request.prompts[row] for row in missing])
        for row in missing:
            said = written[request.prompts[row]]
            if isinstance(said, AnswerError):
                reasons[row] = f"its checklist: {said}"
            else:
                lists[row] = said
        rows = [row for row in sorted(lists) if reasons[row] is None]
        queries = [
            Query(images=[shown[row]], prompt=request.prompts[row], fields={"question": one})
            for row in rows
            for one in lists[row]
        ]
        options = {"top_logprobs": self.top_logprobs, "max_new_tokens": 1}
        answers = iter(self.server.ask(self.template, queries, read=self._probability, **options))
        found = [[_summary(lists[row], [next(answers)[0] for _ in lists[row]])] for row in rows]
        return self.summed(request, rows, found, reasons, self.unit)

    def _points(self, reply: Reply) -> list[str]:
        """The questions of a written checklist."""
        points = list(dict.fromkeys(match["text"] for match in _POINT.finditer(statement(reply.text).text)))
        if not 1 <= len(points) <= self.most:
            raise AnswerError(f"the model wrote {len(points)} questions; allowed are 1 to {self.most}")
        return points

    def _probability(self, reply: Reply) -> float:
        words = self.template.words
        yes, no = words.get("yes", ("yes",)), words.get("no", ("no",))
        said = read_yes_no(reply.first_token, yes=yes, no=no, min_mass=self.min_mass)
        return sigmoid(said.bound)


def _given(record: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """The checklist of a record, or why it cannot be used."""
    given = record["checklist"]
    is_list = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    if not is_list or not all(isinstance(one, str) and one.strip() for one in given):
        return [], f'its "checklist" is {given!r:.60}; needed is a list of questions'
    return list(given), None


def _summary(
    questions: Sequence[str], answers: Sequence[float | AnswerError]
) -> tuple[dict[str, float], str] | AnswerError:
    probs = [answer for answer in answers if not isinstance(answer, AnswerError)]
    if len(probs) < len(questions):
        return AnswerError(failed(answers))
    text = "\n".join(f"{prob:.3f} {one}" for prob, one in zip(probs, questions, strict=True))
    counted = {"value": sum(probs) / len(probs), "questions": float(len(probs)), "least": min(probs)}
    return counted, text
