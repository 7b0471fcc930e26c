# SPDX-License-Identifier: Apache-2.0
"""Sample the prompts of an iteration: a pure function of the iteration, for any world size and resume."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.seeds import sample_seed

from .processes import process_slice


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Share of a process in an iteration: b of the P·G samples."""

    prompt_index: Tensor  # [b] int64, index into the prompt set
    group_id: Tensor  # [b] int64, unique in the whole run; the samples of one group share one prompt
    sample_id: Tensor  # [b] int64, unique in the whole run; seeds the noise of the sample

    def __len__(self) -> int:
        return self.prompt_index.shape[0]

    def rows(self, index: Tensor) -> Batch:
        """Select the samples `index` [n] int64."""
        return Batch(**{name: column[index] for name, column in vars(self).items()})


def check_batch_algebra(
    prompts_per_iteration: int, group_size: int, world_size: int = 1, *, compared: bool = True
) -> None:
    """Refuse G < 2 where samples are `compared` with their group, and P·G below the number of processes."""
    if group_size < 2 and compared:
        raise UserError(
            f"group_size is {group_size}; a group is compared with itself, so it needs at least 2 samples. "
            f"Set rollout.group_size to 2 or more (Flow-GRPO uses 24)."
        )
    process_slice(prompts_per_iteration * group_size, 0, world_size)


def check_whole_groups(prompts_per_iteration: int, world: int) -> None:
    """Refuse processes that would split a group, whose samples could then not be compared."""
    if prompts_per_iteration % world:
        raise UserError(
            f"rollout.prompts_per_iteration is {prompts_per_iteration} and there are {world} processes: some group "
            f"would be spread over two, and its samples could not be compared. Use a multiple of {world}."
        )


def check_batch_reward(reward: Any, world: int) -> None:
    """Refuse a reward that compares all samples of an iteration where several processes score them."""
    if world > 1 and reward.capabilities.needs_batch:
        raise UserError(
            f"{reward.name} compares all samples of an iteration, and each of {world} processes would compare "
            "its own only. Use one process, or none of rewards.normalise=batch, uncertainty=bhattacharyya and "
            "rewards over the batch (options.over=group takes groups)."
        )


class PromptSampler:
    """P prompts with G samples each per iteration.

    Each epoch visits the prompts in a random order, none twice. Nothing is stored between calls, so a resumed
    run sees the same prompts. The ranks' batches are consecutive slices of the iteration's P·G samples, and
    may end inside a group: their union does not depend on the world size.

    With `strata`, one label per prompt, the groups take the labels of `cycle` in turn, and each stratum has
    its own epochs: a category of ten prompts gets as many groups as one of a thousand, or more where `cycle`
    names it more often.
    """

    def __init__(
        self,
        num_prompts: int,
        prompts_per_iteration: int,
        group_size: int,
        seed: int,
        *,
        strata: Sequence[str] | None = None,
        cycle: Sequence[str] | None = None,
        compared: bool = True,
    ) -> None:
        check_batch_algebra(prompts_per_iteration, group_size, compared=compared)
        self.prompts_per_iteration, self.group_size, self.seed = prompts_per_iteration, group_size, seed
        labels = [""] * num_prompts if strata is None else list(strata)
        if not num_prompts or len(labels) != num_prompts:
            raise UserError(f"There are {num_prompts} prompts and {len(labels)} strata. Give prompts, one label each.")
        self._members = {label: np.flatnonzero(np.array(labels) == label) for label in sorted(set(labels))}
        self._cycle = list(cycle) if cycle else list(self._members)
        if unknown := sorted(set(self._cycle) - set(self._members)):
            raise UserError(
                f"cycle names {unknown}, which no prompt is labelled with; the labels are {list(self._members)}."
            )

    def batch(self, iteration: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the samples of process `rank` of `world` in iteration 0, 1, 2, ..."""
        groups = iteration * self.prompts_per_iteration + np.arange(self.prompts_per_iteration)
        orders: dict[tuple[str, int], np.ndarray] = {}
        prompts = np.array([self._prompt(int(group), orders) for group in groups], dtype=np.int64)
        samples = self.prompts_per_iteration * self.group_size
        part = process_slice(samples, rank, world)
        return Batch(
            prompt_index=torch.from_numpy(np.repeat(prompts, self.group_size)[part].copy()),
            group_id=torch.from_numpy(np.repeat(groups, self.group_size)[part].copy()),
            sample_id=iteration * samples + torch.arange(samples, dtype=torch.int64)[part],
        )

    def _prompt(self, group: int, orders: dict[tuple[str, int], np.ndarray]) -> int:
        """Return the prompt of a group; `orders` caches the permutations of this batch."""
        turn, index = divmod(group, len(self._cycle))
        label = self._cycle[index]
        visit = turn * self._cycle.count(label) + self._cycle[:index].count(label)
        members = self._members[label]
        epoch, position = divmod(visit, len(members))
        if (label, epoch) not in orders:
            seed = sample_seed(self.seed, "prompts", label, epoch)
            orders[label, epoch] = np.random.default_rng(seed).permutation(len(members))
        return int(members[orders[label, epoch][position]])


class BucketSampler:
    """Iterations of P uncompared groups that share a bucket, such as a shape, each as often as it has members.

    `buckets` [N] numbers that of each prompt. The order of the buckets is a low-discrepancy sequence (steps of the
    golden ratio), and each has its own epochs; nothing is stored between calls.
    """

    def __init__(self, buckets: Sequence[int], prompts_per_iteration: int, group_size: int, seed: int) -> None:
        size = prompts_per_iteration, group_size
        labels, self._counts = np.unique(buckets, return_counts=True)
        self._members = {int(label): np.flatnonzero(np.equal(buckets, label)) for label in labels}
        self._parts = {
            label: PromptSampler(len(members), *size, sample_seed(seed, "bucket", label), compared=False)
            for label, members in self._members.items()
        }
        self._all = PromptSampler(len(buckets), *size, seed, compared=False)  # its labels are unique in the run

    def _numbers(self, iterations: int) -> np.ndarray:
        """Number of the bucket, among those with members, of iterations 0 to `iterations` - 1."""
        points = (np.arange(iterations) * (math.sqrt(5) - 1) / 2 + 0.5) % 1
        return np.searchsorted(np.cumsum(self._counts / self._counts.sum())[:-1], points, side="right")

    def bucket(self, iteration: int) -> int:
        """Return the bucket of an iteration."""
        return list(self._members)[self._numbers(iteration + 1)[-1]]

    def batch(self, iteration: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the samples of process `rank` of `world` in iteration 0, 1, 2, ..."""
        numbers, bucket = self._numbers(iteration + 1), self.bucket(iteration)
        visit = int((numbers[:-1] == numbers[-1]).sum())
        index = self._parts[bucket].batch(visit, rank, world).prompt_index
        prompts = torch.from_numpy(self._members[bucket][index.numpy()])
        return replace(self._all.batch(iteration, rank, world), prompt_index=prompts)
