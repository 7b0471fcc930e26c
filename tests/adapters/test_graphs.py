# SPDX-License-Identifier: Apache-2.0
"""Captured passes: the network's velocities and gradients, whatever changes; the card's capture is simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tests.support.models.pipelines import tiny_pipeline, tiny_policy
from visalign.adapters import LoraSettings, graphs
from visalign.adapters.graphs import EAGER_PASSES, GRAPHS, CapturedPasses
from visalign.adapters.pipeline.policy import PipelinePolicy
from visalign.errors import UserError
from visalign.swapping import swapped_weights
from visalign.training.diffusion.merging import mergeable_adapters, merged_adapters

LORA = LoraSettings(rank=2, alpha=4)


class Recorded:
    """Stands in for a CUDA graph: a replay computes again and writes where the first result lies."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute, self.learning, self.replays = compute, torch.is_grad_enabled(), 0
        self.result = compute()

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        self.replays += 1
        with torch.set_grad_enabled(self.learning):
            again = tree_leaves(self.compute())
        for old, new in zip(tree_leaves(self.result), again, strict=True):
            if isinstance(old, Tensor):
                old.detach().copy_(new.detach())


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """What was captured so far."""
    graphs_made: list[Recorded] = []

    def record(compute: Callable[[], Any], stream: Any, pool: Any = None) -> tuple[Recorded, Any]:
        graphs_made.append(Recorded(compute))
        return graphs_made[-1], graphs_made[-1].result

    monkeypatch.setattr(graphs, "record", record)
    return graphs_made


def policy_of(name: str = "flux", *, captured: bool = True, lora: LoraSettings | None = LORA) -> PipelinePolicy:
    policy = tiny_policy(name, lora=lora)
    generator = torch.Generator().manual_seed(1)
    for key, weight in policy.trainable_parameters():
        if "lora_B" in key:  # adapters that have learnt something
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    if captured:
        CapturedPasses(policy.module, "cpu")
    return policy


def noise(policy: PipelinePolicy, seed: int, count: int = 2) -> Tensor:
    return torch.randn(count, *policy.latent_shape, generator=torch.Generator().manual_seed(seed))


def velocity(policy: PipelinePolicy, seed: int, count: int = 2) -> Tensor:
    return policy.velocity(
        noise(policy, seed, count), torch.full((count,), 0.7), policy.encode(["a red circle"] * count)
    )


def gradients(policy: PipelinePolicy, output: Tensor) -> list[Tensor]:
    weights = [weight for _, weight in policy.trainable_parameters()]
    slopes = torch.autograd.grad(output.square().sum(), weights, allow_unused=True)
    return [slope for slope in slopes if slope is not None]


@pytest.mark.parametrize(
    ("name", "lora"), [*((name, LORA) for name in ("flux", "sd15", "sdxl")), ("sd3", None), ("flux", None)]
)
def test_it_is_the_same_function_with_and_without_gradient(name: str, lora: Any, recorded: list[Recorded]):
    policy, eager = policy_of(name, lora=lora), policy_of(name, captured=False, lora=lora)
    for seed in range(EAGER_PASSES + 2):
        with torch.no_grad():
            assert torch.equal(velocity(policy, seed), velocity(eager, seed))
        output, expected = velocity(policy, seed), velocity(eager, seed)
        assert torch.equal(output, expected)
        for gradient, other in zip(gradients(policy, output), gradients(eager, expected), strict=True):
            assert torch.equal(gradient, other) and (gradient.any() or lora is None)
    assert [graph.replays for graph in recorded[-2:]] == [2, 2]  # with gradient, and its backward
    assert recorded[0].replays >= 2 and policy.forward_count == eager.forward_count


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_gradients_under_autocast_are_those_of_eager_passes(recorded: list[Recorded]):
    policy, eager = policy_of(), policy_of(captured=False)
    for seed in range(EAGER_PASSES + 2):
        with torch.autocast("cpu", torch.bfloat16):
            output, expected = velocity(policy, seed), velocity(eager, seed)
        for gradient, other in zip(gradients(policy, output), gradients(eager, expected), strict=True):
            assert torch.equal(gradient, other)
    assert [graph.replays for graph in recorded] == [2, 2]


def test_two_policies_of_one_network_and_its_capture_count_their_own_passes(recorded: list[Recorded]):
    pipe, more = tiny_pipeline("sd15")
    first, second = (PipelinePolicy(copy(pipe), **more) for _ in range(2))
    CapturedPasses(first.module, "cpu")
    with torch.no_grad():
        for seed in range(EAGER_PASSES + 1):
            assert torch.equal(velocity(first, seed), velocity(second, seed))
    assert recorded and first.forward_count == second.forward_count


def test_results_are_not_those_of_the_next_replay(recorded: list[Recorded]):
    policy = policy_of()
    for seed in range(EAGER_PASSES):
        gradients(policy, velocity(policy, seed))
    first = velocity(policy, 5)
    first_copy, first_gradients = first.detach().clone(), gradients(policy, first)
    copies = [gradient.clone() for gradient in first_gradients]
    gradients(policy, velocity(policy, 6))
    assert len(recorded) == 2 and torch.equal(first, first_copy)
    assert all(torch.equal(gradient, copy) for gradient, copy in zip(first_gradients, copies, strict=True))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_weights_moved_in_place_are_seen_and_swapped_ones_or_adapters_off_are_kinds_of_their_own(
    recorded: list[Recorded],
):
    policy, eager = policy_of(), policy_of(captured=False)

    def compare(count: int) -> None:
        with torch.no_grad():
            for seed in range(EAGER_PASSES + 2):
                assert torch.equal(velocity(policy, seed), velocity(eager, seed))
        assert len(recorded) == count

    compare(1)
    for model in (policy, eager):
        for _, weight in model.trainable_parameters():
            weight.data.mul_(1.5)
    compare(1)
    with policy.reference(), eager.reference():
        compare(2)
    compare(2)
    layers = [mergeable_adapters(model.module) for model in (policy, eager)]
    for _ in range(2):
        with merged_adapters(layers[0]), merged_adapters(layers[1]):
            compare(2)  # merged in place, so by the graph of the reference
    compare(2)
    weights = [[weight for _, weight in model.trainable_parameters()] for model in (policy, eager)]
    halves = [[weight.data / 2 for weight in part] for part in weights]
    with swapped_weights(weights[0], halves[0]), swapped_weights(weights[1], halves[1]):
        compare(3)
    with torch.autocast("cpu", torch.bfloat16):
        compare(4)


def test_a_pass_before_the_backward_of_the_last_runs_eagerly(recorded: list[Recorded]):
    policy, eager = policy_of(), policy_of(captured=False)
    for seed in range(EAGER_PASSES):
        gradients(policy, velocity(policy, seed))
    first, second = velocity(policy, 8), velocity(policy, 9)
    assert [graph.replays for graph in recorded] == [1, 0]
    for output, seed in ((second, 9), (first, 8)):
        for gradient, other in zip(gradients(policy, output), gradients(eager, velocity(eager, seed)), strict=True):
            assert torch.equal(gradient, other)
    del first, second
    velocity(policy, 10)  # dropped without a backward
    last = velocity(policy, 11)
    assert recorded[0].replays == 3
    last.square().sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"has one backward, before it runs again\. Set model\.compile=false"):
        last.square().sum().backward()
    gradients(policy, velocity(policy, 12))


def test_without_memory_for_a_graph_passes_run_eagerly_with_a_warning(monkeypatch: pytest.MonkeyPatch):
    def record(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "record", record)
    policy, eager = policy_of(), policy_of(captured=False)
    with torch.no_grad():
        for seed in range(EAGER_PASSES):
            velocity(policy, seed)
        with pytest.warns(UserWarning, match="There is no memory for more CUDA graphs"):
            assert torch.equal(velocity(policy, 3), velocity(eager, 3))
        assert torch.equal(velocity(policy, 4), velocity(eager, 4))


def test_what_cannot_be_captured_is_refused_by_what_failed(monkeypatch: pytest.MonkeyPatch):
    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture\nmore")

    def compute() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    message = r"as a CUDA graph: operation not permitted .* capturing\. Set model\.compile=false\.$"
    with pytest.raises(UserError, match=message):
        graphs.record(compute, None)
    assert torch.is_autocast_cache_enabled()


def test_what_looks_into_a_pass_sees_an_eager_one(recorded: list[Recorded]):
    policy = policy_of()
    with torch.no_grad():
        for seed in range(EAGER_PASSES + 1):
            velocity(policy, seed)
        with FlopCounterMode(display=False) as counter:
            velocity(policy, 0)
        with torch.inference_mode():
            velocity(policy, 0)
    x = noise(policy, 0).requires_grad_()
    policy.velocity(x, torch.full((2,), 0.7), policy.encode(["a red circle"] * 2)).sum().backward()
    assert counter.get_total_flops() > 0 and x.grad is not None
    assert [graph.replays for graph in recorded] == [1]


def test_rare_kinds_are_not_captured_and_beyond_the_last_graph_passes_run_eagerly(recorded: list[Recorded]):
    policy = policy_of()
    with torch.no_grad():
        for count in range(1, GRAPHS + 3):
            for seed in range(EAGER_PASSES):
                velocity(policy, seed, count)
        assert not recorded
        for _ in range(2):
            for count in range(1, GRAPHS + 3):
                velocity(policy, 0, count)
    assert [graph.replays for graph in recorded] == [2] * GRAPHS


def test_the_reference_with_gradients_enabled_is_captured_without(recorded: list[Recorded]):
    policy, eager = policy_of(), policy_of(captured=False)
    with policy.reference(), eager.reference():
        for seed in range(EAGER_PASSES + 1):
            output = velocity(policy, seed)
            assert torch.equal(output, velocity(eager, seed)) and not output.requires_grad
    assert [graph.replays for graph in recorded] == [1]
