# SPDX-License-Identifier: Apache-2.0
"""What is fetched from a hub repository, and the message where nothing can be."""

from __future__ import annotations

import time

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModel

from tests.support.hub import COMMIT, hub, offline
from visalign.rewards import RewardError
from visalign.rewards.clip.loading import HUB_FILES
from visalign.rewards.clip.open_clip_folder import load_open_clip
from visalign.rewards.text.classifier import load_classifier
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.weights.hub import is_hub_id, local_folder, needed_files, revision_of


def test_both_files_of_hp_are_wanted_and_nothing_twice():
    """8y/HP holds no file at its top."""
    published = ["README.md", "hp_backbone/pytorch_model.bin", "hp_scorer/mlp_pytorch_model.bin"]
    assert needed_files(published, HUB_FILES) == published[1:]
    laion = ["model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin", "config.json"]
    assert needed_files(laion, HUB_FILES) == ["model.safetensors", "config.json"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a/b", True), ("a/b@main", True), ("./a", False), ("/a/b", False), ("a", False), ("a/b/c", False)],
)
def test_what_a_hub_id_looks_like(name, expected):
    assert is_hub_id(name) is expected


def test_a_revision_is_asked_for_and_told(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    log = hub(monkeypatch, {"a/b": tmp_path})
    folder = local_folder("a/b@v2", ("*.json",))
    assert revision_of(folder) == COMMIT and (folder / "config.json").is_file()
    assert log == ["list a/b", "fetch a/b config.json"]
    assert revision_of(tmp_path) == ""


def test_without_a_network_each_model_is_asked_for_once(monkeypatch):
    log = offline(monkeypatch)
    begun = time.monotonic()
    with pytest.raises(RewardError, match=r"'Qwen/Qwen2-VL-7B-Instruct' is not on this disk .*ConnectionError"):
        VisionLanguageEngine.from_pretrained("Qwen/Qwen2-VL-7B-Instruct")
    assert time.monotonic() - begun < 5
    assert log == ["list Qwen/Qwen2-VL-7B-Instruct", "fetch Qwen/Qwen2-VL-7B-Instruct "]


@pytest.mark.parametrize(
    ("module", "load"),
    [
        ("text.classifier", lambda: load_classifier("x", "a/b", AutoModel, "fp32", torch.device("cpu"))),
        ("clip.open_clip_folder", lambda: load_open_clip("a/b")),
        ("weights.hub", lambda: local_folder("a/b", ("*",))),
    ],
)
def test_a_hub_that_is_down_is_known_before_it_is_asked(monkeypatch, module, load):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    log: list[str] = []
    monkeypatch.setattr(f"visalign.rewards.{module}.go_offline_if_unreachable", lambda: log.append("asked") or "down")
    with pytest.raises(RewardError, match=r"a/b"):
        load()
    assert log
