# SPDX-License-Identifier: Apache-2.0
"""A linear reward on the frozen states of the packaged vision-language model, fitted in a second."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

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


def fit(left: Tensor, right: Tensor, label: Tensor, weight: Tensor, strength: float) -> Tensor:
    """Weights [D] of Bradley-Terry on standardised states; a pair counts by its weight of mean 1."""
    scale = torch.cat((left, right)).std(0) + 1e-4
    difference = (left - right) / scale
    coefficients = torch.zeros(difference.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([coefficients], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        errors = F.binary_cross_entropy_with_logits(difference @ coefficients, label, reduction="none")
        total = (weight * errors).mean() + strength / 2 * coefficients.square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    return coefficients.detach() / scale


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


class LinearReward:
    """Such a reward from its file of weights."""

    name, unit, range, higher_is_better = "linear", "logit", (-float("inf"), float("inf")), True

    def __init__(self, file: str | Path, model: str = "shapes-vlm") -> None:
        self.coefficients, self.model = torch.load(file), model

    def score(self, images: Any, prompts: Sequence[str], metadata: Any = None) -> Scores:
        """Score B images."""
        values = features(images, prompts, self.model) @ self.coefficients
        return make_scores(values.float(), [None] * len(values), self.unit)
