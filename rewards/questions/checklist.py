# SPDX-License-Identifier: Apache-2.0
"""VisionReward's checklist: yes/no questions, and the rule that makes one score of the answers.

Source: VisionReward, Xu et al., arXiv 2412.21059; the rule as in its released inference-image.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.model_files import read_object

VISIONREWARD_MASKS = {0: (22, 23, 24, 28, 29), 1: (25, 26), 2: (27,)}
"""For the published 30 questions on images: is there a body (0), a face (1), are there hands (2) -> the
questions that count only then."""
_RULE_KEYS = ("coef", "intercept", "masked_features", "mask_questions", "has_alignment")


@dataclass(frozen=True, kw_only=True)
class ChecklistRule:
    """score = w₀·alignment + Σ_f w_f·x_f·m_f + b, with x = ±1 for yes and no, m = 1 where f applies.

    The features f are the questions that mask no others, in their order. A soft answer p counts as x = 2p − 1
    and m = p, which is the expected score when mask and answer are independent.
    """

    weights: Sequence[float]  # Weight of the alignment first where `has_alignment`, then of each feature
    masked: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Question (is there a face?) -> the questions that count 0 unless its answer is yes."""
    intercept: float = 0.0
    has_alignment: bool = True  # Adds a text-image alignment score to the answers

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ChecklistRule:
        """Read the published file: "coef", "intercept" (a number or a list of one) and "masked_features"."""
        if "coef" not in record or not set(record) <= set(_RULE_KEYS):
            raise ValueError(
                f"A checklist rule has {', '.join(sorted(_RULE_KEYS))}, coef at least; given: {list(record)}."
            )
        masked: dict[int, tuple[int, ...]] = {int(key): () for key in record.get("mask_questions", ())}
        masked |= {int(key): tuple(hidden) for key, hidden in record.get("masked_features", {}).items()}
        intercept = record.get("intercept", 0.0)
        return cls(
            weights=tuple(map(float, record["coef"])),
            masked=masked,
            intercept=float(intercept[0] if isinstance(intercept, Sequence) else intercept),
            has_alignment=bool(record.get("has_alignment", True)),
        )

    def score(self, yes: Tensor, alignment: Tensor | None = None) -> Tensor:
        """Score B images [B]; `yes` [B, N] is 1 for yes, 0 for no, or the probability of yes; NaN makes a row NaN."""
        columns = self.features(yes, alignment)
        weights = torch.tensor(list(self.weights), dtype=columns.dtype, device=columns.device)
        return (columns * weights).sum(1) + self.intercept

    def features(self, yes: Tensor, alignment: Tensor | None = None) -> Tensor:
        """[B, F] factors of the weights: the alignment, if the rule has it, then x_f·m_f; differentiable."""
        features = self.feature_questions(yes.shape[1])
        applies = torch.ones_like(yes)
        for question, masked in self.masked.items():
            is_masked = torch.zeros(yes.shape[1], dtype=torch.bool, device=yes.device)
            is_masked[list(masked)] = True
            applies = torch.where(is_masked, applies * yes[:, question : question + 1], applies)
        columns = ((2 * yes - 1) * applies)[:, features]
        return columns if alignment is None else torch.cat((alignment[:, None].to(columns.dtype), columns), 1)

    def fill_unanswered(self, yes: Tensor) -> Tensor:
        """Replace missing answers (NaN) in [B, N] by ½, which counts x = 0; by no in questions that mask."""
        neutral = torch.full_like(yes, 0.5)
        neutral[:, list(self.masked)] = 0.0
        return torch.where(torch.isnan(yes), neutral, yes)

    def feature_questions(self, count: int) -> list[int]:
        """Return which of `count` questions are features; ValueError where masks or weights do not fit."""
        mentioned = {*self.masked, *(question for masked in self.masked.values() for question in masked)}
        if wrong := sorted(question for question in mentioned if not 0 <= question < count):
            raise ValueError(f"The masks name question {wrong[0]}; there are {count}, from 0.")
        features = [question for question in range(count) if question not in self.masked]
        expected = len(features) + self.has_alignment
        if len(self.weights) != expected:
            raise ValueError(f"There are {len(self.weights)} weights for {len(features)} features; give {expected}.")
        return features


@dataclass(frozen=True, kw_only=True)
class Checklist:
    """Questions, in which {prompt} is replaced by the caption, and the rule that scores their answers."""

    questions: tuple[str, ...]
    rule: ChecklistRule

    def __post_init__(self) -> None:
        is_text = all(isinstance(question, str) and question.strip() for question in self.questions)
        if not self.questions or not is_text or len(set(self.questions)) != len(self.questions):
            raise ValueError("A checklist needs questions that are non-empty strings, and no question twice.")
        self.rule.feature_questions(len(self.questions))

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Checklist:
        """Read {"questions": [...], and the keys of `ChecklistRule.from_dict`}."""
        if not isinstance(record.get("questions"), list | tuple):
            raise ValueError('A checklist is an object with "questions", a list of strings, and "coef".')
        rule = {key: value for key, value in record.items() if key != "questions"}
        return cls(questions=tuple(record["questions"]), rule=ChecklistRule.from_dict(rule))

    def to_dict(self) -> dict[str, Any]:
        rule = self.rule
        return {
            "questions": list(self.questions),
            "coef": list(rule.weights),
            "intercept": rule.intercept,
            "masked_features": {str(question): list(masked) for question, masked in rule.masked.items()},
            "has_alignment": rule.has_alignment,
        }

    @classmethod
    def read(cls, file: str | Path) -> Checklist:
        return cls.from_dict(read_object(Path(file)))

    @classmethod
    def from_visionreward(
        cls, questions: str | Path, weights: str | Path, *, masks: Mapping[int, Sequence[int]] = VISIONREWARD_MASKS
    ) -> Checklist:
        """Read VisionReward's question file (one per line) and weight file, with the alignment's coefficient first.

        `masks`: question -> the questions that count only where its answer is yes.
        """
        lines = Path(questions).read_text(encoding="utf-8-sig").splitlines()
        record = read_object(Path(weights))
        coef = record.get("coef", [])
        coef = coef[0] if coef and isinstance(coef[0], list) else coef  # scikit-learn's coef_ has two axes
        rule = {"coef": coef, "intercept": record.get("intercept", 0.0), "masked_features": masks}
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
"""Checklist for the embedded model. The weights are the best non-negative ones on the votes of 800 training
pairs, rounded; questions about faults and flat shapes then got the opposite sign."""
