# SPDX-License-Identifier: Apache-2.0
"""Trees of samples that share their first steps: the node of each sample before every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_nodes(group: Tensor, steps: int, *, at: Sequence[int], children: int) -> Tensor:
    """Assign samples to nodes of trees whose paths split into K at some steps.

    A tree has K^|at| leaves, consecutive in their group; a group of more samples is several trees, each with
    its own start.

    Args:
        group: [B] integer labels, the samples of a group consecutive.
        steps: T.
        at: steps at which paths split, in [0, T).
        children: K, branches of each split.

    Returns:
        [T + 1, B] int64: the first sample with the same latent, before each step and at the end.

    >>> tree_nodes(torch.zeros(4, dtype=torch.int64), 3, at=[0, 2], children=2).tolist()
    [[0, 0, 0, 0], [0, 0, 2, 2], [0, 0, 2, 2], [0, 1, 2, 3]]
    """
    index = torch.arange(len(group))
    _, number = group.cpu().unique(return_inverse=True)
    first = torch.full_like(index, len(index)).scatter_reduce(0, number, index, "amin")[number]
    leaves = [children ** sum(step >= k for step in at) for k in range(steps + 1)]
    return torch.stack([index - (index - first) % size for size in leaves])


def check_nodes(nodes: Tensor | None, count: int, total: int, sde_steps: Sequence[int]) -> Tensor:
    """Return the nodes [T + 1, B] of a rollout; None: each sample is alone from its start.

    Raises:
        ValueError: Another shape, a node that is not its own first sample, or samples that meet again or
            split at a step without noise.
    """
    own_indices = torch.arange(count)
    if nodes is None:
        return own_indices.expand(total + 1, count)
    nodes = nodes.cpu()
    if nodes.shape != (total + 1, count) or nodes.dtype != torch.int64:
        raise ValueError(
            f"nodes are int64 {[total + 1, count]}, one row for each of the {total} steps and one for the "
            f"end; got {nodes.dtype} {list(nodes.shape)}. Use tree_nodes."
        )
    firsts = bool((nodes >= 0).all() & (nodes <= own_indices).all()) and torch.equal(
        nodes.gather(1, nodes), nodes
    )
    if not firsts or not torch.equal(nodes[:-1].gather(1, nodes[1:]), nodes[:-1]):
        raise ValueError(
            "nodes name, for each sample, the first with the same latent, and samples that have split do "
            "not meet again. Use tree_nodes."
        )
    splits = (nodes[1:] != nodes[:-1]).any(1).nonzero()[:, 0].tolist()
    if noiseless := sorted(set(splits) - set(sde_steps)):
        raise ValueError(
            f"Samples split at step {noiseless[0]}, which has no noise to tell them apart. Name it in "
            f"sde_steps (now {list(sde_steps)}), or split them elsewhere."
        )
    if not torch.equal(nodes[-1], own_indices):
        raise ValueError("Samples share their last latent; split them at a stochastic step.")
    return nodes
