# SPDX-License-Identifier: Apache-2.0
"""What images add to their sets: brute force on the tower's own embeddings, groups, broken images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.utils import save_image

from tests.support.models.clip import save_tiny_clip
from visalign.core import frechet_distance, vendi_score
from visalign.rewards import RewardError, WeightedSum, load_reward
from visalign.rewards.scorers.clip_score import ClipScore

GROUPS = [7, 3, 7, 3, 7, 7]
RECORDS = [{"group_id": group} for group in GROUPS]
PROMPTS = ["a red circle" if group == 7 else "two circles" for group in GROUPS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_clip(tmp_path_factory.mktemp("models") / "tiny clip")


def make_images(count: int, seed: int = 1) -> Tensor:
    levels = torch.randint(0, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(seed))
    return levels.float() / 255


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("reference")
    (place / "below").mkdir()
    for number, image in enumerate(make_images(4, seed=2)):
        save_image(image, place / ("below" if number else ".") / f"{number}.png")
    (place / "notes.txt").write_text("no image")
    return place


@pytest.mark.parametrize("over", ["group", "batch"])
@pytest.mark.parametrize("name", ["vendi_gain", "frechet_gain"])
def test_gains_are_the_set_with_and_without_each_image(folder: Path, reference: Path, name: str, over: str) -> None:
    options: dict[str, Any] = {"reference": reference} if name == "frechet_gain" else {}
    reward = load_reward(name, model=folder, over=over, **options)
    images = make_images(6)
    scores = reward.score(images, PROMPTS, RECORDS)
    tower = ClipScore(folder).towers
    with torch.no_grad():
        embedding = tower.image_features_with_gradient(images)
        other = tower.image_features_with_gradient(make_images(4, seed=2))
    labels = GROUPS if over == "group" else [0] * 6
    for row in range(6):
        own = [i for i in range(6) if labels[i] == labels[row]]
        both = embedding[own], embedding[[i for i in own if i != row]]
        if name == "vendi_gain":
            whole, rest = map(vendi_score, both)
            expected = whole - rest
        else:
            whole, rest = (frechet_distance(rows, other) for rows in both)
            expected = rest - whole
        torch.testing.assert_close(scores.value[row].double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(scores.parts["set"][row].double(), whole, rtol=1e-4, atol=1e-5)


def test_an_image_without_another_is_invalid_and_in_no_set(folder: Path) -> None:
    reward = load_reward("vendi_gain", model=folder)
    images = list(make_images(6))
    alone = reward.score(images[:3], PROMPTS[:3], RECORDS[:3])
    assert alone.valid.tolist() == [True, False, True]
    assert alone.reason is not None and alone.reason[1] == "its set has no other image"
    broken: list[Any] = [*images[:4], "absent.png", images[5]]
    scores = reward.score(broken, PROMPTS, RECORDS)
    assert scores.valid.tolist() == [True, True, True, True, False, True]
    kept = [0, 1, 2, 3, 5]
    fewer = reward.score([images[i] for i in kept], [PROMPTS[i] for i in kept], [RECORDS[i] for i in kept])
    torch.testing.assert_close(scores.value[kept], fewer.value)


def test_a_sum_hands_the_groups_on(folder: Path) -> None:
    reward = load_reward("vendi_gain", model=folder)
    terms = {"variety": (reward, 2.0), "size": (load_reward("jpeg_size"), 0.0)}
    both = WeightedSum(terms)
    assert both.capabilities.needs_group
    images = make_images(6)
    expected = reward.score(images, PROMPTS, RECORDS)
    scores = both.score(images, PROMPTS, RECORDS)
    torch.testing.assert_close(scores.value, 2 * expected.value)
    torch.testing.assert_close(scores.parts["variety.set"], expected.parts["set"])


def test_refused(folder: Path, reference: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"scores sets, not single images.*'group_id'"):
        load_reward("vendi_gain", model=folder).score(make_images(2), ["a", "a"])
    with pytest.raises(ValueError, match=r"over is 'prompt'; allowed are group, batch"):
        load_reward("vendi_gain", over="prompt")
    with pytest.raises(RewardError, match=r"reference='.*' holds 0 images"):
        load_reward("frechet_gain", reference=tmp_path)
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(b"no image")
    broken = load_reward("frechet_gain", reference=tmp_path, model=folder)
    with pytest.raises(RewardError, match=r"0\.png cannot be read: .*cannot be decoded"):
        broken.score(make_images(2), ["a", "a"], [{"group_id": 0}] * 2)
