# SPDX-License-Identifier: Apache-2.0
"""The LoRA ensemble as a judge: equal to its members one by one; its uncertainty, folder and identity."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.judges.lora_members import MEMBERS, joined, save_members
from tests.support.judges.vision_language import given, noise, tiny_judge, why
from visalign.core.preference.uncertainty import log_win_probability, pair_deviation
from visalign.data.assets import resolve_model
from visalign.data.shapes.preferences import ShapesPreferences
from visalign.rewards.base.contract import RewardError
from visalign.rewards.catalogue import load_reward
from visalign.rewards.checks import check_reward
from visalign.rewards.hpsv3.ensemble_judge import LoraEnsembleReward
from visalign.rewards.hpsv3.ensemble_model import LoraEnsembleModel, stretch_scale
from visalign.rewards.hpsv3.judge import HPSv3
from visalign.rewards.hpsv3.model import HPSv3Model
from visalign.rewards.vlm.template import JudgeSettings

IMAGES = [noise(16, 24, 1), noise(40, 8, 2), noise(16, 24, 1), noise(24, 24, 3)]
PROMPTS = ["a cat", "a red dog", "two owls", "a cat"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_members(tmp_path_factory.mktemp("ensemble"))


@pytest.fixture(scope="module")
def judge(root: Path) -> LoraEnsembleReward:
    return LoraEnsembleReward.from_members([root / f"m{m}" for m in range(MEMBERS)])


def _spoil(judge: LoraEnsembleReward, member: int) -> None:
    judge.model.heads.biases[0].data[member] = torch.nan


def test_members_score_as_they_do_one_by_one(root: Path, judge: LoraEnsembleReward) -> None:
    scores = judge.score(IMAGES, PROMPTS)
    singles = [HPSv3(root / f"m{m}").score(IMAGES, PROMPTS) for m in range(MEMBERS)]
    means = torch.stack([given(single.value) for single in singles]).double()
    deviations = torch.stack([given(single.std) for single in singles]).double()
    for m in range(MEMBERS):
        torch.testing.assert_close(scores.parts[f"member_{m}"].double(), means[m], rtol=1e-5, atol=1e-6)
    assert float((means[0] - means[1]).abs().min()) > 1e-3
    torch.testing.assert_close(scores.value.double(), means.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scores.parts["min"].double(), means.amin(0), rtol=1e-5, atol=1e-6)
    epistemic, aleatoric = means.var(0), deviations.square().mean(0)
    torch.testing.assert_close(scores.parts["epistemic"].double().square(), epistemic, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(given(scores.std).double().square(), epistemic + aleatoric, rtol=1e-5, atol=1e-6)
    assert scores.parts["members"].tolist() == [MEMBERS] * 4 and scores.text is None


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_other_families_are_repeated_whole(kind: str) -> None:
    """Windows of the tower, and features that are added behind deeper layers."""
    generator = torch.Generator().manual_seed(5)
    single = HPSv3Model.new(tiny_judge(kind))
    width = {"q_proj": (32, 32), "down_proj": (48, 32)}
    layers = {
        f"model.language_model.layers.{n}.{p}": width[p.split(".")[1]]
        for n in (0, 1)
        for p in ("self_attn.q_proj", "mlp.down_proj")
    }
    tensors = {key: torch.stack([value] * 2) for key, value in single.head.state_dict().items()}
    tensors["reward_token"] = torch.randn(2, 32, generator=generator)
    for name, (narrow, wide) in layers.items():
        tensors[f"{name}.lora_A"] = torch.randn(2, 2, narrow, generator=generator)
        tensors[f"{name}.lora_B"] = torch.randn(2, wide, 2, generator=generator)
    model = LoraEnsembleModel(tiny_judge(kind), tensors, template=None, scaling=0.5, clamp=None)
    scores = LoraEnsembleReward(model).score(IMAGES, PROMPTS)
    for m in range(2):
        one = HPSv3Model.new(tiny_judge(kind), clamp=None)
        one.head.load_state_dict(single.head.state_dict())
        one.add_token(tensors["reward_token"][m])
        for name in layers:
            change = 0.5 * tensors[f"{name}.lora_B"][m] @ tensors[f"{name}.lora_A"][m]
            one.backbone.get_submodule(name).weight.data += change  # type: ignore[operator]
        expected = HPSv3(one.eval()).score(IMAGES, PROMPTS).value
        torch.testing.assert_close(scores.parts[f"member_{m}"], expected, rtol=1e-5, atol=1e-5)


def test_one_pass_encodes_each_image_once(root: Path) -> None:
    judge = joined(root)
    network, calls = judge.model.engine.network, []
    network.trunk.language_model.register_forward_hook(lambda *_: calls.append("language"))
    network.trunk.visual.register_forward_hook(lambda *_: calls.append("tower"))
    judge.score(IMAGES, PROMPTS)
    assert calls == ["tower", "language"] and network.cache.misses == 3


def test_the_judge_keeps_the_contract_of_rewards(judge: LoraEnsembleReward) -> None:
    check_reward(judge)


def test_one_folder_gives_the_same_scores(root: Path, judge: LoraEnsembleReward, tmp_path: Path) -> None:
    judge.save(tmp_path / "joined")
    again = LoraEnsembleReward(tmp_path / "joined")
    scores, expected = again.score(IMAGES, PROMPTS), judge.score(IMAGES, PROMPTS)
    assert torch.equal(scores.value, expected.value) and torch.equal(given(scores.std), given(expected.std))
    assert again.identity.differences(judge.identity) == ["model"]
    settings = JudgeSettings.read(tmp_path / "joined")
    assert (tmp_path / "joined" / settings.rest["base"]).resolve() == (root / "base").resolve()
    files = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "joined").iterdir()}
    assert set(files) == {"judge.json", "members.safetensors"} and len(set(files.values())) == 1
    stored = load_file(tmp_path / "joined" / "members.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float32}  # the padded member is rescaled
    joined(root).save(tmp_path / "alike")
    stored = load_file(tmp_path / "alike" / "members.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float16}
    with pytest.raises(RewardError, match=r"is {'type': 'ranknet members'.*HPSv3's is 'ranknet' .*: ensemble"):
        _ = HPSv3(tmp_path / "joined").model


def test_a_member_with_nan_is_left_out_and_named(root: Path) -> None:
    judge = joined(root, MEMBERS)
    before = judge.score(IMAGES, PROMPTS)
    _spoil(judge, 1)
    scores = judge.score(IMAGES, PROMPTS)
    assert scores.valid.all() and scores.parts["members"].tolist() == [2] * 4
    assert scores.parts["member_1"].isnan().all()
    torch.testing.assert_close(scores.value, (before.parts["member_0"] + before.parts["member_2"]) / 2)
    assert given(scores.text)[0].startswith("Left out: member_1 gave mean nan")
    strict = LoraEnsembleReward(judge.model, min_members=3).score(IMAGES, PROMPTS)
    assert not strict.valid.any() and strict.value.isnan().all() and given(strict.std).isnan().all()
    assert "2 of 3 members judged it: member_1 gave mean nan" in why(strict, 0)
    _spoil(judge, 0)
    assert not judge.score(IMAGES, PROMPTS).valid.any()
    single = LoraEnsembleReward(judge.model, min_members=1).score(IMAGES, PROMPTS)
    assert single.valid.all() and given(single.std).isnan().all()
    assert torch.equal(single.value, before.parts["member_2"])


def test_levels_and_scales_of_the_members_are_aligned(root: Path) -> None:
    judge = joined(root, MEMBERS)
    before, weights = judge.score(IMAGES, PROMPTS), judge.identity.weights
    judge.align(IMAGES, PROMPTS)
    after = judge.score(IMAGES, PROMPTS)
    new = torch.stack([after.parts[f"member_{m}"] for m in range(MEMBERS)])
    old = torch.stack([before.parts[f"member_{m}"] for m in range(MEMBERS)])
    wide = old.std(1).max()
    torch.testing.assert_close(new.std(1), wide.expand(MEMBERS), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(new.mean(1), new.mean().expand(MEMBERS), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(new, old, strict=True):
        torch.testing.assert_close((mine - mine[0]) / wide, (theirs - theirs[0]) / theirs.std(), rtol=1e-3, atol=1e-4)
    assert bool((judge.model.stretch >= 1).all()) and float(judge.model.stretch.min()) == 1
    assert judge.identity.weights != weights
    judge.align(IMAGES, PROMPTS)
    again = judge.score(IMAGES, PROMPTS)
    torch.testing.assert_close(again.value, after.value, rtol=1e-4, atol=1e-5)
    judge.save(root / "aligned")
    read = LoraEnsembleReward(root / "aligned").score(IMAGES, PROMPTS)
    torch.testing.assert_close(read.value, again.value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(given(read.std), given(again.std), rtol=1e-5, atol=1e-6)
    for images, prompts in ((IMAGES[:1], PROMPTS[:1]), (IMAGES[:1], [" "])):
        with pytest.raises(RewardError, match=r"[01] images were judged by all members; give"):
            judge.align(images, prompts)


def test_stretching_keeps_the_probability_of_every_pair() -> None:
    generator = torch.Generator().manual_seed(3)
    mean = 4 * torch.randn(200, generator=generator)
    log_std = torch.rand(200, generator=generator) * 4 - 2.5
    left, right = torch.arange(100), torch.arange(100, 200)

    def chances(mean: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
        spread = pair_deviation(log_std[left].exp(), log_std[right].exp())
        return log_win_probability((mean[left] - mean[right]).double(), spread.double()).exp()

    plain = chances(mean, log_std)
    for factor in (1.0, 1.5, 3.0):
        wide, log_wide = stretch_scale(mean, log_std, torch.tensor(factor))
        torch.testing.assert_close(wide, factor * mean)
        assert float((chances(wide, log_wide) - plain).abs().max()) < 0.025
        assert factor == 1 or float((chances(factor * mean, log_std) - plain).abs().max()) > 0.05
    assert torch.equal(stretch_scale(mean, log_std, torch.tensor(1.0))[1], log_std)


def test_the_packaged_ensemble_is_as_good_as_its_card_says() -> None:
    world = ShapesPreferences(11, split="heldout")
    pairs = [pair for pair in (world.pair(n) for n in range(400)) if pair.is_clear]
    images = np.stack([image for pair in pairs for image in pair.images()])
    scores = load_reward("lora_ensemble").score(images, [pair.prompt for pair in pairs for _ in range(2)])
    better = torch.tensor([pair.utility[0] > pair.utility[1] for pair in pairs])
    left, right = scores.value.view(-1, 2).unbind(1)
    folder = Path(resolve_model("shapes-hpsv3-ensemble"))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 800_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    stated = re.search(r"total deviation of the difference \| ([\d.]+)", card)
    assert stated is not None
    accuracy = ((left > right) == better).float().mean().item()
    assert accuracy >= 0.95 and accuracy == pytest.approx(float(stated[1]), abs=0.03)
    assert scores.parts["members"].min() == 3 and scores.parts["epistemic"].min() > 0
