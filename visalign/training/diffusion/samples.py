# SPDX-License-Identifier: Apache-2.0
"""Samples of an image algorithm: drawn, scored, selected for an update, or stored and replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from visalign.core.groups.group_statistics import group_mean
from visalign.core.groups.labels import group_index
from visalign.core.regression.signals import best_and_worst
from visalign.flow.rollout import rollout
from visalign.flow.trajectory import Trajectory, concatenate_trajectories, trajectory_of_latents
from visalign.interfaces import Condition, Metadata, RewardCapabilities, Scores
from visalign.training.loop.dynamic_groups import ScoredGroup
from visalign.training.loop.judging import concatenate_scores
from visalign.training.loop.processes import Shares
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.sampler import Batch
from visalign.training.policy.winners import StoredSample, WinnerBuffer, group_means

from .settings import ScoutSettings

Records = Sequence[Mapping[str, Any]]
Encode = Callable[[Records], Condition]
Features = Callable[[Tensor], Tensor]
"""Images [b, 3, H, W] -> features [b, d] in any unit, for distances between images."""
Stored = Callable[[Records], Tensor]
"""b records -> clean latents [b, ...] of their images, in the policy's storage dtype, on its device."""


class StoredPreference:
    """Reward that returns the "preference" of a record; no image is looked at."""

    name = "preference"
    unit = "share of votes, or rating"
    range = (float("-inf"), float("inf"))
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
    scouted: Tensor | None = None  # [b] scores of the same samples in the pool that they are from


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


def scout_pool(
    algorithm: Any, scout: ScoutSettings, batch: Batch, records: Records, clock: PhaseClock
) -> tuple[Tensor, Tensor]:
    """Return the rows of a pool for an `ImageAlgorithm` to draw in all steps, and their scores in few, NaN if missing.

    A sample's seed is that of its place in the pool, so the exact image is the one that the scout foretold.
    """
    settings, policy, waiting = algorithm.rollout, algorithm.policy, []
    condition, group = algorithm.encode(records, clock), batch.group_id.tolist()
    sigmas = policy.sigmas(scout.steps, timestep_schedule=settings.timestep_schedule)
    options = {"sigmas": sigmas, "batch_size": algorithm.batch_size, "solver": settings.solver}
    for rows in algorithm.scorer.chunks(group, math.ceil(len(batch) / algorithm.batch_size), whole_groups=True):
        seeds = algorithm.sample_seeds(batch.sample_id[rows])
        with clock.phase("rollout"), algorithm.accelerator.autocast():
            latents = rollout(policy, condition.select(rows), seeds=seeds, **options).latents
        images, _ = algorithm.decode(latents, clock, measured=False)
        waiting.append(algorithm.submit(images, [records[i] for i in rows.tolist()], clock))
    with clock.phase("reward"):
        scores = concatenate_scores([wait() for wait in waiting])
    value = torch.where(scores.valid, scores.value, torch.nan).double().cpu()
    best = settings.group_size // 2 if scout.best is None else scout.best
    rows = best_and_worst(value, group, best=best, worst=settings.group_size - best, valid=scores.valid.cpu())
    return rows, value[rows]


def select_images(taken: Sequence[ScoredGroup], encode: Encode) -> ScoredImages:
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


@dataclass(frozen=True, kw_only=True)
class StoredImage(StoredSample):
    """Clean latents of D numbers of an image."""

    latents: Tensor  # [D] storage dtype
    prompt: Tensor  # [1] int64, index of the training prompt
    sample: Tensor  # [1] int64, `Batch.sample_id`


class SelfImitation(WinnerBuffer[StoredImage]):
    """Buffer of images with A > 0, and what each update of an iteration replays.

    L = mean over the replay of c(s) Ã w(σ) |v_θ − (ε − x0)|², Ã = R − median of the groups' means, Ã > 0. SPEAR (arXiv
    2509.22601) with reward-weighted regression (arXiv 2302.12192). The off-policy rule: a stored image is a target
    at its noised end point; a ratio would take it for a draw of the old policy, which it is not.
    """

    def replays(
        self, images: ScoredImages, records: Records, encode: Encode, iteration: int, updates: int
    ) -> list[tuple[ScoredImages, Tensor] | None]:
        """Draw (images, weights [N] c(s) Ã) for each update, or None, and store the iteration's own winners.

        The scores of what is drawn are those of the iteration.
        """
        index, groups = group_index(images.group, len(images.value))
        means = group_means(images.value, images.valid, images.group)
        drawn, advantage, _ = self.draw_winners(means, iteration, len(images.value))
        parts = [part.sort().values for part in drawn.tensor_split(updates)]
        take = partial(self._samples, images=images, records=records, encode=encode)
        result = [(take(part), self.weight * advantage[part]) if len(part) else None for part in parts]
        winners = images.valid & (images.value > group_mean(images.value, images.valid, index, groups)[index])
        born = torch.tensor([iteration], dtype=torch.int32)
        pairs = [(row, i) for row, i in enumerate(images.shares.own.tolist()) if winners[i]]
        own = [(i, self._store(images, row, i, born)) for row, i in pairs]
        self.samples.extend(stored for _, stored in sorted(gather_object(own), key=lambda pair: pair[0]))
        return result

    def _samples(self, index: Tensor, images: ScoredImages, records: Records, encode: Encode) -> ScoredImages:
        accelerator = images.shares.accelerator
        shares = Shares.of_owners(torch.arange(len(index)) % accelerator.num_processes, accelerator)
        stored = [self.samples[i] for i in index[shares.own if len(shares.own) else [0]].tolist()]
        sample, prompt = (torch.cat([getattr(image, name) for image in stored]) for name in ("sample", "prompt"))
        chosen, latents = [records[i] for i in prompt.tolist()], images.trajectory.latents
        clean = torch.stack([image.latents for image in stored]).view(-1, *latents.shape[1:]).to(latents.device)
        batch = Batch(prompt_index=prompt, group_id=sample, sample_id=sample)
        columns: dict[str, Any] = {"condition": encode(chosen), "batch": batch, "records": chosen, "shares": shares}
        return replace(images, trajectory=trajectory_of_latents(clean), **columns)

    def _store(self, images: ScoredImages, row: int, sample: int, born: Tensor) -> StoredImage:
        return StoredImage(
            latents=images.trajectory.latents[row].flatten().cpu().clone(),
            prompt=images.batch.prompt_index[row : row + 1].clone(),
            sample=images.batch.sample_id[row : row + 1].clone(),
            reward=images.value[sample : sample + 1].float(),
            born=born,
        )
