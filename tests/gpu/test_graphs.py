# SPDX-License-Identifier: Apache-2.0
"""Captured passes on a GPU are the eager ones; another network joins `CAPTURED` once it passes here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.support.models.pipelines import tiny_pipeline, tiny_prompts
from visalign.adapters import LoraSettings
from visalign.adapters.graphs import EAGER_PASSES
from visalign.adapters.pipeline.policy import PipelinePolicy
from visalign.adapters.speed import CAPTURED, speed_up

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def policy_of(name: str, lora: LoraSettings | None) -> Any:
    pipe, more = tiny_pipeline(name)
    pipe.to("cuda")
    encode = pipe.encode_prompt
    pipe.encode_prompt = lambda *args, **options: tree_map_only(
        Tensor, lambda embedding: embedding.to("cuda"), encode(*args, **options)
    )
    policy = PipelinePolicy(pipe, lora=lora, **more)
    generator = torch.Generator().manual_seed(1)
    for key, weight in policy.trainable_parameters():
        if "lora_B" in key:  # adapters that have learnt something
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return policy


@pytest.mark.parametrize("lora", [LoraSettings(rank=2, alpha=4), None])
@pytest.mark.parametrize("name", ["sd3"])
def test_captured_passes_are_the_eager_ones(name: str, lora: LoraSettings | None):
    policy = policy_of(name, lora)
    condition, time = policy.encode(tiny_prompts(name, ["a red circle"] * 2)), torch.full((2,), 0.7, device="cuda")
    weights, outputs = [weight for _, weight in policy.trainable_parameters()], list[Tensor]()

    def passes() -> list[Any]:
        results = []
        for seed in range(EAGER_PASSES + 2):
            x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(seed)).to("cuda")
            with torch.no_grad():
                sampled = policy.velocity(x, time, condition)
            output = policy.velocity(x, time, condition)
            outputs.append(output)
            slopes = torch.autograd.grad(output.square().sum(), weights, allow_unused=True)
            results.append((sampled, output.detach(), [slope for slope in slopes if slope is not None]))
        return results

    expected = passes()  # the nodes that add up gradients stay alive while passes are captured
    speed_up(policy.module, compiled=None)
    results = passes()
    captured = policy.module.__dict__["captured_passes"]
    assert [len(kinds) for kinds in captured._graphs.values()] == [1, 1]
    assert type(policy.module).__name__ in CAPTURED
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-4, atol=1e-5)
