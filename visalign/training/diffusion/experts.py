# SPDX-License-Identifier: Apache-2.0
"""Several trained policies that a new one learns from, each on the prompts that are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.flow.rollout import velocity_of
from visalign.interfaces import Condition
from visalign.training.policy.reference import swapped_weights

REST = "*"
"""The tag of all prompts that no other expert is named for."""


def check_experts(folders: Mapping[str, str | Path], records: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tags without an expert, experts without a prompt, and folders that are not there.

    Raises:
        UserError: with what is allowed.
    """
    tags = {str(record.get("tag", "")) for record in records}
    unknown, bare = sorted(folders.keys() - tags - {REST}), sorted(tags - folders.keys())
    if not folders or unknown or (bare and REST not in folders):
        raise UserError(
            f"objective.experts names {sorted(folders)}, and the tags of the training prompts are "
            f'{sorted(tags)}. Give each tag the folder of a trained policy, or "{REST}" one for the rest.'
        )
    for tag, folder in folders.items():
        if not Path(folder).is_dir():
            raise UserError(
                f"objective.experts.{tag} is {folder}, which is no folder. Name a run's lora/ or model/."
            )


class Experts:
    """Weights of policies that were trained as this one is, asked for the samples of their tags.

    Args:
        policy: with `load`, of what `save` of an equally built policy wrote.
        folders: tag of prompt records, or `REST` -> such a folder.
        records: the training prompts.

    Raises:
        UserError: no experts, tags without one, experts without a prompt, or weights that do not fit.
    """

    def __init__(
        self, policy: Any, folders: Mapping[str, str | Path], records: Sequence[Mapping[str, Any]]
    ) -> None:
        check_experts(folders, records)
        if not hasattr(policy, "load"):
            raise UserError(
                f"objective.experts reads weights by policy.load, which {type(policy).__name__} does not "
                "offer. Add it: it reads what save wrote."
            )
        self._policy, self._place = policy, {tag: str(folder) for tag, folder in folders.items()}
        own = self._copy()
        self._weights = {}
        try:
            for folder in sorted(set(self._place.values())):
                policy.load(Path(folder))
                self._weights[folder] = self._copy()
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"objective.experts: {folder} is no expert of this policy: {error}") from error
        finally:
            with torch.no_grad():
                for name, parameter in policy.trainable_parameters():
                    parameter.copy_(own[name])

    def _copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._policy.trainable_parameters()}

    @torch.no_grad()
    def velocity(
        self,
        records: Sequence[Mapping[str, Any]],
        x: Tensor,
        sigma: Tensor,
        condition: Condition,
        time: Tensor,
    ) -> Tensor:
        """[N, ...], each row by the expert of its prompt."""
        asked = [self._place.get(str(r.get("tag", "")), self._place.get(REST, "")) for r in records]
        found = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for folder in sorted(set(asked)):
            rows = torch.tensor([i for i, one in enumerate(asked) if one == folder])
            at = rows.to(x.device)
            with swapped_weights(self._policy, self._weights[folder]):
                v = velocity_of(self._policy, x[at], sigma[at], condition.select(rows), time[at])
            found[at] = v.to(found.dtype)
        return found
