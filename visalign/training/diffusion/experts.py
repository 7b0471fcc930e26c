# SPDX-License-Identifier: Apache-2.0
"""Distillation from several trained policies, each an expert for some tags of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.flow.rollout import velocity_of
from visalign.interfaces import Condition
from visalign.swapping import swapped_weights

REST = "*"  # Tag of all prompts that no other expert is named for


def check_experts(folders: Mapping[str, str | Path], records: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tags without an expert, experts without a prompt, and missing folders."""
    tags = {str(record.get("tag", "")) for record in records}
    unknown, without_expert = sorted(folders.keys() - tags - {REST}), sorted(tags - folders.keys())
    if not folders or unknown or (without_expert and REST not in folders):
        raise UserError(
            f"objective.experts names {sorted(folders)}, and the tags of the training prompts are "
            f'{sorted(tags)}. Give each tag the folder of a trained policy, or "{REST}" one for the rest.'
        )
    for tag, folder in folders.items():
        if not Path(folder).is_dir():
            raise UserError(f"objective.experts.{tag} is {folder}, which is no folder. Name a run's lora/ or model/.")


class Experts:
    """Weights of equally built policies, evaluated on the samples of their tags.

    `policy.load` reads the output of `policy.save` from `folders`: tag of prompt records, or `REST` -> folder.
    """

    def __init__(self, policy: Any, folders: Mapping[str, str | Path], records: Sequence[Mapping[str, Any]]) -> None:
        check_experts(folders, records)
        self._policy, self._folders = policy, {tag: str(folder) for tag, folder in folders.items()}
        self._weights: dict[str, list[Tensor]] = {}
        self._trained = [parameter for _, parameter in policy.trainable_parameters()]
        for folder in sorted(set(self._folders.values())):
            copies = [parameter.detach().clone() for parameter in self._trained]
            try:
                with swapped_weights(self._trained, copies):
                    policy.load(Path(folder))
                    self._weights[folder] = [parameter.data for parameter in self._trained]
            except (OSError, RuntimeError, ValueError) as error:
                raise UserError(f"objective.experts: {folder} is no expert of this policy: {error}") from error

    @torch.no_grad()
    def velocity(
        self, records: Sequence[Mapping[str, Any]], x: Tensor, sigma: Tensor, condition: Condition, time: Tensor
    ) -> Tensor:
        """Compute [N, ...] velocities, each row by the expert of its prompt."""
        rest = self._folders.get(REST, "")
        folders = [self._folders.get(str(record.get("tag", "")), rest) for record in records]
        velocity = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for folder in sorted(set(folders)):
            rows = torch.tensor([i for i, other in enumerate(folders) if other == folder])
            index = rows.to(x.device)
            with swapped_weights(self._trained, self._weights[folder]):
                v = velocity_of(self._policy, x[index], sigma[index], condition.select(rows), time[index])
            velocity[index] = v.to(velocity.dtype)
        return velocity
