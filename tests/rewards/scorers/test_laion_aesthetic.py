# SPDX-License-Identifier: Apache-2.0
"""LAION aesthetic: the published head layouts, normalised embeddings, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.models.clip import SIZES, save_tiny_transformers_clip
from tests.support.models.published_layouts import head, random_state
from visalign.rewards import RewardError, check_reward, load_reward
from visalign.rewards.base.contract import read_request
from visalign.rewards.scorers.clip_score import ClipScore
from visalign.rewards.scorers.laion_aesthetic import LaionAesthetic, read_head
from visalign.rewards.weights.resize import model_levels

WIDTH = SIZES["embed"]
NARROW = (24, 12, 8, 4, 1)
PROMPTS = ["", "", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = save_tiny_transformers_clip(tmp_path_factory.mktemp("models") / "clip")
    torch.save(random_state(head(WIDTH, NARROW), 1), directory / "linear.pth")
    torch.save(random_state(head(WIDTH, NARROW, relu=True), 2), directory / "relu.pth")
    torch.save({"weight": torch.full((1, WIDTH), 0.5), "bias": torch.tensor([3.0])}, directory / "single.pth")
    return directory


def by_hand(state: dict[str, torch.Tensor], features: torch.Tensor, relu: bool) -> torch.Tensor:
    x = F.normalize(features, dim=-1)
    layers = (0, 3, 6, 9, 11) if relu else (0, 2, 4, 6, 7)
    for layer in layers:
        x = x @ state[f"layers.{layer}.weight"].T + state[f"layers.{layer}.bias"]
        x = x.relu() if relu and layer != 11 else x
    return x[:, 0]


@pytest.mark.parametrize("kind", ["linear", "relu"])
def test_score_equals_the_layers_by_hand_and_has_a_gradient(folder, images, kind):
    reward = LaionAesthetic(folder, head=folder / f"{kind}.pth")
    request = read_request("test", images, PROMPTS, None)
    _, features = reward.towers.image_features(request, [None] * 3)
    state = torch.load(folder / f"{kind}.pth", weights_only=True)
    scores = reward.score(images, PROMPTS)
    assert scores.unit == "rating 1-10"
    torch.testing.assert_close(scores.value, by_hand(state, features, kind == "relu"), rtol=1e-5, atol=1e-6)
    assert (features.norm(dim=1) - 1).abs().min() > 0.05, "the tower's embedding must not be of length 1"
    samples = images.clone().requires_grad_()
    value = reward.score_with_gradient(samples)
    torch.testing.assert_close(value.detach(), scores.value, rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(value.sum(), samples)[0].abs().sum() > 0


def test_the_crop_is_torchvisions(folder):
    """OpenAI's transform, written down: where three columns are left over the crop begins at the second."""
    size = SIZES["image"]
    wide = torch.zeros(1, 3, size, size + 3)
    wide[..., 0:2] = 1.0
    reward = LaionAesthetic(folder, head=folder / "single.pth")
    assert not model_levels(wide[0], reward.towers.preprocess).any(), "both bright columns are cut off"
    same = LaionAesthetic(folder, head=folder / "single.pth").score(torch.zeros(1, 3, size, size), [""])
    assert torch.equal(reward.score(wide, [""]).value, same.value)
    assert model_levels(wide[0], ClipScore(folder).towers.preprocess).any(), "transformers' crop keeps one"


def test_one_linear_layer(folder, images):
    reward = LaionAesthetic(folder, head=folder / "single.pth")
    _, features = reward.towers.image_features(read_request("test", images, PROMPTS, None), [None] * 3)
    expected = 0.5 * F.normalize(features, dim=-1).sum(1) + 3
    torch.testing.assert_close(reward.score(images, PROMPTS).value, expected)


def test_contract_and_identity(folder):
    one = LaionAesthetic(folder, head=folder / "linear.pth")
    assert len(check_reward(one)) == 11
    other = LaionAesthetic(folder, head=folder / "relu.pth")
    assert one.identity.differences(other.identity) == ["weights", "options"]


def test_refusals(folder, tmp_path, images):
    with pytest.raises(FileNotFoundError, match=r"no aesthetic head 'sac\+logos\+ava1-l14-linearMSE.pth'. Give "):
        load_reward("laion_aesthetic", model=folder).score(images, PROMPTS)
    torch.save({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, tmp_path / "two.pth")
    with pytest.raises(RewardError, match=r"no linear head: weight must have shape \(1, D\)"):
        read_head(tmp_path / "two.pth")
    torch.save({"weight": torch.zeros(1, 768), "bias": torch.zeros(1)}, tmp_path / "l14.pth")
    with pytest.raises(RewardError, match=r"takes embeddings of 768 numbers, the tower .* gives 16"):
        LaionAesthetic(folder, head=tmp_path / "l14.pth").score(images, PROMPTS)
