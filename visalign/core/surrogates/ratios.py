# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of Gaussian steps and likelihood ratios, at the level of one decision or one sequence.

`log_prob_reduction` says how the D elements of one denoising step enter: "sum" is the true log-density,
"mean" is that divided by D, as in the published Flow-GRPO. A clip range means D times more under "mean": 1e-4
at D = 65536 is 6.6 nats.
"""

from __future__ import annotations

import math
from typing import Literal

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
"""Name -> formula. PPO, GRPO: token; GSPO: sequence; whole trajectories: sequence_sum; GSPO-token:
sequence_token."""


def gaussian_log_prob(
    x: Tensor, mean: Tensor, std: Tensor, *, log_prob_reduction: LogProbReduction
) -> Tensor:
    """Log-density of a diagonal Gaussian with one standard deviation per decision.

    log p = Σ_d [−(x_d − μ_d)²/(2 std²) − log std − ½ log 2π], divided by D for "mean".

    Args:
        x: [*N, *event], the point; the dimensions beyond those of std are the event.
        mean: [*N, *event] μ, differentiable.
        std: [*N] total standard deviation of x', with the √(−dt), > 0; N has at least one dimension.
        log_prob_reduction: "mean" or "sum" over the event.

    Returns:
        [*N], float32 or better.

    Liu et al., Flow-GRPO, arXiv 2505.05470; the density of its SDE step.
    """
    x, mean, std = float32(x), float32(mean), float32(std)
    scale = expand_over_event(std, x, mean)
    density = -((x - mean) / scale).square() / 2 - scale.log() - math.log(2 * math.pi) / 2
    return reduce_event(density, std.ndim, log_prob_reduction)


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute log r = log π − log π_old, with no gradient into π_old.

    Args:
        log_prob: [B] or [B, T], differentiable.
        old_log_prob: the same shape, from the rollout.
        weight: the same shape; where it is 0 the result is 0 and log_prob gets exactly zero gradient, even if
            it is NaN.

    Returns:
        The shape of log_prob, float32 or better.
    """
    check_same(log_prob=log_prob, old_log_prob=old_log_prob, weight=weight)
    difference = float32(log_prob) - float32(old_log_prob).detach()
    if weight is None:
        return difference
    return torch.where(weight != 0, difference, 0.0)


def ratio_level(log_ratio: Tensor, weight: Tensor, level: Level) -> Tensor:
    """Take the log-ratio of each decision at the level of a token, a sequence, or both.

    The formulas are in `LEVELS`. The result has one entry per decision at every level, so that one surrogate
    and one aggregation serve all: averaged with "seq_mean_token_mean", a surrogate of the "sequence" level
    counts once per sequence. "sequence_token" has the value of "sequence", and each decision keeps its own
    gradient: equal gradients where the advantage is the same for the whole sequence, and a meaning where it
    is not. Decisions are tokens or denoising steps: the "sequence" level of steps is Flow-GSPO.

    Args:
        log_ratio: [B, T], differentiable; whole sequences.
        weight: [B, T], 0 for absent decisions; for "sequence_sum" a mask of 0 and 1 gives the true ratio.
        level: a key of `LEVELS`.

    Returns:
        [B, T] float32 or better; 0 with exactly zero gradient where weight is 0.

    Zheng et al., GSPO, arXiv 2507.18071, eq. 7 (sequence), eq. 14 (sequence_token).
    """
    check_choice("level", level, LEVELS)
    check_axes(log_ratio=(log_ratio, "B T"), weight=(weight, "B T"))
    inside = weight != 0
    own = torch.where(inside, float32(log_ratio), 0.0)
    if level == "token":
        return own
    scale = weight.to(own.dtype)
    whole = (own * scale).sum(1, keepdim=True)
    if level != "sequence_sum":
        total = scale.sum(1, keepdim=True)
        whole = whole / torch.where(total == 0, 1.0, total)
    if level == "sequence_token":
        whole = whole.detach() + (own - own.detach())
    return torch.where(inside, whole, 0.0)


def guard_log_ratio(noise: Tensor, mean: Tensor, mean_old: Tensor, *, batch_dims: int = 1) -> Tensor:
    """Log-ratio of GRPO-Guard: log r = mean_d(ε_d Δμ_d), with Δμ = μ − μ_old.

    This is ((log p − log p_old) + mean(Δμ²)/(2 std²))·std per sample, without its cancellation: its
    distribution is centred at 0 and free of the step's own scale. Every sample uses its own step.

    Args:
        noise: [*N, *event] ε of the rollout, or (x' − μ_old)/std.
        mean: [*N, *event] μ under the current policy, differentiable.
        mean_old: [*N, *event] μ under the rollout policy; detached here.
        batch_dims: how many leading dimensions N has.

    Returns:
        [*N], float32 or better.

    Wang et al., GRPO-Guard, arXiv 2510.22319.
    """
    check_same(mean=mean, mean_old=mean_old, noise=noise)
    if not 1 <= batch_dims < mean.ndim:
        raise ValueError(
            f"batch_dims must leave at least one event dimension; got batch_dims={batch_dims} for shape "
            f"{tuple(mean.shape)}."
        )
    product = float32(noise).detach() * (float32(mean) - float32(mean_old).detach())
    return reduce_event(product, batch_dims, "mean")


def guard_step_weight(dt: Tensor) -> Tensor:
    """Weight 1/(−dt) that GRPO-Guard puts on the loss of a step; multiply the loss, do not renormalise.

    Args:
        dt: σ' − σ of each step, < 0, any shape.

    Returns:
        The shape of dt, float32 or better, > 0.
    """
    return -1 / float32(dt)


def expand_over_event(std: Tensor, *tensors: Tensor) -> Tensor:
    """View std [*N] as [*N, 1, …] for tensors [*N, *event], after checking that they fit."""
    shape = tensors[0].shape
    if any(t.shape != shape for t in tensors):
        raise ValueError(
            f"tensors of one shape are needed; got {', '.join(str(tuple(t.shape)) for t in tensors)}."
        )
    if not 0 < std.ndim < len(shape) or std.shape != shape[: std.ndim]:
        raise ValueError(
            f"std must have the leading dimensions of {tuple(shape)}, at least one and not all; got shape "
            f"{tuple(std.shape)}."
        )
    return std.reshape(std.shape + (1,) * (len(shape) - std.ndim))


def reduce_event(values: Tensor, batch_dims: int, log_prob_reduction: LogProbReduction) -> Tensor:
    """Sum or average over all dimensions after the first batch_dims."""
    if log_prob_reduction not in ("mean", "sum"):
        raise ValueError(
            "log_prob_reduction must be 'mean' (per element, Flow-GRPO) or 'sum' (the density); got "
            f"{log_prob_reduction!r}."
        )
    flat = values.flatten(batch_dims)
    return flat.mean(-1) if log_prob_reduction == "mean" else flat.sum(-1)
