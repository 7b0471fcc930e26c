# SPDX-License-Identifier: Apache-2.0
"""Adapters under kohya's keys: diffusers' own loader makes the same network of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.support.models.pipelines import tiny_pipeline
from visalign.adapters import LoraSettings
from visalign.adapters.pipeline.policy import PipelinePolicy
from visalign.pipelines.cli.app import app


def saved(name: str, folder: Path) -> PipelinePolicy:
    pipe, options = tiny_pipeline(name)
    policy = PipelinePolicy(pipe, lora=LoraSettings(rank=2, alpha=6), **options)
    with torch.no_grad():
        for _, weight in policy.trainable_parameters():
            weight.add_(0.1)
    policy.save(folder / "lora")
    return policy


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_the_exported_file_makes_the_same_pictures(name, tmp_path):
    policy = saved(name, tmp_path)
    file = tmp_path / "kohya.safetensors"
    done = CliRunner().invoke(app, ["export-lora", str(tmp_path), "-o", str(file)])
    assert done.exit_code == 0, done.output
    pipe, _ = tiny_pipeline(name)
    pipe.load_lora_weights(file)
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    sigma, condition = torch.tensor([0.8, 0.4]), policy.encode(["a red circle", "two squares"])
    with torch.no_grad():
        expected = policy.velocity(x, sigma, condition)
        policy.networks["unet"].load_state_dict(
            {key.replace("default_0", "default"): w for key, w in pipe.unet.state_dict().items()}
        )
        assert torch.equal(policy.velocity(x, sigma, condition), expected)
    scales = [m.scaling for m in pipe.unet.modules() if hasattr(m, "scaling") and hasattr(m, "lora_A")]
    assert scales and all(set(scale.values()) == {3.0} for scale in scales)


def test_a_network_without_such_keys_is_refused(tmp_path):
    saved("flux", tmp_path)
    done = CliRunner().invoke(app, ["export-lora", str(tmp_path), "-o", str(tmp_path / "k.safetensors")])
    assert done.exit_code != 0 and "converts adapters of U-Nets alone" in " ".join(done.output.split())
    assert not (tmp_path / "k.safetensors").exists()
