# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks, another attention, channels last: the same velocities and gradients, or a refusal."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn

from tests.support.models.pipelines import tiny_pipeline
from visalign.adapters import LoraSettings
from visalign.adapters.pipeline.policy import PipelinePolicy
from visalign.adapters.speed import speed_up
from visalign.errors import UserError


def policy_of(name: str) -> PipelinePolicy:
    pipe, more = tiny_pipeline(name)
    return PipelinePolicy(pipe, lora=LoraSettings(rank=2, alpha=4), **more)


def asked(policy: PipelinePolicy) -> tuple[torch.Tensor, torch.Tensor]:
    """A velocity [2, ...] and the gradient of its square at the first adapter's second matrix."""
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    velocity = policy.velocity(x, torch.tensor([0.7, 0.7]), policy.encode(["a red circle", "two squares"]))
    weights = [w for n, w in policy.trainable_parameters() if "lora_B" in n]
    found = torch.autograd.grad(velocity.square().sum(), weights, allow_unused=True)  # wan has two networks
    return velocity.detach(), next(gradient for gradient in found if gradient is not None)


@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor")  # torch.compile looks at it
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("flux", {"compiled": True}),
        ("flux", {"attention": "_native_math"}),
        ("sd15", {"channels_last": True}),
        ("wan", {"channels_last": True}),
    ],
)
def test_it_is_the_same_function(name: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    compiled: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(str(graph.graph))
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    policy = policy_of(name)
    height, width = policy.decode(torch.zeros(1, *policy.latent_shape)).shape[-2:]
    sizes = [(height, width), (height, 2 * width), (2 * height, 2 * width)]
    graphs: list[int] = []

    def at_sizes() -> list[torch.Tensor]:
        found = []
        for size in sizes:
            policy.image_size = size
            found.extend(asked(policy))
            graphs.append(len(compiled))
        return found

    before, of_others = at_sizes(), _AttentionBackendRegistry.get_active_backend()
    speed_up(policy.module, **how)
    assert _AttentionBackendRegistry.get_active_backend() == of_others
    for there, here in zip(before, at_sizes(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)
    first, second, third = graphs[len(sizes) :]
    assert 0 < first < second == third if "compiled" in how else third == 0
    if name == "sd15":
        conv: Any = policy.module.conv_in
        assert conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_what_it_cannot_do_is_refused():
    sd15, flux = policy_of("sd15").module, policy_of("flux").module
    with pytest.raises(UserError, match=r"'native', but no layer of this UNet2DConditionModel"):
        speed_up(sd15, attention="native")
    with pytest.raises(UserError, match=r"model\.attention is 'fastest': .* must be one of the following"):
        speed_up(flux, attention="fastest")
    with pytest.raises(UserError, match=r"model\.compile is set, but Linear declares no repeated blocks"):
        speed_up(nn.Linear(2, 2), compiled=True)
