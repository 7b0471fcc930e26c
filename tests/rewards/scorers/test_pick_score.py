# SPDX-License-Identifier: Apache-2.0
"""PickScore: the checkpoint's own factor, the peers' scales, the published layout, the contract."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models.clip import save_tiny_transformers_clip, tiny_clip_state
from visalign.rewards import check_reward
from visalign.rewards.pairs.as_pairwise import PairsFromScores
from visalign.rewards.scorers.clip_score import ClipScore
from visalign.rewards.scorers.pick_score import PickScore

PROMPTS = ["a red circle", "two circles", "a blue square"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "pick"
    save_tiny_transformers_clip(directory)
    state = tiny_clip_state()
    from safetensors.torch import save_file

    save_file({**state, "logit_scale": torch.tensor(4.605170)}, directory / "model.safetensors")
    return directory


def test_score_is_the_checkpoints_factor_times_the_cosine(folder, images):
    reward = PickScore(folder)
    scores = reward.score(images, PROMPTS)
    cosine = ClipScore(folder).score(images, PROMPTS).value
    assert reward.logit_scale == pytest.approx(100.0, rel=1e-5)
    torch.testing.assert_close(scores.value, 100 * cosine, rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.parts["cosine"], cosine)
    assert scores.unit == "cosine × exp(logit_scale)"


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("cosine", lambda c: c),
        ("cosine × 100", lambda c: 100 * c),
        ("logit / 26", lambda c: 100 * c / 26),
        ("(logit − 18) / 8", lambda c: (100 * c - 18) / 8),
    ],
)
def test_scales_of_the_peers(folder, images, scale, expected):
    scores = PickScore(folder, scale=scale).score(images, PROMPTS)
    torch.testing.assert_close(scores.value, expected(scores.parts["cosine"]), rtol=1e-5, atol=1e-5)
    assert scores.unit == scale
    assert PairsFromScores(PickScore(folder, scale=scale)).link == "normal", "no difference of 1 is odds of e"


def test_gradient_path(folder, images):
    reward = PickScore(folder)
    samples = images.clone().requires_grad_()
    value = reward.score_with_gradient(samples, PROMPTS)
    torch.testing.assert_close(value.detach(), reward.score(images, PROMPTS).value, rtol=1e-5, atol=1e-5)
    assert torch.autograd.grad(value.sum(), samples)[0].abs().sum() > 0


def test_contract_and_identity(folder):
    assert len(check_reward(PickScore(folder), tolerance=1e-5)) == 11
    one, other = PickScore(folder).identity, PickScore(folder, scale="cosine").identity
    assert one.differences(other) == ["options"] and len(one.weights) == 32


def test_published_file_with_position_ids_loads(tmp_path, images):
    folder = save_tiny_transformers_clip(tmp_path / "published", binary=True)
    assert "vision_model.embeddings.position_ids" in tiny_clip_state()
    assert PickScore(folder).score(images, PROMPTS).valid.all()
