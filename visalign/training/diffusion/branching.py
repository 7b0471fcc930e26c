# SPDX-License-Identifier: Apache-2.0
"""Branching rollouts: images of a prompt are leaves of trees, and shared steps are sampled and trained
once."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from visalign.settings import MOST, Natural, settings


@settings("rollout.branch")
class BranchSettings:
    """Steps at which the images of a prompt branch (BranchGRPO, arXiv 2509.06040)."""

    at: list[Natural]
    """Stochastic steps at which every path splits into `children`, each with its own noise."""
    children: Annotated[int, Field(ge=2, le=MOST)] = 2
    """K, children per split. A tree has K^len(at) images; `group_size` holds one or more trees, each with its
    own initial noise."""

    @property
    def leaves(self) -> int:
        """Images of one tree, K^len(at)."""
        return self.children ** len(self.at)

    def paths(self, group_size: int, step: int) -> int:
        """Count the different latents of a group before a step: n_k = G / K^#{a ∈ at: a ≥ k}."""
        return group_size // self.children ** sum(a >= step for a in self.at)
