# SPDX-License-Identifier: Apache-2.0
"""What a judge learns from rated images: the rating itself, or who is rated higher."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visalign.core.preference.fidelity import fidelity_loss, quality_preferences, thurstone_score

if TYPE_CHECKING:
    from .batch import Outputs, RewardBatch

Settings = Any
"""Of the task: its class in `settings`."""
Sums = tuple[Tensor, Tensor]
"""(Σ weight · loss, Σ weight): micro-batches and processes add up to the whole batch."""


def rating(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """Squared error of the expectation over the score tokens."""
    if batch.target is None:
        raise ValueError("the task rating learns from rated images, and the batch has no target.")
    value = outputs["value"]
    target = batch.target.to(value)
    known = ~torch.isnan(target)
    error = (value - target.nan_to_num(0.0)).square() + other_answer_penalty(outputs, settings)
    loss = torch.where(known, error, 0.0)
    return loss.sum(), known.sum().to(value)


def rating_fidelity(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """VisualQuality-R1's fidelity of Thurstone's probability, between all images of a micro-batch."""
    if batch.target is None:
        raise ValueError("the task rating_fidelity learns from rated images, and the batch has no target.")
    mean, variance = outputs["value"], (2 * outputs["log_std"]).exp()
    label = quality_preferences(batch.target.to(mean)).fill_diagonal_(math.nan)
    score = thurstone_score(mean[:, None], mean[None, :], variance[:, None], variance[None, :])
    count = (~torch.isnan(label)).sum().to(mean)
    return fidelity_loss(score, label).sum() + other_answer_penalty(outputs, settings).mean() * count, count


def other_answer_penalty(outputs: Outputs, settings: Settings) -> Tensor:
    """What it costs a judge to say anything but the answers asked for, [M]: −mass · ln P(any of them).

    0 for judges that give no "log_mass", ln P [M].
    """
    log_mass = outputs.get("log_mass")
    return torch.zeros_like(outputs["value"]) if log_mass is None else -settings.mass * log_mass
