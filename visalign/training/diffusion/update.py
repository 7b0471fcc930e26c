# SPDX-License-Identifier: Apache-2.0
"""The policy update: one iteration's optimizer steps, and what they did."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from visalign.core.surrogates.ratio_check import check_log_ratio
from visalign.flow.replay import RATIO_BOUND
from visalign.training.loop.counters import Progressed
from visalign.training.loop.ema import EMA
from visalign.training.loop.optimizer import OptimizerSettings

from .collect import Experience, Team
from .loss import accumulate, chunks
from .settings import ObjectiveSettings


def optimize(
    module: nn.Module,
    team: Team,
    experience: Experience,
    optimizer: torch.optim.Optimizer,
    ema: EMA,
    weight: Tensor,
    objective: ObjectiveSettings,
    settings: OptimizerSettings,
    *,
    iteration: int,
    before: Progressed,
) -> tuple[Progressed, dict[str, float]]:
    """Run the updates of one iteration.

    Returns:
        The counters afterwards, and the metrics; without a live sample nothing moves and the ratios are NaN.

    Raises:
        RatioError: at the run's first update the ratio is not 1 within the bound.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rows: list[list[float]] = []
    now = before
    for chunk in chunks(experience, settings.updates_per_iteration, team.seed, iteration):
        lr = settings.lr_at(now.updates)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        sums = accumulate(module, team, experience, chunk, weight, objective, settings)
        norm = nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        largest = team.accelerator.gather(sums[7:]).max()  # type: ignore[union-attr]
        total = team.accelerator.reduce(sums[:7], "sum")
        row = [*torch.cat([total, largest[None], norm.double()[None]]).tolist(), lr]  # type: ignore[list-item]
        if not now.checked:
            _check_ratio(row[7], experience, objective)
            now = replace(now, checked=True)
        finite = math.isfinite(row[8])
        if finite:
            optimizer.step()
            ema.update(now.updates + 1)
        now = replace(now, updates=now.updates + 1, skipped=now.skipped + (not finite))
        rows.append(row)
    optimizer.zero_grad(set_to_none=True)
    return now, _metrics(rows, now, objective)


def _check_ratio(largest: float, experience: Experience, objective: ObjectiveSettings) -> None:
    """The bound grows with what the log-ratio is a sum over; the guard's is a mean under either norm."""
    is_sum = objective.ratio == "gaussian" and experience.trajectory.kernel.log_prob_reduction == "sum"
    dimensions = experience.trajectory.dimensions if is_sum else 1
    bound = RATIO_BOUND * dimensions if objective.ratio_bound is None else objective.ratio_bound
    check_log_ratio(torch.tensor([largest]), bound=bound)


def _metrics(rows: list[list[float]], now: Progressed, objective: ObjectiveSettings) -> dict[str, float]:
    table = np.array(rows or [[math.nan] * 10])
    pairs = table[:, 0].sum()
    shift, square, low, high, kl = (table[:, i].sum() / pairs for i in range(1, 6))
    norms = table[:, 8][np.isfinite(table[:, 8])]
    metrics = {
        "updates": now.updates,
        "updates_skipped": now.skipped,
        "loss": table[:, 6].mean(),
        "ratio_mean": 1 + shift,
        "ratio_std": math.sqrt(square),
        "ratio_max": table[:, 7].max(),
        "ratio_floor": table[0, 7],
        "clip_range": min(objective.eps_low, objective.eps_high),
        "clip_low": low,
        "clip_high": high,
        "kl": kl,
        "grad_norm": norms.mean() if len(norms) else math.nan,
        "lr": table[-1, 9],
    }
    return {key: value if isinstance(value, int) else float(value) for key, value in metrics.items()}
