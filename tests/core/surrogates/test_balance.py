# SPDX-License-Identifier: Apache-2.0
"""FlowRL's balance and DRO: where they rest, whom gradients reach, and what is absent.

Values and gradients of the released codes stand in tests/golden.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from visalign.core import aggregate, count_step, log_ratio
from visalign.core.surrogates.balance import dro, flow_balance
from visalign.core.surrogates.ratios import ratio_level

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
WEIGHT = torch.tensor([[1.0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 1, 0]], **DOUBLE)


def draw(seed: int = 0) -> dict[str, Tensor]:
    """log π, log π_ref and log π_old [3, 4], log Z and R [3], float64."""
    generator = torch.Generator().manual_seed(seed)
    new, change, drift = torch.randn(3, 3, 4, generator=generator, **DOUBLE)
    log_z, reward = torch.randn(2, 3, generator=generator, **DOUBLE)
    return {"new": new, "ref": new + drift, "old": new - 0.2 * change, "log_z": log_z, "reward": reward}


@pytest.mark.parametrize("normalised", [True, False])
def test_flow_balance_gradients_reach_the_policy_and_the_partition_only(normalised: bool) -> None:
    d = {name: value.requires_grad_() for name, value in draw().items()}
    sequence_ratio = ratio_level(log_ratio(d["new"], d["old"]), WEIGHT, "sequence_sum")
    inputs = (d["new"], d["ref"], d["log_z"], d["reward"], WEIGHT)
    losses = flow_balance(*inputs, log_ratio=sequence_ratio, length_normalised=normalised)
    aggregate(losses, WEIGHT, "seq_mean_token_sum", count_step(WEIGHT)).backward()
    assert d["ref"].grad is None and d["reward"].grad is None
    new, log_z = d["new"].grad, d["log_z"].grad
    assert new is not None and log_z is not None
    length = WEIGHT.sum(1, keepdim=True) if normalised else 1
    torch.testing.assert_close(new, log_z[:, None] / length * WEIGHT)
    fixed = draw()
    assert torch.autograd.gradcheck(
        lambda n, z: flow_balance(n, fixed["ref"], z, fixed["reward"], WEIGHT, beta=0.5),
        (fixed["new"].requires_grad_(), fixed["log_z"].requires_grad_()),
    )


def test_flow_balance_rests_at_the_reward_distribution() -> None:
    """π = π_ref e^{βR}/Z has loss 0 everywhere; any other policy has not."""
    generator = torch.Generator().manual_seed(1)
    ref = torch.randn(5, generator=generator, **DOUBLE).log_softmax(0)
    reward = torch.randn(5, generator=generator, **DOUBLE)
    log_z = torch.logsumexp(ref + 2 * reward, 0).expand(5)
    target = ref + 2 * reward - log_z
    ones = torch.ones(5, 1)
    losses = flow_balance(target[:, None], ref[:, None], log_z, reward, ones, beta=2.0)
    torch.testing.assert_close(losses, torch.zeros(5, 1, **DOUBLE))
    assert flow_balance(ref[:, None], ref[:, None], log_z, reward, ones, beta=2.0).max() > 0.1


def test_what_is_absent_adds_nothing() -> None:
    d = draw()
    absent = WEIGHT == 0
    new, ref = (d[name].masked_fill(absent, torch.nan).requires_grad_() for name in ("new", "ref"))
    for loss in (
        flow_balance(new, ref, d["log_z"], d["reward"], WEIGHT, log_ratio=ref * 0),
        dro(new, new - ref, ref, beta=1.0, weight=WEIGHT),
    ):
        (grad,) = torch.autograd.grad(loss.sum(), new, retain_graph=True)
        for values in (loss, grad):
            assert values.isfinite().all() and torch.equal(values != 0, ~absent)
