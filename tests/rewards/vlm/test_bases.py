# SPDX-License-Identifier: Apache-2.0
"""Folders that hold only a LoRA: their base is found, wherever they lie and whoever wrote them."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from tests.support.judges.vision_language import ONE, noise
from tests.support.models.vision_language import save_tiny_seeing_model
from visalign.errors import UserError
from visalign.rewards.base.contract import RewardError
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine
from visalign.rewards.vlm.loading import is_adapter, name_base

ASK = Query(images=[noise(16, 24)], prompt="a cat")
TARGET = r".*language_model.*\.(q_proj|v_proj)"
TEMPLATE = {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "{prompt}?"}]}]}


def states(judge: VisionLanguageEngine) -> torch.Tensor:
    return judge.hidden(ONE, [ASK]).states


def save_lora(path, folder, seed: int, base: str, *, settings: bool = True) -> torch.Tensor:
    """A random LoRA of the model at `path` in `folder`; returns what the two give together."""
    judge = VisionLanguageEngine.from_pretrained(path)
    torch.manual_seed(seed)
    judge.model.add_adapter(LoraConfig(r=2, target_modules=TARGET, init_lora_weights=False))
    judge.model.eval()
    judge.model.save_pretrained(folder)
    name_base(folder, base)
    if settings:
        inputs = {"templates": {f"own{seed}": TEMPLATE}, "base": base}
        (folder / "judge.json").write_text(json.dumps(inputs))
    return states(judge)


@pytest.fixture
def models(tmp_path):
    save_tiny_seeing_model(tmp_path / "models" / "base")
    (tmp_path / "models" / "base" / "judge.json").write_text(json.dumps({"templates": {"old": TEMPLATE}}))
    return tmp_path / "models"


def test_a_lora_alone_is_read_with_its_base_from_wherever_both_went(models, tmp_path):
    expected = save_lora(models / "base", models / "lora", 1, "../base")
    assert is_adapter(models / "lora") and not is_adapter(models / "base")
    shutil.move(models, tmp_path / "elsewhere")
    judge = VisionLanguageEngine.from_pretrained(tmp_path / "elsewhere" / "lora")
    torch.testing.assert_close(states(judge), expected, rtol=1e-4, atol=1e-5)
    assert judge.name == "lora" and set(judge.settings.templates) == {"own1"}
    plain = VisionLanguageEngine.from_pretrained(tmp_path / "elsewhere" / "base")
    assert not torch.allclose(states(plain), expected, rtol=1e-3)
    assert judge.weights.startswith(plain.weights + "+") and len(judge.weights) > len(plain.weights) + 1


def test_pefts_own_folder_names_the_base_and_gets_its_settings(models):
    expected = save_lora(models / "base", models / "lora", 2, str(models / "base"), settings=False)
    judge = VisionLanguageEngine.from_pretrained(models / "lora")
    torch.testing.assert_close(states(judge), expected, rtol=1e-4, atol=1e-5)
    assert set(judge.settings.templates) == {"old"}


def test_a_lora_on_a_lora_adds_both(models):
    first = save_lora(models / "base", models / "one", 3, "../base")
    expected = save_lora(models / "one", models / "two", 4, "../one")
    judge = VisionLanguageEngine.from_pretrained(models / "two")
    torch.testing.assert_close(states(judge), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(first, expected, rtol=1e-3) and judge.weights.count("+") == 2
    assert set(judge.settings.templates) == {"own4"}


def test_a_base_that_is_not_there_is_named(models, tmp_path):
    save_lora(models / "base", models / "lora", 5, "../base")
    shutil.rmtree(models / "base")
    with pytest.raises(FileNotFoundError, match=r"There is no model folder \.\./base"):
        VisionLanguageEngine.from_pretrained(models / "lora")
    (models / "lora" / "judge.json").unlink()
    (models / "lora" / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match=r"adapter_config\.json is not JSON \(Expecting property name"):
        VisionLanguageEngine.from_pretrained(models / "lora")
    (models / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"There is no model folder .*give the base model"):
        VisionLanguageEngine.from_pretrained(models / "lora")


def test_a_lora_is_strict(models):
    """peft warns of missing tensors, but not of surplus ones."""
    save_lora(models / "base", models / "lora", 1, "../base")
    file = models / "lora" / "adapter_model.safetensors"
    state = load_file(file)
    lost = next(key for key in state if key.endswith("layers.0.self_attn.q_proj.lora_A.weight"))
    save_file({key: value for key, value in state.items() if key != lost}, file, {"format": "pt"})
    with pytest.raises(RewardError, match=r"missing .*layers\.0\.self_attn\.q_proj\.lora_A.*; unexpected nothing"):
        VisionLanguageEngine.from_pretrained(models / "lora")
    save_file({**state, "base_model.model.other.lora_A.weight": torch.zeros(2, 2)}, file, {"format": "pt"})
    with pytest.raises(RewardError, match=r"missing nothing; unexpected base_model\.model\.other\.lora_A"):
        VisionLanguageEngine.from_pretrained(models / "lora")
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(RewardError, match=r"does not fit the model: .*header"):
        VisionLanguageEngine.from_pretrained(models / "lora")
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"with adapter_model\.safetensors; give the folder"):
        VisionLanguageEngine.from_pretrained(models / "lora")
