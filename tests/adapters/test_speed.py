# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks, another attention, channels last: the same velocities and gradients, or a refusal."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn

from tests.support.models.pipelines import tiny_policy
from visalign.adapters.pipeline.policy import PipelinePolicy
from visalign.adapters.speed import speed_up
from visalign.errors import UserError


def asked(policy: PipelinePolicy) -> tuple[torch.Tensor, torch.Tensor]:
    """A velocity [2, ...] and the gradient of its square at the first adapter's second matrix."""
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    velocity = policy.velocity(x, torch.tensor([0.7, 0.7]), policy.encode(["a red circle", "two squares"]))
    weights = [w for n, w in policy.trainable_parameters() if "lora_B" in n]
    gradients = torch.autograd.grad(velocity.square().sum(), weights, allow_unused=True)  # wan has two networks
    return velocity.detach(), next(gradient for gradient in gradients if gradient is not None)


def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs that blocks compile to from here on."""
    graphs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    return graphs


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
    compiled = compiled_graphs(monkeypatch)
    policy = tiny_policy(name)
    height, width = policy.decode(torch.zeros(1, *policy.latent_shape)).shape[-2:]
    sizes = [(height, width), (height, 2 * width)]
    graphs: list[int] = []

    def at_sizes() -> list[torch.Tensor]:
        outputs = []
        for size in sizes:
            policy.image_size = size
            outputs.extend(asked(policy))
            graphs.append(len(compiled))
        return outputs

    before, backend = at_sizes(), _AttentionBackendRegistry.get_active_backend()
    speed_up(policy.module, **how)
    assert _AttentionBackendRegistry.get_active_backend() == backend
    for expected, actual in zip(before, at_sizes(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    first, second = graphs[len(sizes) :]
    assert 0 < first < second if "compiled" in how else second == 0
    if name == "sd15":
        conv: Any = policy.module.conv_in
        assert conv.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", ["flux", "sd15"])
def test_rollout_and_replay_run_one_graph_of_compiled_blocks(name: str, monkeypatch: pytest.MonkeyPatch):
    policy = tiny_policy(name)
    policy.guidance = 3.0  # with a half that has no gradient
    graphs = compiled_graphs(monkeypatch)
    speed_up(policy.module, compiled=True)
    x, time = torch.randn(2, *policy.latent_shape), torch.tensor([0.7, 0.7])
    condition = policy.encode(["a red circle", "two squares"])
    with torch.no_grad():
        sampled = policy.velocity(x, time, condition)
    assert not sampled.requires_grad
    count = len(graphs)
    replayed = policy.velocity(x, time, condition)
    assert len(graphs) == count > 0
    assert torch.equal(sampled, replayed)
    replayed.square().sum().backward()
    assert any(w.grad is not None and w.grad.any() for _, w in policy.trainable_parameters())
    assert policy.forward_count.forward > 0 < policy.forward_count.forward_backward
    with policy.reference(), torch.no_grad():
        policy.velocity(x, time, condition)  # adapters off: graphs of its own
    assert len(graphs) > count


@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor")
def test_activations_of_a_sampling_pass_are_freed_block_by_block(monkeypatch: pytest.MonkeyPatch):
    policy = tiny_policy("flux")
    compiled_graphs(monkeypatch)
    speed_up(policy.module, compiled=True)
    outputs: list[torch.Tensor] = []
    module: Any = policy.module
    last: Any = module.single_transformer_blocks[-1]
    call = last._compiled_call_impl
    last._compiled_call_impl = lambda *a, **k: outputs.extend(out := call(*a, **k)) or out
    asked(policy)
    assert all(output.grad_fn is not None for output in outputs)
    outputs.clear()
    with torch.no_grad():
        x = torch.randn(2, *policy.latent_shape)
        policy.velocity(x, torch.tensor([0.7, 0.7]), policy.encode(["a red circle", "two squares"]))
    assert outputs and all(output.grad_fn is None and output.requires_grad for output in outputs)


def test_a_block_that_cannot_be_compiled_runs_eagerly_with_a_warning(monkeypatch: pytest.MonkeyPatch):
    def no_backend(graph: Any, _: Any) -> Any:
        raise RuntimeError("no compiler here")

    policy = tiny_policy("flux")
    expected = asked(policy)[0]
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=no_backend))
    speed_up(policy.module, compiled=True)
    with pytest.warns(UserWarning, match="runs without torch.compile: .*no compiler here"):
        assert torch.equal(asked(policy)[0], expected)


def test_small_networks_and_those_on_a_cpu_are_not_compiled_by_default():
    policy = tiny_policy("flux")
    speed_up(policy.module, compiled=None)
    assert all(part._compiled_call_impl is None for part in policy.module.modules())


def test_what_it_cannot_do_is_refused():
    sd15, flux = tiny_policy("sd15").module, tiny_policy("flux").module
    with pytest.raises(UserError, match=r"'native', but no layer of this UNet2DConditionModel"):
        speed_up(sd15, attention="native")
    with pytest.raises(UserError, match=r"model\.attention is 'fastest': .* must be one of the following"):
        speed_up(flux, attention="fastest")
    with pytest.raises(UserError, match=r"model\.compile is set, but Linear declares no repeated blocks"):
        speed_up(nn.Linear(2, 2), compiled=True)
