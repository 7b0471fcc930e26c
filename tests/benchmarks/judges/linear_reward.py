# SPDX-License-Identifier: Apache-2.0
"""A linear reward on the frozen states of the packaged vision-language model, fitted in a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.interfaces import Scores
from visalign.rewards.base.contract import make_scores, read_request
from visalign.rewards.questions.reward_dance import YES_NO
from visalign.rewards.questions.visual_quality_r1 import RATING
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.requests import requests

STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)
"""L2 strengths that cross-validation chooses from."""


@cache
def engine(model: str) -> VisionLanguageEngine:
    return VisionLanguageEngine.from_pretrained(model, feature_bytes=1 << 28, max_tokens_per_batch=1 << 14)


@torch.no_grad()
def features(images: Any, prompts: Sequence[str], model: str = "shapes-vlm") -> Tensor:
    """The states [N, D] at two questions, float64."""
    request, columns = read_request("linear", images, prompts, None), []
    for name, question in (("yes_no", YES_NO), ("rating", RATING)):
        template = engine(model).template(name, question)
        _, queries = requests(request, template, list(request.images.reasons))
        columns.append(engine(model).hidden(template, queries).states)
    return torch.cat(columns, 1).double()


def minimise(loss: Callable[[Tensor], Tensor], width: int, strength: float) -> Tensor:
    """Coefficients [width] at the least of a convex loss plus L2, float64."""
    coefficients = torch.zeros(width, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([coefficients], max_iter=100, line_search_fn="strong_wolfe")

    def total() -> Tensor:
        optimizer.zero_grad()
        value = loss(coefficients) + strength / 2 * coefficients.square().sum()
        value.backward()
        return value

    optimizer.step(total)
    return coefficients.detach()


def fit(left: Tensor, right: Tensor, label: Tensor, weight: Tensor, strength: float) -> Tensor:
    """Weights [D] of Bradley-Terry on standardised states; a pair counts by its weight of mean 1."""
    scale = torch.cat((left, right)).std(0) + 1e-4
    difference = (left - right) / scale

    def loss(coefficients: Tensor) -> Tensor:
        errors = F.binary_cross_entropy_with_logits(difference @ coefficients, label, reduction="none")
        return (weight * errors).mean()

    return minimise(loss, difference.shape[1], strength) / scale


def fit_choices(states: Tensor, chosen: Tensor, strength: float) -> Tensor:
    """Weights [D] of the chosen one [P] of each group of states [P, K, D], by softmax over the group."""
    scale = states.flatten(0, 1).std(0) + 1e-4

    def loss(coefficients: Tensor) -> Tensor:
        return F.cross_entropy(states / scale @ coefficients, chosen)

    return minimise(loss, states.shape[2], strength) / scale


def strength_of(left: Tensor, right: Tensor, label: Tensor, fold: Tensor) -> float:
    """The L2 strength under which other folds predict the labels best."""

    def error(strength: float) -> float:
        total = 0.0
        for part in fold.unique():
            rows = fold != part
            logits = (left - right)[~rows] @ fit(left[rows], right[rows], label[rows], torch.ones(()), strength)
            total += float(F.binary_cross_entropy_with_logits(logits, label[~rows], reduction="sum"))
        return total

    return min(STRENGTHS, key=error)


def tilted(scores: np.ndarray, right: np.ndarray, divergence: float) -> np.ndarray:
    """Accuracy [P] of the policy w ∝ exp(βr) over the N samples [P, N] of a prompt, at a mean KL over prompts.

    It is what the reward's maximum under a KL penalty comes to on these samples; β is found by bisection.
    """
    count, centred = scores.shape[1], scores - scores.max(1, keepdims=True)
    low, high = 0.0, 1e4 / scores.std()
    for _ in range(60):
        middle = (low + high) / 2
        weight = np.exp(middle * centred)
        weight /= weight.sum(1, keepdims=True)
        spent = (weight * np.log(np.maximum(weight, 1e-300) * count)).sum(1).mean()
        low, high = (middle, high) if spent < divergence else (low, middle)
    return (weight * right).sum(1)


class LinearReward:
    """Such a reward from its file of weights."""

    name, unit, range, higher_is_better = "linear", "logit", (-float("inf"), float("inf")), True

    def __init__(self, file: str | Path, model: str = "shapes-vlm") -> None:
        self.coefficients, self.model = torch.load(file), model

    def score(self, images: Any, prompts: Sequence[str], metadata: Any = None) -> Scores:
        """Score B images."""
        values = features(images, prompts, self.model) @ self.coefficients
        return make_scores(values.float(), [None] * len(values), self.unit)
