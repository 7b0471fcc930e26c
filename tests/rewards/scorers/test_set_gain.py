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
    directory = tmp_path_factory.mktemp("reference")
    (directory / "below").mkdir()
    for number, image in enumerate(make_images(4, seed=2)):
        save_image(image, directory / ("below" if number else ".") / f"{number}.png")
    (directory / "notes.txt").write_text("no image")
    return directory


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
            full, rest = map(vendi_score, both)
            expected = full - rest
        else:
            full, rest = (frechet_distance(rows, other) for rows in both)
            expected = rest - full
        torch.testing.assert_close(scores.value[row].double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(scores.parts["set"][row].double(), full, rtol=1e-4, atol=1e-5)


def test_an_image_without_another_is_invalid_and_in_no_set(folder: Path) -> None:
    reward = load_reward("vendi_gain", model=folder)
    images = list(make_images(6))
    first = reward.score(images[:3], PROMPTS[:3], RECORDS[:3])
    assert first.valid.tolist() == [True, False, True]
    assert first.reason is not None and first.reason[1] == "its set has no other image"
    broken: list[Any] = [*images[:4], "absent.png", images[5]]
    scores = reward.score(broken, PROMPTS, RECORDS)
    assert scores.valid.tolist() == [True, True, True, True, False, True]
    selected = [0, 1, 2, 3, 5]
    fewer = reward.score([images[i] for i in selected], [PROMPTS[i] for i in selected], [RECORDS[i] for i in selected])
    torch.testing.assert_close(scores.value[selected], fewer.value)


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


@pytest.mark.parametrize("name", ["vendi_gain", "frechet_gain"])
def test_sets_are_divided_pair_by_pair(folder: Path, reference: Path, name: str) -> None:
    """Odd images of a group have no pair; what is left scores 1 and −1, as no single swap could do better."""
    options: dict[str, Any] = {"reference": reference} if name == "frechet_gain" else {}
    reward: Any = load_reward(name, model=folder, over="sets", **options)
    assert reward.capabilities.needs_batch and reward.unit == "1 = in the positive set"
    groups = [7, 3, 7, 3, 7, 9, 9]
    scores = reward.score(make_images(7), ["a"] * 7, [{"group_id": group} for group in groups])
    assert scores.valid.tolist() == [True] * 4 + [False] + [True] * 2
    assert scores.reason is not None and scores.reason[4] == "its group has no other image"
    value, parts = scores.value, scores.parts
    assert all(float(value[a]) == -float(value[b]) and abs(value[a]) == 1 for a, b in ((0, 2), (1, 3), (5, 6)))
    with torch.no_grad():
        embedding = ClipScore(folder).towers.image_features_with_gradient(make_images(7)).double()
    for part, side in (("positive", 1), ("negative", -1)):
        expected = reward.sign * reward.measure(embedding[value == side])
        assert parts[part][0].item() == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("kind", ["list", "file"])
def test_exemplars_may_be_texts_and_an_image_alone_may_be_scored(folder: Path, tmp_path: Path, kind: str) -> None:
    """By hand: |z − μ|² + tr Σ of unit embeddings; the nearest image is the one of the largest mean cosine."""
    texts = ["a red circle", "two circles", "a green square"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n\n")
    exemplars: Any = texts if kind == "list" else tmp_path / "texts.txt"
    reward: Any = load_reward("frechet_gain", model=folder, reference=exemplars, over="image")
    assert not reward.capabilities.needs_group and not reward.capabilities.needs_batch
    scores = reward.score(make_images(4), ["a"] * 4)
    cosines = torch.stack([ClipScore(folder).score(make_images(4), [text] * 4).value for text in texts])
    torch.testing.assert_close(scores.value, 2 * cosines.mean(0) - 2, rtol=1e-4, atol=1e-5)


def test_refused(folder: Path, reference: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"scores sets, .*'group_id'"):
        load_reward("vendi_gain", model=folder).score(make_images(2), ["a", "a"])
    with pytest.raises(ValueError, match=r"over is 'image'; allowed are group, batch, sets"):
        load_reward("vendi_gain", over="image")
    with pytest.raises(RewardError, match=r"reference='.*' holds 0 exemplars; give at least two: a folder"):
        load_reward("frechet_gain", reference=tmp_path)
    with pytest.raises(RewardError, match=r"the exemplar ' ' cannot be read: the prompt is empty"):
        load_reward("frechet_gain", reference=["a", " "], model=folder, over="image").score(make_images(1), ["a"])
    content = (reference / "0.png").read_bytes()
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(content[: len(content) // 2])
    broken = load_reward("frechet_gain", reference=tmp_path, model=folder)
    with pytest.raises(RewardError, match=r"0\.png' cannot be read: .*cannot be decoded"):
        broken.score(make_images(2), ["a", "a"], [{"group_id": 0}] * 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("absent", None, "absent' does not exist"), ("a.txt", b"caf\xe9\nb", "is no UTF-8 text"), ("", None, "does not")],
)
def test_unreadable_exemplars_are_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RewardError, match=message):
        load_reward("frechet_gain", reference=str(tmp_path / name) if name else "")
