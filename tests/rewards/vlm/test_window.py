# SPDX-License-Identifier: Apache-2.0
"""Packaged judges read an image that lies on a larger canvas at its own size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from visalign.data.assets import resolve_model
from visalign.data.shapes.preferences import ShapesPreferences
from visalign.data.shapes.render import render
from visalign.interfaces import PointwiseReward
from visalign.rewards import load_judge
from visalign.rewards.base.contract import RewardError
from visalign.rewards.clip.loading import load_clip
from visalign.rewards.heie.heads import HeieHeads
from visalign.rewards.heie.judge import Heie
from visalign.rewards.hpsv3.judge import HPSv3
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.weights.resize import model_levels, model_pixels


def make_images(canvas: bool) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Both sides of two pairs [2, 3, h, w] uint8, as they are or on a white canvas, and their prompts."""
    pairs = [ShapesPreferences(3, split="heldout", kinds=("alignment",)).pair(k) for k in range(2)]
    sides = []
    for name in ("left", "right"):
        drawn = [torch.from_numpy(render(getattr(pair, name))).permute(2, 0, 1) for pair in pairs]
        if canvas:
            wide = [torch.full((3, 128, 128), 255, dtype=torch.uint8) for _ in drawn]
            for large, small in zip(wide, drawn, strict=True):
                large[:, 10:74, 60:124] = small
            drawn = wide
        sides.append(torch.stack(drawn))
    return sides[0], sides[1], [pair.prompt for pair in pairs]


@pytest.mark.parametrize(
    "name", ["clip_score", "ict", "hp", "hpsv3", "reward_dance", "reward_dance_pairs", "vqa_score", "lora_ensemble"]
)
def test_a_canvas_costs_a_packaged_judge_nothing(name: str) -> None:
    judge: Any = load_judge(name)

    def said(canvas: bool) -> torch.Tensor:
        left, right, prompts = make_images(canvas)
        if isinstance(judge, PointwiseReward):
            return judge.score(left, prompts).value
        return judge.compare(left, right, prompts).log_odds

    torch.testing.assert_close(said(True), said(False), atol=1e-5, rtol=1e-5)


def test_a_map_of_what_is_wrong_is_of_the_whole_image() -> None:
    """Cells are shares of the given image, so HEIE's model sees all of it."""
    heads = HeieHeads.load(Path(resolve_model("shapes-heie")) / "heie_heads.safetensors")
    for judge in (Heie(), Heie("shapes-vlm", heads=heads)):
        assert "window" not in judge.engine.network.images.settings()
    with pytest.raises(ValueError, match=r"heie: the model crops plain borders .*load it with window=0"):
        Heie(VisionLanguageEngine.from_pretrained("shapes-vlm"), heads=heads)


@pytest.mark.parametrize("window", [-5, 0.5, "64", True])
def test_a_window_that_is_no_number_of_pixels_is_refused(window: object) -> None:
    with pytest.raises(RewardError, match=r"window is .*; it is a whole number of pixels, or 0"):
        VisionLanguageEngine.from_pretrained("shapes-vlm", window=window)


def test_a_saved_judge_keeps_its_window(tmp_path: Path) -> None:
    load_clip("shapes-clip").save(tmp_path / "clip")
    assert load_clip(tmp_path / "clip").preprocess["window"] == 64
    judge = HPSv3()
    judge.model.save_pretrained(tmp_path / "hpsv3")
    again = HPSv3(tmp_path / "hpsv3")
    assert again.model.engine.network.images.settings()["window"] == 64


def test_pixels_with_a_gradient_are_those_without() -> None:
    """Two images of one batch, one with a border, each with the gradient of its visible part."""
    config = {"size": 64, "interpolation": "bicubic", "resize_mode": "shortest", "window": 64}
    left, _, _ = make_images(canvas=True)
    generator = torch.Generator().manual_seed(0)
    images = torch.stack([left[0].float() / 255, torch.rand(3, 128, 128, generator=generator)])
    images.requires_grad_(True)
    result = model_pixels(images, config)
    assert torch.equal(result, torch.stack([model_levels(image, config) for image in images.detach()]) / 255)
    result.sum().backward()
    assert images.grad is not None and (images.grad[0] != 0).any(0).nonzero().amin(0).tolist() == [10, 60]
    assert (images.grad[1] != 0).all(0).sum() > 16_000
