# SPDX-License-Identifier: Apache-2.0
"""Log-probs of Gaussian steps, and likelihood ratios per decision or per sequence.

`log_prob_reduction` combines the D elements of one denoising step: "sum" is the true log-density, "mean" divides it by
D, as in the published Flow-GRPO. Under "mean" a clip range allows D times more: 1e-4 at D = 65536 is 6.6 nats.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_choice, check_same
from visalign.core.precision import float32

LogProbReduction = Literal["mean", "sum"]
Level = Literal["token", "sequence", "sequence_sum", "sequence_token"]

LEVELS: dict[str, str] = {
    "token": "log r_it",
    "sequence": "log s_i = Σ_t w log r_it / Σ_t w",
    "sequence_sum": "Σ_t w log r_it",
    "sequence_token": "sg[log s_i] + log r_it − sg[log r_it]",
}
"""Formula of each level. PPO, GRPO: token; GSPO: sequence; trajectories: sequence_sum; GSPO-token: sequence_token."""


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor, *, log_prob_reduction: LogProbReduction) -> Tensor:
    """Compute the log-density [*N] of a Gaussian with one standard deviation per decision.

    log p = Σ_d [−(x_d − μ_d)²/(2 std²) − log std − ½ log 2π], divided by D for "mean". x and μ are [*N,
    *event]; std [*N] is the total standard deviation of x', with the √(−dt); the dimensions beyond its own
    are the event. Liu et al., Flow-GRPO, arXiv 2505.05470 (density of its SDE step).
    """
    x, mean, std = float32(x), float32(mean), float32(std)
    scale = expand_over_event(std, x, mean)
    density = -((x - mean) / scale).square() / 2 - scale.log() - math.log(2 * math.pi) / 2
    return reduce_event(density, std.ndim, log_prob_reduction)


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute log r = log π − log π_old, with no gradient into π_old."""
    check_same(log_prob=log_prob, old_log_prob=old_log_prob, weight=weight)
    difference = float32(log_prob) - float32(old_log_prob).detach()
    if weight is None:
        return difference
    return torch.where(weight != 0, difference, 0.0)


def ratio_level(log_ratio: Tensor, weight: Tensor, level: Level) -> Tensor:
    """Convert log-ratios [B, T] per decision to the level of a token, a sequence, or both, by `LEVELS`.

    Every level returns one entry per decision, so that all surrogates and aggregations apply: under
    "seq_mean_token_mean" the "sequence" level counts once per sequence. "sequence_token" has the value of
    "sequence", with each decision's own gradient, for advantages that vary along the sequence. The "sequence"
    level of denoising steps is Flow-GSPO. "sequence_sum" needs a weight of 0 and 1 for the true ratio. Zheng
    et al., GSPO, arXiv 2507.18071, eq. 7 (sequence), eq. 14 (sequence_token).
    """
    check_choice("level", level, LEVELS)
    check_axes(log_ratio=(log_ratio, "B T"), weight=(weight, "B T"))
    present = weight != 0
    log_r = torch.where(present, float32(log_ratio), 0.0)
    if level == "token":
        return log_r
    scale = weight.to(log_r.dtype)
    sequence = (log_r * scale).sum(1, keepdim=True)
    if level != "sequence_sum":
        total = scale.sum(1, keepdim=True)
        sequence = sequence / torch.where(total == 0, 1.0, total)
    if level == "sequence_token":
        sequence = sequence.detach() + (log_r - log_r.detach())
    return torch.where(present, sequence, 0.0)


def guard_log_ratio(noise: Tensor, mean: Tensor, mean_old: Tensor) -> Tensor:
    """Compute GRPO-Guard's log-ratio [N], log r = mean_d(ε_d Δμ_d), with Δμ = μ − μ_old.

    It equals ((log p − log p_old) + mean(Δμ²)/(2 std²))·std per sample without the cancellation, and is
    centered at 0 and free of the step's scale. `noise` is the ε of the rollout, or (x' − μ_old)/std. Wang et
    al., GRPO-Guard, arXiv 2510.22319.
    """
    check_same(mean=mean, mean_old=mean_old, noise=noise)
    product = float32(noise).detach() * (float32(mean) - float32(mean_old).detach())
    return reduce_event(product, 1, "mean")


def guard_step_weight(dt: Tensor) -> Tensor:
    """Compute GRPO-Guard's loss weight 1/(−dt), for dt = σ' − σ < 0; it is not renormalized."""
    return -1 / float32(dt)


def expand_over_event(std: Tensor, *tensors: Tensor) -> Tensor:
    """View std [*N] as [*N, 1, …] for tensors [*N, *event] of one shape."""
    shape = tensors[0].shape
    check_same(**{f"tensor {i}": t for i, t in enumerate(tensors)})
    if not 0 < std.ndim < len(shape) or std.shape != shape[: std.ndim]:
        raise ValueError(
            f"std must have the leading dimensions of {tuple(shape)}, at least one and not all; got shape "
            f"{tuple(std.shape)}."
        )
    return std.reshape(std.shape + (1,) * (len(shape) - std.ndim))


def reduce_event(values: Tensor, batch_dims: int, log_prob_reduction: LogProbReduction) -> Tensor:
    """Sum or average over all dimensions after the first batch_dims."""
    check_choice("log_prob_reduction", log_prob_reduction, get_args(LogProbReduction))
    flat = values.flatten(batch_dims)
    return flat.mean(-1) if log_prob_reduction == "mean" else flat.sum(-1)
