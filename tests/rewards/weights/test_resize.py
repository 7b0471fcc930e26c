# SPDX-License-Identifier: Apache-2.0
"""Preprocessing on tensors against PIL: pixels, scores, gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.models.clip import save_tiny_transformers_clip
from visalign.rewards.scorers.clip_score import ClipScore
from visalign.rewards.weights.resize import model_levels, model_pixels, resized_shape
from visalign.vision.resize import resize_smoothly

BICUBIC = Image.Resampling.BICUBIC
CONFIG = {"size": 64, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}


def make_image(number: int) -> Image.Image:
    """Smooth shapes, hard edges and noise of a random size, by turns."""
    random = np.random.default_rng(number)
    height, width = random.integers(20, 300, 2)
    if number % 3 == 0:
        array = random.integers(0, 256, (height, width, 3))
    elif number % 3 == 1:
        rows, columns = np.mgrid[:height, :width]
        waves = [np.sin(rows / random.uniform(2, 30) + columns / random.uniform(2, 30)) for _ in range(3)]
        array = (np.stack(waves, -1) + 1) * 127.5
    else:
        array = random.choice([0, 40, 200, 255], (height // 8 + 1, width // 8 + 1, 3))
        array = array.repeat(8, 0).repeat(8, 1)[:height, :width]
    return Image.fromarray(array.astype(np.uint8))


def test_the_scores_move_by_less_than_a_thousandth_of_their_spread(tmp_path):
    reward = ClipScore(save_tiny_transformers_clip(tmp_path / "clip"))
    size = reward.towers.preprocess["size"]
    images = [make_image(number) for number in range(24)]
    ours = reward.score(images, ["a red circle"] * 24).value
    resized = [Image.fromarray(by_crop(image, size)) for image in images]
    theirs = reward.score(resized, ["a red circle"] * 24).value
    assert (ours - theirs).abs().max() <= 1e-3 * ours.std()


def by_crop(image: Image.Image, size: int) -> np.ndarray:
    """As `by_pil`, with the crop of transformers: the odd pixel stays at the bottom and the right."""
    height, width = resized_shape(image.height, image.width, {"size": size})
    resized = image.resize((width, image.height), BICUBIC).resize((width, height), BICUBIC)
    top, left = (height - size) // 2, (width - size) // 2
    return np.array(resized)[top : top + size, left : left + size]


@pytest.mark.parametrize("resampling", ["pil", "float", "aliased"])
@pytest.mark.parametrize("rounding", ["nearest", "down"])
def test_gradient_path_has_the_values_of_the_score(resampling, rounding):
    config = {**CONFIG, "size": 24, "resampling": resampling, "crop_rounding": rounding}
    images = torch.rand(3, 3, 47, 60, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
    pixels = model_pixels(images, config)
    levels = torch.stack([model_levels(image, config) for image in images])
    torch.testing.assert_close(pixels * 255, levels, rtol=0, atol=1e-4)


def test_gradients_of_the_smooth_resize():
    images = torch.rand(1, 2, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(lambda x: resize_smoothly(x, (4, 5)), images.requires_grad_())
    # The derivative of the whole path sums the weights with which each pixel enters: a resize of ones.
    pixels = torch.full((1, 3, 20, 20), 0.5, requires_grad=True)
    (gradient,) = torch.autograd.grad(model_pixels(pixels, {**CONFIG, "size": 10}).sum(), pixels)
    assert gradient.sum().item() == pytest.approx(300, rel=1e-5)


def test_unknown_resampling():
    with pytest.raises(ValueError, match="resampling is 'best'; allowed are 'pil', 'float' and 'aliased'"):
        model_levels(torch.zeros(3, 20, 20), {**CONFIG, "resampling": "best"})
