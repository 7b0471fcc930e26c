# SPDX-License-Identifier: Apache-2.0
"""Judges without a model, to show what drifted while another reward rose: no weights, no prompt."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import PIL
import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.rewards.base.contract import check_choices, make_scores, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import to_pil

LUMA = (0.299, 0.587, 0.114)
"""ITU-R BT.601 weights of red, green and blue."""
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

    About 0 for grey, 15 slightly, 45 averagely, 82 highly and above 109 extremely colourful images.

    Source: Hasler and Süsstrunk, "Measuring colourfulness in natural images", SPIE 5007, 2003, sec. 7 (M⁽³⁾).
    """
    red, green, blue = image.double() * 255
    opponents = torch.stack([red - green, (red + green) / 2 - blue]).flatten(1)
    return opponents.var(1, correction=0).sum().sqrt() + 0.3 * opponents.mean(1).square().sum().sqrt()


def edge_density(image: Tensor) -> Tensor:
    """Share of pixels whose Sobel gradient |∇Y|/8 exceeds `EDGE_THRESHOLD`: scalar float64 in [0, 1].

    The borders repeat the outermost pixels. Images of one flat colour have 0; a hard edge has two pixels.
    """
    luma = F.pad(_luma(image)[None, None], (1, 1, 1, 1), mode="replicate")
    across = luma.new_tensor([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
    kernels = torch.stack([across, across.T])[:, None]
    gradient = F.conv2d(luma, kernels).square().sum(1).sqrt()
    return (gradient > EDGE_THRESHOLD).double().mean()


def laplacian_variance(image: Tensor) -> Tensor:
    """Var(∇²Y) of the luma Y on 0-255 with the 4-neighbour Laplacian, borders left out: scalar float64.

    The population variance in squared 8-bit levels; H and W are at least 3.

    Source: Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000 (LAPV).
    """
    luma = _luma(image) * 255
    kernel = luma.new_tensor([[0, 1, 0], [1, -4, 1], [0, 1, 0]])
    return F.conv2d(luma[None, None], kernel[None, None]).var(correction=0)


STATISTICS: dict[str, tuple[Callable[[Tensor], Tensor], str, tuple[float, float]]] = {
    "brightness": (brightness, "mean luma", (0.0, 1.0)),
    "contrast": (contrast, "standard deviation of luma", (0.0, 0.5)),
    "saturation": (saturation, "mean HSV saturation", (0.0, 1.0)),
    # √S + 0.3 √M with S + M ≤ 2 · 255² is largest at S : M = 1 : 0.09
    "colourfulness": (colourfulness, "Hasler-Süsstrunk M3", (0.0, 255 * math.sqrt(2 * 1.09))),
    "edge_density": (edge_density, "share of pixels", (0.0, 1.0)),
}
"""name -> (function of an image, unit, range). Brightness drifts when a reward likes bright or dark images,
saturation rises with CLIP-type rewards that are over-optimized."""


class ImageStatistic:
    """A statistic of the pixels (`STATISTICS`) as a reward.

    `prefer` says whether "larger" or "smaller" is better; the value is the statistic either way.
    """

    capabilities = RewardCapabilities(needs_prompt=False)
    name: str
    unit: str
    range: tuple[float, float]
    higher_is_better = True

    def __init__(self, statistic: str, prefer: str = "larger") -> None:
        check_choices("image statistic", statistic=(statistic, STATISTICS))
        self.name = statistic
        self.measure, self.unit, self.range = STATISTICS[statistic]
        self.higher_is_better = _direction(statistic, prefer)
        self.identity = Identity(judge=statistic, model="statistic of the pixels")

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        values = torch.full((len(request),), torch.nan)
        for row, image in request.images.readable():
            try:
                values[row] = float(self.measure(image))
            except (OSError, ValueError) as error:  # an image too small, or too large for the JPEG encoder
                height, width = image.shape[1:]
                reasons[row] = f"{self.name} cannot measure an image of {width}×{height} pixels: {error}"
        return make_scores(values, reasons, self.unit)


class Sharpness(ImageStatistic):
    """Variance of the Laplacian; higher means more and harder edges (noise counts as edges, too).

    Images below 3×3 are invalid.
    """

    name = "sharpness"
    unit = "8-bit levels²"
    range = (0.0, 1020.0**2)
    """The upper end is a checkerboard of single black and white pixels: ∇²Y = ±4·255."""
    identity = Identity(judge="sharpness", model="variance of the Laplacian")

    def __init__(self) -> None:
        """There is nothing to choose."""

    @staticmethod
    def measure(image: Tensor) -> Tensor:
        """Compute `laplacian_variance` of an image that is large enough."""
        if min(image.shape[1:]) < 3:
            raise ValueError("sides of at least 3 are needed")
        return laplacian_variance(image)


class JpegSize(ImageStatistic):
    """Size of the JPEG file of an image in kilobytes of 1000 bytes, a cheap stand-in for its detail.

    flow_grpo's `jpeg_incompressibility` is this value at quality 95; its `jpeg_compressibility` the negative.
    The byte count depends on the JPEG library that PIL was built with: compare numbers of one machine only.

    Args:
        quality: JPEG quality, 1 to 95 (above 95 PIL switches quantization off in parts).
        prefer: "larger" rewards detail, "smaller" simplicity; the value is the size either way.
    """

    name = "jpeg_size"
    unit = "kB"
    range = (0.0, float("inf"))

    def __init__(self, quality: int = 95, prefer: str = "larger") -> None:
        if not 1 <= quality <= 95:
            raise ValueError(f"jpeg_size: quality is {quality!r}; allowed are whole numbers from 1 to 95.")
        self.quality, self.higher_is_better = quality, _direction(self.name, prefer)
        options = {"quality": quality, "pillow": PIL.__version__}
        self.identity = Identity(judge=self.name, model="PIL", options=options)

    def measure(self, image: Tensor) -> float:
        """Kilobytes of the encoded image."""
        buffer = io.BytesIO()
        to_pil(image).save(buffer, format="JPEG", quality=self.quality)
        return buffer.tell() / 1000


def _direction(name: str, prefer: str) -> bool:
    check_choices(name, prefer=(prefer, ("larger", "smaller")))
    return prefer == "larger"


def _luma(image: Tensor) -> Tensor:
    return torch.einsum("c,chw->hw", image.new_tensor(LUMA, dtype=torch.float64), image.double())
