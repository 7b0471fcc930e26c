# SPDX-License-Identifier: Apache-2.0
"""Exact verifier of the shapes world as a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.rewards.base.contract import check_choices, make_scores, read_request, scatter
from visalign.rewards.base.identity import Identity

SIDE = 64
"""Height and width of the shapes world's images."""
UNITS = {"correct": "1 = correct", "partial": "share of checks", "mixed": "mean of 1 = correct and share of checks"}
"""mode -> unit."""


class ShapesVerifier:
    """1 for a correct image and 0 otherwise, or the share of the prompt's checks that hold.

    The checks come from the metadata record (GenEval's layout), or from the prompt without one.

    Args:
        mode: "correct" (0 or 1), "partial" (credit in [0, 1]), or "mixed", the mean of both: a signal
            before anything is correct, with the largest step for the last check. Parts hold both.
    """

    name = "shapes_verifier"
    range = (0.0, 1.0)
    higher_is_better = True
    capabilities = RewardCapabilities(takes_gpu_images=True)

    def __init__(self, mode: str = "correct") -> None:
        check_choices(self.name, mode=(mode, UNITS))
        self.mode, self.unit = mode, UNITS[mode]
        self.identity = Identity(judge=self.name, model="rules of GenEval", options={"mode": mode})

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Verify 64×64 images; other sizes, and prompts from outside the shapes world, are invalid."""
        from visalign.data.shapes.verifier import verify

        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, readable_images, records = [], [], []
        for row, image in request.images.readable():
            record, problem = _read_record(request.prompts[row], request.metadata[row])
            height, width = image.shape[1:]
            if (height, width) != (SIDE, SIDE):
                problem = f"the shapes verifier reads {SIDE}×{SIDE} images, this one has {width}×{height}"
            if problem is not None:
                reasons[row] = problem
                continue
            rows.append(row)
            readable_images.append(image)
            records.append(record)
        verdicts = verify(torch.stack(readable_images), records) if rows else []
        parts = {
            "correct": scatter([float(verdict.correct) for verdict in verdicts], rows, len(request)),
            "partial": scatter([verdict.score for verdict in verdicts], rows, len(request)),
        }
        text = [""] * len(request)
        for row, verdict in zip(rows, verdicts, strict=True):
            text[row] = verdict.reason
        value = (parts["correct"] + parts["partial"]) / 2 if self.mode == "mixed" else parts[self.mode]
        return make_scores(value, reasons, self.unit, parts=parts, text=text)


def _read_record(prompt: str, record: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], str | None]:
    """(record to verify against, reason why it cannot be used or None)."""
    if record is not None and "include" in record:
        return record, _problem(record)
    from visalign.data.shapes.prompts import parse_prompt

    try:
        return parse_prompt(prompt), None
    except ValueError as error:
        return {}, f"no metadata with 'include', and the prompt is not of the shapes world: {error}"


def _problem(record: Mapping[str, Any]) -> str | None:
    """Reason why a record cannot be verified, or None; found by checking an empty image with it."""
    from visalign.data.shapes.verifier import judge

    form = "needed is GenEval's layout, include: [{class: circle, count: 1}, ...]"
    if not isinstance(record["include"], list | tuple) or not record["include"]:
        return f"the metadata's include is {record['include']!r}; {form}"
    try:
        judge([], record)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        return f"the metadata cannot be read ({type(error).__name__}: {error}); {form}"
    return None
