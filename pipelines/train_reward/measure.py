# SPDX-License-Identifier: Apache-2.0
"""Held-out numbers of a judge while it is trained and afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.functional import softplus

from visalign.evaluation.statistics.correlations import srcc
from visalign.evaluation.statistics.intervals import share_interval
from visalign.training.reward.heldout import LOW, HeldoutPairs, auroc, concatenate_pairs, pair_measures, score_pairs
from visalign.training.reward.tasks import TASKS

from .config import TrainRewardConfig
from .examples import Examples

ON_THE_WAY = 400  # Held-out examples of the evaluations on the way; the last one takes all


def read_batches(
    judge: Any, examples: Any, size: int, processes: tuple[int, int], *, final: bool, read: Callable[[Any], Any]
) -> list[Any]:
    """Read held-out batches, all (`final`) or the first `ON_THE_WAY`, shared by `processes` (number, count)."""
    count = len(examples) if final else min(len(examples), ON_THE_WAY)
    results = []
    for start in range(processes[0] * size, count, processes[1] * size):
        numbers = range(start, min(start + size, count))
        results.append((start, read(judge.encode([examples[number] for number in numbers], heldout=True))))
    if processes[1] > 1:
        results = gather_object(results)
    return [value for _, value in sorted(results, key=itemgetter(0))]


@dataclass(frozen=True)
class Measure:
    """Measures a judge with the weights that it has; `processes` (number, count) share the examples."""

    config: TrainRewardConfig
    judge: Any
    heldout: Examples | None
    processes: tuple[int, int] = (0, 1)

    def __call__(self, *, final: bool = False) -> dict[str, float]:
        """Compute the numbers on all held-out examples (`final`) or the first `ON_THE_WAY`; all processes call it."""
        if self.heldout is None:
            return {}
        task = TASKS[self.config.objective.task]
        reading = self.judge, self.heldout, self.config.evaluation.batch, self.processes
        if task.labels in ("pairs", "triples"):
            scored = read_batches(*reading, final=final, read=lambda batch: score_pairs(self.judge, [batch], task))
            pairs = concatenate_pairs(scored)
            return {**pair_measures(pairs), **(accuracy_interval(pairs) if final else {})}
        self.judge.train(False)
        values = read_batches(*reading, final=final, read=lambda batch: self._outputs(batch, task.labels))
        if task.labels == "faults":
            score, heat = (torch.cat(part, 1) for part in zip(*values, strict=True))
            return {**rating_measures(*score), "heat_auroc": auroc(heat[0], heat[1] >= 0.5)}
        value, mass, target = torch.cat(values, 1)
        if task.labels == "checks":
            return {**_answer_measures(value, target), "mass_low": float(mass.quantile(LOW))}
        if self.config.model.kind == "artefact":
            return {**rating_measures(value.sigmoid(), target), "artefact_auroc": auroc(value, target >= 0.5)}
        measures = rating_measures if task.labels == "rows" else _critique_measures
        return {**measures(value, target), "mass_low": float(mass.quantile(LOW))}

    @torch.no_grad()
    def _outputs(self, batch: Any, labels: str) -> Any:
        """[3, n] value, mass of the answers, target; of maps [2, n] score and target, [2, cells] heat and truth."""
        outputs = self.judge(batch.inputs)
        if labels == "faults":
            score = torch.stack([outputs["value"].sigmoid().cpu(), batch.target]).double()
            return score, torch.stack([outputs["heat"].cpu().flatten(), outputs["truth"].flatten()])
        if labels == "checks":
            odds, answered = outputs["odds"].cpu().double(), ~torch.isnan(batch.target)
            mass = outputs["log_mass"].cpu().double().exp()[:, None].expand_as(odds)
            return torch.stack([odds[answered], mass[answered], batch.target.double()[answered]])
        value = outputs["value"].cpu().double()
        mass = outputs["log_mass"].cpu().double().exp() if "log_mass" in outputs else torch.ones_like(value)
        return torch.stack([value, mass, batch.target.double()])


def accuracy_interval(pairs: HeldoutPairs) -> dict[str, float]:
    """Compute the ends of the 95 % interval of the accuracy, over examples where one has several pairs."""
    decided = torch.isfinite(pairs.truth) & (pairs.truth != 0.5) & pairs.clear
    hits = (pairs.difference[decided].sign() * (pairs.truth[decided] - 0.5).sign() + 1) / 2
    example = torch.arange(len(hits)) if pairs.example is None else pairs.example[decided]
    ends = share_interval(hits.numpy(), example.tolist())
    return {"accuracy_low": ends.low, "accuracy_high": ends.high}


def rating_measures(value: Tensor, target: Tensor) -> dict[str, float]:
    return {"mae": float((value - target).abs().mean()), "srcc": float(srcc(value.numpy(), target.numpy()))}


def _answer_measures(value: Tensor, target: Tensor) -> dict[str, float]:
    """Measure log-odds against shares of yes; an even share is on no side."""
    decided = target != 0.5
    return {
        "answer_accuracy": float(((value > 0) == (target > 0.5))[decided].double().mean()),
        "answer_nll": float((softplus(value) - target * value).mean()),
    }


def _critique_measures(value: Tensor, target: Tensor) -> dict[str, float]:
    right = target > 0.5
    return {
        "critique_right": float(target.mean()),
        "critique_accuracy": float(((value > 0) == right).double().mean()),
        "critique_auroc": auroc(value, right),
        "critique_nll": float(softplus(torch.where(right, -value, value)).mean()),
    }
