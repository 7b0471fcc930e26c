# SPDX-License-Identifier: Apache-2.0
"""Log-prob and entropy from logits and from hidden states: hand values, the dense formula, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.dense_head import VARIANTS, H, dense, gradients, options, problem
from visalign.core.tokens.fused_head import fused_log_prob_entropy, log_prob_entropy


def test_hand_values() -> None:
    """Logits (0, log 3): p = (1/4, 3/4)."""
    hidden = torch.ones(1, 1, dtype=torch.float64)
    head = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    for result in (
        fused_log_prob_entropy(hidden, head, torch.tensor([0]), sum_p2=True),
        log_prob_entropy(hidden @ head.T, torch.tensor([0])),
    ):
        assert result.sum_p2 is not None
        assert result.log_prob.item() == pytest.approx(math.log(1 / 4), rel=1e-14)
        assert result.entropy.item() == pytest.approx(math.log(4) - 3 / 4 * math.log(3), rel=1e-14)
        assert result.sum_p2.item() == pytest.approx(10 / 16, rel=1e-14)


def test_hand_gradient() -> None:
    """∂ log p_0/∂z = (3/4, −3/4); ∂H/∂z_v = −p_v (log p_v + H), here ∓(3/16) log 3."""
    head = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64, requires_grad=True)
    result = fused_log_prob_entropy(torch.ones(1, 1, dtype=torch.float64), head, torch.tensor([0]))
    (of_log_prob,) = torch.autograd.grad(result.log_prob, head, retain_graph=True)
    (of_entropy,) = torch.autograd.grad(result.entropy, head)
    slope = 3 / 16 * math.log(3)
    torch.testing.assert_close(of_log_prob[:, 0], torch.tensor([0.75, -0.75], dtype=torch.float64))
    torch.testing.assert_close(of_entropy[:, 0], torch.tensor([slope, -slope], dtype=torch.float64))


@pytest.mark.parametrize("tile", [None, (1, 1), (3, 4), (7, 11), (2, 100), (100, 5)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_dense_formula(variant: dict[str, Any], tile: tuple[int, int] | None) -> None:
    hidden, head, bias, target = problem()
    chosen = options(variant, bias)
    inputs = [hidden, head, *([bias] if "head_bias" in chosen else [])]
    expected = dense(hidden, head, target, **chosen)
    result = fused_log_prob_entropy(hidden, head, target, tile=tile, sum_p2=True, **chosen)
    for ours, theirs in zip((result.log_prob, result.entropy, result.sum_p2), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    assert result.sum_p2 is not None and not result.sum_p2.requires_grad
    for ours, theirs in zip(gradients(result, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_from_logits_equals_the_dense_formula(variant: dict[str, Any]) -> None:
    hidden, head, _, target = problem()
    chosen = {k: v for k, v in variant.items() if k != "head_bias"}
    expected = dense(hidden, head, target, **chosen)
    result = log_prob_entropy(hidden @ head.T, target, **chosen)
    for ours, theirs in zip((result.log_prob, result.entropy, result.sum_p2), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(gradients(result, [head]), gradients(expected, [head]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("output", ["log_prob", "entropy"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(variant: dict[str, Any], output: str) -> None:
    """Finite differences, each output alone: the other one's gradient is then None."""
    hidden, head, bias, target = problem(3, 2, 5)

    def call(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return getattr(fused_log_prob_entropy(h, w, target, tile=(2, 3), **options(variant, b)), output)

    bias.requires_grad_("head_bias" in variant)
    assert torch.autograd.gradcheck(call, (hidden, head, bias))


@pytest.mark.parametrize("call", ["fused", "dense"])
def test_far_off_and_excluded_entries(call: str) -> None:
    """Logits of ±1e4 in every order of tiles, and −∞ for entries that cannot be drawn."""
    bias = torch.tensor([-1e4, 0.0, -math.inf, 1e4, 1e4, -math.inf], requires_grad=True)
    hidden, head = torch.zeros(2, 1, requires_grad=True), torch.ones(6, 1)
    for order in (torch.arange(6), torch.arange(5, -1, -1)):
        target = torch.stack([(order == 3).nonzero()[0, 0], (order == 1).nonzero()[0, 0]])
        if call == "fused":
            result = fused_log_prob_entropy(hidden, head, target, head_bias=bias[order], tile=(2, 2))
        else:
            result = log_prob_entropy(hidden @ head.T + bias[order], target)
        torch.testing.assert_close(result.log_prob, torch.tensor([-math.log(2), -1e4 - math.log(2)]))
        torch.testing.assert_close(result.entropy, torch.full((2,), math.log(2)))
        (grad,) = torch.autograd.grad(result.log_prob.sum() + result.entropy.sum(), bias)
        torch.testing.assert_close(grad, torch.tensor([0, 1.0, 0, 0, -1.0, 0]))


def test_shapes_strides_and_integer_ids() -> None:
    hidden, head, _, target = problem(6)
    expected = fused_log_prob_entropy(hidden, head, target)
    wide = torch.stack([hidden.detach(), hidden.detach()], -1)[..., 0].view(2, 3, H)
    tall = head.detach().T.contiguous().T
    assert not wide.is_contiguous() and not tall.is_contiguous()
    for kind in (torch.int32, torch.uint8):
        result = fused_log_prob_entropy(wide, tall.requires_grad_(), target.view(2, 3).to(kind))
        torch.testing.assert_close(result.log_prob.flatten(), expected.log_prob)
    single = fused_log_prob_entropy(hidden[0], head, target[0])
    assert single.log_prob.shape == () and single.log_prob == expected.log_prob[0]
    empty = fused_log_prob_entropy(hidden[:0], head, target[:0])
    assert empty.log_prob.shape == (0,)
    (grad,) = torch.autograd.grad(empty.log_prob.sum(), head)
    assert torch.equal(grad, torch.zeros_like(head))


def test_no_second_derivative() -> None:
    hidden, head, _, target = problem()
    loss = fused_log_prob_entropy(hidden, head, target).log_prob.square().sum()
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.tensor([0, -100])}, r"ids in \[0, 4\); 1 of 2 are outside: \[-100\] first"),
        ({"target": torch.tensor([4, 0]), "weight": torch.ones(2)}, r"\[0, 4\).* weight 0"),
        ({"head_weight": torch.ones(3, 4)}, r"hidden \(2, 3\) and head_weight \(3, 4\)"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    zeros = torch.zeros(2, dtype=torch.long)
    good: dict[str, Any] = {"hidden": torch.ones(2, 3), "head_weight": torch.ones(4, 3), "target": zeros}
    with pytest.raises(ValueError, match=message):
        fused_log_prob_entropy(**(good | change))
    if change.keys() <= {"temperature", "soft_cap", "target"}:
        good = {"logits": torch.ones(2, 4), "target": zeros}
        with pytest.raises(ValueError, match=message):
            log_prob_entropy(**(good | change))
