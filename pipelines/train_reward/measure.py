# SPDX-License-Identifier: Apache-2.0
"""Held-out numbers of a judge while it is trained and afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from visalign.training.reward.batch import RewardBatch
from visalign.training.reward.heldout import LOW, auroc, concatenate_pairs, pair_measures, score_pairs
from visalign.training.reward.tasks import TASKS

from .config import TrainRewardConfig
from .examples import Example, Examples, in_order

ON_THE_WAY = 400
"""Held-out examples of the evaluations on the way; the last one takes all."""


class Measure:
    """Measures a judge with the weights that it has; several processes share the examples, each counted once,
    and all of them get the numbers.

    Args:
        config: of the job.
        judge: with `encode(examples, heldout=True)`.
        heldout: what is measured on; None measures nothing.
        processes: (i, n): this one's number and how many there are.
    """

    def __init__(
        self,
        config: TrainRewardConfig,
        judge: Any,
        heldout: Examples | None,
        processes: tuple[int, int] = (0, 1),
    ) -> None:
        self.config, self.judge, self.heldout = config, judge, heldout
        self.processes = processes
        self.size = 0 if heldout is None else len(heldout)

    def __call__(self, *, final: bool = False) -> dict[str, float]:
        """Names and numbers; all processes call it together.

        Args:
            final: on all held-out examples, not on the first `ON_THE_WAY`.
        """
        if self.heldout is None:
            return {}
        count = self.size if final else min(self.size, ON_THE_WAY)
        if self.config.model.kind == "rating":
            return self._ratings(count)
        if self.config.model.kind == "critique":
            return self._answers(count)
        task = TASKS[self.config.objective.task]
        results = [(number, score_pairs(self.judge, [batch], task)) for number, batch in self._batches(count)]
        return pair_measures(concatenate_pairs(self._of_all(results)))

    def _batches(self, count: int) -> Iterator[tuple[int, RewardBatch]]:
        assert self.heldout is not None
        return in_order(
            self.heldout.first(count), self._encode, size=self.config.evaluation.batch, part=self.processes
        )

    def _of_all(self, results: list[tuple[int, Any]]) -> list[Any]:
        """Gather the results of all processes in the order of the batches."""
        gathered = results
        if self.processes[1] > 1:
            from accelerate.utils import gather_object

            gathered = gather_object(results)
        return [value for _, value in sorted(gathered, key=lambda pair: pair[0])]

    def _encode(self, examples: Sequence[Example]) -> RewardBatch:
        return self.judge.encode(examples, heldout=True)

    def _ratings(self, count: int) -> dict[str, float]:
        from visalign.evaluation.statistics.correlations import srcc

        value, mass, target = self._said(count)
        return {
            "mae": float((value - target).abs().mean()),
            "srcc": float(srcc(value.numpy(), target.numpy())),
            "mass_low": float(mass.quantile(LOW)),
        }

    def _answers(self, count: int) -> dict[str, float]:
        value, mass, target = self._said(count)
        return {
            "critique_right": float(target.mean()),
            "critique_accuracy": float(((value > 0) == (target > 0.5)).double().mean()),
            "critique_auroc": auroc(value, target > 0.5),
            "critique_nll": float(softplus(torch.where(target > 0.5, -value, value)).mean()),
            "mass_low": float(mass.quantile(LOW)),
        }

    @torch.no_grad()
    def _said(self, count: int) -> Tensor:
        """[3, count] value, mass of the answers, and target."""
        self.judge.train(False)
        results = []
        for number, batch in self._batches(count):
            assert batch.target is not None
            outputs = self.judge(batch.inputs)
            value, mass = outputs["value"].cpu().double(), outputs["log_mass"].cpu().double().exp()
            results.append((number, torch.stack([value, mass, batch.target.double()])))
        return torch.cat(self._of_all(results), 1)
