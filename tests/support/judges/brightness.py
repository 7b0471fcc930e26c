# SPDX-License-Identifier: Apache-2.0
"""Pairwise and pointwise judges for the tests: they read an image's brightness, and count what they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Preferences, Scores
from visalign.rewards import load_images, read_request


def grey(values: list[float], size: int = 8) -> Tensor:
    """[B, 3, size, size] even images, of the given brightness each."""
    return torch.tensor(values)[:, None, None, None].expand(-1, 3, size, size).clone()


class BrightnessPairs:
    """ℓ = scale (brightness left − right) + bias; votes with `hard`; fails where `fails` says so."""

    name = "brightness_pairs"

    def __init__(
        self,
        *,
        scale: float = 10.0,
        bias: float = 0.0,
        hard: bool = False,
        fails: Callable[[float, float], bool] = lambda left, right: False,
    ) -> None:
        self.scale, self.bias, self.hard, self.fails = scale, bias, hard, fails
        self.asked: list[tuple[float, float]] = []
        self.rounds = 0

    def compare(self, left: Any, right: Any, prompts: Any, metadata: Any = None) -> Preferences:
        first = [round(float(image.mean()), 4) for _, image in load_images(left).readable()]
        second = [round(float(image.mean()), 4) for _, image in load_images(right).readable()]
        assert len(first) == len(second) == len(prompts)
        pairs = list(zip(first, second, strict=True))
        self.asked += pairs
        self.rounds += 1
        odds = torch.tensor([self.scale * (a - b) + self.bias for a, b in pairs])
        failed = torch.tensor([self.fails(a, b) for a, b in pairs])
        prob = (1 + odds.sign()) / 2 if self.hard else odds.sigmoid()
        return Preferences(
            prob=torch.where(failed, torch.nan, prob),
            valid=~failed,
            reason=["no answer" if bad else None for bad in failed.tolist()],
        )


class Brightness:
    """Mean brightness with a constant standard deviation; counts its images."""

    name = "brightness"
    range = (0.0, 1.0)

    def __init__(self, *, unit: str = "brightness", std: float | None = None, higher_is_better: bool = True) -> None:
        self.unit, self.std, self.higher_is_better = unit, std, higher_is_better
        self.seen = self.most = 0  # images, and the most of one call

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
        batch = read_request(self.name, images, prompts, metadata).images
        self.seen += len(batch)
        self.most = max(self.most, len(batch))
        value = torch.tensor([torch.nan if image is None else float(image.mean()) for image in batch.images])
        std = None if self.std is None else torch.full_like(value, self.std)
        return Scores(value=value, valid=batch.valid, unit=self.unit, std=std, reason=batch.reasons)
