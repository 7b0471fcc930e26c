# SPDX-License-Identifier: Apache-2.0
"""Parts in CPU memory: nothing reads their weights but where they are on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.pipelines import tiny_folder, tiny_prompts
from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.adapters import load_policy, offload
from visalign.adapters.pipeline import call, policy
from visalign.adapters.sd3 import policy as sd3_policy
from visalign.adapters.sd3 import text

GOOD: dict[torch.nn.Parameter, torch.Tensor] = {}


@contextmanager
def _restored(pipe: Any, names: tuple[str, ...], device: torch.device) -> Iterator[None]:
    """Stands in for `on_device` without a second device: weights are NaN outside of the block."""
    parts = [part for name, part in pipe.components.items() if name.startswith(names)]
    weights = [w for part in parts if isinstance(part, torch.nn.Module) for w in part.parameters()]
    outside = [weight.data for weight in weights]
    for weight in weights:
        weight.data = GOOD.setdefault(weight, weight.data)
    yield
    for weight, data in zip(weights, outside, strict=True):
        weight.data = torch.full_like(data, torch.nan)


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated")
@pytest.mark.parametrize("name", ["sd3", "sd15", "flux_kontext"])
def test_parts_are_used_on_the_device_alone(name: str, tmp_path: Path, monkeypatch):
    if name == "sd3":
        tiny_sd3_pipeline().save_pretrained(tmp_path)
    else:
        tiny_folder(name, tmp_path)
    options: Any = {"image_size": (16, 8), "call": {"_auto_resize": False}} if name == "flux_kontext" else {}
    GOOD.clear()
    prompts = ["a red circle"] if name == "sd3" else tiny_prompts(name, ["a red circle"])

    def sample(offloaded: bool) -> list[torch.Tensor]:
        model: Any = load_policy(tmp_path, guidance=2.0, offload=offloaded, **options)
        condition = model.encode(prompts)
        x = torch.randn(1, *model.latent_shape, generator=torch.Generator().manual_seed(0))
        latents = model.velocity(x, torch.full((1,), 0.5), condition).detach()
        images = model.decode(latents)
        return [latents, images, model.encode_images(list(images))]

    expected = sample(False)
    for module in (call, policy, sd3_policy, text):
        if hasattr(module, "on_device"):
            monkeypatch.setattr(module, "on_device", _restored)
    for actual, other in zip(sample(True), expected, strict=True):
        assert torch.equal(actual, other)
    assert GOOD


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_return_to_cpu_memory():
    model: Any = load_policy("shapes-sd3", device="cuda", offload=True)
    with offload.on_device(model.pipe, offload.ENCODERS, model.device):
        assert model.pipe.text_encoder.device.type == "cuda" and model.pipe.vae.device.type == "cpu"
    assert model.pipe.text_encoder.device.type == "cpu"
    images = model.decode(torch.zeros(1, *model.latent_shape, device="cuda"))
    assert images.is_cuda and model.pipe.vae.device.type == "cpu" and model.encode(["a"]).embeds.is_cuda
