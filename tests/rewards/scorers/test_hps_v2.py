# SPDX-License-Identifier: Apache-2.0
"""HPSv2: versions, resampling, other folders, refusals; values are in `test_official`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.clip import save_tiny_clip
from tests.support.models.published_layouts import open_clip_vit, random_state
from visalign.rewards import RewardError, check_reward, load_reward
from visalign.rewards.scorers.hps_v2 import FILES, HpsV2
from visalign.rewards.scorers.laion_aesthetic import LaionAesthetic
from visalign.rewards.weights.resize import resized_shape

PROMPTS = ["a red circle", "two circles on a table", "a blue square"]
SIZES: dict[str, Any] = {
    "text": (32, 128, 1),
    "vision": (32, 128, 1),
    "embed": 16,
    "vocabulary": 49408,
    "context": 16,
    "patch": 8,
    "image": 32,
}
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("hps")
    for seed, name in enumerate(FILES.values()):
        torch.save({"epoch": 1, "state_dict": random_state(open_clip_vit(**SIZES), seed)}, directory / name)
    return directory


def tiny(folder: Path, **options: Any) -> HpsV2:
    return HpsV2(folder, architecture=TINY, **options)


def test_versions_are_different_files(folder, images):
    new, old = (tiny(folder, version=version).score(images, PROMPTS).value for version in ("2.1", "2.0"))
    direct = tiny(folder / FILES["2.0"]).score(images, PROMPTS).value
    assert not torch.allclose(new, old) and torch.equal(old, direct)


@pytest.mark.parametrize("resampling", ["float", "aliased", "pil"])
def test_resampling_is_named_and_differs(folder, images, resampling):
    reward = tiny(folder, resampling=resampling)
    value = reward.score(images, PROMPTS).value
    assert reward.identity.preprocessing["resampling"] == resampling
    gradient_path = reward.score_with_gradient(images, PROMPTS)
    torch.testing.assert_close(gradient_path, value, rtol=1e-5, atol=1e-6)
    other = tiny(folder, resampling="pil" if resampling == "float" else "float").score(images, PROMPTS).value
    assert not torch.equal(value, other)


def test_the_longest_edge_is_padded_and_preprocess_changes_it(folder):
    assert [resized_shape(*size, {"size": 224, "resize_mode": "longest_max"}) for size in ((420, 768), (9, 250))] == [
        (123, 224),
        (8, 224),
    ], "the product with 224 / 768, in floating point, is above 122.5"
    wide = torch.zeros(1, 3, 40, 80)
    wide[..., :10] = wide[..., -10:] = 1.0
    padded, cropped = tiny(folder), tiny(folder, preprocess={"resize_mode": "shortest"})
    assert padded.towers.pixels(list(wide))[0, 0, 16].max() > 1.5 > cropped.towers.pixels(list(wide)).max()
    torch.testing.assert_close(padded.score_with_gradient(wide, ["a"]), padded.score(wide, ["a"]).value)
    assert padded.identity != cropped.identity
    assert load_reward("hps_v2", model=str(folder), preprocess={"resize_mode": "squash"}).name == "hps_v2"
    for judge in (HpsV2, LaionAesthetic):
        with pytest.raises(ValueError, match="preprocess is 'mode'; allowed are size, mean"):
            judge(folder, preprocess={"mode": "longest"})


def test_contract(folder):
    assert len(check_reward(tiny(folder))) == 11


def test_a_folder_of_open_clip_serves_too(tmp_path, images):
    reward = HpsV2(save_tiny_clip(tmp_path / "clip"))
    assert reward.score(images, ["a red circle"] * 3).valid.all()
    assert reward.towers.preprocess["resampling"] == "float"
    packaged = HpsV2("shapes-clip")
    assert packaged.score(images, ["a red circle"] * 3).valid.all() and len(packaged.identity.weights) == 32


def test_refusals(folder, tmp_path, images):
    for options, message in (
        ({"version": "3"}, "version is '3'; allowed are 2.0, 2.1"),
        ({"resampling": "nearest"}, "resampling is 'nearest'; allowed are float, aliased, pil"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny(folder, **options)
    with pytest.raises(RewardError, match=r"is unknown; needed are HPS_v2.1_compressed.pt"):
        tiny(tmp_path).score(images, PROMPTS)
    with pytest.raises(RewardError, match="or 'ViT-Z' is unknown"):
        HpsV2(folder, architecture="ViT-Z").score(images, PROMPTS)


def test_keys_are_strict_and_the_wrapper_is_needed(folder, tmp_path, images):
    state = random_state(open_clip_vit(**SIZES))
    torch.save(state, tmp_path / "bare.pt")
    with pytest.raises(RewardError, match=r"has no 'state_dict' at its top level; give the file"):
        tiny(tmp_path / "bare.pt").score(images, PROMPTS)
    del state["visual.ln_post.weight"]
    torch.save({"state_dict": {**state, "module.logit_scale": torch.tensor(1.0)}}, tmp_path / "odd.pt")
    with pytest.raises(RewardError, match=r"missing: visual.ln_post.weight; unexpected: module.logit_scale"):
        tiny(tmp_path / "odd.pt").score(images, PROMPTS)
