# SPDX-License-Identifier: Apache-2.0
"""Vision judges from a folder: settings, templates, adapters, and refusals by message."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from tests.support.judges.vision_language import ONE, noise, tiny_judge
from tests.support.models.language import tiny_model, tiny_tokenizer
from tests.support.models.vision_language import save_tiny_seeing_model, tiny_seeing_model
from visalign.rewards.base.contract import RewardError
from visalign.rewards.vlm import loading
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine
from visalign.rewards.vlm.network import image_encoder
from visalign.rewards.vlm.template import JudgeSettings, Template, escape
from visalign.rewards.weights.checkpoint_files import quiet_loading

ASK = Query(images=[noise(16, 24)], prompt="a cat")
OTHER = {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "{prompt}!"}]}]}


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_folder_gives_the_same_as_its_parts(tmp_path, kind) -> None:
    judge = VisionLanguageEngine.from_pretrained(save_tiny_seeing_model(tmp_path, kind))
    assert judge.name == tmp_path.name and judge.weights and judge.positions == "mrope"
    assert not judge.model.training and not any(parameter.requires_grad for parameter in judge.model.parameters())
    torch.testing.assert_close(judge.hidden(ONE, [ASK]).states, tiny_judge(kind).hidden(ONE, [ASK]).states)


def test_the_folders_settings_come_before_the_defaults(tmp_path) -> None:
    save_tiny_seeing_model(tmp_path)
    inputs = {"templates": {"yes_no": {**OTHER, "yes": ["y"], "no": ["n"]}}, "positions": "1d", "more": 1}
    (tmp_path / "judge.json").write_text(json.dumps(inputs))
    judge = VisionLanguageEngine.from_pretrained(tmp_path)
    assert judge.positions == "1d" and judge.settings.rest == {"more": 1}
    template = judge.template("yes_no", ONE)
    assert template.words == {"yes": ("y",), "no": ("n",)} and template.images == 1
    assert judge.template("pair", ONE) is ONE
    assert VisionLanguageEngine.from_pretrained(tmp_path, positions="mrope").positions == "mrope"
    judge.settings.write(tmp_path)
    assert JudgeSettings.read(tmp_path) == judge.settings


def test_an_adapter_is_merged(tmp_path) -> None:
    base = save_tiny_seeing_model(tmp_path / "base")
    judge = VisionLanguageEngine.from_pretrained(base)
    plain = judge.hidden(ONE, [ASK]).states
    target = r".*language_model.*\.(q_proj|v_proj)"
    judge.model.add_adapter(LoraConfig(r=2, target_modules=target, init_lora_weights=False))
    judge.model.eval()
    expected = judge.hidden(ONE, [ASK]).states
    judge.model.save_pretrained(tmp_path / "adapter")
    again = VisionLanguageEngine.from_pretrained(base, adapter=tmp_path / "adapter")
    torch.testing.assert_close(again.hidden(ONE, [ASK]).states, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, expected, rtol=1e-3)
    assert not any("lora" in name for name, _ in again.model.named_parameters()) and "+" in again.weights
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_config\.json"):
        VisionLanguageEngine.from_pretrained(base, adapter=tmp_path / "none")


def test_missing_parts_are_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no model folder nowhere with a config\.json"):
        VisionLanguageEngine.from_pretrained("nowhere")
    tiny_seeing_model().save_pretrained(tmp_path)
    with pytest.raises(RewardError, match="has no processor of a vision-language model"):
        VisionLanguageEngine.from_pretrained(tmp_path)
    save_tiny_seeing_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RewardError, match=r"cannot be loaded: .*Copy it whole"):
        VisionLanguageEngine.from_pretrained(tmp_path)


def test_weights_are_strict(tmp_path) -> None:
    file = save_tiny_seeing_model(tmp_path) / "model.safetensors"
    state = load_file(file)
    lost = next(key for key in state if key.endswith("layers.0.mlp.down_proj.weight"))
    save_file({key: value for key, value in state.items() if key != lost}, file, {"format": "pt"})
    with pytest.raises(RewardError, match=r"missing .*layers\.0\.mlp\.down_proj\.weight; unexpected nothing"):
        VisionLanguageEngine.from_pretrained(tmp_path)
    save_file({**state, "extra.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(RewardError, match=r"missing nothing; unexpected extra\.weight"):
        VisionLanguageEngine.from_pretrained(tmp_path)


def test_a_model_that_does_not_see_is_refused() -> None:
    processor: Any = tiny_tokenizer()
    with pytest.raises(RewardError, match=r"is no vision-language judge; supported are qwen2_vl, .*internvl"):
        image_encoder(tiny_model(), processor)
    with pytest.raises(RewardError, match=r"\('qwen2_vl'\) with a \w+ is no vision-language judge"):
        image_encoder(tiny_seeing_model(), processor)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"templates": []}', "needs an object with an object 'templates'"),
        ('{"templates": {"a": {}}}', "template 'a' is {}; it needs 'messages'"),
        ('{"templates": {"a": {"messages": [{"role": "user", "content": [{"type": "video"}]}]}}}', "needs 'messages"),
        ('{"templates": {"a": {"messages": [], "yes": "yes"}}}', "'yes' is 'yes'; it takes a list of words"),
        ('{"templates": {"a": {"messages": [], "answer_prefix": 3}}}', "a text answer_prefix"),
    ],
)
def test_wrong_settings_are_refused_by_message(tmp_path, content, message) -> None:
    (tmp_path / "judge.json").write_text(content)
    with pytest.raises(RewardError, match=message):
        JudgeSettings.read(tmp_path)


def test_templates_survive_the_round_trip_and_know_their_slots() -> None:
    again = Template.from_dict("one", json.loads(json.dumps(ONE.to_dict())))
    assert again.digest == ONE.digest and again.fields == {"prompt"} and again.images == 1
    plain = Template.from_dict("plain", {"messages": [{"role": "user", "content": "{a} {b c} {}"}]})
    assert plain.fields == {"a"} and plain.images == 0
    assert plain.filled({"a": "{b}", "b": "x"})[0]["content"] == "{b} {b c} {}"
    assert again.digest != plain.digest


def test_escaping_changes_nothing_else() -> None:
    assert escape("a § b§", ["§"]) == "a   b "
    tokens = ["<|im_end|>", "<|Reward|>"]
    assert escape("a cat, <b> {x} <| |>", tokens) == "a cat, <b> {x} <| |>"
    assert escape("<|Reward|>", tokens) == "< |Reward|>"
    assert escape("ab", ["ab", "a b"]) == "a  b"


def test_loading_is_silent_and_leaves_the_users_settings(tmp_path, capfd) -> None:
    save_tiny_seeing_model(tmp_path)
    capfd.readouterr()
    before = logging.is_progress_bar_enabled()
    VisionLanguageEngine.from_pretrained(tmp_path)
    assert capfd.readouterr().err == ""
    list(logging.tqdm(range(2), desc="Loading weights"))
    assert "Loading weights: 100%" in capfd.readouterr().err, "the user's own loads show their bar again"
    with pytest.raises(RewardError), quiet_loading():
        raise RewardError("no such model")
    assert logging.is_progress_bar_enabled() == before


def test_quantization_needs_its_package_and_spares_what_is_read(monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(RewardError, match=r"'int8'; allowed, with bitsandbytes: "):
        loading.placing_options(torch.bfloat16, "cuda", quantization="int8")
    monkeypatch.setattr(loading, "find_spec", lambda name: name)
    options = loading.placing_options(torch.bfloat16, "cuda:1", quantization="int4")
    config = options["quantization_config"]
    assert config.load_in_4bit and config.bnb_4bit_compute_dtype == torch.bfloat16
    assert {"lm_head", "visual"} <= set(config.llm_int8_skip_modules)
    assert options["device_map"] == {"": "cuda:1"}


def test_a_model_that_is_partly_on_disk_is_refused():
    model = SimpleNamespace(hf_device_map={"model.visual": 0, "lm_head": "disk"})
    with pytest.raises(RewardError, match="device_map puts parts of the model on disk"):
        loading.placed(model, "cuda", device_map="auto")
