# SPDX-License-Identifier: Apache-2.0
"""Captured passes on a GPU: those of every family are the eager ones, or run eagerly with a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.support.models.pipelines import TINY, tiny_pipeline, tiny_prompts
from visalign.adapters import LoraSettings
from visalign.adapters.graphs import EAGER_PASSES, CapturedPasses
from visalign.adapters.pipeline.policy import PipelinePolicy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
READ_BY_THE_HOST: set[str] = set()
"""Families whose network waits for the GPU within a pass, which no graph can hold."""


def policy_of(name: str) -> Any:
    pipe, more = tiny_pipeline(name)
    pipe.to("cuda")
    encode: Any = getattr(pipe, "encode_prompt", None)
    if encode is not None:
        pipe.encode_prompt = lambda *args, **options: tree_map_only(
            Tensor, lambda embedding: embedding.to("cuda"), encode(*args, **options)
        )
    policy = PipelinePolicy(pipe, lora=LoraSettings(rank=2, alpha=4), **more)
    generator = torch.Generator().manual_seed(1)
    for key, weight in policy.trainable_parameters():
        if "lora_B" in key:  # adapters that have learnt something
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return policy


@pytest.mark.parametrize("name", TINY)
def test_captured_passes_are_the_eager_ones(name: str):
    policy = policy_of(name)
    condition, time = policy.encode(tiny_prompts(name, ["a red circle"] * 2)), torch.full((2,), 0.7, device="cuda")
    weights = [weight for _, weight in policy.trainable_parameters()]

    def passes() -> list[Any]:
        results = []
        for seed in range(EAGER_PASSES + 2):
            x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(seed)).to("cuda")
            with torch.no_grad():
                sampled = policy.velocity(x, time, condition)
            output = policy.velocity(x, time, condition)
            slopes = torch.autograd.grad(output.square().sum(), weights, allow_unused=True)
            results.append((sampled, output.detach(), [slope for slope in slopes if slope is not None]))
        return results

    expected = passes()
    captured = [CapturedPasses(network) for network in policy.networks.values()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = passes()
    said = [str(warning.message) for warning in caught if "CUDA graphs" in str(warning.message)]
    print(name, said or [len(kinds) for part in captured for kinds in part._graphs.values()])
    assert bool(said) == (name in READ_BY_THE_HOST)
    assert torch.randn(3, device="cuda").isfinite().all()  # the generator works after a capture that failed
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-4, atol=1e-5)
