# SPDX-License-Identifier: Apache-2.0
"""Adapters by name, by the model's own index, and by a user's file; each refusal says what exists."""

import json
from typing import Any

import pytest
import torch

from tests.support.models.sd3 import build_tiny_sd3
from visalign.adapters import AdapterError, LoraSettings, PipelinePolicy, SD3Policy, check_adapter, load_policy
from visalign.errors import UserError

OWN = """
from tests.support.training.images import ToyPolicy

class Own(ToyPolicy):
    @classmethod
    def from_pretrained(cls, folder_or_id, *, dtype, device, guidance=1.0):
        made = cls(dtype, guided=guidance > 1)
        made.source = str(folder_or_id)
        return made

class Unfinished(Own):
    decode = None

class Undeclared(Own):
    prediction = "noise"

class Passing(Own):
    def __init__(self, dtype, width=3, **others):
        super().__init__(dtype)
        self.others = others

    @classmethod
    def from_pretrained(cls, folder_or_id, *, dtype, device, **options):
        return cls(dtype, **options)

def make(): ...
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_sd3(tmp_path_factory.mktemp("models") / "sd3")


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


@pytest.mark.parametrize("adapter", [None, "sd3", "visalign.adapters.sd3.policy:SD3Policy"])
def test_the_adapter_follows_from_the_folder_or_is_named(folder, adapter):
    policy = load_policy(folder, adapter=adapter, dtype=torch.bfloat16, guidance=2.0, lora=LoraSettings(rank=2))
    assert type(policy) is SD3Policy and policy.guidance == 2 and policy.storage_dtype == torch.bfloat16


def test_sd3_is_driven_by_the_general_adapter_where_only_that_takes_an_option(folder):
    base = {"use_t5": True, "max_sequence_length": 256}
    options = {"defaults": base, "guidance": 2.0, "lora": LoraSettings(rank=2), **base, "decoder_dtype": torch.float32}
    policy = load_policy(folder, **options)
    assert type(policy) is PipelinePolicy and policy.guidance == 2
    assert type(load_policy(folder, adapter="pipeline", **options)) is PipelinePolicy
    with pytest.raises(UserError, match=r"SD3Policy takes no decoder_dtype\."):
        load_policy(folder, adapter="sd3", **options)
    with pytest.raises(UserError, match=r"PipelinePolicy takes no use_t5\."):
        load_policy(folder, **{**options, "use_t5": False})


def test_a_users_own_class_gets_what_it_takes(own):
    base = {"guidance": 1.0, "use_t5": True}
    policy: Any = load_policy(
        "anything", adapter=f"{own}:Own", dtype=torch.float64, defaults=base, guidance=2.0, use_t5=True
    )
    assert policy.guided and policy.source == "anything" and policy.storage_dtype == torch.float64
    with pytest.raises(UserError, match=r"Own takes no use_t5\. It takes dtype, device, guidance\."):
        load_policy("anything", adapter=f"{own}:Own", defaults=base, use_t5=False)
    passing: Any = load_policy("x", adapter=f"{own}:Passing", defaults=base, use_t5=True, guidance=3.0)
    assert passing.others == {"guidance": 3.0}


def test_a_users_own_class_is_checked(own):
    policy: Any = load_policy("x", adapter=f"{own}:Own")
    policy.net.shift.data += torch.arange(12.0).view(3, 4)  # prompts that it tells apart
    assert "gradients" in check_adapter(policy, prompts=("bright", "dark"), save=False)
    with pytest.raises(AdapterError, match=r"is no adapter: it lacks the methods decode\. Add them"):
        load_policy("x", adapter=f"{own}:Unfinished")
    with pytest.raises(AdapterError, match=r"it lacks the methods from_pretrained, encode"):
        load_policy("x", adapter=f"{own}:make")
    with pytest.raises(AdapterError, match=r"prediction is 'noise'; allowed: velocity, epsilon, v, x0"):
        load_policy("x", adapter=f"{own}:Undeclared")


def test_refusals_say_what_exists(folder, own, tmp_path):
    with pytest.raises(UserError, match=r"no adapter 'sd4'\. Did you mean 'sd3'\? Allowed: sd3, pipeline"):
        load_policy(folder, adapter="sd4")
    with pytest.raises(UserError, match=r"own.py has no 'Owm'\. Did you mean 'Own'\?"):
        load_policy(folder, adapter=f"{own}:Owm")
    with pytest.raises(UserError, match=r"absent\.py does not exist; give the path of the file"):
        load_policy(folder, adapter="absent.py:Own")
    other = tmp_path / "flux"
    other.mkdir()
    (other / "model_index.json").write_text(json.dumps({"_class_name": "PRXPixelPipeline"}))
    for text, message in (
        ('{"_class_name": ["a"]}', "'_class_name' is no text"),
        ("[]", "holds a list, needed is an object"),
        ("[" * 9999, "nested too deeply"),
    ):
        (tmp_path / "model_index.json").write_text(text)
        with pytest.raises(UserError, match=message):
            load_policy(tmp_path)
    message = r"is a PRXPixelPipeline, which is of no family .*FluxPipeline \(flux\).*file\.py:Class"
    with pytest.raises(UserError, match=message):
        load_policy(other)
