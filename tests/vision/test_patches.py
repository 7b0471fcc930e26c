# SPDX-License-Identifier: Apache-2.0
"""Patches cut from tensors: sizes and pixels as the library's processor and PIL have them."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as own_smart_resize

from visalign.vision.images import level_sums
from visalign.vision.patches import PatchCutter, smart_resize


def make_image(height: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(3, 1 + height // 6, 1 + width // 6, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse[None], (height, width), mode="nearest")[0]
    noisy = smooth + 0.2 * torch.randn(smooth.shape, generator=generator)
    return noisy.clamp(0, 1).mul(255).round().to(torch.uint8)


def test_sizes_are_those_of_the_library() -> None:
    chance = random.Random(0)
    for _ in range(1000):
        height, width = chance.randint(1, 900), chance.randint(1, 900)
        factor = chance.choice((8, 28, 32))
        min_pixels = chance.choice((factor**2, 56 * 56, 200704))
        max_pixels = chance.choice((min_pixels, 4 * min_pixels, 1003520))
        if max(height, width) > 200 * min(height, width):
            continue
        sizes = smart_resize(height, width, factor, min_pixels, max(min_pixels, max_pixels))
        assert sizes == own_smart_resize(height, width, factor, min_pixels, max(min_pixels, max_pixels))


def test_halves_round_to_even_and_little_images_grow() -> None:
    assert smart_resize(42, 70, 28, 1, 10**6) == (56, 56)  # 1.5 -> 2 and 2.5 -> 2
    # 0 · 588 is too little, and 600 · √(3136 / 1800) = 792 grows to 29 · 28
    assert smart_resize(3, 600, 28, 3136, 10**6) == (28, 812)
    assert smart_resize(448, 448, 28, 200704, 200704) == (448, 448)
    # 258.66 and 775.97 grow to whole tokens where the image was less, and shrink where it was more
    assert smart_resize(100, 300, 28, 200704, 200704) == (280, 784)
    assert smart_resize(1000, 3000, 28, 200704, 200704) == (252, 756)


def test_a_side_below_half_a_token_is_nothing_or_one_token() -> None:
    # transformers: 0 · 392 is too little, 400 · √(3136 / 4000) = 354 grows to 13 · 28
    assert smart_resize(10, 400, 28, 3136, 10**6) == (28, 364)
    assert smart_resize(10, 400, 28, 3136, 10**6, whole_tokens=True) == (28, 392)
    assert smart_resize(10, 60, 28, 3136, 10**6, whole_tokens=True) == (28, 140)  # 1 · 56 · 28 is too little


@pytest.mark.parametrize("size", [(1, 201), (0, 5)])
def test_stripes_are_refused(size) -> None:
    with pytest.raises(ValueError, match=f"{size[1]}×{size[0]} pixels: one side may be at most 200 times"):
        smart_resize(size[0], size[1], 28, 3136, 10**6)


def test_pixels_are_within_one_level_of_pil_and_the_processor() -> None:
    processor = Qwen2VLImageProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1600})
    cutter = PatchCutter.of(processor)
    std = torch.tensor(cutter.std).view(3, 1, 1, 1)
    chance, worst, differing, count = random.Random(1), 0.0, 0, 0
    for number in range(100):
        height, width = chance.randint(3, 120), chance.randint(3, 120)
        pixels = make_image(height, width, number)
        levels = cutter.levels(pixels)
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        # the width first, as Pillow up to 12 has it
        for size in ((levels.shape[2], height), (levels.shape[2], levels.shape[1])):
            image = image.resize(size, Image.Resampling.BICUBIC)
        pil = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
        differing += int((pil != levels).sum())
        count += levels.numel()
        worst = max(worst, float((pil - levels).abs().max()))
        own = processor(images=[pixels], return_tensors="pt", input_data_format="channels_first")
        assert tuple(own["image_grid_thw"][0].tolist()) == cutter.grid(height, width)
        patches = cutter.cut(pixels)
        assert patches.shape == own["pixel_values"].shape
        difference = (patches - own["pixel_values"]).view(len(patches), 3, 2, -1).transpose(0, 1) * std
        assert float(difference.abs().max()) <= 1.001 / 255 + 1e-6
    assert worst <= 1 and differing / count < 1e-3, (worst, differing / count)


def test_settings_that_are_not_done_here_are_refused() -> None:
    changes: Any = [{"do_resize": False}, {"rescale_factor": 0.5}, {"resample": 0}]
    for change in changes:
        with pytest.raises(ValueError, match=r"The image processor has .*; supported are True, 1/255"):
            PatchCutter.of(Qwen2VLImageProcessor(**change))
    cutter = PatchCutter.of(Qwen2VLImageProcessor(), min_pixels=200704, max_pixels=200704)
    assert cutter.settings()["min_pixels"] == cutter.max_pixels == 200704 and cutter.patch == 14


@pytest.mark.parametrize("size", [(56, 56), (100, 301), (37, 90), (90, 90), (1, 90), (118, 40)])
def test_images_with_a_gradient_have_the_processors_pixels(size) -> None:
    processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1600})
    levels, cutter = make_image(*size, seed=0), PatchCutter.of(processor)
    leaf = (levels.float() / 255).requires_grad_()
    cut = cutter.cut(leaf)
    expected = cutter.cut(levels)
    if size[0] <= 2 * size[1]:  # Pillow 13 begins with the height of tall images, see visalign/vision/resize.py
        image = Image.fromarray(levels.permute(1, 2, 0).numpy())
        expected = torch.as_tensor(processor(images=[image], return_tensors="pt")["pixel_values"])
    torch.testing.assert_close(cut.detach(), expected, rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(cut.sum(), leaf)
    # rows of the resize sum to 1: along a brighter image each number grows by 1 / std
    growth = sum(cut.numel() / 3 / deviation for deviation in cutter.std)
    assert float(gradient.sum()) == pytest.approx(growth, rel=1e-4)


def test_images_cut_together_have_the_patches_of_each() -> None:
    cutter = PatchCutter.of(Qwen2VLImageProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1600}))
    images = torch.stack([make_image(90, 40, seed) for seed in range(3)])
    assert torch.equal(cutter.cut(images, is_clip=False), torch.cat([cutter.cut(image) for image in images]))


def test_sums_of_levels_tell_images_apart() -> None:
    image = make_image(300, 310, seed=0)  # two blocks
    changed = image.clone()
    changed[0, 0, :2] += 128  # words of eight levels would differ by multiples of 2^56 here
    last = image.clone()
    last[2, 299, 309] += 1
    sums = [level_sums(levels) for levels in (image, changed, last)]
    assert sums[0].shape == (2, 2) and torch.equal(level_sums(image.clone()), sums[0])
    assert bool((sums[1][0] != sums[0][0]).all()) and torch.equal(sums[1][1], sums[0][1])
    assert bool((sums[2][1] != sums[0][1]).all()) and torch.equal(sums[2][0], sums[0][0])
