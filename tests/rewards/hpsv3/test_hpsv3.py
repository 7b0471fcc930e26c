# SPDX-License-Identifier: Apache-2.0
"""HPSv3: pooled at one token, both layouts, what is refused, and the contract of rewards."""

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from tests.support.judges.vision_language import noise, tiny_judge
from tests.support.models.vision_language import save_tiny_seeing_model
from visalign.core.preference.uncertainty import soft_clamp
from visalign.rewards.base.contract import RewardError
from visalign.rewards.checks import check_reward
from visalign.rewards.hpsv3.head import RanknetHead
from visalign.rewards.hpsv3.judge import HPSv3
from visalign.rewards.hpsv3.model import REWARD_TOKEN, HPSv3Model
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.template import JudgeSettings, Template

IMAGES = [noise(16, 24, 1), noise(40, 8, 2), noise(16, 24, 3)]
PROMPTS = ["a cat", "a red dog", "a cat"]


def tiny_hpsv3(**options: Any) -> HPSv3Model:
    model = HPSv3Model.new(tiny_judge(positions=options.pop("positions", "1d"), **options))
    with torch.no_grad():
        last: Any = model.head.rm_head[5]
        last.bias.copy_(torch.tensor([0.5, -1.0]))
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def shared() -> HPSv3Model:
    return tiny_hpsv3()


def test_the_score_is_the_head_at_the_reward_token(shared) -> None:
    scores = HPSv3(shared).score(IMAGES, PROMPTS)
    for row, (image, prompt) in enumerate(zip(IMAGES, PROMPTS, strict=True)):
        model: Any = shared.backbone
        encoded = shared.encode([image], [prompt]).rows[0]
        token = shared.engine.processor.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        ids = torch.tensor([encoded.ids])
        assert encoded.ids.count(token) == 1 and encoded.ids[-1] == token
        embeds = model.get_input_embeddings()(ids).clone()
        patches = shared.engine.network.images.cutter.cut(encoded.images[0].pixels)  # type: ignore[attr-defined]
        features = model.model.visual(patches, torch.tensor([encoded.images[0].grid])).pooler_output
        embeds[ids == shared.engine.network.image_token] = features
        hidden = model.model.language_model(inputs_embeds=embeds).last_hidden_state
        mean, raw = shared.head(hidden[0, -1])
        torch.testing.assert_close(scores.value[row], mean, rtol=1e-5, atol=1e-5)
        assert scores.std is not None
        torch.testing.assert_close(scores.std[row], soft_clamp(raw).exp(), rtol=1e-5, atol=1e-5)


def test_a_typed_reward_token_is_escaped(shared) -> None:
    typed = f"a cat {REWARD_TOKEN} 10 {REWARD_TOKEN}"
    batch = shared.encode([IMAGES[0]], [typed])
    token = shared.engine.processor.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
    assert batch.reasons == [None] and batch.rows[0].ids.count(token) == 1
    assert batch.rows[0].ids[-1] == token and len(batch.rows[0].ids) > 20
    assert HPSv3(shared).score([IMAGES[0]], [typed]).valid.all()


def test_the_contract_of_rewards(shared) -> None:
    check_reward(HPSv3(shared))


def test_rows_that_cannot_be_judged_carry_their_reason(shared) -> None:
    scores = HPSv3(shared).score([IMAGES[0], noise(2, 500), IMAGES[1], "none.png"], ["a", "b", " ", "c"])
    assert scores.valid.tolist() == [True, False, False, False] and scores.reason is not None
    assert scores.std is not None and scores.std[1:].isnan().all() and scores.value[1:].isnan().all()
    for reason, part in zip(scores.reason[1:], ("200 times", "prompt is empty", "no such image"), strict=True):
        assert part in (reason or "")


@pytest.mark.parametrize("text", ["{prompt}", "{prompt} <|Reward|> and <|Reward|>"])
def test_a_template_without_one_token_is_refused(text) -> None:
    content = [{"type": "image"}, {"type": "text", "text": text}]
    wrong = Template(name="wrong", messages=[{"role": "user", "content": content}])
    with pytest.raises(RewardError, match=r"'wrong' needs one image, one <\|Reward\|>; it has [02]"):
        HPSv3Model(tiny_judge(), RanknetHead(32), template=wrong)
    with pytest.raises(RewardError, match="The head maps 16 numbers to 2; needed are 32"):
        HPSv3Model(tiny_judge(), RanknetHead(16))


def test_the_whole_model_survives_a_round_trip(tmp_path, shared) -> None:
    shared.save_pretrained(tmp_path)
    settings = JudgeSettings.read(tmp_path)
    assert settings.positions == "1d" and settings.rest["head"] == {"type": "ranknet", "clamp": [-7.0, 3.0]}
    again = HPSv3(tmp_path)
    assert torch.equal(again.score(IMAGES, PROMPTS).value, HPSv3(shared).score(IMAGES, PROMPTS).value)
    assert not any(parameter.requires_grad for parameter in again.model.parameters())
    assert again.identity.weights and again.identity.options["positions"] == "1d"
    head = load_file(tmp_path / "reward_head.safetensors")
    save_file({key: value for key, value in head.items() if "3.bias" not in key}, tmp_path / "reward_head.safetensors")
    with pytest.raises(RewardError, match=r"missing: rm_head\.3\.bias"):
        _ = HPSv3(tmp_path).model
    (tmp_path / "reward_head.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no weight file .*reward_head\.safetensors"):
        _ = HPSv3(tmp_path).model


def test_a_lora_and_a_head_are_saved_with_the_name_of_their_base(tmp_path) -> None:
    base = save_tiny_seeing_model(tmp_path / "base")
    model = HPSv3Model.new(VisionLanguageEngine.from_pretrained(base))
    target = r".*language_model.*\.(q_proj|v_proj)"
    model.backbone.add_adapter(LoraConfig(r=2, target_modules=target, init_lora_weights=False))  # type: ignore[operator]
    model.eval()
    batch = model.encode(IMAGES, PROMPTS)
    mean, log_std = model(batch)
    (mean.sum() + log_std.sum()).backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert any("lora_B" in name for name in trained) and any("rm_head" in name for name in trained)
    assert not any("visual" in name for name in trained)
    with pytest.raises(RewardError, match="name its base: save_pretrained"):
        model.save_pretrained(tmp_path / "lora")
    model.save_pretrained(tmp_path / "lora", base="../base")
    assert not (tmp_path / "lora" / "model.safetensors").exists()
    again = HPSv3(tmp_path / "lora").score(IMAGES, PROMPTS)
    torch.testing.assert_close(again.value, mean.detach(), rtol=1e-4, atol=1e-5)


def test_a_new_token_gets_the_mean_embedding() -> None:
    engine = tiny_judge()
    before = len(engine.model.get_input_embeddings().weight)
    weight = engine.model.get_input_embeddings().weight.detach().clone()
    model = HPSv3Model.new(engine)
    after = engine.model.get_input_embeddings().weight
    token = engine.processor.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
    assert len(after) == max(before, token + 1) and torch.equal(after[:before][:token], weight[:token])
    torch.testing.assert_close(after[token], weight[:token].mean(0))
    model.add_token()
    assert torch.equal(engine.model.get_input_embeddings().weight, after)


def test_nan_is_masked(shared) -> None:
    model = tiny_hpsv3()
    with torch.no_grad():
        last: Any = model.head.rm_head[5]
        last.bias[0] = math.nan
    scores = HPSv3(model).score(IMAGES[:1], PROMPTS[:1])
    assert not scores.valid.any() and "gave mean nan" in str(scores.reason)
