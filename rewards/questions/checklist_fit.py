# SPDX-License-Identifier: Apache-2.0
"""Learning a checklist's weights from pairs: logistic regression on differences of answers, weights ≥ 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from .checklist_rule import ChecklistRule


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
    _check(left, right, label, weight, penalty)
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


def _check(left: Tensor, right: Tensor, label: Tensor, weight: Tensor | None, penalty: float) -> None:
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
        left: [N, Q] answers for the left pictures: 1 yes, 0 no, or the probability of yes; NaN where a
            question was not answered, which leaves the pair out.
        right: [N, Q].
        label: [N] probability that the left picture is better.
        masked: question -> the questions that count 0 unless its answer is yes, as in `ChecklistRule`.
        left_alignment: [N] text-image alignment of the left pictures, if the rule shall have it.
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
