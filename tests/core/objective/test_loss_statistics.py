# SPDX-License-Identifier: Apache-2.0
"""What a loss says of its ratios and its clip, counted by hand and over micro-batches."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from tests.support.core import step
from visalign.core.objective.algorithms import named_objective
from visalign.core.objective.data import Loss, PolicyOutput
from visalign.core.objective.loss_statistics import LossStatistics, no_statistics


def _loss(kl: float = 0.04) -> tuple[Loss, list[LossStatistics], torch.Tensor, torch.Tensor]:
    """(of the whole batch, of its micro-batches, log r, present) of a GRPO step."""
    trajectories, policy = step(4, move=1.0)
    objective = named_objective("grpo", kl=kl)
    prepared = objective.prepare(trajectories)
    leaf = policy.log_prob.clone().requires_grad_()
    loss = objective.loss(prepared, PolicyOutput(log_prob=leaf))
    parts = [
        objective.loss(prepared.rows(rows), PolicyOutput(log_prob=leaf[rows])).statistics
        for rows in (slice(0, 3), slice(3, 4), slice(4, 8))
    ]
    return loss, parts, leaf.detach() - prepared.old_log_prob, prepared.weight != 0


def test_every_sum_is_that_over_present_decisions() -> None:
    loss, _, log_r, present = _loss()
    statistics = loss.statistics
    inside = log_r[present]
    assert float(statistics.decisions) == len(inside) and float(statistics.samples) == int(present.any(1).sum())
    assert float(statistics.shift) == pytest.approx(float((inside.exp() - 1).sum()))
    assert float(statistics.square) == pytest.approx(float((inside.exp() - 1).square().sum()))
    assert float(statistics.moved) == pytest.approx(float((inside.exp() - 1 - inside).sum()))
    assert float(statistics.largest) == pytest.approx(float(inside.abs().max()))


def test_dead_decisions_are_those_that_the_clip_takes_although_the_kl_term_pulls() -> None:
    loss, _, log_r, present = _loss(kl=1.0)
    trajectories, _ = step(4, move=1.0)
    advantage = named_objective("grpo").prepare(trajectories).advantage
    low = present & (advantage < 0) & (log_r.exp() < 0.8)
    high = present & (advantage > 0) & (log_r.exp() > 1.2)
    assert int(low.sum()) and int(high.sum())
    assert float(loss.statistics.dead_low) == int(low.sum())
    assert float(loss.statistics.dead_high) == int(high.sum())


def test_micro_batches_add_up_and_travel_as_one_tensor() -> None:
    loss, parts, _, _ = _loss()
    added = no_statistics()
    for part in parts:
        added = added.plus(part)
    for item in fields(LossStatistics):
        expected = getattr(loss.statistics, item.name)
        torch.testing.assert_close(getattr(added, item.name), expected, msg=item.name)
        assert expected.dtype == torch.float64 and not expected.requires_grad
    doubled = added.with_sums(2 * added.stack(), added.largest)
    assert float(doubled.decisions) == 2 * float(added.decisions)
    assert doubled.reference is not None and added.reference is not None
    assert float(doubled.reference) == 2 * float(added.reference)
    assert float(doubled.largest) == float(added.largest)


def test_the_reference_is_exact_where_it_can_be_and_none_where_there_is_none() -> None:
    trajectories, policy = step(4, move=1.0)
    objective = named_objective("grpo", kl=0.0)
    prepared = objective.prepare(trajectories)
    assert prepared.ref_log_prob is not None
    present = prepared.weight != 0
    d = (policy.log_prob - prepared.ref_log_prob)[present]
    k3 = objective.loss(prepared, policy).statistics.reference
    assert k3 is not None and float(k3) == pytest.approx(float((torch.exp(-d) - 1 + d).sum()))
    exact = replace(policy, kl=torch.full_like(policy.log_prob, 0.5))
    kl = objective.loss(prepared, exact).statistics.reference
    assert kl is not None and float(kl) == pytest.approx(0.5 * int(present.sum()))
    unreferenced = objective.prepare(replace(trajectories, ref_log_prob=None))
    nothing = objective.loss(unreferenced, policy).statistics
    assert nothing.reference is None and nothing.plus(nothing).reference is None
    assert nothing.with_sums(nothing.stack(), nothing.largest).reference is None


def test_without_a_gradient_nobody_knows_what_is_dead() -> None:
    trajectories, policy = step(4, move=1.0)
    objective = named_objective("grpo", kl=0.0)
    statistics = objective.loss(objective.prepare(trajectories), policy).statistics
    assert math.isnan(statistics.dead_low) and math.isnan(statistics.dead_high) and float(statistics.decisions) > 0
