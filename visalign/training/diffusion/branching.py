# SPDX-License-Identifier: Apache-2.0
"""Images of a prompt as the leaves of trees: what they have in common is made once and trained once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from visalign.errors import UserError


@dataclass(frozen=True, kw_only=True)
class BranchSettings:
    """Where images of a prompt part (BranchGRPO, arXiv 2509.06040)."""

    at: list[int]
    """Stochastic steps at which every path goes on as several, each with noise of its own."""
    children: int = 2
    """K, as how many. A tree has K^len(at) images; `group_size` holds one tree or several, each from a
    start of its own."""

    def paths(self, group_size: int, step: int) -> int:
        """n_k, different latents of a group before a step: G / K^#{a ∈ at: a ≥ k}."""
        return group_size // self.children ** sum(a >= step for a in self.at)

    def check(self, group_size: int, trained: Sequence[int]) -> None:
        """Refuse trees that a group cannot hold, or that have steps nobody can learn from.

        Args:
            group_size: G.
            trained: the steps that are trained on.

        Raises:
            UserError: with what to set instead.
        """
        if self.children < 2:
            raise UserError(
                f"rollout.branch.children is {self.children}, so no path would part and nothing be shared. "
                "Set it to 2 or more, or rollout.branch=null for samples that each go alone."
            )
        leaves = self.children ** len(self.at)
        if group_size % leaves:
            raise UserError(
                f"rollout.group_size is {group_size}, and a tree with {self.children} children at "
                f"{len(self.at)} steps has {leaves} images. Take a multiple of {leaves}, for one tree of a "
                "prompt or several, or other rollout.branch.at and children."
            )
        if common := [step for step in trained if self.paths(group_size, step + 1) == 1]:
            raise UserError(
                f"rollout.branch.at is {self.at}, and all images of a prompt have step {common[0]} in "
                f"common: there is nothing to compare it with. Let them part there, take {common[0]} out of "
                "rollout.sde_steps or train_steps, or let rollout.group_size hold several trees."
            )
