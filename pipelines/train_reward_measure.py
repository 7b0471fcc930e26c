# SPDX-License-Identifier: Apache-2.0
"""Held-out numbers of a judge while it is trained and afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from visalign.training.reward_heldout import judge_pairs, pair_measures
from visalign.training.reward_tasks import TASKS, RewardBatch

from .train_reward_batches import in_order
from .train_reward_config import TrainRewardConfig
from .train_reward_examples import Example, Examples

ON_THE_WAY = 400
"""Held-out examples of the evaluations on the way; the last one takes all."""


class Measure:
    """Measures a judge with the weights that it has.

    Args:
        config: of the job.
        judge: with `encode(examples, heldout=True)`.
        heldout: what is measured on; None measures nothing.
    """

    def __init__(self, config: TrainRewardConfig, judge: Any, heldout: Examples | None) -> None:
        self.config, self.judge, self.heldout = config, judge, heldout
        self.size = 0 if heldout is None else len(heldout)

    def __call__(self, *, final: bool = False) -> dict[str, float]:
        """Names and numbers.

        Args:
            final: on all held-out examples, not on the first `ON_THE_WAY`.
        """
        if self.heldout is None:
            return {}
        count = self.size if final else min(self.size, ON_THE_WAY)
        if self.config.model.kind == "rating":
            return self._ratings(count)
        pairs = judge_pairs(self.judge, self._batches(count), TASKS[self.config.objective.task])
        return pair_measures(pairs)

    def _batches(self, count: int) -> Iterator[RewardBatch]:
        assert self.heldout is not None
        first = _First(self.heldout, count)
        return in_order(first, self._encode, size=self.config.evaluation.batch)

    def _encode(self, examples: Sequence[Example]) -> RewardBatch:
        return self.judge.encode(examples, heldout=True)

    @torch.no_grad()
    def _ratings(self, count: int) -> dict[str, float]:
        from visalign.evaluation.correlations import srcc

        self.judge.train(False)
        said, true = [], []
        for batch in self._batches(count):
            assert batch.target is not None
            said.append(self.judge(batch.inputs)["value"].cpu().double())
            true.append(batch.target.double())
        value, target = torch.cat(said), torch.cat(true)
        return {
            "mae": float((value - target).abs().mean()),
            "srcc": float(srcc(value.numpy(), target.numpy())),
        }


class _First:
    """The first examples of a set."""

    def __init__(self, examples: Examples, count: int) -> None:
        self.examples, self.count = examples, count

    @property
    def prompts(self) -> frozenset[str]:
        return self.examples.prompts

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Example:
        return self.examples[number]
