# SPDX-License-Identifier: Apache-2.0
"""The exact checker of the embedded text tasks as a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from visalign.data.text_tasks.tasks import TASKS, check_answer
from visalign.interfaces import Metadata, Scores

from .contract import Prompt, TextVerdict, read_text_request, text_scores


class TaskAnswer:
    """1 where the boxed answer of a text task is right, 0 where it is wrong or missing.

    The metadata is the task's record (`visalign.data.text_tasks.tasks`); tasks with many right answers take
    each of them. A record that is no task's is invalid, never 0.
    """

    name = "task_answer"
    unit = "1 = correct"
    range = (0.0, 1.0)
    higher_is_better = True

    def score(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Scores:
        """Score B completions; the remark says what was wrong."""
        request = read_text_request(self.name, completions, prompts, metadata)
        verdicts = [
            _verdict(text, record) for text, record in zip(request.completions, request.metadata, strict=True)
        ]
        return text_scores(verdicts, self.unit)


def _verdict(text: str, record: Mapping[str, Any] | None) -> TextVerdict:
    missing = [key for key in ("task", "problem", "answer") if record is None or key not in record]
    if record is None or missing:
        return TextVerdict(reason=f"the metadata lacks {', '.join(missing)}, so it is no text task's record")
    if record["task"] not in TASKS:
        return TextVerdict(reason=f"there is no text task {record['task']!r}")
    right, remark = check_answer(text, record)
    return TextVerdict(value=float(right), remark=remark)
