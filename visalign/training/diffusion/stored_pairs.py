# SPDX-License-Identifier: Apache-2.0
"""Learning from stored images: what that allows, and what was said of them, as a reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from visalign.errors import UserError
from visalign.interfaces import Metadata, Scores

from .rollout_settings import RolloutSettings
from .settings import DiffusionObjectiveSettings

OFF_POLICY = ("dpo", "gdro", "weighted")
"""Losses whose samples another policy may have made."""


class StoredPreference:
    """What a record says under "preference", as the reward of its image; nothing is judged."""

    name = "preference"
    unit = "share of votes"
    range = (0.0, 1.0)
    higher_is_better = True

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """The records' own numbers.

        Args:
            images: not looked at.
            prompts: not looked at.
            metadata: B records with "preference".
        """
        said = [float(record["preference"]) for record in metadata or () if record is not None]
        value = torch.tensor(said, dtype=torch.float32)
        return Scores(value=value, valid=torch.ones(len(value), dtype=torch.bool), unit=self.unit)


def check_stored(objective: DiffusionObjectiveSettings, rollout: RolloutSettings, *, stored: bool) -> None:
    """Refuse what stored pairs cannot teach, and without them what only they can.

    Raises:
        UserError: with what to set instead.
    """
    row, name = objective.regression, f"objective.algorithm={objective.algorithm}"
    if not stored:
        if row is not None and row.loss_options.get("soft"):
            raise UserError(
                f"{name} has loss_options soft=true, which takes votes for probabilities, and samples of the "
                "policy have none. Set data.pairs to a set of stored pairs, or soft=false."
            )
        return
    why = None
    if row is None or row.loss not in OFF_POLICY:
        why = "learns from samples of the policy itself"
    elif row.anchor == "old":
        why = "with anchor='old' leans on the policy that sampled"
    elif row.noise == "start":
        why = "with noise='start' takes the noise that a sample was made from"
    elif objective.balance_every is not None:
        why = f"with objective.balance_every={objective.balance_every} weighs several rewards"
    elif row.signal not in ("reward", "tilt", "best"):
        why = f"with signal={row.signal!r} learns from rewards of many samples"
    if why is not None:
        raise UserError(
            f"{name} {why}, and data.pairs holds images from elsewhere. Take diffusion_dpo, gdro, "
            "reward_weighted or rejection as published, or leave data.pairs out."
        )
    if rollout.group_size != 2:
        raise UserError(
            f"rollout.group_size is {rollout.group_size}, and a group of data.pairs is a pair. Set "
            "rollout.group_size=2; rollout.prompts_per_iteration is then the number of pairs."
        )
