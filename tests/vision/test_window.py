# SPDX-License-Identifier: Apache-2.0
"""The part of an image that is read where the rest is a plain border."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from visalign.vision.patches import PatchCutter
from visalign.vision.window import TOLERANCE, seen_window


def on_border(small: torch.Tensor, top: int, left: int, height: int = 128, width: int = 128) -> torch.Tensor:
    """The image [3, h, w] uint8 on a teal border that is off by up to 4 levels, as JPEG's would be."""
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 5, (3, height, width)))
    canvas = (torch.tensor([0, 128, 128])[:, None, None] + noise).to(torch.uint8)
    canvas[:, top : top + small.shape[1], left : left + small.shape[2]] = small
    return canvas


def noise(height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(140, 256, (3, height, width), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(("top", "left"), [(0, 0), (64, 64), (0, 64), (17, 40), (64, 3)])
def test_an_image_on_a_border_is_read_at_its_own_size(top: int, left: int) -> None:
    small = noise(64, 64)
    assert torch.equal(seen_window(on_border(small, top, left), 64), small)
    as_float = seen_window(on_border(small, top, left).float() / 255, 64)
    assert torch.equal(as_float, small.float() / 255)


def test_what_is_smaller_stays_in_the_middle_and_in_the_image() -> None:
    window = seen_window(on_border(noise(10, 20), 50, 60), 64)
    assert window.shape == (3, 64, 64) and (window[0, 27:37, 22:42] >= 140).all() and (window[0] < 9).sum() > 3000
    at_the_edge = seen_window(on_border(noise(10, 20), 118, 2), 64)
    assert (at_the_edge[0, 54:, 2:22] >= 140).all()
    low = seen_window(on_border(noise(10, 20), 20, 100, height=40, width=128), 64)
    assert low.shape == (3, 40, 64), "a side that is shorter than the window stays whole"


@pytest.mark.parametrize(
    "image",
    [
        noise(64, 64),
        noise(128, 128),
        on_border(noise(10, 10), 3, 3, 60, 64),
        on_border(noise(65, 20), 3, 3),
        on_border(noise(20, 20), 0, 0, 128, 20).flip(2),
        on_border(noise(0, 0), 0, 0),
    ],
    ids=["no larger", "no border", "no larger, border", "does not fit", "two corners", "nothing but border"],
)
def test_otherwise_the_image_is_read_whole(image: torch.Tensor) -> None:
    assert seen_window(image, 64) is image


def test_more_than_the_tolerance_is_content() -> None:
    """One pixel that is off by a level more than a border may be is in the middle of the window."""
    image = torch.full((3, 128, 128), 100, dtype=torch.uint8)
    image[1, 100, 64] = 100 - TOLERANCE
    assert seen_window(image, 64) is image
    image[1, 100, 64] -= 1
    assert seen_window(image, 64).shape == (3, 64, 64) and seen_window(image, 64)[1].min() == 99 - TOLERANCE


def test_a_clip_is_taken_whole() -> None:
    clip = on_border(noise(64, 64), 3, 3)[None].repeat(2, 1, 1, 1)
    of_three = (0.5, 0.5, 0.5)
    cutter = PatchCutter(
        patch=8, merge=2, frames=2, min_pixels=64, max_pixels=4096, mean=of_three, std=of_three, window=64
    )
    assert cutter.seen(clip) is clip and cutter.seen(clip[0]).shape == (3, 64, 64)
