# SPDX-License-Identifier: Apache-2.0
"""ImageReward: the published layout, cut prompts, one look an image; values are in `test_official`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support.models.clip import WORDS
from tests.support.models.published_layouts import IMAGE_REWARD, image_reward, random_state
from visalign.rewards import RewardError, check_reward
from visalign.rewards.scorers.image_reward import MED_CONFIG, UNUSED, ImageReward, ImageRewardModel, rename

TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS)
SIZES: dict[str, Any] = {
    "text": (32, 64, 2),
    "vision": (24, 48, 2),
    "vocabulary": len(TOKENS),
    "context": 40,
    "patch": 8,
    "image": 32,
    "widths": (12, 8, 6, 4, 1),
    "projection": 5,
}
HEADS = {"text": 4, "vision": 3}
PROMPTS = ["a red circle", "two circles left of a blue square", "a"]


def bert_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(TOKENS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def med_config() -> dict[str, Any]:
    width, inner, layers = SIZES["text"]
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS["text"],
        "vocab_size": SIZES["vocabulary"],
        "max_position_embeddings": SIZES["context"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "encoder_width": 768,
        "add_cross_attention": True,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder_path = tmp_path_factory.mktemp("image reward")
    torch.save(random_state(image_reward(**SIZES), 4), folder_path / "ImageReward.pt")
    (folder_path / "med_config.json").write_text(json.dumps(med_config()))
    bert_tokenizer().save_pretrained(str(folder_path))
    return folder_path


def tiny(folder: Path, **options: Any) -> ImageReward:
    return ImageReward(folder, vision_heads=HEADS["vision"], **{"max_tokens": 12, **options})


def test_each_image_is_looked_at_once(folder, images, monkeypatch):
    reward = tiny(folder, batch_size=2)
    image_batches, text_batches = [], []
    look, read = reward.model.encode_image, reward.model.forward
    monkeypatch.setattr(reward.model, "encode_image", lambda x: image_batches.append(len(x)) or look(x))
    monkeypatch.setattr(reward.model, "forward", lambda p, t, m: text_batches.append(len(p)) or read(p, t, m))
    pairs = [(i, p) for p in (*PROMPTS, PROMPTS[0]) for i in range(3)]
    scores = reward.score([images[i] for i, _ in pairs], [p for _, p in pairs])
    assert sum(image_batches) == 3 and sum(text_batches) == 9
    assert torch.equal(scores.value[:3], scores.value[9:])
    direct = torch.cat([tiny(folder).score(images[[i]], [p]).value for i, p in pairs])
    torch.testing.assert_close(scores.value, direct, rtol=1e-5, atol=1e-6)


def test_long_prompts_are_cut_and_noted(folder, images):
    long = " ".join(["red"] * 9 + ["blue", "circle"])
    cut = " ".join(["red"] * 9 + ["blue"])
    scores = tiny(folder).score(images[[0, 0]], [long, cut])
    assert scores.text == ["the prompt was cut to 12 tokens", ""]
    assert scores.value[0] == scores.value[1]
    assert tiny(folder, max_tokens=20).score(images[[0]], [long]).value[0] != scores.value[0]
    assert ImageReward(folder).max_tokens == 35
    bad = tiny(folder).score(images[[0, 1, 0]], [long, "\u200b ", "a \ud800"])
    assert bad.valid.tolist() == [True, False, False] and bad.parts["cut"][0] == 1
    assert bad.reason is not None and "prompt is empty" in str(bad.reason[1])
    assert "surrogate" in str(bad.reason[2])


def test_gradient_path(folder, images):
    reward = tiny(folder)
    samples = images.clone().requires_grad_()
    value = reward.score_with_gradient(samples, PROMPTS)
    torch.testing.assert_close(value.detach(), reward.score(images, PROMPTS).value, rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(value.sum(), samples)[0].abs().sum() > 0


def test_contract_bad_rows_and_identity(folder, images):
    reward = tiny(folder)
    assert len(check_reward(reward)) == 11
    scores = reward.score([images[0], torch.zeros(3, 1, 400), "missing.png"], PROMPTS)
    assert scores.valid.tolist() == [True, False, False] and scores.reason is not None
    assert "too elongated" in str(scores.reason[1])
    for change in ({"max_tokens": 20}, {"tokenizer": folder}):
        assert reward.identity.differences(tiny(folder, **change).identity) == ["options"]
    assert not reward.score(["missing.png"], ["a"]).valid.any()


def test_published_layout_at_its_size():
    """Every key of ImageReward-v1.0 finds its place, with its shape, and none is left empty."""
    published = image_reward(**IMAGE_REWARD)
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 16,
    }
    with torch.device("meta"):
        model = ImageRewardModel(vision, MED_CONFIG, [1024, 128, 64, 16, 1])
    ours = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert {rename(key): shape for key, shape in published.items() if key not in UNUSED} == ours
    assert set(UNUSED) <= set(published)


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        (
            "blip.text_encoder.encoder.layer.1.crossattention.self.key.bias",
            None,
            r"missing: text.encoder.layer.1.crossattention.self.key.bias",
        ),
        (None, "blip.itm_head.weight", r"unexpected: blip.itm_head.weight"),
        ("mlp.layers.4.bias", None, r"the head has layers \[0, 2, 6, 7\], needed are mlp.layers.0, 2, 4"),
    ],
)
def test_keys_are_strict(folder, tmp_path, images, drop, add, message):
    state = torch.load(folder / "ImageReward.pt", weights_only=True)
    if drop:
        del state[drop]
    if add:
        state[add] = torch.zeros(2)
    torch.save(state, tmp_path / "ImageReward.pt")
    (tmp_path / "med_config.json").write_text(json.dumps(med_config()))
    bert_tokenizer().save_pretrained(str(tmp_path))
    with pytest.raises(RewardError, match=message):
        tiny(tmp_path).score(images, PROMPTS)


def test_what_is_not_there_or_not_allowed(folder, tmp_path, images):
    with pytest.raises(FileNotFoundError, match=r"no weight file .*ImageReward.pt"):
        _ = tiny(tmp_path).model
    for options, message in (
        ({"max_tokens": 0}, "max_tokens is 0; allowed are whole numbers from 1"),
        ({"batch_size": 0}, "batch_size is 0; allowed are whole numbers from 1"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny(folder, **options)
