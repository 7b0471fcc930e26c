# SPDX-License-Identifier: Apache-2.0
"""What a fused head does not compute, how much memory it takes, in which precision, on which devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.dense_head import VARIANTS, H, N, V, Watch, dense, gradients, options, problem
from visalign.core.tokens import fused_tiles
from visalign.core.tokens.fused_head import LogProbEntropy, fused_log_prob_entropy

NAN = float("nan")


def test_rows_without_upstream_gradient_cost_nothing_and_may_be_nan() -> None:
    """Clipped, without advantage, not selected: 8 of 10 rows leave (1 + 3·0.2)/4 of the products."""
    hidden, head, bias, target = problem(10)
    upstream = torch.zeros(10, dtype=torch.float64)
    upstream[[3, 8]] = torch.tensor([0.5, -2.0], dtype=torch.float64)
    expected = gradients_of_log_prob(hidden, head, bias, target, upstream, dense_call=True)
    with Watch() as some:
        ours = gradients_of_log_prob(hidden, head, bias, target, upstream)
    with Watch() as full:
        gradients_of_log_prob(hidden, head, bias, target, torch.ones(10, dtype=torch.float64))
    assert full.products == 4 * 10 * H * V and some.products == 0.4 * full.products
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    assert torch.equal(ours[0][[0, 9]], torch.zeros(2, H, dtype=torch.float64))
    with torch.no_grad():
        hidden[0] = NAN
    again = gradients_of_log_prob(hidden, head, bias, target, upstream)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, ours, strict=True))


def gradients_of_log_prob(
    hidden: Tensor, head: Tensor, bias: Tensor, target: Tensor, upstream: Tensor, *, dense_call: bool = False
) -> tuple[Tensor, ...]:
    """Of Σ_n upstream_n log p_n; NaN in the forward pass of rows of upstream 0 does not matter."""
    if dense_call:
        log_prob = dense(hidden, head, target, head_bias=bias)[0]
    else:
        log_prob = fused_log_prob_entropy(hidden, head, target, head_bias=bias).log_prob
    return torch.autograd.grad(log_prob, (hidden, head, bias), upstream)


def test_positions_of_weight_zero() -> None:
    """Not computed, 0, exactly zero gradient; NaN and any target there are harmless."""
    hidden, head, bias, target = problem(6)
    weight = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]])
    inside = weight.flatten() != 0
    expected = fused_log_prob_entropy(hidden[inside], head, target[inside], head_bias=bias, sum_p2=True)
    expected_gradients = gradients(expected, [hidden, head, bias])
    broken = torch.where(inside[:, None], hidden.detach(), NAN).view(2, 3, H).requires_grad_()
    labels = torch.where(inside, target, -100).view(2, 3)
    with Watch() as watch:
        result = fused_log_prob_entropy(broken, head, labels, weight, head_bias=bias, sum_p2=True)
    assert watch.products == 4 * H * V
    for name in ("log_prob", "entropy", "sum_p2"):
        value = getattr(result, name)
        assert value.shape == (2, 3) and torch.equal(value[weight == 0], torch.zeros(2, dtype=torch.float64))
        torch.testing.assert_close(value[weight != 0], getattr(expected, name))
    part = LogProbEntropy(result.log_prob[weight != 0], result.entropy[weight != 0])
    ours = gradients(part, [broken, head, bias])
    assert torch.equal(ours[0][weight == 0], torch.zeros(2, H, dtype=torch.float64))
    torch.testing.assert_close((ours[0].view(6, H), *ours[1:]), expected_gradients)
    upstream = torch.zeros(2, 3, dtype=torch.float64)
    upstream[1, 1:] = torch.tensor([0.0, 3.0])  # of the present positions the last alone
    again = fused_log_prob_entropy(broken, head, labels, weight, head_bias=bias).log_prob
    expected = fused_log_prob_entropy(hidden[5:], head, target[5:], head_bias=bias).log_prob
    ours = torch.autograd.grad(again, (broken, head, bias), upstream)
    theirs = torch.autograd.grad(3 * expected, (hidden, head, bias))
    torch.testing.assert_close((ours[0].view(6, H), *ours[1:]), theirs)
    nothing = fused_log_prob_entropy(broken, head, labels, torch.zeros(2, 3))
    (grad,) = torch.autograd.grad(nothing.log_prob.sum(), head)
    assert torch.equal(grad, torch.zeros_like(head))


@pytest.mark.parametrize(("frozen", "products"), [("none", 4), ("head", 3), ("hidden", 3), ("both", 2)])
def test_products_only_for_what_needs_a_gradient(frozen: str, products: int) -> None:
    hidden, head, bias, target = problem()
    hidden.requires_grad_(frozen in ("none", "head"))
    head.requires_grad_(frozen in ("none", "hidden"))
    with Watch() as watch:
        fused_log_prob_entropy(hidden, head, target, head_bias=bias).log_prob.sum().backward()
    assert watch.products == products * N * H * V
    assert (hidden.grad is None) == (not hidden.requires_grad)
    assert (head.grad is None) == (not head.requires_grad)
    assert bias.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_operands_and_memory(dtype: torch.dtype) -> None:
    """Logits in float32, gradients in the operands' dtype, nothing of N·V, no float32 of V·H."""
    hidden, head, bias, target = problem(96, 32, 3000, dtype)
    with Watch() as watch:
        result = fused_log_prob_entropy(hidden, head, target, head_bias=bias, tile=(40, 700))
        ours = gradients(result, [hidden, head, bias])
    exact = dense(hidden, head, target, head_bias=bias)
    assert result.log_prob.dtype == result.entropy.dtype == torch.float32
    torch.testing.assert_close(result.log_prob.double(), exact[0], rtol=0, atol=5e-6)
    torch.testing.assert_close(result.entropy.double(), exact[1], rtol=0, atol=5e-6)
    for mine, theirs in zip(ours, gradients(exact, [hidden, head, bias]), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, theirs)
    assert max(size for size, _ in watch.sizes) == 3000 * 32
    assert max(size for size, kind in watch.sizes if kind == torch.float32) == 40 * 700


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_of_a_device_that_sums_bfloat16_in_float32(
    variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of CUDA, with a stand-in for its product."""
    hidden, head, bias, target = problem(9, 16, 50, torch.bfloat16)
    chosen = options(variant, bias)
    lifted = fused_log_prob_entropy(hidden, head, target, tile=(4, 20), **chosen)
    expected = gradients(lifted, [hidden, head])
    plain, dtypes = torch.mm, set[torch.dtype]()

    def product(left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        dtypes.update({left.dtype, right.dtype})
        return plain(left.to(out_dtype), right.to(out_dtype))

    monkeypatch.setattr(fused_tiles, "multiplies_bfloat16", lambda hidden, weight: True)
    monkeypatch.setattr(torch, "mm", product)
    result = fused_log_prob_entropy(hidden, head, target, tile=(4, 20), **chosen)
    torch.testing.assert_close(result.log_prob, lifted.log_prob)
    for mine, theirs in zip(gradients(result, [hidden, head]), expected, strict=True):
        assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()
    assert dtypes == {torch.bfloat16}


def test_autocast_changes_nothing() -> None:
    hidden, head, _, target = problem(dtype=torch.float32)
    expected = fused_log_prob_entropy(hidden, head, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = fused_log_prob_entropy(hidden, head, target)
        ours = gradients(result, [hidden, head])
    assert torch.equal(result.log_prob, expected.log_prob)
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients(expected, [hidden, head]), strict=True))
