# SPDX-License-Identifier: Apache-2.0
"""Named algorithms: invariant, right at ratio 1, changed by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.core import objectives, step_for
from visalign.core.objective.algorithms import NAMED, named_objective
from visalign.core.objective.invariance import check_invariance

NO_POLICY_GRADIENT = {"flowrl"}
"""Algorithms whose loss is not −A log π at ratio 1."""


@pytest.mark.parametrize("name", NAMED)
def test_every_algorithm_is_invariant(name: str) -> None:
    report = check_invariance(objectives()[name], *step_for(name))
    if name == "da_pg":  # the order within a group says which samples are actions taken
        assert report.pop("permute") > 1e-6
    assert max(report.values()) < 1e-6, report


@pytest.mark.parametrize("name", sorted(set(NAMED) - NO_POLICY_GRADIENT))
def test_at_ratio_one_every_algorithm_follows_the_policy_gradient(name: str) -> None:
    """−A ∇log π, weighted as the aggregation says; with sequence ratios in sum over the completion."""
    objective = replace(objectives()[name], kl=0.0, entropy=0.0, value=0.0, ptx=0.0)
    trajectories, policy = step_for(name)
    leaf = trajectories.old_log_prob.clone().requires_grad_()
    prepared = objective.prepare(trajectories)
    term = objective.loss(prepared, replace(policy, log_prob=leaf)).terms["policy"]
    (gradient,) = torch.autograd.grad(term, leaf)
    plain = replace(objective, surrogate="reinforce", surrogate_options={}, level="token")
    (expected,) = torch.autograd.grad(
        plain.loss(plain.prepare(trajectories), replace(policy, log_prob=leaf)).terms["policy"], leaf
    )
    if prepared.keep is not None:
        expected = torch.where(prepared.keep, expected, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_changes_are_merged_into_the_options_of_the_same_choice() -> None:
    row = named_objective("dapo", surrogate_options={"eps_high": 0.3}, kl=0.01)
    assert row.surrogate_options == {"eps_low": 0.2, "eps_high": 0.3} and row.kl == 0.01
    other = named_objective("dapo", surrogate="sapo", surrogate_options={"tau_pos": 2.0})
    assert other.surrogate_options == {"tau_pos": 2.0}
    assert NAMED["dapo"].surrogate_options == {"eps_low": 0.2, "eps_high": 0.28}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dappo", {}, r"no algorithm 'dappo'\. Did you mean 'dapo'"),
        ("grpo", {"beta": 0.1}, r"no field 'beta'.*Its fields: advantage"),
        ("grpo", {"agregation": "token_mean"}, r"no field 'agregation'\. Did you mean 'aggregation'"),
        ("grpo", {"surrogate_options": {"eps": 0.1}}, r"no option 'eps'"),
        ("drpo", {"surrogate_options": {"epsilon": 0}}, r"epsilon must be a number in \(0, inf\); got 0"),
        ("spo", {"surrogate_options": {"epsilon": -0.2}}, r"epsilon must be a number in \(0, inf\); got -0.2"),
        ("cppo", {"surrogate_options": {"limit": -0.1}}, r"limit must be a number in \[0, inf\); got -0.1"),
        ("cppo", {"surrogate_options": {"smallest": 1.1}}, r"smallest must be a number in \[0, 1\]; got 1.1"),
        ("cppo", {"surrogate_options": {"budget": 0}}, r"budget must be a number in \(0, inf\); got 0"),
        ("prime", {"advantage_options": {"gamma": 1.5}}, r"gamma must be a number in \[0, 1\]; got 1.5"),
    ],
)
def test_unknown_names_and_fields(name: str, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named_objective(name, **changes)
