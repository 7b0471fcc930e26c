# SPDX-License-Identifier: Apache-2.0
"""Rewards with a weakness that is planted on purpose, for tests of what must find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from visalign.interfaces import Scores
from visalign.rewards.contract import make_scores, read_request
from visalign.rewards.image_statistics import brightness, saturation
from visalign.rewards.shapes_verifier import ShapesVerifier


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
        pictures = [torch.zeros(3, 64, 64) if image is None else image for image in request.images.images]
        value = honest.value + self.bonus(torch.stack(pictures), prompts)
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
    """Judges a picture against the mean of its batch."""

    def __init__(self) -> None:
        super().__init__("looks_at_neighbours")

    def bonus(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        light = torch.stack([brightness(image) for image in images]).float()
        return light - light.mean()
