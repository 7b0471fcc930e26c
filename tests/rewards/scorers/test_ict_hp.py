# SPDX-License-Identifier: Apache-2.0
"""ICT, HP and their product: hand values, published and own folders, training modules, both modes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.models.clip import save_tiny_clip, save_tiny_hp, save_tiny_transformers_clip
from visalign.rewards import RewardError, check_reward
from visalign.rewards.base.contract import make_scores
from visalign.rewards.scorers.clip_score import ClipScore
from visalign.rewards.scorers.hp import Hp
from visalign.rewards.scorers.ict import Ict
from visalign.rewards.scorers.ict_hp import IctHp

PROMPTS = ["a red circle", "two circles", "a blue square"]
WIDTHS = (12, 8, 6, 4, 1)


@pytest.fixture(scope="module")
def ict_folder(tmp_path_factory) -> Path:
    return save_tiny_transformers_clip(tmp_path_factory.mktemp("models") / "ict", binary=True)


@pytest.fixture(scope="module")
def hp_folder(tmp_path_factory) -> Path:
    return save_tiny_hp(tmp_path_factory.mktemp("models") / "hp")


def test_ict_is_the_cosine(ict_folder, images):
    scores = Ict(ict_folder).score(images, PROMPTS)
    assert torch.equal(scores.value, ClipScore(ict_folder).score(images, PROMPTS).value)
    assert scores.unit == "cosine"


def test_ict_with_a_threshold_is_truncated(ict_folder, images):
    cosine = Ict(ict_folder).score(images, PROMPTS).value
    theta = float(cosine.abs().median())
    reward = Ict(ict_folder, threshold=theta)
    value = reward.score(images, PROMPTS).value
    torch.testing.assert_close(value, torch.minimum(cosine / theta, torch.ones(3)))
    assert reward.range == (-1 / theta, 1.0)
    for wrong in (0, -0.2, 1.5):
        with pytest.raises(ValueError, match=r"threshold is .*; allowed are numbers above 0 up to 1"):
            Ict(ict_folder, threshold=wrong)


def test_product_in_both_modes(ict_folder, hp_folder, images):
    ict = Ict(ict_folder).score(images, PROMPTS).value
    hp = Hp(hp_folder).score(images, PROMPTS).value
    for mode, expected in (("paper", ict * hp), ("upstream", ict * hp.sigmoid())):
        reward = IctHp(ict_folder, hp_folder, mode=mode)
        scores = reward.score(images, PROMPTS)
        torch.testing.assert_close(scores.value, expected)
        torch.testing.assert_close(scores.parts["ict"], ict)
        torch.testing.assert_close(scores.parts["hp"], hp if mode == "paper" else hp.sigmoid())
    with pytest.raises(ValueError, match="mode is 'softmax'; allowed are paper, upstream"):
        IctHp(ict_folder, hp_folder, mode="softmax")


def test_a_negative_hp_does_not_turn_the_order_round_by_default(ict_folder, hp_folder, images, monkeypatch):
    def given(values):
        def score(images, prompts, metadata=None):
            return make_scores(torch.tensor(values), [None] * 3, "1")

        return score

    result = {}
    for mode in (None, "paper"):
        reward = IctHp(ict_folder, hp_folder) if mode is None else IctHp(ict_folder, hp_folder, mode=mode)
        monkeypatch.setattr(reward.ict, "score", given([0.8, 0.2, -0.3]))
        monkeypatch.setattr(reward.hp, "score", given([-2.0, -2.0, -2.0]))
        result[mode] = reward.score(images, PROMPTS).value.argsort(descending=True).tolist()
    assert result == {None: [0, 1, 2], "paper": [2, 1, 0]}


def test_a_bad_row_is_invalid_in_the_product(ict_folder, hp_folder, images):
    samples = [images[0], "missing.png", images[2]]
    scores = IctHp(ict_folder, hp_folder).score(samples, [*PROMPTS[:2], "a <end> red"])
    assert scores.valid.tolist() == [True, False, False] and scores.reason is not None
    assert "no such image file" in str(scores.reason[1]) and "end token" in str(scores.reason[2])
    assert scores.parts["hp"][1:].isnan().all()


def test_contracts_and_gradients(ict_folder, hp_folder, images):
    for reward in (Ict(ict_folder), Hp(hp_folder), IctHp(ict_folder, hp_folder, mode="upstream")):
        assert len(check_reward(reward)) == 11
        samples = images.clone().requires_grad_()
        value = reward.score_with_gradient(samples, PROMPTS)
        torch.testing.assert_close(value.detach(), reward.score(images, PROMPTS).value, rtol=1e-5, atol=1e-6)
        assert torch.autograd.grad(value.sum(), samples)[0].abs().sum() > 0


def test_untrained_judges_train_save_and_load(tmp_path, images):
    """A few steps raise what they train; the saved folders give the trained scores."""
    source = save_tiny_clip(tmp_path / "clip")
    torch.manual_seed(0)
    ict, hp = Ict(source), Hp.untrained(source, WIDTHS)
    assert [p.shape[0] for key, p in hp.head.named_parameters() if key.endswith("bias")] == list(WIDTHS)
    before = ict.score(images, PROMPTS).value.mean(), hp.score(images, PROMPTS).value.mean()
    pixels, tokens = ict.towers.pixels(list(images)), ict.towers.tokens(PROMPTS)
    modules = ict.module.requires_grad_(True).train(), hp.module.requires_grad_(True).train()
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        (-modules[0](pixels, tokens).mean() - modules[1](pixels).mean()).backward()
        optimizer.step()
    after = ict.score(images, PROMPTS).value, hp.score(images, PROMPTS).value
    assert after[0].mean() > before[0] and after[1].mean() > before[1]
    assert modules[0].training, "scoring leaves the trainer's mode alone"
    ict.save(tmp_path / "ict", torch.float32)
    hp.save(tmp_path / "hp", torch.float32)
    torch.testing.assert_close(Ict(tmp_path / "ict").score(images, PROMPTS).value, after[0])
    torch.testing.assert_close(Hp(tmp_path / "hp").score(images, PROMPTS).value, after[1])
    names = {file.name for file in (tmp_path / "hp").iterdir()}
    clip = {"open_clip_config.json", "open_clip_model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == clip | {"hp_head.safetensors"}


def test_published_folders_are_strict(ict_folder, hp_folder, tmp_path, images):
    for name, message in (
        ("hp_backbone/pytorch_model.bin", "contains no weights; it needs one of model.safetensors"),
        ("hp_scorer/mlp_pytorch_model.bin", r"lacks the HP head hp_head.safetensors or hp_scorer"),
    ):
        copy = shutil.copytree(hp_folder, tmp_path / Path(name).stem)
        (copy / name).unlink()
        with pytest.raises(FileNotFoundError, match=message):
            _ = Hp(copy).head, Hp(copy).towers.parts
    with pytest.raises(RewardError, match=r"There is no folder 'nowhere'; give one, or a hub id"):
        _ = Ict("nowhere").towers.parts
    inside = shutil.copytree(ict_folder, tmp_path / "run" / "ict_model").parent
    assert torch.equal(Ict(inside).score(images, PROMPTS).value, Ict(ict_folder).score(images, PROMPTS).value)
