# SPDX-License-Identifier: Apache-2.0
"""Statistics of images and distances of features, by hand values."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.training.images import toy_trainer
from visalign.training.diffusion.image_statistics import STATISTICS, feature_drift, group_diversity, image_statistics


def _flat(*colour: float) -> torch.Tensor:
    return torch.tensor(colour)[:, None, None].expand(3, 8, 8)


def test_light_colour_and_detail_of_images_that_one_can_count():
    """Red; black; a board of single black and white pixels, all energy at the finest frequency. Stripes of
    four black and four white have harmonics 1/8 and 3/8 with energies as 1/sin²: the latter's share is
    sin²(π/8) = .1464."""
    board = ((torch.arange(8)[:, None] + torch.arange(8)) % 2).float().expand(3, 8, 8)
    stripes = (torch.arange(8) // 4).float()[None, None].expand(3, 8, 8)
    statistics = image_statistics(torch.stack([_flat(1, 0, 0), _flat(0, 0, 0), board, stripes]))
    expected = [
        [0.299, 1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [0.5, 0.0, 0.5, 1.0],
        [0.5, 0.0, 0.5, math.sin(math.pi / 8) ** 2],
    ]
    assert statistics.tolist() == [pytest.approx(row, abs=1e-6) for row in expected]
    assert len(STATISTICS) == statistics.shape[1]


def test_a_clip_looks_like_its_middle_frame():
    clip = torch.stack([_flat(0, 0, 0), _flat(1, 1, 1), _flat(0, 0, 0)])[None]
    assert image_statistics(clip)[0, 0] == pytest.approx(1.0)


def test_diversity_is_the_mean_distance_within_groups():
    """1 − cos: group 0 has 0, 1, 1 between its pairs, group 1 has 2; group 2 has no pair."""
    z = torch.tensor([[1.0, 0], [3, 0], [0, 2], [1, 0], [-5, 0], [1, 1]])
    assert group_diversity(z, torch.tensor([0, 0, 0, 1, 1, 2])) == pytest.approx((2 / 3 + 2) / 2)
    assert math.isnan(group_diversity(z, torch.arange(6)))


def test_drift_is_measured_against_the_same_samples_before():
    """Two of the four unit vectors turn by 90°: mean distance 1/2. The base's pairs are apart by 1 (four of
    six) and 2. The means are (0, 1/2) and 0, the covariances diag(0, 3/4) and I/2."""
    base = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    same = feature_drift(3 * base, base)
    assert same == pytest.approx({"feature_distance": 0, "feature_frechet": 0, "feature_drift": 0}, abs=1e-9)
    now = torch.tensor([[0.0, 1], [0, 1], [0, 1], [0, -1]])
    drift = feature_drift(now, base)
    assert drift["feature_distance"] == pytest.approx(0.5)
    assert drift["feature_drift"] == pytest.approx(0.5 / (8 / 6))
    # |μ|² + tr Σ + tr Σ0 − 2 tr (Σ Σ0)^½ = 1/4 + 3/4 + 1 − 2 √(3/8)
    assert drift["feature_frechet"] == pytest.approx(2 - 2 * math.sqrt(3 / 8))


def test_a_run_logs_how_its_images_look_and_how_varied_they_are(tmp_path):
    record = toy_trainer(tmp_path, features=lambda images: images.flatten(1)).iterate()
    assert {f"image/{name}" for name in STATISTICS} <= set(record) and 0 < record["diversity"] < 0.1
    assert "diversity" not in toy_trainer(tmp_path).iterate()
