# SPDX-License-Identifier: Apache-2.0
"""Heatmaps against the truth, by hand; coverage of Laplace intervals on draws from that distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from assets.build.heatmaps import heatmap_quality, laplace_coverage


def test_two_maps_by_hand() -> None:
    truth = np.zeros((3, 2, 2))
    truth[0, 0, 0] = truth[1, 0, 0] = truth[1, 0, 1] = 1.0
    heat = np.array([[[0.9, 0.6], [0.1, 0.0]], [[0.4, 0.2], [0.3, 0.0]], [[0.7, 0.0], [0.0, 0.0]]])
    quality = heatmap_quality(heat, truth)
    assert quality.auc == pytest.approx((1 + 3 / 4) / 2)  # of the second, 0.2 is below the 0.3 of a right cell
    assert quality.iou == pytest.approx((1 / 2 + 0) / 2)
    assert (quality.found, quality.alarms) == (0.5, 1.0)
    assert quality.error == pytest.approx((0.1 + 0.6 + 0.1 + 0.6 + 0.8 + 0.3 + 0.7) / 12)
    assert quality.correlation == pytest.approx(np.corrcoef(heat[:2].ravel(), truth[:2].ravel())[0, 1])


def test_a_perfect_map_and_images_of_one_kind_alone() -> None:
    truth = np.zeros((2, 3, 3))
    nothing = heatmap_quality(truth, truth)
    assert math.isnan(nothing.correlation) and math.isnan(nothing.auc) and math.isnan(nothing.iou)
    assert (nothing.alarms, nothing.error) == (0.0, 0.0)
    truth[:, 1, 1] = 1.0
    perfect = heatmap_quality(truth, truth)
    assert (perfect.auc, perfect.iou, perfect.found) == (1.0, 1.0, 1.0)
    assert perfect.correlation == pytest.approx(1.0) and math.isnan(perfect.alarms)


def test_right_deviations_cover_their_level_and_half_of_them_cover_less() -> None:
    rng = np.random.default_rng(0)
    std = rng.uniform(0.1, 2.0, size=(4, 50, 50))
    truth = rng.laplace(0.0, std / math.sqrt(2))
    covered = laplace_coverage(np.zeros_like(truth), std, truth)
    for level, share in covered.items():
        assert share == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / truth.size))
    halved = laplace_coverage(np.zeros_like(truth), std / 2, truth, [0.75])
    assert halved[0.75] == pytest.approx(0.5, abs=0.02)  # 1 − √(1 − p)
