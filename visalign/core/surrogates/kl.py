# SPDX-License-Identifier: Apache-2.0
"""KL divergence between policy and reference: sampled estimators, and closed forms where they exist.

With d = log π(a) − log π_ref(a) of a sampled decision a ~ π, an estimator k(d) has a mean (seen by a metric
or a reward) and, inside a loss, a gradient k'(d) ∇log π. The two estimate different things:

| k          | value            | E_π[value]       | k'(d)           | E_π[k'(d) ∇log π]                  |
|------------|------------------|------------------|-----------------|------------------------------------|
| k1         | d                | KL(π‖π_ref)      | 1               | 0: refused as a gradient           |
| k2         | d²/2             | biased           | d               | ∇KL(π‖π_ref)                       |
| k3         | e^−d − 1 + d     | KL(π‖π_ref)      | 1 − e^−d        | ∇KL(π_ref‖π), the other direction  |
| abs        | |d|              | neither          | sign d          | ∇‖π − π_ref‖₁, twice total variation |
| low_var_kl | min(k3, 10)      | biased           | k3's, 0 where k3 > 10 | biased                       |

So `kl_penalty` takes value and gradient separately. With a live ratio r = π/π_old, ∇(r k3) = r d ∇log π for each
sample: k2's gradient with importance weight r, correct off-policy. r k1 has the same mean; r k2 and r abs do not.

The table holds for one decision given its past. Summed over a sampled sequence, the gradient through each
decision's own log-prob ignores its effect on later states; k1 inside the reward does not.

Deviation: e^−d is e^min(−d, 20), in value and slope, so that distant tokens neither overflow nor lose their gradient.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_choice, check_same
from visalign.core.precision import float32, float32_dtype

from .ratios import LogProbReduction, expand_over_event, reduce_event

Estimator = Literal["k1", "k2", "k3", "abs", "low_var_kl"]
Direction = Literal["reverse", "forward"]

LOG_LIMIT = 20.0  # Exponentials are e^min(x, 20), as in `ppo`
VALUE_LIMIT = 10.0  # Value at which "low_var_kl" saturates


def kl_estimate(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    estimator: Estimator = "k3",
    *,
    log_ratio: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Estimate KL(π‖π_ref) from sampled decisions, nats: k(d), or r k(d) for decisions sampled from π_old, r live.

    For metrics, rewards and parity. As a loss its gradient is the last column of the module's table: use
    `kl_penalty` there. Schulman, Approximating KL divergence, 2020 (k1, k2, k3); Shao et al., DeepSeekMath,
    arXiv 2402.03300, eq. 4 (k3); DeepSeek-V3.2, arXiv 2512.02556, section 3.1 (r k3).
    """
    check_choice("estimator", estimator, get_args(Estimator))
    d, ratio = _inputs(log_prob, ref_log_prob, log_ratio, weight)
    value, slope = _value_and_slope(d, estimator)
    estimate = _straight_through(value, slope, d)
    return estimate if ratio is None else ratio * estimate


def kl_penalty(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    *,
    value: Estimator = "k3",
    gradient: Estimator = "k2",
    log_ratio: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute a KL loss term, to be multiplied by β, with the value of one estimator and the gradient of another.

    ℓ = r [k_value(d) + k'_gradient(d) (d − sg d)], where d − sg d is 0 with gradient ∇log π, and r = sg(π/π_old), 1
    without `log_ratio`. The default reports the unbiased k3 and follows ∇KL(π‖π_ref), on samples of π, or of π_old
    with `log_ratio`; then its gradient is that of r k3 with a live r. `gradient="k3"` is GRPO as published, which
    follows ∇KL(π_ref‖π). Table of the module; Tang and Munos, arXiv 2506.09477; Liu et al., Rethinking KL
    Regularization in RLHF, arXiv 2510.01555; DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    if gradient == "k1":
        raise ValueError(
            "gradient='k1' is refused: the mean of ∇log π under π is zero. Use gradient='k2', or subtract β·k1 from "
            "the reward."
        )
    check_choice("value", value, get_args(Estimator))
    check_choice("gradient", gradient, get_args(Estimator))
    d, ratio = _inputs(log_prob, ref_log_prob, log_ratio, weight)
    estimate, _ = _value_and_slope(d, value)
    _, slope = _value_and_slope(d, gradient)
    if ratio is not None:
        estimate, slope = ratio.detach() * estimate, ratio.detach() * slope
    # r [k_value(d) + k'_gradient(d) (d − sg d)]
    return _straight_through(estimate, slope, d)


def categorical_kl(
    logits: Tensor, ref_logits: Tensor, *, direction: Direction = "reverse", weight: Tensor | None = None
) -> Tensor:
    """Compute the exact KL [*N] of two categorical distributions over a whole vocabulary, from logits [*N, V].

    "reverse": KL(π‖π_ref) = Σ_v π_v (log π_v − log π_ref,v); "forward": KL(π_ref‖π). No sampling noise. A few
    [*N, V] float32 tensors are alive at once. A logit of −∞ is probability 0: it adds 0 in the first
    argument, and makes the divergence infinite in the second alone. Divide by the temperature first.
    """
    check_choice("direction", direction, get_args(Direction))
    check_same(logits=logits, ref_logits=ref_logits)
    if weight is not None:
        check_same(", [*N] of logits [*N, V]", logits=logits[..., 0], weight=weight)
        outside = (weight == 0)[..., None]
        logits, ref_logits = logits.masked_fill(outside, 0.0), ref_logits.masked_fill(outside, 0.0)
    new = float32(logits).log_softmax(-1)
    ref = float32(ref_logits.detach()).log_softmax(-1)
    first, second = (new, ref) if direction == "reverse" else (ref, new)
    possible = first != float("-inf")
    first, second = torch.where(possible, first, 0.0), torch.where(possible, second, 0.0)
    result = torch.where(possible, first.exp() * (first - second), 0.0).sum(-1)
    return result if weight is None else torch.where(weight != 0, result, 0.0)


def gaussian_kl(mean: Tensor, mean_ref: Tensor, std: Tensor, *, log_prob_reduction: LogProbReduction) -> Tensor:
    """Compute the exact KL(N(μ, std²) ‖ N(μ_ref, std²)) = Σ_d (μ_d − μ_ref,d)²/(2 std²), over D for "mean"; [*N] nats.

    Means are [*N, *event]; std [*N] is the total standard deviation of the step, with the √(−dt), detached.
    `log_prob_reduction`, as in the log-prob, sets the scale of β. Published code often leaves √(−dt) out of
    std; then early denoising steps count too little (Flow-GRPO's paper has it: ‖Δμ‖²/(2 s² Δt)). Liu et al.,
    Flow-GRPO, arXiv 2505.05470, section 4.
    """
    dtype = float32_dtype(mean)
    difference = mean.to(dtype) - mean_ref.detach().to(dtype)
    scale = expand_over_event(std.detach().to(dtype), mean, mean_ref)
    return reduce_event((difference / scale).square() / 2, std.ndim, log_prob_reduction)


def velocity_kl(velocity: Tensor, velocity_ref: Tensor) -> Tensor:
    """Velocity KL mean_d (v_d − v_ref,d)² [N], a Gaussian step's without σ and dt; DiffusionNFT, arXiv 2509.16117."""
    check_same(velocity=velocity, velocity_ref=velocity_ref)
    dtype = float32_dtype(velocity)
    return reduce_event((velocity.to(dtype) - velocity_ref.detach().to(dtype)).square(), 1, "mean")


def _value_and_slope(d: Tensor, estimator: Estimator) -> tuple[Tensor, Tensor]:
    """Compute k(d) and k'(d), without gradient."""
    d = d.detach()
    if estimator == "k1":
        return d, torch.ones_like(d)
    if estimator == "k2":
        return d.square() / 2, d
    if estimator == "abs":
        return d.abs(), d.sign()
    excess = torch.expm1((-d).clamp(max=LOG_LIMIT))
    k3 = excess + d
    if estimator == "k3":
        return k3, -excess
    return k3.clamp(max=VALUE_LIMIT), torch.where(k3 > VALUE_LIMIT, 0.0, -excess)


def _straight_through(value: Tensor, slope: Tensor, d: Tensor) -> Tensor:
    """Give `value` the gradient slope ∇d; d − sg d is exactly 0."""
    return value + slope * (d - d.detach())


def _inputs(
    log_prob: Tensor, ref_log_prob: Tensor, log_ratio: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return d and r (or None), finite and without gradient where weight is 0."""
    check_same(log_prob=log_prob, ref_log_prob=ref_log_prob, log_ratio=log_ratio, weight=weight)
    d = float32(log_prob) - float32(ref_log_prob.detach())
    logs = None if log_ratio is None else log_ratio.to(d.dtype)
    if weight is not None:
        d = torch.where(weight != 0, d, 0.0)
        logs = None if logs is None else torch.where(weight != 0, logs, 0.0)
    if logs is None:
        return d, None
    return d, torch.exp(logs - (logs - LOG_LIMIT).clamp(min=0).detach())
