# SPDX-License-Identifier: Apache-2.0
"""A line of the error stream names the devices of models and rewards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from visalign.adapters import LoraSettings, load_policy
from visalign.errors import UserError
from visalign.pipelines.flow_grpo.config import ModelConfig
from visalign.pipelines.flow_grpo.parts import build_policy
from visalign.pipelines.shared.places import place_of
from visalign.pipelines.shared.reward_options import load_each
from visalign.rewards import load_reward


def test_device_and_dtype_are_those_of_the_largest_weight_or_as_chosen(capsys) -> None:
    policy: Any = load_policy("shapes-sd3", dtype=torch.bfloat16, lora=LoraSettings(rank=2))
    assert place_of(policy) == "cpu in bfloat16"
    capsys.readouterr()  # bars of loading
    options = ["clip_score.precision=bf16", "rubric.base_url=http://127.0.0.1:9", "rubric.model=m"]
    load_each(["clip_score", "jpeg_size", "rubric"], options, load_reward, "cpu")
    captured, devices = capsys.readouterr(), "clip_score on cpu in bfloat16; jpeg_size on cpu; rubric on a server"
    assert captured.err == f"Computing: {devices}.\n" and not captured.out


def test_a_reward_without_weights_that_takes_images_on_a_gpu_follows_them(monkeypatch) -> None:
    verifier = load_reward("shapes_verifier")
    assert place_of(verifier) == "cpu"
    monkeypatch.setattr("visalign.pipelines.shared.places.default_device", lambda: "cuda")
    assert place_of(verifier) == "the device of its images" and place_of(load_reward("jpeg_size")) == "cpu"


def test_images_that_are_decoded_ahead_go_to_the_device_of_the_judges(monkeypatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr("visalign.pipelines.shared.reward_options.check_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cuda:1", "cuda", "cpu"):
        load_each([], [], load_reward, device)
    assert chosen == ["cuda:1", "cuda:1", "cuda", "cpu"]


def test_a_dtype_that_a_card_emulates_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    with pytest.raises(
        UserError, match=r"model\.dtype is bfloat16, which Tesla V100 does not multiply\. Set model\.dtype="
    ):
        build_policy(ModelConfig(dtype="bfloat16"), torch.device("cuda"), 0)
