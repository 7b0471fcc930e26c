# SPDX-License-Identifier: Apache-2.0
"""Log-probs, ratios and the exact KL: against torch.distributions, gradcheck, and GRPO-Guard's identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from visalign.core import gaussian_kl, gaussian_log_prob, guard_log_ratio, guard_step_weight, log_ratio
from visalign.core.surrogates.ratios import ratio_level

NAN = float("nan")
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def step(batch: tuple[int, ...] = (5,), event: tuple[int, ...] = (2, 3, 4)) -> tuple[Tensor, ...]:
    """(x', μ, μ_old, std) of a random step, float64."""
    generator = torch.Generator().manual_seed(2)
    mean_old = torch.randn(*batch, *event, generator=generator, **DOUBLE)
    mean = mean_old + 0.05 * torch.randn(*batch, *event, generator=generator, **DOUBLE)
    std = 0.1 + torch.rand(*batch, generator=generator, **DOUBLE)
    scale = std.reshape(*batch, *(1,) * len(event))
    return mean_old + scale * torch.randn(*batch, *event, generator=generator, **DOUBLE), mean, mean_old, std


@pytest.mark.parametrize("batch", [(5,), (5, 3)])
def test_log_prob_and_kl_equal_torch_distributions(batch: tuple[int, ...]) -> None:
    x, mean, mean_ref, std = step(batch)
    scale = std.reshape(*batch, 1, 1, 1)
    normal = torch.distributions.Normal(mean, scale)
    other = torch.distributions.Normal(mean_ref, scale)
    axes = (-1, -2, -3)
    log_prob, kl = normal.log_prob(x), torch.distributions.kl_divergence(normal, other)
    for norm, size in (("sum", 1), ("mean", 24)):
        options: Any = {"log_prob_reduction": norm}
        torch.testing.assert_close(gaussian_log_prob(x, mean, std, **options), log_prob.sum(axes) / size)
        torch.testing.assert_close(gaussian_kl(mean, mean_ref, std, **options), kl.sum(axes) / size)


def test_gradients() -> None:
    x, mean, mean_ref, std = step((2,), (2, 2))
    mean.requires_grad_()
    for norm in ("sum", "mean"):
        options: Any = {"log_prob_reduction": norm}
        assert torch.autograd.gradcheck(lambda m, o=options: gaussian_log_prob(x, m, std, **o), (mean,))
        assert torch.autograd.gradcheck(lambda m, o=options: gaussian_kl(m, mean_ref, std, **o), (mean,))
    assert torch.autograd.gradcheck(lambda m: guard_log_ratio(x, m, mean_ref), (mean,))
    new = torch.randn(3, 4, requires_grad=True, **DOUBLE)
    weight = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]], **DOUBLE)
    assert torch.autograd.gradcheck(lambda n: ratio_level(log_ratio(n, weight, weight), weight, "sequence"), (new,))


def test_guard_log_ratio_identity() -> None:
    """mean(ε Δμ) = (Δ log p + mean(Δμ²)/(2 std²))·std for each row, whatever its own std."""
    x, mean, mean_old, std = step()
    noise = (x - mean_old) / std.reshape(-1, 1, 1, 1)
    new = gaussian_log_prob(x, mean, std, log_prob_reduction="mean")
    old = gaussian_log_prob(x, mean_old, std, log_prob_reduction="mean")
    drift = (mean - mean_old).square().mean((1, 2, 3)) / (2 * std.square())
    torch.testing.assert_close(guard_log_ratio(noise, mean, mean_old), (new - old + drift) * std)


def test_guard_step_weight() -> None:
    dt = torch.tensor([-0.5, -0.04])
    torch.testing.assert_close(guard_step_weight(dt), torch.tensor([2.0, 25.0]))


def test_log_ratio_detaches_the_old_and_survives_nan_padding() -> None:
    new = torch.tensor([[-1.0, -2.0, NAN]], requires_grad=True)
    old = torch.tensor([[-1.5, -1.0, NAN]], requires_grad=True)
    ratio = log_ratio(new, old, torch.tensor([[1.0, 0.5, 0.0]]))
    assert torch.equal(ratio.detach(), torch.tensor([[0.5, -1.0, 0.0]]))
    (ratio.exp() * ratio).sum().backward()
    assert old.grad is None and new.grad is not None
    assert new.grad[0, 2] == 0 and torch.isfinite(new.grad).all() and new.grad[0, 0] > 0


ROWS = torch.tensor([[1.0, 2.0, NAN], [NAN, NAN, NAN], [4.0, NAN, 8.0], [NAN, 0.5, -0.25]], **DOUBLE)
MASK = torch.tensor([[1.0, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 1]], **DOUBLE)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[1, 2, 0], [0, 0, 0], [4, 0, 8], [0, 0.5, -0.25]]),
        ("sequence", [[1.5, 1.5, 0], [0, 0, 0], [6, 0, 6], [0, 0.125, 0.125]]),
        ("sequence_sum", [[3, 3, 0], [0, 0, 0], [12, 0, 12], [0, 0.25, 0.25]]),
        ("sequence_token", [[1.5, 1.5, 0], [0, 0, 0], [6, 0, 6], [0, 0.125, 0.125]]),
    ],
)
def test_ratio_levels_by_hand(level: Any, expected: list[list[float]]) -> None:
    """Padding on either side and holes; NaN there reaches neither value nor gradient."""
    rows = ROWS.clone().requires_grad_()
    result = ratio_level(rows, MASK, level)
    assert torch.equal(result.detach(), torch.tensor(expected, **DOUBLE))
    (slope,) = torch.autograd.grad((result * torch.tensor([3.0, 5.0, 7.0], **DOUBLE)).sum(), rows)
    own = torch.tensor([3.0, 5.0, 7.0], **DOUBLE) * MASK
    total = own.sum(1, keepdim=True) * MASK
    count = MASK.sum(1, keepdim=True).clamp(min=1)
    slopes = {"token": own, "sequence": total / count, "sequence_sum": total, "sequence_token": own}
    torch.testing.assert_close(slope, slopes[level])
