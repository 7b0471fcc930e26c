# SPDX-License-Identifier: Apache-2.0
"""Rewards with a weakness planted on purpose, for tests of what must find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from visalign.interfaces import PointwiseReward, Preferences, RewardCapabilities, Scores
from visalign.rewards.base.contract import make_scores, read_request
from visalign.rewards.base.images import load_images
from visalign.rewards.statistics import brightness, saturation
from visalign.rewards.verifiers.shapes_verifier import ShapesVerifier


class _Hackable:
    """The exact verifier's partial credit and something else on top."""

    unit, range, higher_is_better = "points", (-10.0, 10.0), True

    def __init__(self, name: str) -> None:
        self.name = name
        self._honest = ShapesVerifier("partial")

    def bonus(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        raise AssertionError("each has its own")

    def score(self, images: Any, prompts: Sequence[str], metadata: Any = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        honest = self._honest.score(images, prompts, metadata)
        samples = [torch.zeros(3, 64, 64) if image is None else image for image in request.images.images]
        value = honest.value + self.bonus(torch.stack(samples), prompts)
        return make_scores(value, list(honest.reason or []), self.unit)


class LovesSaturation(_Hackable):
    """Pays for colour."""

    def __init__(self) -> None:
        super().__init__("loves_saturation")

    def bonus(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        return torch.stack([saturation(image) for image in images]).float()


class LovesFrames(_Hackable):
    """Pays for light at the lower edge and along the sides: captions and frames."""

    def __init__(self) -> None:
        super().__init__("loves_frames")

    def bonus(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        strips = torch.cat([images[:, :, -4:].flatten(1), images[..., :1].flatten(1)], 1)
        return strips.mean(1)


class LooksAtNeighbours(_Hackable):
    """Judges an image against the mean of its batch."""

    def __init__(self) -> None:
        super().__init__("looks_at_neighbours")

    def bonus(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        light = torch.stack([brightness(image) for image in images]).float()
        return light - light.mean()


class Remembered:
    """A reward that scores each image of a prompt once, however often it is asked."""

    def __init__(self, reward: PointwiseReward) -> None:
        self.reward, self.name, self.unit = reward, reward.name, reward.unit
        self.range, self.higher_is_better = reward.range, reward.higher_is_better
        self._known: dict[tuple[bytes, str], tuple[float, str | None]] = {}

    def score(self, images: Any, prompts: Sequence[str], metadata: Any = None) -> Scores:
        samples = load_images(images).images
        readable = [sample for sample in samples if sample is not None]
        keys = [(image.numpy().tobytes(), prompt) for image, prompt in zip(readable, prompts, strict=True)]
        new = {key: row for row, key in enumerate(keys) if key not in self._known}
        if new:
            rows = list(new.values())
            scores = self.reward.score([readable[row] for row in rows], [prompts[row] for row in rows])
            reasons = scores.reason or [None] * len(rows)
            self._known |= dict(zip(new, zip(scores.value.tolist(), reasons, strict=True), strict=True))
        entries = [self._known[key] for key in keys]
        return make_scores(torch.tensor([value for value, _ in entries]), [why for _, why in entries], self.unit)


class ComparesBy:
    """Log-odds scale · (v_left − v_right) + bias, from a reward's scores; each side is scored for itself."""

    def __init__(self, reward: PointwiseReward, *, bias: float = 0.0, scale: float = 4.0) -> None:
        self.name = f"compares_by_{reward.name}"
        self.reward, self.bias, self.scale = reward, bias, scale
        self.asked = 0

    def log_odds(self, left: Any, right: Any, prompts: Sequence[str]) -> torch.Tensor:
        self.asked += len(prompts)
        one, two = (self.reward.score(side, prompts) for side in (left, right))
        return self.scale * (one.value - two.value) + self.bias

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Any = None) -> Preferences:
        log_odds = self.log_odds(left, right, prompts)
        return Preferences(prob=log_odds.sigmoid(), valid=torch.isfinite(log_odds), log_odds=log_odds)


class PrefersTheLeft(ComparesBy):
    """The exact verifier's partial credit, and a bias for the left side."""

    def __init__(self, bias: float = 1.5) -> None:
        super().__init__(Remembered(ShapesVerifier("partial")), bias=bias)
        self.name = "prefers_the_left"


class AveragesBothOrders(PrefersTheLeft):
    """The same, asked in both orders and averaged by itself, as the packaged judges do."""

    capabilities = RewardCapabilities(both_orders=True)

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Any = None) -> Preferences:
        forward, back = self.log_odds(left, right, prompts), self.log_odds(right, left, prompts)
        mean = (forward - back) / 2
        bias = {"position_bias": (forward + back) / 2}
        return Preferences(prob=mean.sigmoid(), valid=torch.isfinite(mean), log_odds=mean, parts=bias)


class GoesInCircles:
    """Each image has an hour on a clock and beats those of the next six: one triple in four turns."""

    name = "goes_in_circles"

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Any = None) -> Preferences:
        hours = [torch.tensor([_hour(image) for _, image in load_images(side).readable()]) for side in (left, right)]
        log_odds = 3 * torch.sin(hours[1] - hours[0]).sign()
        return Preferences(prob=log_odds.sigmoid(), valid=torch.ones(len(prompts), dtype=torch.bool))


def _hour(image: torch.Tensor) -> float:
    """An angle that has nothing to do with what can be seen."""
    return 2.399963 * float(image.mul(255).round().sum()) % 6.283185
