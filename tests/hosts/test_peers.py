# SPDX-License-Identifier: Apache-2.0
"""Public trainers' algorithms run, and their losses differ from ours where the table says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.hosts.peers import PEERS
from tests.support.core import step, step_for
from visalign.core import PolicyOutput, named_objective


@pytest.mark.parametrize("name", PEERS)
def test_a_peers_algorithm_runs_and_differs(name: str) -> None:
    peer = PEERS[name]
    ours = name.split(":")[1].replace("bnpo", "grpo")
    trajectories, policy = step_for(ours)
    assert torch.isfinite(peer.objective.loss(peer.objective.prepare(trajectories), policy).total)
    assert peer.notes or replace(peer.objective, source="") != replace(named_objective(ours), source="")


def test_the_dual_clip_of_a_peer_changes_the_loss_once_a_ratio_passes_three() -> None:
    """TRL and verl differ on the same batch: A < 0 and a ratio of 4."""
    trajectories, _ = step()
    trajectories = replace(
        trajectories, weight=torch.ones(8, 6).double(), advantage=-torch.ones(8).double(), reward=None
    )
    moved = PolicyOutput(log_prob=trajectories.old_log_prob + torch.tensor(4.0).log())
    values = []
    for objective in (named_objective("grpo", kl=0.0), PEERS["verl:grpo"].objective):
        plain = replace(objective, advantage="given", advantage_options={})
        values.append(float(plain.loss(plain.prepare(trajectories), moved).total))
    assert values == pytest.approx([4.0, 3.0])
