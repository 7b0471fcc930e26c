# SPDX-License-Identifier: Apache-2.0
"""Comparisons of numbered images by a pairwise judge: calls counted, answers checked, failures masked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.core.preference.ranking import MAX_LOG_ODDS
from visalign.data.sets.image_references import CompletionText
from visalign.errors import Naming
from visalign.interfaces import Preferences
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.images import as_contract


@dataclass(frozen=True)
class PairAnswers:
    """Answers to N ordered pairs."""

    log_odds: Tensor
    """[N] float64, ln(p / (1 − p)) that the left one is better, NaN where the judge failed.

    Clamped to ±`MAX_LOG_ODDS`, so that a certain "yes" can be averaged with a certain "no".
    """
    reasons: list[str | None]  # Reason why an answer is missing; None for the others

    @property
    def prob(self) -> Tensor:
        """[N] float64 probability that the left one is better; exactly 0 or 1 where the judge is certain."""
        prob = self.log_odds.sigmoid()
        prob = torch.where(self.log_odds >= MAX_LOG_ODDS, 1.0, prob)
        return torch.where(self.log_odds <= -MAX_LOG_ODDS, 0.0, prob)


class PairAsker:
    """Asks one judge about pairs of n images [3, H, W] in [0, 1], given by number, and counts the calls.

    Both images of a pair must have the same prompt. A judge may have `compare_pairs(images, pairs, prompts,
    metadata)`, which encodes each of n numbered images once; any other gets all pairs of a round in one `compare`.
    """

    def __init__(
        self,
        judge: Any,
        images: Sequence[Tensor],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any] | None],
    ) -> None:
        self.judge = judge
        self.calls = 0
        self._images, self._prompts, self._metadata = list(images), list(prompts), list(metadata)

    def ask(self, pairs: Tensor) -> PairAnswers:
        """Ask about each ordered pair [N, 2] (left, right) once."""
        if not len(pairs):
            return PairAnswers(torch.zeros(0, dtype=torch.float64), [])
        self.calls += len(pairs)
        with Naming(self.judge.name):
            preferences = self._compare(pairs)
        return read_preferences(check_preferences(self.judge.name, preferences, len(pairs)))

    def _compare(self, pairs: Tensor) -> Any:
        if hasattr(self.judge, "compare_pairs"):
            images = as_contract(self._images)
            return self.judge.compare_pairs(images, pairs, list(self._prompts), list(self._metadata))
        left, right = pairs.T.tolist()
        return self.judge.compare(
            as_contract([self._images[i] for i in left]),
            as_contract([self._images[j] for j in right]),
            [self._prompts[i] for i in left],
            [self._metadata[i] for i in left],
        )


def check_preferences(name: str, preferences: Any, size: int) -> Preferences:
    """Return what a judge returned, checked to be one preference per pair."""
    if isinstance(preferences, Preferences) and len(preferences) == size:
        return preferences
    count = len(preferences) if isinstance(preferences, Preferences) else f"a {type(preferences).__name__}"
    raise RewardError(f"Judge {name!r} returned {count} for {size} pairs; needed are Preferences, an entry per pair.")


def read_preferences(preferences: Preferences) -> PairAnswers:
    """Return log-odds and reasons; a valid entry that is no probability becomes a failure."""
    prob = preferences.prob.detach().cpu().double()
    valid = preferences.valid.cpu() & (prob >= 0) & (prob <= 1)
    log_odds = torch.logit(prob)
    if preferences.log_odds is not None:
        exact = preferences.log_odds.detach().cpu().double()
        log_odds = torch.where(torch.isnan(exact), log_odds, exact)
    log_odds = torch.where(valid, log_odds.clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS), torch.nan)
    reasons: list[str | None] = []
    given_reasons = preferences.reason or [None] * len(prob)
    for is_valid, claims_valid, reason in zip(valid.tolist(), preferences.valid.tolist(), given_reasons, strict=True):
        default = "the preference is no probability" if claims_valid else "no reason given"
        reasons.append(None if is_valid else reason or default)
    return PairAnswers(log_odds, reasons)


def distinct_images(images: Sequence[Tensor], labels: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Find images with equal pixels and an equal label (hashable: a prompt, a group).

    Returns:
        (position of the first of each distinct image, number of the distinct image of each image).
    """
    numbers: dict[Any, int] = {}
    first: list[int] = []
    index: list[int] = []
    for position, (image, label) in enumerate(zip(images, labels, strict=True)):
        if isinstance(image, CompletionText):
            key = (label, (), image)
        else:
            pixels = hashlib.sha256(image.detach().cpu().contiguous().numpy().tobytes()).digest()
            key = (label, tuple(image.shape), pixels)
        if key not in numbers:
            numbers[key] = len(first)
            first.append(position)
        index.append(numbers[key])
    return first, index
