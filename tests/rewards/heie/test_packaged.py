# SPDX-License-Identifier: Apache-2.0
"""The packaged heatmap judge: no network, the contract, heat on what is wrong; files of heads in float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.judges.vision_language import PROMPTS, ask_text, images, tiny_engine
from visalign.data.assets import resolve_model
from visalign.data.shapes.prompts import parse_prompt
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import Scene, SceneObject
from visalign.rewards import check_reward, load_reward
from visalign.rewards.heie.heads import HeieHeads, HeieSettings
from visalign.rewards.heie.judge import HEADS, Heie


def packaged(**options: Any) -> Heie:
    judge = load_reward("heie", **options)
    assert isinstance(judge, Heie)
    return judge


def test_the_packaged_judge_keeps_the_contract_and_repeats_itself(monkeypatch):
    monkeypatch.setattr("socket.socket.connect", refuse_network)
    judge = packaged()
    pictures, prompts = images(4, size=64), PROMPTS
    check_reward(judge, images=pictures, prompts=prompts)
    first, second = (copy.explain(pictures, prompts) for copy in (judge, packaged()))
    assert torch.equal(first.heatmap, second.heatmap) and torch.equal(first.scores.value, second.scores.value)
    assert list(first.text) == list(second.text) and all(first.text)
    assert judge.identity.model == "shapes-heie" and judge.identity.digest == packaged().identity.digest
    assert {parameter.dtype for parameter in judge.heads.parameters()} == {torch.float32}
    assert judge.tiles == 2 and "{prompt}" in judge.template.text


def refuse_network(*_):
    raise AssertionError("a packaged judge asked for the network")


def test_the_packaged_judge_heats_what_breaks_the_prompt_and_nothing_else():
    circle = SceneObject(shape="circle", color="red", x=32, y=24, radius=9.3)
    scene = Scene(
        record=parse_prompt("a red circle"), objects=(circle,), background=(60, 60, 60), style="flat", texture_seed=0
    )
    image = torch.from_numpy(render(scene)).permute(2, 0, 1).float() / 255
    report = packaged(write_reasons=False).explain([image] * 3, ["a red circle", "a blue circle", "a cross"])
    inside = report.heatmap[:, 18:30, 26:38].mean((1, 2))
    assert inside[0] < 0.1 and (inside[1:] > 0.7).all()
    assert (report.heatmap[:, 40:].mean((1, 2)) < 0.02).all() and (report.heatmap[:, :, :17].mean((1, 2)) < 0.02).all()
    assert report.scores.value[0] > 0.8 and (report.scores.value[1:] < 0.5).all()


def test_heads_in_a_folder_name_their_base(tmp_path):
    folder = Path(resolve_model("shapes-heie"))
    for name in (HEADS, "judge.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    pictures = images(2, size=64)
    copied, original = (Heie(path, write_reasons=False).score(pictures, PROMPTS[:2]) for path in (tmp_path, folder))
    assert torch.equal(copied.value, original.value)
    own = Heie("shapes-vlm", heads=tmp_path / HEADS).score(pictures, PROMPTS[:2])
    assert torch.equal(own.value, copied.value)
    (tmp_path / HEADS).unlink()
    with pytest.raises(FileNotFoundError, match=r"There are no HEIE heads at .*heie_heads\.safetensors"):
        Heie(tmp_path)


def test_heads_in_float16_are_read_as_float32(tmp_path):
    from safetensors.torch import load_file

    original = HeieHeads(HeieSettings(hidden=32, features=32, width=32, tiles=3))
    original.save(tmp_path / "h.safetensors", half=True)
    assert {value.dtype for value in load_file(tmp_path / "h.safetensors").values()} == {torch.float16}
    read = HeieHeads.load(tmp_path / "h.safetensors")
    for key, value in original.state_dict().items():
        assert torch.equal(read.state_dict()[key], value.half().float())
    engine, template = tiny_engine(), ask_text("wrong {prompt}?")
    for option, tiles in ((None, 3), (1, 1)):  # as they were trained, or as asked for
        assert Heie(engine, heads=tmp_path / "h.safetensors", template=template, tiles=option).tiles == tiles
