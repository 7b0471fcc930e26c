# SPDX-License-Identifier: Apache-2.0
"""The named rows: invariant, right at ratio 1, changed by name; and how public trainers' rows differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.core import objectives, step, step_for
from visalign.core.objective.algorithms import NAMED, named_objective
from visalign.core.objective.data import PolicyOutput
from visalign.core.objective.invariance import check_invariance
from visalign.core.objective.objective import Objective
from visalign.core.objective.peers import PEERS, diff_presets

NO_POLICY_GRADIENT = {"flowrl"}
"""Rows whose loss is not −A log π at ratio 1."""


@pytest.mark.parametrize("name", NAMED)
def test_every_row_is_invariant(name: str) -> None:
    report = check_invariance(objectives()[name], *step_for(name))
    assert report.passed, f"{name}\n{report}"


@pytest.mark.parametrize("name", sorted(set(NAMED) - NO_POLICY_GRADIENT))
def test_at_ratio_one_every_row_follows_the_policy_gradient(name: str) -> None:
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


def test_every_row_names_its_source() -> None:
    for name, row in NAMED.items():
        assert "arXiv" in row.source or name == "flow_gspo", name


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
        ("grpo", {"correction": {}}, r"no field 'correction'\. It is called 'importance_sampling' now"),
        ("grpo", {"agregation": "token_mean"}, r"no field 'agregation'\. Did you mean 'aggregation'"),
        ("grpo", {"surrogate_options": {"eps": 0.1}}, r"no option 'eps'"),
    ],
)
def test_unknown_names_and_fields(name: str, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named_objective(name, **changes)


@pytest.mark.parametrize("name", PEERS)
def test_a_peers_row_runs_and_says_what_differs(name: str) -> None:
    peer = PEERS[name]
    ours = name.split(":")[1].replace("bnpo", "grpo")
    difference = diff_presets(ours, name)
    assert difference.fields or difference.notes
    assert "source" not in difference.fields and difference.notes == peer.notes
    trajectories, policy = step_for(ours)
    assert isinstance(peer.objective, Objective)
    assert torch.isfinite(peer.objective.loss(peer.objective.prepare(trajectories), policy).total)


def test_differences_are_told_field_by_field() -> None:
    told = diff_presets("grpo", "verl:grpo")
    assert told.fields["surrogate_options.dual_clip"] == (None, 3.0)
    assert told.fields["aggregation"] == ("seq_mean_token_mean", "token_mean")
    assert told.fields["advantage_options.singleton"] == (None, "raw")
    assert "1.16" in str(told) and "grpo -> verl:grpo" in str(told)
    assert str(diff_presets("grpo", "grpo")) == "grpo -> grpo\nno difference"
    assert diff_presets("grpo", "dr_grpo").fields["aggregation"] == ("seq_mean_token_mean", "dr_grpo")
    with pytest.raises(ValueError, match=r"no preset 'verl:gropo'\. Did you mean 'verl:grpo'"):
        diff_presets("grpo", "verl:gropo")


def test_what_trl_and_verl_are_known_to_do_otherwise_is_said() -> None:
    assert diff_presets("dapo", "trl:dapo").fields == {
        "drop_zero_signal": (True, False),
        "surrogate_options.eps_high": (0.28, 0.2),
    }
    assert diff_presets("sapo", "trl:sapo").fields["empty"] == ("drop", "keep")
    assert diff_presets("grpo", "trl:bnpo").fields["mean_rows"] == (None, 8)
    assert diff_presets("ppo", "verl:ppo").fields["advantage_options.ddof"] == (None, 1)
    for name in ("clip_cov", "kl_cov"):
        assert "covariances are taken anew at each update" in str(diff_presets(name, f"verl:{name}"))


def test_the_dual_clip_of_a_peer_changes_the_loss_once_a_ratio_passes_three() -> None:
    """What TRL and verl disagree about: the same batch, A < 0 and a ratio of 4."""
    trajectories, _ = step()
    trajectories = replace(
        trajectories, weight=torch.ones(8, 6).double(), advantage=-torch.ones(8).double(), reward=None
    )
    moved = PolicyOutput(log_prob=trajectories.old_log_prob + torch.tensor(4.0).log())
    values = []
    for objective in (named_objective("grpo", kl=0.0), PEERS["verl:grpo"].objective):
        given = replace(objective, advantage="given", advantage_options={})
        values.append(float(given.loss(given.prepare(trajectories), moved).total))
    assert values == pytest.approx([4.0, 3.0])
