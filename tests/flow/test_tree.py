# SPDX-License-Identifier: Apache-2.0
"""Trees: what samples have in common is made once, by one noise, and equal everywhere bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.flow_policies import GaussianPolicy, LinearPolicy, Shift
from tests.support.ratio import ratio_check
from visalign.flow import initial_noise, rollout, step_noise, timestep_sigmas, tree_nodes
from visalign.flow.trajectory import concatenate_trajectories

SIGMAS, SEEDS = timestep_sigmas(4), list(range(10, 18))
GROUP = torch.tensor([7] * 4 + [3] * 4)
CONDITION = Shift(torch.tensor([0.5] * 4 + [-0.5] * 4))


def run(policy, nodes, **settings):
    return rollout(
        policy, CONDITION, **{"sigmas": SIGMAS, "sde_steps": [0, 1, 2], "seeds": SEEDS, **settings}, nodes=nodes
    )


def test_a_tree_by_hand():
    nodes = tree_nodes(GROUP, 4, at=[0, 2], children=2)
    assert nodes.tolist() == [
        [0, 0, 0, 0, 4, 4, 4, 4],
        [0, 0, 2, 2, 4, 4, 6, 6],
        [0, 0, 2, 2, 4, 4, 6, 6],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]
    two = tree_nodes(GROUP, 2, at=[1], children=2)  # two trees in each group
    assert two.tolist() == [[0, 0, 2, 2, 4, 4, 6, 6]] * 2 + [list(range(8))]
    assert torch.equal(tree_nodes(GROUP, 2, at=[0, 1], children=1), torch.arange(8).expand(3, 8))


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_leaves_have_in_common_is_equal_to_the_bit_and_made_once(batch_size, dtype):
    class Counting(LinearPolicy):
        def velocity(self, x, sigma, condition, time=None):
            self.count.forward += len(x)
            return super().velocity(x, sigma, condition, time)

    policy = Counting(storage_dtype=dtype)
    nodes = tree_nodes(GROUP, 4, at=[0, 2], children=2)
    trajectory = run(policy, nodes, batch_size=batch_size)
    # 2 trees: 1, 2, 2 and 4 paths before the four steps
    assert policy.forward_count.forward == 2 * (1 + 2 + 2 + 4)
    assert torch.equal(trajectory.node, nodes[1:4].T)
    for name in ("x", "x_next", "log_prob", "mean", "std"):
        values = getattr(trajectory, name)
        for s in range(3):
            first = nodes[s if name == "x" else s + 1]
            assert torch.equal(values[:, s], values[first, s]), name
    assert torch.equal(trajectory.x[:, 0], trajectory.x[nodes[0], 0])
    assert len(trajectory.latents.flatten(1).unique(dim=0)) == 8
    assert ratio_check(policy, CONDITION, trajectory).max_abs_log_ratio < 1e-5


def test_a_node_draws_the_noise_of_its_first_sample():
    policy = GaussianPolicy(latent_shape=(2, 3, 3), storage_dtype=torch.float64)
    nodes = tree_nodes(GROUP, 4, at=[0, 2], children=2)
    trajectory = run(policy, nodes)
    drawn = torch.tensor(SEEDS)
    torch.testing.assert_close(trajectory.x[:, 0], initial_noise(drawn[nodes[0]], (2, 3, 3)).double())
    for s in range(3):
        noise = (trajectory.x_next[:, s] - trajectory.mean[:, s]) / trajectory.std[:, s].view(-1, 1, 1, 1)
        expected = step_noise(drawn[nodes[s + 1]], s, (2, 3, 3))
        torch.testing.assert_close(noise.float(), expected, rtol=1e-4, atol=1e-4)
    # the first sample of a tree is what it would be alone
    independent = run(policy, None)
    assert torch.equal(trajectory.latents[[0, 4]], independent.latents[[0, 4]])
    assert not torch.equal(trajectory.latents[1], independent.latents[1])
    assert torch.equal(independent.node, torch.arange(8)[:, None].expand(8, 3))


def test_stretches_of_trees_are_those_of_one_rollout():
    policy = GaussianPolicy(latent_shape=(2, 3, 3), storage_dtype=torch.float32)
    nodes = tree_nodes(GROUP, 4, at=[0, 2], children=2)
    full = run(policy, nodes)
    parts = [
        rollout(
            policy,
            CONDITION.select(rows),
            sigmas=SIGMAS,
            sde_steps=[0, 1, 2],
            seeds=torch.tensor(SEEDS)[rows],
            nodes=tree_nodes(GROUP[rows], 4, at=[0, 2], children=2),
        )
        for rows in torch.arange(8).split(4)
    ]
    joined = concatenate_trajectories(parts)
    assert torch.equal(joined.node, full.node) and torch.equal(joined.latents, full.latents)


@pytest.mark.parametrize(
    "nodes",
    [
        tree_nodes(GROUP, 3, at=[0], children=4),  # another number of steps
        tree_nodes(GROUP, 4, at=[0], children=4) + 1,  # not the first of each
        torch.zeros(5, 8, dtype=torch.int64),  # never apart
    ],
)
def test_nodes_that_do_not_fit_are_refused(nodes):
    with pytest.raises(ValueError, match=r"nodes must be int64 \[5, 8\] as tree_nodes gives them"):
        run(LinearPolicy(), nodes)


def test_nodes_need_one_start_noise():
    with pytest.raises(ValueError, match="join samples that start from different noise"):
        run(LinearPolicy(), tree_nodes(GROUP, 4, at=[0], children=4), noise=initial_noise(SEEDS, (2, 3, 3)))
