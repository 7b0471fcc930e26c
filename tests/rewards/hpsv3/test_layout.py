# SPDX-License-Identifier: Apache-2.0
"""HPSv3's published layout: a tiny checkpoint under the published names, the key list of the real size."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, Qwen2VLConfig

from tests.support.hub import offline
from tests.support.judges.vision_language import noise
from tests.support.models.vision_language import tiny_processor, tiny_seeing_model
from visalign.rewards.base.contract import RewardError
from visalign.rewards.hpsv3.head import RanknetHead
from visalign.rewards.hpsv3.judge import HPSv3
from visalign.rewards.hpsv3.loading import current_key, load_hpsv3
from visalign.rewards.hpsv3.model import TEMPLATE, HPSv3Model
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.template import JudgeSettings
from visalign.rewards.weights.checkpoint_files import check_fit

IMAGES = [noise(16, 24, 1), noise(40, 8, 2), noise(16, 24, 3)]
PROMPTS = ["a cat", "a red dog", "a cat"]


def published(folder: Path) -> tuple[Path, HPSv3Model]:
    """A tiny checkpoint under the published names, beside the base's config and processor."""
    seeing = tiny_seeing_model(vocab_size=62, max_position_embeddings=512)
    own = HPSv3Model.new(VisionLanguageEngine(seeing, tiny_processor(), positions="1d")).eval()
    model: Any = own.backbone
    base = folder / "base"
    tiny_seeing_model().save_pretrained(base)
    tiny_processor().save_pretrained(base)
    state: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        new = key.removeprefix("model.") if "visual" in key else key.replace("model.language_model.", "model.")
        state[new] = value.clone()
    state |= own.head.state_dict()
    save_file(state, folder / "HPSv3.safetensors")
    return folder / "HPSv3.safetensors", own


def test_the_published_layout(tmp_path) -> None:
    file, own = published(tmp_path)
    keys = set(load_file(file))
    assert {"visual.merger.mlp.0.weight", "model.layers.1.self_attn.q_proj.bias", "lm_head.weight"} <= keys
    options: dict[str, Any] = {"base": tmp_path / "base", "min_pixels": 64, "max_pixels": 4096}
    built_in = HPSv3(file, **options).model
    text = built_in.template.messages[0]["content"][1]["text"]
    # of the instruction and the line of the reward token in the package hpsv3 1.0.0
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == "e61d58f3c7d3"
    JudgeSettings(templates={"hpsv3": TEMPLATE}).write(tmp_path)
    judge = HPSv3(tmp_path, **options)
    assert judge.model.clamp is None and judge.model.engine.positions == "1d"
    scores, expected = judge.score(IMAGES, PROMPTS), HPSv3(own).score(IMAGES, PROMPTS)
    torch.testing.assert_close(scores.value, expected.value, rtol=1e-5, atol=1e-5)
    own.clamp = None
    assert scores.std is not None
    torch.testing.assert_close(scores.std, HPSv3(own).score(IMAGES, PROMPTS).std, rtol=1e-5, atol=1e-5)
    standard = load_hpsv3(tmp_path, base=tmp_path / "base").engine.network.images.settings()
    assert standard["min_pixels"] == standard["max_pixels"] == 200704
    for state in (load_file(file), {"model": load_file(file)}):  # as training writes it, too
        torch.save(state, tmp_path / "HPSv3.pt")
        again = HPSv3(tmp_path / "HPSv3.pt", **options)
        torch.testing.assert_close(again.score(IMAGES, PROMPTS).value, scores.value)


def test_a_published_file_takes_no_adapter(tmp_path) -> None:
    file, _ = published(tmp_path)
    with pytest.raises(RewardError, match="A published file of weights takes no adapter"):
        _ = HPSv3(file, base=tmp_path / "base", adapter=tmp_path).model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("visual.merger.mlp.0.weight"), r"missing: model.visual.merger.mlp.0.weight\. Give"),
        (lambda s: s.update(extra=torch.zeros(1)), r"model, unexpected: extra\. Give"),
        (lambda s: s.update({"model.norm.weight": torch.zeros(3)}), r"norm.weight \(3,\) instead of \(32,\)"),
        (lambda s: s.pop("rm_head.5.weight"), "are no HPSv3 head"),
        (lambda s: s.update({"rm_head.7.bias": torch.zeros(2)}), "unexpected: rm_head.7.bias"),
    ],
)
def test_wrong_keys_are_refused_by_name(tmp_path, change, message) -> None:
    file, _ = published(tmp_path)
    state = load_file(file)
    change(state)
    save_file(state, file)
    with pytest.raises(RewardError, match=message):
        load_hpsv3(file, base=tmp_path / "base", template=TEMPLATE)


def test_missing_parts_are_named(tmp_path, monkeypatch) -> None:
    file, _ = published(tmp_path)
    offline(monkeypatch)
    with pytest.raises(RewardError, match=r"'Qwen/Qwen2-VL-7B-Instruct' is not on this disk"):
        load_hpsv3(file, template=TEMPLATE)
    (tmp_path / "other.pt").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"holds 2 weight files and no judge\.json with a head"):
        load_hpsv3(tmp_path, base=tmp_path / "base", template=TEMPLATE)
    (tmp_path / "judge.json").write_text(json.dumps({"head": {"type": "linear"}}))
    with pytest.raises(RewardError, match=r"is \{'type': 'linear'\}; HPSv3's is 'ranknet'"):
        load_hpsv3(tmp_path)
    with pytest.raises(RewardError, match="There is no folder 'nowhere'"):
        load_hpsv3("nowhere")


def published_keys() -> list[str]:
    """The names of the published 7B checkpoint."""
    layer = [f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    layer += ["self_attn.o_proj.weight", *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down"))]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    block = [
        f"{part}.{kind}"
        for part in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        for kind in ("weight", "bias")
    ]
    keys = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "visual.patch_embed.proj.weight"]
    keys += [f"model.layers.{number}.{name}" for number in range(28) for name in layer]
    keys += [f"visual.blocks.{number}.{name}" for number in range(32) for name in block]
    keys += [f"visual.merger.{part}.{kind}" for part in ("ln_q", "mlp.0", "mlp.2") for kind in ("weight", "bias")]
    return keys + [f"rm_head.{index}.{kind}" for index in (0, 3, 5) for kind in ("weight", "bias")]


def test_the_key_list_of_the_published_size_fits() -> None:
    keys = published_keys()
    assert len(keys) == 736
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 151658, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4,
            "patch_size": 14,
        },
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        expected = AutoModelForImageTextToText.from_config(config).state_dict()
    names = [current_key(key) for key in keys if not key.startswith("rm_head.")]
    check_fit(expected, {key: expected.get(key, torch.empty(0)) for key in names}, "the list")
    head = RanknetHead(3584).state_dict()
    assert sorted(head) == sorted(key for key in keys if key.startswith("rm_head."))
    assert expected["model.language_model.embed_tokens.weight"].shape == (151658, 3584)
