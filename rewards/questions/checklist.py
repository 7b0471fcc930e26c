# SPDX-License-Identifier: Apache-2.0
"""VisionReward's checklist: the rule that makes one score of yes/no answers, its data, and its fit on votes.

Source: VisionReward, Xu et al., arXiv 2412.21059; the rule as in its released inference-image.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

VISIONREWARD_MASKS = {0: (22, 23, 24, 28, 29), 1: (25, 26), 2: (27,)}
"""Of the published 30 questions on images: is there a body (0), a face (1), are there hands (2) -> the
questions that count only then."""


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
        """Read the published file: "coef", "intercept" (a number or a list of one), and "masked_features",
        whose keys may be strings, as JSON has it.
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
        """The score of B images; differentiable in both arguments.

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
        """[B, F] differentiable: what each weight is multiplied with, the alignment where the rule has it,
        then x_f·m_f.
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
        if not yes.is_meta and ((yes < 0) | (yes > 1)).any():
            raise ValueError("Answers are 0 for no, 1 for yes, or a probability between them.")
        return features


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


@dataclass(frozen=True, kw_only=True)
class ChecklistFit:
    """Weights of features, and how they were found."""

    weights: Tensor
    """[F] float64; exactly 0 where the best weight would be negative."""
    loss: float
    """Mean negative log-likelihood of the pairs used, in nats, without the penalty; chance is ln 2."""
    accuracy: float
    """Share of the pairs with p ≠ ½ that are on the right side; equal scores count ½. NaN without any."""
    pairs: int
    """Pairs used."""
    left_out: int
    """Pairs with a missing answer or label, or weight 0."""


def fit_weights(
    left: Tensor,
    right: Tensor,
    label: Tensor,
    *,
    weight: Tensor | None = None,
    penalty: float = 1e-3,
    non_negative: bool = True,
) -> ChecklistFit:
    """Minimise mean_i n_i [−p ln σ(w·Δ) − (1 − p) ln σ(−w·Δ)] + λ/2 |w|² over w ≥ 0, Δ = x_left − x_right.

    VisionReward drops questions with negative weights one after another and fits again; the bound gives the
    best non-negative weights at once. The problem is convex: there is no seed.

    Args:
        left: [N, F] features of the left answers: ±1, soft answers between, 0 where a mask hides a question.
        right: [N, F].
        label: [N] probability that the left one is better; NaN where unknown.
        weight: [N] n_i ≥ 0, e.g. votes; None means 1.
        penalty: λ ≥ 0; with 0, weights of a question that separates the pairs grow without bound.
        non_negative: False fits without the bound, to see which weights it moved.

    Returns:
        The fit.

    Raises:
        ValueError: shapes that do not fit, a label outside [0, 1], a negative weight or penalty, no pair that
            can be used, or an optimizer that did not arrive.

    VisionReward, arXiv 2412.21059, section 3; the solver is L-BFGS-B (Byrd et al. 1995).
    """
    _check_pairs(left, right, label, weight, penalty)
    difference = (left - right).detach().cpu().double().numpy()
    prob = label.detach().cpu().double().numpy()
    factor = np.ones_like(prob) if weight is None else weight.detach().cpu().double().numpy()
    used = _used(difference, prob, factor)
    delta, p, share = difference[used], prob[used], factor[used] / factor[used].sum()

    def objective(w: np.ndarray) -> tuple[float, np.ndarray]:
        z = delta @ w
        value = share @ (np.logaddexp(0.0, -z) + (1 - p) * z) + penalty / 2 * (w @ w)
        slope = delta.T @ (share * (0.5 * (1 + np.tanh(z / 2)) - p)) + penalty * w
        return float(value), slope

    bounds = [(0.0 if non_negative else None, None)] * delta.shape[1]
    options = {"maxiter": 10_000, "ftol": 1e-15, "gtol": 1e-9}
    start = np.zeros(delta.shape[1])
    found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    if not found.success:
        raise ValueError(f"The weights did not settle ({found.message}); raise penalty above {penalty}.")
    z = delta @ found.x
    clear = p != 0.5
    right_side = np.where(z == 0, 0.5, (z > 0) == (p > 0.5))[clear]
    return ChecklistFit(
        weights=torch.from_numpy(found.x),
        loss=float(objective(found.x)[0] - penalty / 2 * (found.x @ found.x)),
        accuracy=float(right_side.mean()) if clear.any() else float("nan"),
        pairs=int(used.sum()),
        left_out=int((~used).sum()),
    )


def _check_pairs(left: Tensor, right: Tensor, label: Tensor, weight: Tensor | None, penalty: float) -> None:
    if left.ndim != 2 or left.shape != right.shape or label.shape != left.shape[:1]:
        raise ValueError(
            "left and right must be [N, F] and label [N]; got "
            f"{tuple(left.shape)}, {tuple(right.shape)}, {tuple(label.shape)}."
        )
    if weight is not None and weight.shape != label.shape:
        raise ValueError(f"weight must be {tuple(label.shape)} like label; got {tuple(weight.shape)}.")
    if not 0 <= penalty < float("inf"):
        raise ValueError(f"penalty must be finite and ≥ 0; got {penalty}.")


def _used(difference: np.ndarray, prob: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """bool [N]: the pairs with all answers, a label and a weight."""
    used = np.isfinite(difference).all(1) & np.isfinite(prob) & np.isfinite(factor) & (factor != 0)
    if ((prob < 0) | (prob > 1)).any() or (factor < 0).any():
        raise ValueError("Each label must lie in [0, 1] (NaN: unknown) and each weight be ≥ 0.")
    if not used.any():
        raise ValueError(f"None of the {len(prob)} pairs has all answers, a label and a weight above 0.")
    return used


def fit_checklist(
    left: Tensor,
    right: Tensor,
    label: Tensor,
    *,
    masked: Mapping[int, Sequence[int]] | None = None,
    left_alignment: Tensor | None = None,
    right_alignment: Tensor | None = None,
    weight: Tensor | None = None,
    penalty: float = 1e-3,
) -> tuple[ChecklistRule, ChecklistFit]:
    """The rule whose weights explain pairs of answered checklists best.

    Args:
        left: [N, Q] answers for the left images: 1 yes, 0 no, or the probability of yes; NaN where a
            question was not answered, which leaves the pair out.
        right: [N, Q].
        label: [N] probability that the left image is better.
        masked: question -> the questions that count 0 unless its answer is yes, as in `ChecklistRule`.
        left_alignment: [N] text-image alignment of the left images, if the rule shall have it.
        right_alignment: [N], given with left_alignment.
        weight: [N] ≥ 0, e.g. votes.
        penalty: as in `fit_weights`.

    Returns:
        (rule, fit).

    Raises:
        ValueError: as `fit_weights` and `ChecklistRule`, or one alignment without the other.
    """
    if (left_alignment is None) != (right_alignment is None):
        raise ValueError("left_alignment and right_alignment go together; one of them is missing.")
    held = dict(masked or {})
    features = [
        _features(answers, alignment, held)
        for answers, alignment in ((left, left_alignment), (right, right_alignment))
    ]
    fit = fit_weights(features[0], features[1], label, weight=weight, penalty=penalty)
    rule = ChecklistRule(
        weights=tuple(fit.weights.tolist()), masked=held, has_alignment=left_alignment is not None
    )
    return rule, fit


def _features(yes: Tensor, alignment: Tensor | None, masked: Mapping[int, Sequence[int]]) -> Tensor:
    """[N, F]: what the rule multiplies with each weight."""
    count = yes.shape[-1] - len(masked) + (alignment is not None)
    rule = ChecklistRule(weights=(0.0,) * count, masked=masked, has_alignment=alignment is not None)
    return rule.features(yes.double(), None if alignment is None else alignment.double())


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
