# SPDX-License-Identifier: Apache-2.0
"""Towers of both libraries: the libraries' own numbers, one encoding each, gradients, strict loading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.models.clip import SIZES, save_tiny_transformers_clip
from visalign.rewards import check_reward, load_reward
from visalign.rewards.base.contract import read_request
from visalign.rewards.base.images import to_pil
from visalign.rewards.clip.towers import ClipTowers
from visalign.rewards.scorers.clip_score import ClipScore

PROMPTS = ["a red circle", "two circles", "a blue square", "a green triangle left of a red circle"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_transformers_clip(tmp_path_factory.mktemp("models") / "tiny transformers clip")


@pytest.fixture
def images() -> torch.Tensor:
    uint8 = torch.randint(0, 256, (4, 3, 41, 56), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return uint8.float() / 255


def count_encoded(towers: ClipTowers, monkeypatch) -> dict[str, int]:
    counts = {"image": 0, "text": 0}
    encoder = towers.encoder
    image, text = encoder.encode_image, encoder.encode_text
    monkeypatch.setattr(encoder, "encode_image", lambda x: counts.update(image=counts["image"] + len(x)) or image(x))
    monkeypatch.setattr(encoder, "encode_text", lambda x: counts.update(text=counts["text"] + len(x)) or text(x))
    return counts


def test_score_equals_transformers_own_pipeline(folder, images):
    from transformers import AutoTokenizer, CLIPModel

    name = "transformers.models.clip.image_processing_pil_clip"  # transformers 5.0 has the one on tensors alone
    CLIPImageProcessorPil = pytest.importorskip(name).CLIPImageProcessorPil
    model: Any = CLIPModel.from_pretrained(folder).eval()
    edges: dict[str, Any] = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    samples: Any = [to_pil(image) for image in images]
    pixels = CLIPImageProcessorPil(**edges)(samples, return_tensors="pt")["pixel_values"]
    tokens = AutoTokenizer.from_pretrained(folder)(PROMPTS, padding=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        sample = model.get_image_features(pixel_values=pixels).pooler_output
        text = model.get_text_features(input_ids=tokens).pooler_output
    scores = ClipScore(folder).score(images, PROMPTS)
    torch.testing.assert_close(scores.value, F.cosine_similarity(sample, text), rtol=1e-5, atol=1e-6)


def test_each_image_and_prompt_is_encoded_once_and_kept(folder, images, monkeypatch):
    reward = ClipScore(folder)
    counts = count_encoded(reward.towers, monkeypatch)
    pairs = [(i, p) for i in range(3) for p in PROMPTS[:2]]
    first = reward.score([images[i] for i, _ in pairs], [p for _, p in pairs])
    assert counts == {"image": 3, "text": 2}
    again = reward.score([to_pil(images[i]) for i, _ in pairs], [p for _, p in pairs])
    assert counts == {"image": 3, "text": 2} and torch.equal(first.value, again.value)
    reward.score(images[:2].flip(3), PROMPTS[:2])
    assert counts == {"image": 5, "text": 2}


def test_the_cache_keeps_to_its_bytes(folder, images, monkeypatch):
    row = SIZES["embed"] * 4
    reward = ClipScore(folder, cache_bytes=2 * row)
    counts = count_encoded(reward.towers, monkeypatch)
    reward.score(images, PROMPTS)
    assert reward.towers.images.bytes == 2 * row and len(reward.towers.images) == 2
    reward.score(images[[3]], PROMPTS[:1])
    assert counts["image"] == 4
    reward.score(images[[0]], PROMPTS[:1])
    assert counts["image"] == 5


def test_a_changed_weight_empties_the_cache(folder, images):
    reward = ClipScore(folder)
    before = reward.score(images, PROMPTS).value
    with torch.no_grad():
        reward.towers.encoder.model.visual_projection.weight[0].mul_(-3)  # type: ignore[union-attr,index]
    changed = reward.score(images, PROMPTS).value
    assert not torch.allclose(before, changed)
    reward.towers.images.clear()
    assert torch.equal(changed, reward.score(images, PROMPTS).value)


def test_gradient_path_has_the_values_of_the_score(folder, images):
    reward = ClipScore(folder)
    samples = images.clone().requires_grad_()
    value = reward.score_with_gradient(samples, PROMPTS)
    torch.testing.assert_close(value.detach(), reward.score(images, PROMPTS).value, rtol=1e-6, atol=1e-7)
    value.sum().backward()
    assert samples.grad is not None and (samples.grad.flatten(1).abs().sum(1) > 0).all()


def test_scoring_leaves_a_module_in_training_as_it_was(folder, images):
    towers = ClipTowers(folder)
    towers.encoder.train()
    towers.encoder.model.vision_model.eval()  # type: ignore[union-attr]
    towers.image_features(read_request("test", images, PROMPTS, None), [None] * len(PROMPTS))
    model: Any = towers.encoder.model
    assert towers.encoder.training and model.text_model.training and not model.vision_model.training


def test_batch_normalisation_never_looks_at_the_batch():
    from visalign.rewards.clip.encoder import ClipEncoder

    network = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Dropout(0.5))
    encoder = ClipEncoder(network).train()
    assert encoder.training and network[1].training and not network[0].training


def test_contract_with_transformers_towers(folder):
    for cache_bytes in (1 << 20, 0):  # a cache would answer for what neighbours did
        assert len(check_reward(ClipScore(folder, cache_bytes=cache_bytes))) == 11


def test_half_precision_towers(folder, images):
    half = ClipScore(folder, precision="bf16").score(images, PROMPTS).value
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, ClipScore(folder).score(images, PROMPTS).value, rtol=0, atol=0.05)


@pytest.mark.parametrize("name", ["clip_score", "ict_hp", "hps_v2"])
def test_a_prompt_that_was_cut_shows_in_the_parts(name, images):
    options = {"model": "shapes-clip"} if name == "hps_v2" else {}
    prompts = ["a red circle", "a red circle left of a blue square " * 9, "", "two circles"]
    scores = load_reward(name, **options).score(images, prompts)
    assert scores.valid.tolist() == [True, True, False, True]
    cut = scores.parts["cut"]
    assert cut[[0, 1, 3]].tolist() == [0, 1, 0] and cut.isnan().tolist() == [False, False, True, False]
    assert scores.text is not None and scores.text[1].startswith("the prompt was cut to 12 tokens")


def test_a_reading_that_fails_leaves_no_note_that_a_prompt_is_whole(monkeypatch):
    reward: Any = load_reward("clip_score", run_device="cpu")
    long, parts = "a red circle and " * 20, reward.towers.parts
    monkeypatch.setattr(reward.towers, "parts", replace(parts, tokenizer=None))
    with pytest.raises(TypeError):
        reward.towers.read_prompts([long], [None])
    monkeypatch.setattr(reward.towers, "parts", parts)
    assert reward.towers.read_prompts([long], [None])[0].startswith("the prompt was cut")


SPELLED = [
    ("<|endoftext|>", "spells out the model's end token"),
    ("a red circle <|endoftext|>", "spells out the model's end token"),
    ("<|startoftext|> a red circle", "spells out the model's start token"),
    ("a \ud800 circle", "half of a surrogate pair"),
]


@pytest.mark.parametrize(("prompt", "reason"), SPELLED)
def test_a_prompt_that_is_no_plain_text_costs_its_own_row(images, prompt, reason):
    judge = ClipScore("shapes-clip")
    scores = judge.score(images[:2], [prompt, "a red circle"])
    assert scores.valid.tolist() == [False, True] and scores.reason is not None
    assert reason in str(scores.reason[0])
    torch.testing.assert_close(scores.value[1:], judge.score(images[1:2], ["a red circle"]).value)
