# SPDX-License-Identifier: Apache-2.0
"""Trees of samples that share their first steps: the node of each sample before every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_nodes(group: Tensor, steps: int, *, at: Sequence[int], children: int) -> Tensor:
    """Assign samples to nodes of trees whose paths split into K = `children` at the steps `at`.

    Returns [T + 1, B] int64: the first sample with the same latent, before each of T = `steps` steps and at
    the end. A tree has K^|at| leaves, consecutive in their `group` [B]; a group of more samples is several
    trees, each with its own start.

    >>> tree_nodes(torch.zeros(4, dtype=torch.int64), 3, at=[0, 2], children=2).tolist()
    [[0, 0, 0, 0], [0, 0, 2, 2], [0, 0, 2, 2], [0, 1, 2, 3]]
    """
    index = torch.arange(len(group))
    _, number = group.cpu().unique(return_inverse=True)
    first = torch.full_like(index, len(index)).scatter_reduce(0, number, index, "amin")[number]
    leaves = [children ** sum(step >= k for step in at) for k in range(steps + 1)]
    return torch.stack([index - (index - first) % size for size in leaves])


def check_nodes(nodes: Tensor | None, count: int, total: int, sde_steps: Sequence[int]) -> Tensor:
    """Return the nodes [T + 1, B] of a rollout on the CPU; None: each sample is alone from its start."""
    index = torch.arange(count)
    if nodes is None:
        return index.expand(total + 1, count)
    nodes = nodes.cpu()
    fits = nodes.shape == (total + 1, count) and nodes.dtype == torch.int64
    if fits := fits and bool((nodes >= 0).all() & (nodes <= index).all()):
        splits = (nodes[1:] != nodes[:-1]).any(1).nonzero()[:, 0].tolist()
        are_firsts = torch.equal(nodes.gather(1, nodes), nodes)
        never_meet = torch.equal(nodes[:-1].gather(1, nodes[1:]), nodes[:-1])
        fits = are_firsts and never_meet and {*splits} <= {*sde_steps} and torch.equal(nodes[-1], index)
    if not fits:
        raise ValueError(
            f"nodes must be int64 {[total + 1, count]} as tree_nodes gives them: for each sample the first "
            f"with the same latent, split at steps of sde_steps {list(sde_steps)} alone, until all are apart."
        )
    return nodes
