# SPDX-License-Identifier: Apache-2.0
"""What the entropy term of an objective may be: what is settled over the whole step, and its loss.

A rule that looks at earlier steps finds what it keeps of them in `Trajectories.entropy_before`, which
`entropy_memory` makes; a trainer holds it from one rollout to the next, and in its checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.core.surrogates.aggregation import Counts, Mode, aggregate, count_step
from visalign.core.tokens.entropy import covariance_statistics, entropy_bonus, token_covariance
from visalign.core.tokens.entropy_terms import (
    anchored_entropy_loss,
    entropy_band_penalty,
    peak_entropy,
    siren_keep,
    tea_weights,
)

from .data import PolicyOutput, Prepared, Trajectories
from .options import Stage
from .stages import ares_threshold


@dataclass(frozen=True, kw_only=True)
class Held:
    """What an entropy term settles before the first micro-batch."""

    weight: Tensor | None = None
    """[B, T] factor of each decision's entropy."""
    level: Tensor | None = None
    """[B, n] numbers that it is held at, the same in each row."""


def _bonus(_t: Trajectories, _advantage: Tensor, _weight: Tensor, _counts: Counts) -> Held:
    return Held()


def _siren(
    t: Trajectories,
    _advantage: Tensor,
    weight: Tensor,
    counts: Counts,
    *,
    p: float = 0.8,
    quantile: float = 0.8,
) -> Held:
    """Hold the nucleus entropy of peak tokens where it began: L = β (H_agg − H_anchor)².

    H_agg and peaks are of the policy that the rollout was made by, for all its updates; `p` is that of the
    nucleus in which the entropies were taken, and `quantile` each completion's own.

    SIREN, arXiv 2509.25133. Deviation from the released code: its H_agg and its anchor are a micro-batch's.
    """
    entropy = t.nucleus_entropy
    assert entropy is not None
    peaks = peak_entropy(torch.ones_like(entropy), weight, siren_keep(entropy, weight, quantile=quantile))
    measured = aggregate(_times(entropy, peaks), weight, "seq_mean_token_mean", counts)
    anchor = measured if t.entropy_before is None else t.entropy_before
    return Held(weight=peaks, level=(measured - anchor).expand(len(weight), 1))


def _epo(
    t: Trajectories,
    _advantage: Tensor,
    weight: Tensor,
    _counts: Counts,
    *,
    low: float = 0.8,
    high: float = 1.2,
    smoothing: float = 0.1,
) -> Held:
    """κ_l and κ_r of the mean entropy of the rollouts before, and λ_s: one number for the whole run in place
    of the paper's schedules over turns and epochs."""
    if not (0 <= low <= high and smoothing >= 0):
        raise ValueError(f"0 ≤ low ≤ high and smoothing ≥ 0 must hold; got {low=}, {high=}, {smoothing=}.")
    before = torch.nan if t.entropy_before is None else t.entropy_before
    edges = torch.tensor([low * before, high * before], dtype=torch.float64, device=weight.device)
    return Held(weight=torch.full_like(weight, smoothing), level=edges.expand(len(weight), 2))


def _tea(
    t: Trajectories,
    advantage: Tensor,
    weight: Tensor,
    _counts: Counts,
    *,
    tau: float = 1.0,
    cap: float | None = 100.0,
) -> Held:
    statistics = covariance_statistics(t.old_log_prob, advantage, weight)
    covariance = token_covariance(t.old_log_prob, advantage, weight, statistics)
    return Held(weight=tea_weights(covariance, weight, tau=tau, cap=cap))


ENTROPY_TERMS: dict[str, Stage] = {
    "bonus": Stage(entropy_bonus, _bonus),
    "siren": Stage(_siren, _siren, ("nucleus_entropy",)),
    "epo": Stage(entropy_band_penalty, _epo),
    "tea": Stage(tea_weights, _tea),
}
"""Name -> what it settles over the step; `Objective.entropy` is its coefficient."""


def remembers(objective: Any) -> str | None:
    """What of an `Objective` keeps something of earlier rollouts: "siren", "epo", "ares", or None."""
    if objective.advantage == "ares":
        return "ares"
    term = objective.entropy_term if objective.entropy else None
    return term if term in ("siren", "epo") else None


def entropy_loss(
    name: str, coefficient: float, rows: Prepared, policy: PolicyOutput, mode: Mode
) -> tuple[Tensor, Mode]:
    """Loss of each decision [b, T], and how it is aggregated.

    bonus: −c H. siren: β(H_agg − anchor)². epo: −c(H − λ_s pen). tea: −c Σ w H, over the step.

    Args:
        name: a key of `ENTROPY_TERMS`.
        coefficient: c, or SIREN's β.
        rows: prepared, of these samples.
        policy: with their entropies.
        mode: of the row.
    """
    held, level = rows.entropy_weight, rows.entropy_level
    if name == "siren":
        assert policy.nucleus_entropy is not None and held is not None and level is not None
        peaks = _times(policy.nucleus_entropy, held)
        return anchored_entropy_loss(peaks, level, 0.0, coefficient=coefficient), "seq_mean_token_mean"
    assert policy.entropy is not None
    if name == "tea":
        assert held is not None
        return entropy_bonus(_times(policy.entropy, held), coefficient), "token_sum"
    loss = entropy_bonus(policy.entropy, coefficient)
    if name == "epo":
        assert held is not None and level is not None
        penalty = entropy_band_penalty(policy.entropy, rows.weight, level[:, :1], level[:, 1:])
        loss = loss + coefficient * held * penalty
    return loss, mode


def entropy_memory(objective: Any, t: Trajectories, before: Sequence[float]) -> list[float]:
    """What a row keeps of the rollouts so far: [what the next one goes by, how many there were].

    SIREN keeps H_agg of the first, EPO the mean of the mean entropies of all, ARES a moving average (0.99) of
    the threshold.

    Args:
        objective: an `Objective` that `remembers`.
        t: a whole rollout.
        before: what was kept of those before it, empty at the beginning.

    Returns:
        Two numbers; `before` where the rollout has nothing to say.
    """
    name, options = remembers(objective), objective.entropy_term_options
    assert t.entropy is not None
    weight = torch.where(t.present()[:, None], t.weight, 0.0)
    counts = count_step(weight)
    if name == "ares":
        known = ("window", "quantile")
        given = {key: objective.advantage_options[key] for key in known if key in objective.advantage_options}
        now = float(ares_threshold(t, **given))
    elif name == "siren":
        assert t.nucleus_entropy is not None
        held = _siren(t, weight, weight, counts, **options).weight
        assert held is not None
        now = float(aggregate(_times(t.nucleus_entropy, held), weight, "seq_mean_token_mean", counts))
    else:
        now = float(aggregate(t.entropy, weight, "token_mean", counts))
    if math.isnan(now):
        return list(before)
    mean, count = before or (now, 0.0)
    share = {"siren": 0.0, "epo": 1 / (count + 1), "ares": 0.01}[name or ""]
    return [mean + share * (now - mean), count + 1]


def _times(entropy: Tensor, factor: Tensor) -> Tensor:
    """Their product; 0, without gradient, where the factor is 0."""
    return torch.where(factor != 0, entropy, 0.0) * factor
