# SPDX-License-Identifier: Apache-2.0
"""Diversity of the adapters of an ensemble's next member and those of its earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from visalign.core import nuclear_diversity
from visalign.errors import UserError
from visalign.rewards.base.contract import RewardError
from visalign.rewards.hpsv3.ensemble_folders import adapters_of
from visalign.rewards.hpsv3.loading import find_weights


class OtherMembers:
    """Nuclear diversity of the trained LoRA matrices and those of earlier members.

    Args:
        folders: Judges that were trained with adapters.
        trained: Parameters that are trained, by name; only LoRA matrices count.
    """

    def __init__(self, folders: Sequence[str], trained: Mapping[str, Tensor]) -> None:
        self.trained = {
            name.removesuffix(".default.weight"): value for name, value in trained.items() if ".lora_" in name
        }
        self.others = [self._read(folder) for folder in folders]

    def _read(self, folder: str) -> dict[str, Tensor]:
        try:
            adapters = adapters_of(find_weights(folder))
        except (OSError, RewardError) as error:
            raise UserError(
                f"model.diversity.others names {folder!r}, which has no adapters to be kept apart from "
                f"({error}). Give folders of judges that were trained with model.train lora."
            ) from error
        for name, value in self.trained.items():
            axis = 1 if name.endswith("lora_A") else 0  # ranks may differ
            if name not in adapters or adapters[name].shape[axis] != value.shape[axis]:
                raise UserError(
                    f"model.diversity.others names {folder!r}, whose adapters have no {name} of the trained "
                    "size. Members have one base and model.lora.target_modules."
                )
        return {name: adapters[name].to(value.device).float() for name, value in self.trained.items()}

    def diversity(self) -> Tensor:
        """Mean over the matrices A and B of all layers."""
        values = []
        for name, value in self.trained.items():
            matrices = [*(other[name] for other in self.others), value]
            values.append(nuclear_diversity(matrices, dim=int(name.endswith("lora_B"))))
        return torch.stack(values).mean()
