# SPDX-License-Identifier: Apache-2.0
"""VisionReward's rule: answers to yes/no questions become one score; masks and weights are data.

Source: VisionReward, Xu et al., arXiv 2412.21059; the rule as in its released inference-image.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ChecklistRule:
    """score = w₀·alignment + Σ_f w_f·x_f·m_f + b, with x = ±1 for yes and no, m = 1 where f applies.

    The features f are the questions that mask no others, in their order. A soft answer p counts as x = 2p − 1
    and m = p, which is the expected score when mask and answer are independent.
    """

    weights: Sequence[float]
    """Of the alignment first where `has_alignment`, then of each feature."""
    masked: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Question (is there a face?) -> the questions that count 0 unless its answer is yes."""
    intercept: float = 0.0
    has_alignment: bool = True
    """Whether a text-image alignment score stands beside the answers."""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ChecklistRule:
        """Read the published file: "coef", "intercept" (a number or a list of one), and "masked_features".

        Args:
            given: the JSON object; masks may be named by strings, as JSON has it.

        Raises:
            ValueError: a key is missing or unknown.
        """
        known = {"coef", "intercept", "masked_features", "mask_questions", "has_alignment"}
        if "coef" not in given or set(given) - known:
            raise ValueError(
                f"A checklist rule has the keys {', '.join(sorted(known))}, coef at least; given are "
                f"{', '.join(map(str, given))}."
            )
        masked = {int(question): tuple(held) for question, held in given.get("masked_features", {}).items()}
        intercept = given.get("intercept", 0.0)
        return cls(
            weights=tuple(given["coef"]),
            masked={**{int(question): () for question in given.get("mask_questions", ())}, **masked},
            intercept=float(intercept[0] if isinstance(intercept, Sequence) else intercept),
            has_alignment=bool(given.get("has_alignment", True)),
        )

    def score(self, yes: Tensor, alignment: Tensor | None = None) -> Tensor:
        """The score of B pictures; differentiable in both arguments.

        Args:
            yes: [B, N] in [0, 1], 1 for yes, 0 for no, or the probability of yes; NaN makes its row NaN.
            alignment: [B], where the rule has it.

        Returns:
            [B] in the dtype of `yes`.

        Raises:
            ValueError: another number of questions than the weights are for, a mask of a question that there
                is not, or answers outside [0, 1].
        """
        columns = self.features(yes, alignment)
        weights = torch.tensor(list(self.weights), dtype=columns.dtype, device=columns.device)
        return (columns * weights).sum(1) + self.intercept

    def features(self, yes: Tensor, alignment: Tensor | None = None) -> Tensor:
        """What each weight is multiplied with: the alignment where the rule has it, then x_f·m_f.

        Returns:
            [B, F] in the dtype of `yes`, differentiable.

        Raises:
            ValueError: as `score`.
        """
        features = self._check(yes, alignment)
        applies = torch.ones_like(yes)
        for question, held in self.masked.items():
            hidden = torch.zeros(yes.shape[1], dtype=torch.bool, device=yes.device)
            hidden[list(held)] = True
            applies = torch.where(hidden, applies * yes[:, question : question + 1], applies)
        columns = ((2 * yes - 1) * applies)[:, features]
        if alignment is not None:
            columns = torch.cat((alignment[:, None].to(columns.dtype), columns), 1)
        return columns

    def counted(self, yes: Tensor) -> Tensor:
        """Answers [B, N] in which one that is missing (NaN) counts x = 0, and as no where it decides about
        others."""
        neutral = torch.full_like(yes, 0.5)
        neutral[:, list(self.masked)] = 0.0
        return torch.where(torch.isnan(yes), neutral, yes)

    def _check(self, yes: Tensor, alignment: Tensor | None) -> list[int]:
        """The questions that are features."""
        if yes.ndim != 2 or (alignment is not None) != self.has_alignment:
            raise ValueError(
                f"The answers are {tuple(yes.shape)} and the alignment is "
                f"{'missing' if alignment is None else 'given'}; needed are [B, N], and an alignment "
                f"{'[B]' if self.has_alignment else 'left out'}."
            )
        count = yes.shape[1]
        named = {*self.masked, *(feature for held in self.masked.values() for feature in held)}
        if wrong := sorted(question for question in named if not 0 <= question < count):
            raise ValueError(f"The masks name question {wrong[0]}; there are {count}, from 0.")
        features = [question for question in range(count) if question not in self.masked]
        wanted = len(features) + self.has_alignment
        if len(self.weights) != wanted:
            raise ValueError(
                f"There are {len(self.weights)} weights for {len(features)} features"
                f"{' and the alignment' if self.has_alignment else ''}: {wanted} are needed."
            )
        known = yes[~yes.isnan()]
        if known.numel() and (known.min() < 0 or known.max() > 1):
            raise ValueError("Answers are 0 for no, 1 for yes, or a probability between them.")
        return features
