# SPDX-License-Identifier: Apache-2.0
"""Refused members and folders of a LoRA ensemble, each by its fault."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.judges.lora_members import joined, save_member, save_members
from tests.support.models.vision_language import save_tiny_seeing_model
from visalign.rewards.base.contract import RewardError
from visalign.rewards.hpsv3.ensemble_judge import LoraEnsembleReward
from visalign.rewards.vlm.template import Template


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_members(tmp_path_factory.mktemp("ensemble"))


def test_members_that_differ_are_refused_by_what_they_differ_in(root: Path, tmp_path: Path) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "other {prompt} <|Reward|>"}]
    other = Template(name="hpsv3", messages=[{"role": "user", "content": content}])
    save_tiny_seeing_model(tmp_path / "base2")
    odd: dict[str, tuple[Path, dict[str, Any]]] = {
        "base": (tmp_path / "base2", {}),
        "adapted layers": (root / "base", {"targets": r".*language_model.*\.q_proj"}),
        "template": (root / "base", {"template": other}),
        "shapes of the head": (root / "base", {"hidden": (6, 4)}),
        "positions": (root / "base", {"positions": "1d"}),
    }
    for number, (what, (base, changes)) in enumerate(odd.items()):
        member = save_member(tmp_path / f"odd{number}", base, 7, **changes)
        with pytest.raises(RewardError, match=f"m0 and odd{number} differ in {what}: "):
            LoraEnsembleReward.from_members([root / "m0", member])
    with pytest.raises(RewardError, match="1 members were given; an ensemble needs at least two"):
        LoraEnsembleReward.from_members([root / "m0"])
    with pytest.raises(RewardError, match="base is no member of a LoRA ensemble: it needs adapter_config"):
        LoraEnsembleReward.from_members([root / "m0", root / "base"])


def test_unsupported_adapters_are_refused(root: Path, tmp_path: Path) -> None:
    tower = [save_member(tmp_path / f"t{seed}", root / "base", seed, targets=r".*\.visual\..*qkv") for seed in (0, 1)]
    with pytest.raises(RewardError, match=r"adapt model\.visual.*outside the language part"):
        LoraEnsembleReward.from_members(tower)
    member = save_member(tmp_path / "dora", root / "base", 3)
    config = json.loads((member / "adapter_config.json").read_text())
    (member / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(RewardError, match="The LoRA of dora has use_dora True; members"):
        LoraEnsembleReward.from_members([root / "m0", member])
    (member / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"There is no weight file .*adapter_model\.safetensors"):
        LoraEnsembleReward.from_members([root / "m0", member])


def test_damaged_folders_and_wrong_options_are_refused(root: Path, tmp_path: Path) -> None:
    joined(root).save(tmp_path / "whole")
    file = tmp_path / "whole" / "members.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith("lora_B"))
    for change, message in (
        ({name: None}, rf"missing: {re.escape(name)}"),
        ({"rm_head.3.bias": None}, "missing: rm_head.3.bias"),
        ({name: tensors[name][:, :5].contiguous()}, "of another shape: .*lora_B"),
        ({"reward_token": tensors["reward_token"][:1]}, r"together \(\[1, 2\]"),
        ({name.replace("layers.0", "layers.9"): tensors[name].clone()}, "unexpected: .*layers.9"),
    ):
        both = tensors | change
        save_file({key: value for key, value in both.items() if value is not None}, file)
        with pytest.raises(RewardError, match=message):
            _ = LoraEnsembleReward(tmp_path / "whole").model
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"There is no weight file .*members\.safetensors"):
        _ = LoraEnsembleReward(tmp_path / "whole").model
    with pytest.raises(RewardError, match=r"m0 is no LoRA ensemble .*from_members"):
        _ = LoraEnsembleReward(root / "m0").model
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"min_members": 0}, "min_members is 0; allowed are whole numbers from 1"),
        ({"precision": "int8"}, "precision is 'int8'; allowed are fp32"),
    )
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            LoraEnsembleReward(**options)
    with pytest.raises(RewardError, match="min_members is 4, and the ensemble has 2"):
        joined(root, min_members=4)
    with pytest.raises(ValueError, match="made from a module whose base has no name"):
        LoraEnsembleReward(joined(root).model).save(tmp_path / "nameless")
