# SPDX-License-Identifier: Apache-2.0
"""Asking a pairwise judge about numbered images of a set: calls counted, answers checked, failures masked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.core.preference.ranking import MAX_LOG_ODDS
from visalign.interfaces import PairwiseReward, Preferences
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import Naming
from visalign.rewards.base.images import as_contract


@dataclass(frozen=True)
class PairAnswers:
    """What a judge said of N ordered pairs."""

    log_odds: Tensor
    """[N] float64, ln(p / (1 − p)) that the left one is better, NaN where the judge failed.

    Within ±`MAX_LOG_ODDS`, so that a certain "yes" can be averaged with a certain "no".
    """
    reasons: list[str | None]
    """Why an answer is missing; None for the others."""

    @property
    def prob(self) -> Tensor:
        """[N] float64 probability that the left one is better; exactly 0 or 1 where the judge is certain."""
        prob = self.log_odds.sigmoid()
        prob = torch.where(self.log_odds >= MAX_LOG_ODDS, 1.0, prob)
        return torch.where(self.log_odds <= -MAX_LOG_ODDS, 0.0, prob)


class PairAsker:
    """One judge and n images [3, H, W] in [0, 1] with their prompts (both images of a pair must have the same
    one) and records; pairs are given by number.

    A judge that has `compare_pairs(images, pairs, prompts, metadata)`, with n images and prompts and pairs
    [N, 2], is asked through it, so that it reads and encodes each image once whatever the pairs; any other
    gets `compare` with all pairs of a round in one call.
    """

    def __init__(
        self,
        judge: PairwiseReward,
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
            answer = self._ask(pairs)
        return read_preferences(one_each(self.judge.name, answer, len(pairs)))

    def _ask(self, pairs: Tensor) -> Any:
        indexed = getattr(self.judge, "compare_pairs", None)
        if indexed is not None:
            return indexed(as_contract(self._images), pairs, list(self._prompts), list(self._metadata))
        left, right = pairs.T.tolist()
        return self.judge.compare(
            as_contract([self._images[i] for i in left]),
            as_contract([self._images[j] for j in right]),
            [self._prompts[i] for i in left],
            [self._metadata[i] for i in left],
        )


def one_each(name: str, answer: Any, size: int) -> Preferences:
    """What a judge returned, checked to be one preference per pair."""
    if isinstance(answer, Preferences) and len(answer) == size:
        return answer
    given = f"{len(answer)} of them" if isinstance(answer, Preferences) else type(answer).__name__
    raise RewardError(
        f"Judge {name!r} returned {given} for {size} pairs; it must return one "
        "visalign.interfaces.Preferences with an entry per pair."
    )


def read_preferences(answer: Preferences) -> PairAnswers:
    """Log-odds and reasons; a valid entry that is no probability counts as a failure with that reason."""
    prob = answer.prob.detach().cpu().double()
    valid = answer.valid.cpu() & (prob >= 0) & (prob <= 1)
    log_odds = torch.logit(prob)
    if answer.log_odds is not None:
        given = answer.log_odds.detach().cpu().double()
        log_odds = torch.where(torch.isnan(given), log_odds, given)
    log_odds = torch.where(valid, log_odds.clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS), torch.nan)
    given_reasons = answer.reason or [None] * len(prob)
    reasons: list[str | None] = []
    for ok, said, reason in zip(valid.tolist(), answer.valid.tolist(), given_reasons, strict=True):
        missing = "the preference is no probability" if said else "no reason given"
        reasons.append(None if ok else reason or missing)
    return PairAnswers(log_odds, reasons)


def distinct_images(images: Sequence[Tensor], labels: Sequence[Any]) -> tuple[list[int], list[int]]:
    """(position of the first of each distinct image, number of the distinct one of each image); images are
    the same where content and label (hashable: a prompt, a group) are equal.
    """
    seen: dict[Any, int] = {}
    first: list[int] = []
    index: list[int] = []
    for position, (image, label) in enumerate(zip(images, labels, strict=True)):
        pixels = hashlib.sha256(image.detach().cpu().contiguous().numpy().tobytes()).digest()
        key = (label, tuple(image.shape), pixels)
        if key not in seen:
            seen[key] = len(first)
            first.append(position)
        index.append(seen[key])
    return first, index
