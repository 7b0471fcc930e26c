# SPDX-License-Identifier: Apache-2.0
"""AdamW with moments in eight bits: steps near AdamW's at every size of gradients, resume, memory, refusals."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from visalign.errors import UserError
from visalign.pipelines.shared.plan import weight_bytes
from visalign.training.loop import adamw_8bit
from visalign.training.loop.adamw_8bit import moment_bytes
from visalign.training.loop.checkpoint import Checkpoint
from visalign.training.loop.optimizer import OptimizerSettings, TrainedWeights

pytestmark = pytest.mark.filterwarnings("ignore:.*register_constant:UserWarning")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
SHAPES = {"matrix": (32, 256), "bias": (48,)}


def _weights(name: Any) -> TrainedWeights:
    parameters = [(key, torch.nn.Parameter(torch.zeros(shape))) for key, shape in SHAPES.items()]
    return TrainedWeights(parameters, OptimizerSettings(name=name, weight_decay=0.0))


def _train(weights: TrainedWeights, size: float, steps: range) -> float:
    """Take steps on noise; return the largest one in learning rates."""
    largest = 0.0
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        weights.begin(1e-3)
        before = [weight.detach().clone() for _, weight in weights.named]
        for _, weight in weights.named:  # mostly small, as gradients are
            noise = torch.randn(2, *weight.shape, generator=generator)
            weight.grad = size * (noise[0] + 0.3) * torch.linspace(-3, 1, weight.numel()).view_as(weight).exp()
        weights.step()
        moved = (now - old for (_, now), old in zip(weights.named, before, strict=True))
        largest = max(largest, *(float(change.detach().abs().max()) / 1e-3 for change in moved))
    return largest


@needs_torchao
@pytest.mark.parametrize("size", [1e-9, 1.0])
def test_steps_are_near_those_of_float32(size):
    """torchao alone turns gradients of 1e-9, as adapters have, into steps of 1e5 learning rates."""
    plain, low = _weights("adamw"), _weights("adamw_8bit")
    _train(plain, size, range(40))
    assert _train(low, size, range(40)) < 2
    for (_, expected), (_, actual) in zip(plain.named, low.named, strict=True):
        assert torch.cosine_similarity(actual.flatten(), expected.flatten(), dim=0) > 0.99
    assert low.resolution() == pytest.approx(plain.resolution(), rel=0.1)
    moments = [t for state in low.optimizer.state.values() for key, t in state.items() if key != "step"]
    stored = sum(weight_bytes(torch.nn.ParameterList([torch.nn.Parameter(t, False)])) for t in moments)
    assert stored == moment_bytes([weight for _, weight in low.named], "adamw_8bit") < 0.3 * 8 * 32 * 256


@needs_torchao
def test_a_resumed_run_is_the_uninterrupted_one():
    uninterrupted, first, second = (_weights("adamw_8bit") for _ in range(3))
    _train(uninterrupted, 1e-6, range(6))
    _train(first, 1e-6, range(3))
    tensors = {stem: {name: t.clone() for name, t in state.items()} for stem, state in first.tensors().items()}
    assert {"matrix.exp_avg.codes", "bias.exp_avg_sq"} < tensors["optimizer"].keys()
    second.restore(Checkpoint(step=3, tensors=tensors, state={}))
    _train(second, 1e-6, range(3, 6))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(uninterrupted.named, second.named, strict=True))


def test_what_it_needs_is_named(monkeypatch):
    monkeypatch.setattr(adamw_8bit, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs torchao: pip install 'visalign\[quantization\]'"):
        _weights("adamw_8bit")
    with pytest.raises(UserError, match=r"optimizer.fused is true, and adamw_8bit has no fused step"):
        OptimizerSettings(name="adamw_8bit", fused=True)
