# SPDX-License-Identifier: Apache-2.0
"""Samples that have their first steps in common: which of them stand for the others, before every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_nodes(group: Tensor, steps: int, *, at: Sequence[int], children: int) -> Tensor:
    """Who has its latent in common with whom, where each path goes on as K at some steps.

    A tree has K^|at| leaves, side by side in their group; a group of more samples is several trees, each with
    a start of its own.

    Args:
        group: [B] integer labels, the samples of a group side by side.
        steps: T.
        at: the steps at which paths part, in [0, T).
        children: K, ways in which each goes on.

    Returns:
        [T + 1, B] int64: before each step, and at the end, the first of the samples whose latent is the same.

    >>> tree_nodes(torch.zeros(4, dtype=torch.int64), 3, at=[0, 2], children=2).tolist()
    [[0, 0, 0, 0], [0, 0, 2, 2], [0, 0, 2, 2], [0, 1, 2, 3]]
    """
    place = torch.arange(len(group))
    _, index = group.cpu().unique(return_inverse=True)
    first = torch.full_like(place, len(place)).scatter_reduce(0, index, place, "amin")[index]
    leaves = [children ** sum(step >= k for step in at) for k in range(steps + 1)]
    return torch.stack([place - (place - first) % size for size in leaves])


def checked_nodes(nodes: Tensor | None, count: int, total: int, sde_steps: Sequence[int]) -> Tensor:
    """The nodes [T + 1, B] of a rollout; without any each sample is alone from its start.

    Raises:
        ValueError: Another shape, a node that is not its own first sample, samples that meet again, or that
            part at a step without noise.
    """
    alone = torch.arange(count)
    if nodes is None:
        return alone.expand(total + 1, count)
    nodes = nodes.cpu()
    if nodes.shape != (total + 1, count) or nodes.dtype != torch.int64:
        raise ValueError(
            f"nodes are int64 {[total + 1, count]}, one row for each of the {total} steps and one for the "
            f"end; got {nodes.dtype} {list(nodes.shape)}. tree_nodes makes them."
        )
    firsts = bool((nodes >= 0).all() & (nodes <= alone).all()) and torch.equal(nodes.gather(1, nodes), nodes)
    if not firsts or not torch.equal(nodes[:-1].gather(1, nodes[1:]), nodes[:-1]):
        raise ValueError(
            "nodes name, for each sample, the first that has the same latent, and samples that have parted "
            "do not meet again. tree_nodes makes them."
        )
    parting = (nodes[1:] != nodes[:-1]).any(1).nonzero()[:, 0].tolist()
    if silent := sorted(set(parting) - set(sde_steps)):
        raise ValueError(
            f"Samples part at step {silent[0]}, which has no noise to tell them apart. Name it in sde_steps "
            f"(now {list(sde_steps)}), or let them part elsewhere."
        )
    if not torch.equal(nodes[-1], alone):
        raise ValueError("Samples have their last latent in common; let them part at a stochastic step.")
    return nodes
