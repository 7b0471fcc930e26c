# SPDX-License-Identifier: Apache-2.0
"""CLIP score: value against open_clip by hand, batching, deduplication, long prompts, model folders."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import open_clip
import pytest
import torch
import torch.nn.functional as F

from tests.support.models.clip import save_tiny_clip, tiny_tokenizer
from visalign.rewards import RewardError, load_reward
from visalign.rewards.base.images import to_pil
from visalign.rewards.clip.loading import load_clip
from visalign.rewards.clip.open_clip_folder import check_end_token, load_open_clip
from visalign.rewards.scorers.clip_score import ClipScore

PROMPTS = ["a red circle", "two circles", "a blue square", "a green triangle left of a red circle", "a red circle"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_clip(tmp_path_factory.mktemp("models") / "tiny clip")


@pytest.fixture(scope="module")
def reward(folder) -> ClipScore:
    return ClipScore(folder)


@pytest.fixture
def images() -> torch.Tensor:
    uint8 = torch.randint(0, 256, (5, 3, 40, 48), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return uint8.float() / 255


def test_value_equals_open_clip_by_hand(folder, reward, images):
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    model.eval()  # type: ignore[union-attr]
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(PROMPTS)
    pixels = torch.stack([transform(to_pil(image)) for image in images])  # type: ignore[operator,arg-type]
    with torch.no_grad():
        sample, text = model.encode_image(pixels), model.encode_text(tokens)  # type: ignore[operator,union-attr]
    expected = F.cosine_similarity(sample, text)
    scores = reward.score(images, PROMPTS)
    assert scores.unit == "cosine" and scores.valid.all()
    torch.testing.assert_close(scores.value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("part", ["open_clip_config.json", "open_clip_model.safetensors", "tokenizer.json"])
def test_folder_without_a_part(folder, tmp_path, part):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / part).unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks {part}; copy it again"):
        load_open_clip(copy)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("open_clip_model.safetensors", "cut", "cannot be loaded.*Check config, weights"),
        ("open_clip_config.json", '{"model_cfg": {}}', "is no open_clip config.*needs model_cfg"),
    ],
)
def test_a_broken_part(folder, tmp_path, file, content, message):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / file).write_text(content)
    with pytest.raises(RewardError, match=message):
        load_open_clip(copy)


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(end_token=False), tiny_tokenizer(end_last=False)])
def test_tokenizer_that_loses_the_end_token(tmp_path, tokenizer):
    save_tiny_clip(tmp_path / "bad", tokenizer)
    with pytest.raises(RewardError, match=r"pools at .*, but the tokenizer's end token .* Give the tokenizer"):
        load_clip(tmp_path / "bad")


def test_end_token_of_other_poolings(reward):
    class Pooled(torch.nn.Module):
        text_pool_type = "eos"
        text_eos_id = 2

    with pytest.raises(RewardError, match=r"pools at token 2, but the tokenizer's end token is 14"):
        check_end_token(Pooled(), reward.towers.parts.tokenizer)
    Pooled.text_pool_type = "last"
    assert check_end_token(Pooled(), reward.towers.parts.tokenizer) is None
    Pooled.text_pool_type = "argmax"
    assert check_end_token(Pooled(), open_clip.SimpleTokenizer()) == 49407


@pytest.fixture
def packaged(folder, monkeypatch):
    """The package's own models, reduced to the tiny one under the default's name."""
    own = SimpleNamespace(resolve_model=lambda name: {"shapes-clip": folder}.get(str(name), name))
    monkeypatch.setitem(sys.modules, "visalign.data.assets", own)


def test_default_model_is_the_packaged_one(packaged):
    assert load_reward("clip_score").towers.preprocess["mean"] == [0.5, 0.4, 0.3]  # type: ignore[attr-defined]


def test_unknown_names(packaged):
    with pytest.raises(RewardError, match=r"no CLIP model 'ViT-B-99'. Give a folder"):
        load_open_clip("ViT-B-99")
    with pytest.raises(RewardError, match=r"'ViT-B-32:nothing' cannot be loaded"):
        load_open_clip("ViT-B-32:nothing")
