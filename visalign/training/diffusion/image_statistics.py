# SPDX-License-Identifier: Apache-2.0
"""Statistics of images (light, colour, detail) and distances between them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from visalign.core import frechet_distance
from visalign.flow.rollout import middle_frames

STATISTICS = ("brightness", "saturation", "contrast", "high_frequency")


def image_statistics(images: Tensor) -> Tensor:
    """Compute [B, 4] float64 of images [B, 3, H, W] or clips [B, F, 3, H, W] (middle frame) in [0, 1].

    Brightness: mean luma, Y = .299 R + .587 G + .114 B (ITU-R BT.601). Saturation: mean of (max − min)/max over the
    colours, 0 for black. Contrast: standard deviation of Y (Peli 1990). High frequency: the share of the energy of Y
    about its mean at more than a quarter of a cycle per pixel, half of what can be shown, 0 for a flat image.
    """
    images = middle_frames(images).double()
    brightest, darkest = images.amax(1), images.amin(1)
    luma = torch.einsum("bchw,c->bhw", images, images.new_tensor([0.299, 0.587, 0.114]))
    mean = luma.mean((1, 2))
    energy = torch.fft.fft2(luma - mean[:, None, None]).abs().square()
    down, across = (torch.fft.fftfreq(side, device=luma.device).abs() for side in luma.shape[1:])
    fine = torch.maximum(down[:, None], across[None]) > 0.25
    total = energy.sum((1, 2))
    flat = total <= 1e-12 * luma[0].numel() ** 2
    return torch.stack(
        [
            mean,
            ((brightest - darkest) / torch.where(brightest > 0, brightest, 1.0)).mean((1, 2)),
            luma.std((1, 2), correction=0),
            torch.where(flat, 0.0, (energy * fine).sum((1, 2)) / torch.where(flat, 1.0, total)),
        ],
        1,
    )


def mean_distance(features: Tensor) -> Tensor:
    """Compute the mean cosine distance of the pairs of a set [n, d], n ≥ 2."""
    count, total = len(features), normalize(features.double(), dim=1).sum(0)
    # (n² − |Σ z|²)/(n (n − 1)), z of unit norm
    return (count**2 - total @ total).clamp(min=0) / (count * (count - 1))


def group_diversity(features: Tensor, group: Tensor) -> float:
    """Average the mean pairwise cosine distance of features [B, d] over groups; NaN without one of two samples."""
    sets = [features[group == label] for label in group.unique()]
    distances = [float(mean_distance(rows)) for rows in sets if len(rows) > 1]
    return sum(distances) / len(distances) if distances else math.nan


def feature_drift(features: Tensor, base: Tensor) -> dict[str, float]:
    """Measure how far samples moved from those of the same prompts and seeds before training, features [N, d].

    "feature_distance" is the mean cosine distance of a sample from its counterpart; "feature_frechet" the
    squared Fréchet distance of the two sets, of features of unit norm; "feature_drift" that distance over the
    mean distance of two of the base's samples.
    """
    z, z0 = (normalize(rows.double(), dim=1) for rows in (features, base))
    distance = float((1 - (z * z0).sum(1)).mean())
    base_distance = float(mean_distance(base))
    return {
        "feature_distance": distance,
        "feature_frechet": float(frechet_distance(z, z0)),
        "feature_drift": distance / base_distance if base_distance else math.nan,
    }
