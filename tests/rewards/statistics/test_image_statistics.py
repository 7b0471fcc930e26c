# SPDX-License-Identifier: Apache-2.0
"""Image statistics: values by hand on plain images, ranges, the contract."""

from __future__ import annotations

import colorsys
import math

import pytest
import torch

from visalign.rewards import check_reward, load_reward
from visalign.rewards.statistics import brightness, colourfulness, contrast, edge_density, saturation

NAMES = ("brightness", "contrast", "saturation", "colourfulness", "edge_density")


def flat(*colour: float) -> torch.Tensor:
    return torch.tensor(colour, dtype=torch.float32).view(3, 1, 1).expand(3, 8, 8).contiguous()


def halves(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.cat([left, right], 2)


def test_brightness_and_contrast_by_hand():
    assert brightness(flat(1, 0, 0)).item() == pytest.approx(0.299)
    assert brightness(flat(0.5, 0.5, 0.5)).item() == pytest.approx(0.5)
    split = halves(flat(0, 0, 0), flat(1, 1, 1))
    assert contrast(split).item() == pytest.approx(0.5) and contrast(flat(0.3, 0.9, 0.1)).item() < 1e-12


def test_saturation_equals_the_standard_librarys_hsv():
    image = torch.rand(3, 6, 5, generator=torch.Generator().manual_seed(0))
    image[:, 0, 0] = 0
    expected = [colorsys.rgb_to_hsv(*image[:, y, x].tolist())[1] for y in range(6) for x in range(5)]
    assert saturation(image).item() == pytest.approx(sum(expected) / 30, rel=1e-6)
    assert saturation(flat(0, 0, 0)).item() == 0


def test_colourfulness_by_hand():
    assert colourfulness(flat(0.4, 0.4, 0.4)).item() == pytest.approx(0, abs=1e-9)
    # Pure red: rg = 255, yb = 127.5, no spread.
    assert colourfulness(flat(1, 0, 0)).item() == pytest.approx(0.3 * math.hypot(255, 127.5))
    # Half red, half green: rg = ±255, yb = 127.5.
    split = halves(flat(1, 0, 0), flat(0, 1, 0))
    assert colourfulness(split).item() == pytest.approx(255 + 0.3 * 127.5)


def test_edge_density_by_hand():
    split = halves(flat(0, 0, 0), flat(1, 1, 1))
    assert edge_density(split).item() == pytest.approx(2 / 16)
    assert edge_density(flat(0.2, 0.7, 0.1)).item() == 0
    assert edge_density(halves(flat(0, 0, 0), flat(0.15, 0.15, 0.15))).item() == 0
    assert edge_density(torch.zeros(3, 1, 1)).item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_contract(name):
    reward = load_reward(name)
    assert len(check_reward(reward)) == 11 and reward.higher_is_better
    assert not load_reward(name, prefer="smaller").higher_is_better
    assert getattr(reward, "identity").judge == name  # noqa: B009  # no part of the protocol
    with pytest.raises(ValueError, match=f"{name}: prefer is 'more'; allowed are larger, smaller"):
        load_reward(name, prefer="more")
