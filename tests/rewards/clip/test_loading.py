# SPDX-License-Identifier: Apache-2.0
"""Loading contrastive models: strict keys, shards, tokenizers, preprocessing, published sizes, saving."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import open_clip
import pytest
import torch

from tests.support.hub import offline
from tests.support.models.clip import CONTEXT, save_tiny_clip, save_tiny_transformers_clip, tiny_clip_state
from tests.support.models.published_layouts import CLIP_H14, open_clip_vit, transformers_clip
from visalign.rewards import RewardError
from visalign.rewards.clip.loading import load_clip, load_fine_tuned_clip
from visalign.rewards.clip.published_layouts import CLIP_VIT_H_14
from visalign.rewards.scorers.clip_score import ClipScore

PROMPTS = ["a red circle", "two circles", "a blue square", "a green triangle left of a red circle"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_transformers_clip(tmp_path_factory.mktemp("models") / "tiny transformers clip")


@pytest.fixture
def images() -> torch.Tensor:
    uint8 = torch.randint(0, 256, (4, 3, 41, 56), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return uint8.float() / 255


def test_old_and_new_end_token_ids(tmp_path, images):
    """eos_token_id 2 stands in old configs, where transformers pools at the largest id."""
    folder = save_tiny_transformers_clip(tmp_path / "clip", end=2)
    new = save_tiny_transformers_clip(tmp_path / "new")
    left, right = (ClipScore(path).score(images, PROMPTS).value for path in (folder, new))
    assert torch.equal(left, right)


def test_tokenizer_of_another_model_is_refused(tmp_path):
    folder = save_tiny_transformers_clip(tmp_path / "clip", end=5)
    with pytest.raises(RewardError, match=r"pools at token 5, but the tokenizer's end token is 14"):
        load_clip(folder)


def test_without_a_tokenizer_clips_own_is_used_if_the_vocabulary_is_clips(tmp_path):
    with pytest.raises(RewardError, match=r"holds no tokenizer.json, and 15 tokens are not CLIP's"):
        load_clip(save_tiny_transformers_clip(tmp_path / "small", tokenizer=False))
    path = save_tiny_transformers_clip(tmp_path / "large", tokenizer=False, binary=True, vocabulary=49408, end=49407)
    parts = load_clip(path)
    assert parts.end == 49407
    assert parts.tokenizer(["hello " * 50]).shape == (1, CONTEXT)
    # as transformers' CLIPTokenizer reads the published files: HTML stays; open_clip undoes it
    ids = parts.tokenizer(["Tom &amp; Jerry"])[0].tolist()
    assert ids[: ids.index(49407)] == [49406, 2435, 261, 6259, 282, 9164]
    ids = load_fine_tuned_clip(path / "pytorch_model.bin").tokenizer(["Tom &amp; Jerry"])[0].tolist()
    assert ids[: ids.index(49407)] == [49406, 2435, 261, 9164], "ICTHP's evaluation uses open_clip's"


def test_missing_and_unexpected_keys_are_named(folder, tmp_path):
    for change, message in (
        ({"visual_projection.weight": None}, "missing: visual_projection.weight"),
        ({"extra.weight": torch.zeros(1)}, "unexpected: extra.weight"),
        ({"text_projection.weight": torch.zeros(2, 2)}, r"of another shape: .*weight \(2, 2\) instead of \(16, 32\)"),
    ):
        copy = shutil.copytree(folder, tmp_path / f"copy{len(list(tmp_path.iterdir()))}")
        (copy / "model.safetensors").unlink()
        state = {key: value for key, value in {**tiny_clip_state(), **change}.items() if value is not None}
        torch.save(state, copy / "pytorch_model.bin")
        with pytest.raises(RewardError, match=f"do not fit the model, {message}"):
            load_clip(copy)


def test_shards(folder, tmp_path, images):
    from safetensors.torch import save_file

    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    state = tiny_clip_state()
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: state[key] for key in keys}, copy / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    left, right = (ClipScore(path).score(images, PROMPTS).value for path in (folder, copy))
    assert torch.equal(left, right)
    (copy / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no weight file .*b\.safetensors"):
        load_clip(copy)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"size": {"shortest_edge": 64}}, "size {'shortest_edge': 64}, crop_size 32"),
        ({"size": 32, "resample": 1}, "resample 1; allowed are resize"),
    ],
)
def test_preprocessing_that_is_not_offered(folder, tmp_path, processor, message):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(RewardError, match=message):
        load_clip(copy)


def test_preprocessing_is_read_from_either_file(folder, tmp_path):
    settings = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.1] * 3, "image_std": [0.2] * 3}
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "processor_config.json").write_text(json.dumps({"image_processor": {**settings, "crop_size": 32}}))
    preprocess = load_clip(copy).preprocess
    assert (preprocess["resize_mode"], preprocess["interpolation"]) == ("squash", "bilinear")
    assert preprocess["mean"] == [0.1] * 3


def test_other_models_and_precisions_are_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "config.json").write_text('{"model_type": "siglip"}')
    with pytest.raises(RewardError, match="describes a model of type 'siglip'; needed is 'clip'"):
        load_clip(copy)
    with pytest.raises(ValueError, match="precision is 'int8'; allowed are fp32, bf16, fp16"):
        load_clip(folder, precision="int8")


def test_hub_ids_say_what_to_do_without_a_network(monkeypatch, images):
    offline(monkeypatch)
    reward = ClipScore("transformers:openai/clip-vit-base-patch32")
    with pytest.raises(RewardError, match=r"not on this disk.*run `hf download openai/clip-vit-base-patch32"):
        reward.score(images[:1], PROMPTS[:1])
    with pytest.raises(RewardError, match="There is no folder 'nothing'"):
        load_clip("transformers:nothing")


@pytest.mark.parametrize("kind", ["transformers", "open_clip"])
def test_save_and_load_again(kind, tmp_path, folder, images):
    source = folder if kind == "transformers" else save_tiny_clip(tmp_path / "source")
    reward = ClipScore(source)
    reward.towers.parts.save(tmp_path / "saved", torch.float32)
    again = ClipScore(tmp_path / "saved")
    torch.testing.assert_close(again.score(images, PROMPTS).value, reward.score(images, PROMPTS).value)
    assert again.towers.preprocess["size"] == reward.towers.preprocess["size"]
    assert again.identity.differences(reward.identity)[0] == "model"


def shapes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}


def test_published_layout_of_clip_vit_h_14_at_its_size():
    from transformers import CLIPConfig, CLIPModel

    with torch.device("meta"):
        ours = shapes_of(CLIPModel(CLIPConfig.from_dict(CLIP_VIT_H_14)))
        theirs = open_clip.CLIP(**{k: v for k, v in open_clip.get_model_config("ViT-H-14").items()})  # type: ignore[union-attr]
    assert ours == transformers_clip(**CLIP_H14, position_ids=False)  # type: ignore[arg-type]
    assert sum(torch.Size(shape).numel() for shape in ours.values()) == 986_109_441
    assert shapes_of(theirs) == open_clip_vit(**CLIP_H14)  # type: ignore[arg-type]
