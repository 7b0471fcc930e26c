# SPDX-License-Identifier: Apache-2.0
"""Entropy terms of an objective: what each prepares over the whole step, and its loss.

A rule that looks at earlier steps reads `Trajectories.entropy_before`, the result of `entropy_memory`; a
trainer keeps it from one rollout to the next, and in its checkpoints.
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
from .reward_stage import ares_threshold


@dataclass(frozen=True, kw_only=True)
class EntropyTarget:
    """Tensors that an entropy term fixes before the first micro-batch."""

    weight: Tensor | None = None  # [B, T] factor of each decision's entropy
    level: Tensor | None = None  # [B, n] target levels, the same in each row


def bonus() -> EntropyTarget:
    """Reward entropy: −c H of each decision, averaged as the policy's loss is."""
    return EntropyTarget()


def siren(
    nucleus_entropy: Tensor,
    weight: Tensor,
    counts: Counts,
    entropy_before: float | None,
    *,
    p: float = 0.8,
    quantile: float = 0.8,
) -> EntropyTarget:
    """Hold the nucleus entropy of peak tokens at its first value: L = β (H_agg − H_anchor)².

    H_agg and the peaks are those of the policy that made the rollout, for all its updates; `p` is that of the
    nucleus in which the entropies were taken, and `quantile` each completion's own. SIREN, arXiv 2509.25133.
    Deviation from the released code: its H_agg and its anchor are a micro-batch's.
    """
    peaks = siren_peaks(nucleus_entropy, weight, quantile=quantile)
    measured = aggregate(_product(nucleus_entropy, peaks), weight, "seq_mean_token_mean", counts)
    anchor = measured if entropy_before is None else entropy_before  # of the first rollout, for the whole run
    return EntropyTarget(weight=peaks, level=(measured - anchor).expand(len(weight), 1))


def siren_peaks(nucleus_entropy: Tensor, weight: Tensor, *, quantile: float) -> Tensor:
    """[B, T] weights of SIREN's peak tokens."""
    keep = siren_keep(nucleus_entropy, weight, quantile=quantile)
    return peak_entropy(torch.ones_like(nucleus_entropy), weight, keep)


def epo(
    weight: Tensor, entropy_before: float | None, *, low: float = 0.8, high: float = 1.2, smoothing: float = 0.1
) -> EntropyTarget:
    """Reward entropy, and penalise it outside [κ_l, κ_r] times the mean entropy of the earlier rollouts.

    λ_s = `smoothing` is one number for the whole run, not the paper's schedules over turns and epochs. EPO,
    arXiv 2509.22576.
    """
    before = torch.nan if entropy_before is None else entropy_before  # NaN edges penalise nothing
    edges = torch.tensor([low * before, high * before], dtype=torch.float64, device=weight.device)
    return EntropyTarget(weight=torch.full_like(weight, smoothing), level=edges.expand(len(weight), 2))


def tea(
    old_log_prob: Tensor, advantage: Tensor, weight: Tensor, *, tau: float = 1.0, cap: float | None = 100.0
) -> EntropyTarget:
    """Reward entropy weighted by `tea_weights` of each token's covariance, −c Σ w H (Light-IF, arXiv 2508.03178)."""
    statistics = covariance_statistics(old_log_prob, advantage, weight)
    covariance = token_covariance(old_log_prob, advantage, weight, statistics)
    return EntropyTarget(weight=tea_weights(covariance, weight, tau=tau, cap=cap))


ENTROPY_TERMS: dict[str, Stage] = {function.__name__: Stage(function) for function in (bonus, siren, epo, tea)}
"""Name -> `EntropyTarget`; `Objective.entropy` is its coefficient. Fields: `Trajectories`, with the step's
final `advantage` and `weight`, [B, T] each, and its `counts`."""


def entropy_loss(
    name: str, coefficient: float, rows: Prepared, policy: PolicyOutput, mode: Mode
) -> tuple[Tensor, Mode]:
    """Compute the loss of each decision [b, T] of the term `name`, and how it is aggregated; `mode` is the
    objective's.

    bonus: −c H. siren: β(H_agg − anchor)². epo: −c(H − λ_s pen). tea: −c Σ w H, over the step.
    """
    weight, level = rows.entropy_weight, rows.entropy_level
    if name == "siren":
        assert policy.nucleus_entropy is not None and weight is not None and level is not None
        peaks = _product(policy.nucleus_entropy, weight)
        return anchored_entropy_loss(peaks, level, 0.0, coefficient=coefficient), "seq_mean_token_mean"
    assert policy.entropy is not None
    if weight is None:
        return entropy_bonus(policy.entropy, coefficient), mode
    if level is None:  # tea
        return entropy_bonus(_product(policy.entropy, weight), coefficient), "token_sum"
    penalty = entropy_band_penalty(policy.entropy, rows.weight, level[:, :1], level[:, 1:])
    return entropy_bonus(policy.entropy, coefficient) + coefficient * weight * penalty, mode


def remembers(objective: Any) -> str | None:
    """Name the rule of an `Objective` that reads earlier rollouts: "siren", "epo", "ares", or None."""
    if objective.advantage == "ares":
        return "ares"
    return objective.entropy_term if objective.entropy and objective.entropy_term in ("siren", "epo") else None


def entropy_memory(objective: Any, t: Trajectories, before: Sequence[float]) -> list[float]:
    """Update [number that a rule keeps of the rollouts, how many they are] with one; `before` is empty at first.

    SIREN keeps H_agg of the first, EPO the mean of the mean entropies of all, ARES a moving average (0.99) of
    the threshold. A rollout without a present decision changes nothing.
    """
    name = remembers(objective)
    assert t.entropy is not None
    weight = torch.where(t.present()[:, None], t.weight, 0.0)
    counts = count_step(weight)
    if name == "ares":
        options = {k: v for k, v in objective.advantage_options.items() if k in ("window", "quantile")}
        now = float(ares_threshold(t.entropy, weight, **options))
    elif name == "siren":
        assert t.nucleus_entropy is not None
        quantile = objective.entropy_term_options.get("quantile", ENTROPY_TERMS["siren"].options["quantile"])
        peaks = siren_peaks(t.nucleus_entropy, weight, quantile=quantile)
        now = float(aggregate(_product(t.nucleus_entropy, peaks), weight, "seq_mean_token_mean", counts))
    else:
        now = float(aggregate(t.entropy, weight, "token_mean", counts))
    if math.isnan(now):
        return list(before)  # no decision was present
    mean, count = before or (now, 0.0)
    share = {"siren": 0.0, "epo": 1 / (count + 1), "ares": 0.01}[name or ""]
    return [mean + share * (now - mean), count + 1]


def _product(entropy: Tensor, factor: Tensor) -> Tensor:
    # 0, without gradient, where the factor is 0: an absent entropy may be NaN
    return torch.where(factor != 0, entropy, 0.0) * factor
