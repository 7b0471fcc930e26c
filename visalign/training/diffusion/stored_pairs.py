# SPDX-License-Identifier: Apache-2.0
"""Votes on stored images as a reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from visalign.interfaces import Metadata, RewardCapabilities, Scores


class StoredPreference:
    """Reward that returns the "preference" of a record; no image is looked at."""

    name = "preference"
    unit = "share of votes"
    range = (0.0, 1.0)
    higher_is_better = True
    capabilities = RewardCapabilities()
    identity = None

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Return the "preference" of each of the B records."""
        values = [float(record["preference"]) for record in metadata or () if record is not None]
        value = torch.tensor(values, dtype=torch.float32)
        return Scores(value=value, valid=torch.ones(len(value), dtype=torch.bool), unit=self.unit)
