# SPDX-License-Identifier: Apache-2.0
"""Statistics of the picture itself, to show what drifted while another reward rose: no model, no prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import make_scores, read_request, scatter
from visalign.rewards.base.identity import Identity

from .sharpness import LUMA

EDGE_THRESHOLD = 0.1
"""Gradient of the luma per pixel from which a pixel counts as edge; full contrast over one pixel is 0.5."""


def brightness(image: Tensor) -> Tensor:
    """Mean luma Y = .299 R + .587 G + .114 B of an image [3, H, W] in [0, 1]: scalar float64 in [0, 1]."""
    return _luma(image).mean()


def contrast(image: Tensor) -> Tensor:
    """RMS contrast, the population standard deviation of the luma: scalar float64 in [0, 0.5].

    Source: Peli, "Contrast in complex images", JOSA A 7(10), 1990 (RMS contrast).
    """
    return _luma(image).std(correction=0)


def saturation(image: Tensor) -> Tensor:
    """Mean of HSV's S = (max − min)/max over the channels, 0 where max is 0: scalar float64 in [0, 1]."""
    levels = image.double()
    high, low = levels.amax(0), levels.amin(0)
    return torch.where(high > 0, (high - low) / high.clamp(min=1e-12), 0.0).mean()


def colourfulness(image: Tensor) -> Tensor:
    """√(σ²_rg + σ²_yb) + 0.3 √(μ²_rg + μ²_yb) with rg = R − G, yb = (R + G)/2 − B on 0-255: scalar float64.

    About 0 for grey, 15 slightly, 45 averagely, 82 highly and above 109 extremely colourful pictures.

    Source: Hasler and Süsstrunk, "Measuring colourfulness in natural images", SPIE 5007, 2003, sec. 7 (M⁽³⁾).
    """
    red, green, blue = image.double() * 255
    opponents = torch.stack([red - green, (red + green) / 2 - blue]).flatten(1)
    return opponents.var(1, correction=0).sum().sqrt() + 0.3 * opponents.mean(1).square().sum().sqrt()


def edge_density(image: Tensor) -> Tensor:
    """Share of pixels whose Sobel gradient |∇Y|/8 exceeds `EDGE_THRESHOLD`: scalar float64 in [0, 1].

    The borders repeat the outermost pixels. Pictures of one flat colour have 0; a hard edge has two pixels.
    """
    luma = F.pad(_luma(image)[None, None], (1, 1, 1, 1), mode="replicate")
    across = luma.new_tensor([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
    kernels = torch.stack([across, across.T])[:, None]
    gradient = F.conv2d(luma, kernels).square().sum(1).sqrt()
    return (gradient > EDGE_THRESHOLD).double().mean()


class Brightness:
    """Mean luma; drifts when a reward likes bright or dark pictures."""

    name = "brightness"
    unit = "mean luma"
    range = (0.0, 1.0)

    def __init__(self, prefer: str = "larger") -> None:
        """Choose the direction: `prefer` is "larger" or "smaller"; the value is the statistic either way."""
        self.higher_is_better = _direction(self.name, prefer)
        self.identity = Identity(judge=self.name, model="statistic of the pixels")

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Measure each image; prompts and metadata are not looked at."""
        return _measured(brightness, self.name, self.unit, images, prompts, metadata)


class Contrast:
    """RMS contrast."""

    name = "contrast"
    unit = "standard deviation of luma"
    range = (0.0, 0.5)

    def __init__(self, prefer: str = "larger") -> None:
        """Choose the direction: `prefer` is "larger" or "smaller"; the value is the statistic either way."""
        self.higher_is_better = _direction(self.name, prefer)
        self.identity = Identity(judge=self.name, model="statistic of the pixels")

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Measure each image; prompts and metadata are not looked at."""
        return _measured(contrast, self.name, self.unit, images, prompts, metadata)


class Saturation:
    """Mean saturation; rises with CLIP-type rewards that are over-optimized."""

    name = "saturation"
    unit = "mean HSV saturation"
    range = (0.0, 1.0)

    def __init__(self, prefer: str = "larger") -> None:
        """Choose the direction: `prefer` is "larger" or "smaller"; the value is the statistic either way."""
        self.higher_is_better = _direction(self.name, prefer)
        self.identity = Identity(judge=self.name, model="statistic of the pixels")

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Measure each image; prompts and metadata are not looked at."""
        return _measured(saturation, self.name, self.unit, images, prompts, metadata)


class Colourfulness:
    """Colourfulness on the scale of Hasler and Süsstrunk."""

    name = "colourfulness"
    unit = "Hasler-Süsstrunk M3"
    range = (0.0, 255 * math.sqrt(2 * 1.09))
    """√S + 0.3 √M with S + M ≤ 2 · 255² is largest at S : M = 1 : 0.09."""

    def __init__(self, prefer: str = "larger") -> None:
        """Choose the direction: `prefer` is "larger" or "smaller"; the value is the statistic either way."""
        self.higher_is_better = _direction(self.name, prefer)
        self.identity = Identity(judge=self.name, model="statistic of the pixels")

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Measure each image; prompts and metadata are not looked at."""
        return _measured(colourfulness, self.name, self.unit, images, prompts, metadata)


class EdgeDensity:
    """Share of pixels that lie on an edge."""

    name = "edge_density"
    unit = "share of pixels"
    range = (0.0, 1.0)

    def __init__(self, prefer: str = "larger") -> None:
        """Choose the direction: `prefer` is "larger" or "smaller"; the value is the statistic either way."""
        self.higher_is_better = _direction(self.name, prefer)
        self.identity = Identity(judge=self.name, model="statistic of the pixels")

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Measure each image; prompts and metadata are not looked at."""
        return _measured(edge_density, self.name, self.unit, images, prompts, metadata)


def _direction(name: str, prefer: str) -> bool:
    if prefer not in ("larger", "smaller"):
        raise ValueError(f"{name}: prefer is {prefer!r}; allowed are 'larger' and 'smaller'.")
    return prefer == "larger"


def _measured(
    measure: Callable[[Tensor], Tensor],
    name: str,
    unit: str,
    images: Any,
    prompts: Sequence[str],
    metadata: Metadata | None,
) -> Scores:
    request = read_request(name, images, prompts, metadata)
    readable = request.images.readable()
    values = [float(measure(image)) for _, image in readable]
    value = scatter(values, [row for row, _ in readable], len(request))
    return make_scores(value, list(request.images.reasons), unit)


def _luma(image: Tensor) -> Tensor:
    weights = torch.tensor(LUMA, dtype=torch.float64, device=image.device)
    return torch.einsum("c,chw->hw", weights, image.double())
