# SPDX-License-Identifier: Apache-2.0
"""Checklists as data: questions, masks and weights, from JSON or from VisionReward's two files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checklist_rule import ChecklistRule

VISIONREWARD_MASKS = {0: (22, 23, 24, 28, 29), 1: (25, 26), 2: (27,)}
"""Of the published 30 questions on images: is there a body (0), a face (1), are there hands (2) -> the
questions that count only then."""


@dataclass(frozen=True, kw_only=True)
class Checklist:
    """Questions, in which {prompt} stands for the caption, and the rule that scores their answers."""

    questions: tuple[str, ...]
    rule: ChecklistRule

    def __post_init__(self) -> None:
        if not self.questions or len(set(self.questions)) != len(self.questions):
            raise ValueError("A checklist needs questions, and no question twice.")
        if not all(isinstance(question, str) and question.strip() for question in self.questions):
            raise ValueError("A checklist's questions are non-empty strings.")
        alignment = torch.zeros(1) if self.rule.has_alignment else None
        self.rule.score(torch.zeros(1, len(self.questions)), alignment)  # refuses weights that do not fit

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Checklist:
        """Read {"questions": [...], and the keys of `ChecklistRule.from_dict`}.

        Raises:
            ValueError: keys or numbers that do not fit.
        """
        if not isinstance(given.get("questions"), list | tuple):
            raise ValueError('A checklist is an object with "questions", a list of strings, and "coef".')
        rest = {key: value for key, value in given.items() if key != "questions"}
        return cls(questions=tuple(given["questions"]), rule=ChecklistRule.from_dict(rest))

    def to_dict(self) -> dict[str, Any]:
        """The object that `from_dict` reads."""
        rule = self.rule
        return {
            "questions": list(self.questions),
            "coef": list(rule.weights),
            "intercept": rule.intercept,
            "masked_features": {str(question): list(held) for question, held in rule.masked.items()},
            "has_alignment": rule.has_alignment,
        }

    @classmethod
    def read(cls, file: str | Path) -> Checklist:
        """Read a JSON file; see `from_dict`."""
        return cls.from_dict(_object(Path(file)))

    @classmethod
    def from_visionreward(
        cls,
        questions: str | Path,
        weights: str | Path,
        *,
        masks: Mapping[int, Sequence[int]] = VISIONREWARD_MASKS,
    ) -> Checklist:
        """Read VisionReward's question file (one per line) and weight file ("coef", "intercept").

        Args:
            questions: e.g. VisionReward_image_qa_select.txt.
            weights: e.g. weight_select.json; its first coefficient is that of the alignment.
            masks: question -> the questions that count only where its answer is yes.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the numbers of questions and weights do not fit.
        """
        lines = Path(questions).read_text(encoding="utf-8").splitlines()
        given = _object(Path(weights))
        coef = given.get("coef", [])
        flat = coef[0] if coef and isinstance(coef[0], list) else coef  # scikit-learn's coef_ has two axes
        masked = {str(question): list(held) for question, held in masks.items()}
        rule = {"coef": flat, "intercept": given.get("intercept", 0.0), "masked_features": masked}
        return cls.from_dict({"questions": [line.strip() for line in lines if line.strip()], **rule})


SHAPES_CHECKLIST = Checklist.from_dict(
    {
        "questions": [
            "Is the picture blurred?",
            "Is the picture noisy?",
            "Does the picture have compression marks?",
            "Is the contrast of the picture low?",
            "Are the shapes outlined?",
            "Are the shapes shaded?",
            "Is the background textured?",
            "Are the shapes flat?",
        ],
        "coef": [3.9, -0.7, -0.35, -0.45, -0.55, 0.05, 0.05, 0.45, -1.05],
        "has_alignment": True,
    }
)
"""For the embedded model. The weights are those of `fit_checklist` on the votes of 800 training pairs,
rounded, with the answers turned round to the questions that speak of faults and of flat shapes."""


def _object(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"There is no checklist file {file}; give a JSON file.")
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}.") from error
    if not isinstance(given, Mapping):
        raise ValueError(f"{file} holds a {type(given).__name__}; needed is an object.")
    return given
