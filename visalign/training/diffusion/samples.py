# SPDX-License-Identifier: Apache-2.0
"""Samples of an image algorithm: drawn, scored, and those of the groups that an update trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from visalign.flow.trajectory import Trajectory, concatenate_trajectories
from visalign.interfaces import Condition, Metadata, RewardCapabilities, Scores
from visalign.training.loop.dynamic_groups import ScoredGroup
from visalign.training.loop.processes import Shares
from visalign.training.loop.sampler import Batch

Records = Sequence[Mapping[str, Any]]
Features = Callable[[Tensor], Tensor]
"""Images [b, 3, H, W] -> features [b, d] in any unit, for distances between images."""
Stored = Callable[[Records], Tensor]
"""b records -> clean latents [b, ...] of their images, in the policy's storage dtype, on its device."""


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


@dataclass(frozen=True, kw_only=True)
class ImageSamples:
    """b samples of this process."""

    condition: Condition
    trajectory: Trajectory
    batch: Batch
    records: Records


@dataclass(frozen=True, kw_only=True)
class PendingImages(ImageSamples):
    """Samples whose scores are being computed."""

    scores: Sequence[Callable[[], Scores]]  # One per chunk of samples, in order; a call waits for the chunk's scores
    statistics: Tensor | None  # [b, 4 + d]: `image_statistics`, and features; None for stored images


@dataclass(frozen=True, kw_only=True)
class ScoredImages(ImageSamples):
    """b samples of this process, and the scores of all B.

    With dynamic sampling a process may own none of the B. It then has one spare sample, which nothing reads.
    """

    value: Tensor  # [B] float64 of all processes in rank order, on the CPU
    valid: Tensor  # bool [B]
    group: Tensor  # [B] int64
    columns: Tensor  # [B, M] float64, each term of the reward by itself
    parts: Mapping[str, Tensor]  # name -> [B] float64, the parts of the reward
    metrics: Mapping[str, float]
    shares: Shares  # Owner of each of the B samples

    @property
    def own(self) -> Tensor:
        """[b] indices of this process's samples among the B."""
        return self.shares.own if len(self.shares.own) else torch.zeros(len(self.batch), dtype=torch.int64)


def select_images(taken: Sequence[ScoredGroup], encode: Callable[[Records], Condition]) -> ScoredImages:
    """Select the groups that an update trains on, in their order; each process selects among its own samples."""
    pairs: list[tuple[ScoredImages, Tensor]] = [(group.payload, group.index) for group in taken]
    first = pairs[0][0]
    owner = torch.cat([images.shares.owner[index] for images, index in pairs])
    shares = Shares.of_owners(owner, first.shares.accelerator)
    local = [(images, rows[rows >= 0]) for images, index in pairs for rows in (images.shares.local[index],)]
    if not len(shares.own):
        local = [(first, torch.zeros(1, dtype=torch.int64))]

    def batch_column(name: str) -> Tensor:
        return torch.cat([getattr(images.batch, name)[rows] for images, rows in local])

    def column(read: Callable[[ScoredImages], Tensor]) -> Tensor:
        return torch.cat([read(images)[index] for images, index in pairs])

    records = [images.records[i] for images, rows in local for i in rows.tolist()]
    names = dict.fromkeys(name for images, _ in pairs for name in images.parts)
    missing = torch.full_like(first.value, torch.nan)
    return replace(
        first,
        condition=encode(records),
        trajectory=concatenate_trajectories([images.trajectory.rows(rows) for images, rows in local]),
        batch=Batch(**{item.name: batch_column(item.name) for item in fields(Batch)}),
        records=records,
        shares=shares,
        value=column(lambda images: images.value),
        valid=column(lambda images: images.valid),
        group=column(lambda images: images.group),
        columns=column(lambda images: images.columns),
        parts={name: column(lambda images, name=name: images.parts.get(name, missing)) for name in names},
    )
