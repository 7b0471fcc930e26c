# SPDX-License-Identifier: Apache-2.0
"""What is added to a reward before the advantage: its place, the KL penalty, the price of being too long.

The coefficient of the KL penalty is fixed (a number), or moves by one of two pure rules: new coefficient from
the old one and the measured KL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_positive, check_same
from visalign.core.precision import float32


def place_terminal(reward: Tensor, weight: Tensor) -> Tensor:
    """Put the score of a sample on its last present decision: r_t = R·[t = last present].

    Args:
        reward: [B], any unit; a missing score stays NaN at that one place.
        weight: [B, T], 0 for absent decisions: padding on either side, or holes.

    Returns:
        [B, T], float32 or better, no gradient; 0 elsewhere, and in rows without a present decision.

    Ziegler et al., arXiv 1909.08593, section 2: a score at the end of the completion, KL on every token.
    """
    check_axes(reward=(reward, "B"), weight=(weight, "B T"))
    present = weight != 0
    after = present.flip(1).cumsum(1).flip(1)
    last = present & (after == 1)
    return torch.where(last, float32(reward.detach())[:, None], 0.0)


def kl_in_reward(
    reward: Tensor,
    old_log_prob: Tensor,
    ref_log_prob: Tensor,
    *,
    beta: float | Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    """Charge each decision for leaving the reference: r_t − β (log π_old − log π_ref).

    The estimator is k1, the only one of the usual estimators whose sum over a completion, taken as a reward,
    has the gradient of KL(π‖π_ref). RLOO takes the sum over t of the result as one reward per sample. Where
    the KL of a decision is known exactly (Gaussian steps), subtract β·KL directly.

    Args:
        reward: [B, T] per decision, e.g. from `place_terminal`.
        old_log_prob: [B, T] nats, of the policy that sampled.
        ref_log_prob: [B, T] nats, of the reference.
        beta: β ≥ 0, units of the reward per nat; a number or a 0-dim tensor.
        weight: [B, T], 0 for absent decisions; None if all are present.

    Returns:
        [B, T], float32 or better, no gradient; 0 where absent.

    Ouyang et al., InstructGPT, arXiv 2203.02155, eq. 2; Ziegler et al., arXiv 1909.08593, eq. 2. β = 0.04 in
    GRPO, arXiv 2402.03300 (there in the loss), 0.02 in InstructGPT.
    """
    check_same(reward=reward, old_log_prob=old_log_prob, ref_log_prob=ref_log_prob, weight=weight)
    k1 = float32(old_log_prob.detach()) - float32(ref_log_prob.detach())
    result = float32(reward.detach()) - beta * k1
    return result if weight is None else torch.where(weight != 0, result, 0.0)


def adaptive_kl_coefficient(
    beta: float | Tensor,
    kl: float | Tensor,
    *,
    samples: int,
    target: float = 6.0,
    horizon: float = 10_000.0,
    bound: float = 0.2,
) -> Tensor:
    """Move β towards a target KL in proportion: β' = β (1 + clip(KL/target − 1, ±bound)·samples/horizon).

    The paper has K_β = 0.1 in place of samples/horizon; the released code ties it to the samples seen.

    Args:
        beta: β of the step that was measured.
        kl: measured KL(π‖π_ref) in nats per completion; NaN, not measured, leaves β as it is.
        samples: completions of that step.
        target: KL aimed at, in nats per completion.
        horizon: samples over which β may change by about the factor 1 + bound.
        bound: limit of the relative error.

    Returns:
        β', float64 for numbers, else float32 or better; the shape of beta and kl together.

    Raises:
        ValueError: a target, horizon, bound or samples that is not positive, or a step so large that β could
            turn negative.

    Ziegler et al., arXiv 1909.08593, section 2.2.
    """
    check_positive(samples=samples, target=target, horizon=horizon, bound=bound)
    rate = samples / horizon
    if bound * rate >= 1:
        raise ValueError(
            f"samples/horizon must be below 1/bound = {1 / bound:g}, or the coefficient can turn negative; "
            f"got {samples}/{horizon:g}. Use a longer horizon."
        )
    old, measured = _number(beta), _number(kl)
    error = (measured / target - 1).clamp(-bound, bound)
    return torch.where(measured.isnan(), old, old * (1 + error * rate))


def penalty_kl_coefficient(
    beta: float | Tensor,
    kl: float | Tensor,
    *,
    target: float,
    tolerance: float = 1.5,
    factor: float = 2.0,
) -> Tensor:
    """Halve or double the coefficient of PPO's KL penalty when the step was far from its target.

    β' = β/factor if KL < target/tolerance;  β·factor if KL > target·tolerance;  else β.

    Args:
        beta: β of the update that was measured.
        kl: measured mean KL(π_old‖π) in nats per decision; NaN, not measured, leaves β as it is.
        target: KL aimed at, same unit.
        tolerance: ≥ 1, how far from the target counts as far.
        factor: > 1.

    Returns:
        β', float64 for numbers, else float32 or better; the shape of beta and kl together.

    Raises:
        ValueError: a target that is not positive, tolerance < 1, or factor ≤ 1.

    Schulman et al., PPO, arXiv 1707.06347, section 4, eq. 8 and below.
    """
    check_positive(target=target)
    if not tolerance >= 1 or not factor > 1:
        raise ValueError(f"tolerance must be ≥ 1 and factor > 1; got {tolerance} and {factor}.")
    old, measured = _number(beta), _number(kl)
    lowered = torch.where(measured < target / tolerance, old / factor, old)
    return torch.where(measured > target * tolerance, old * factor, lowered)


def constraint_multiplier(
    multiplier: float | Tensor, value: float | Tensor, *, bound: float, rate: float
) -> Tensor:
    """Dual ascent on max R under C ≥ b: λ' = max(0, λ + η (b − C)), of the Lagrangian R + λ (C − b).

    Args:
        multiplier: λ ≥ 0.
        value: C, the measured mean of the constrained reward; NaN, not measured, leaves λ as it is.
        bound: b, in its unit.
        rate: η > 0.

    Returns:
        λ', float64 for numbers, else float32 or better.

    Raises:
        ValueError: a rate that is not positive.

    Tessler et al., RCPO, arXiv 1805.11074, section 4, for a cost that is to stay below its bound.
    """
    check_positive(rate=rate)
    old, measured = _number(multiplier), _number(value)
    return torch.where(measured.isnan(), old, (old + rate * (bound - measured)).clamp(min=0))


def soft_overlong(length: Tensor, *, max_length: int, cache: int) -> Tensor:
    """Punish a completion that comes near its length limit: clip(((L − c) − n)/c, −1, 0).

    0 up to L − c, then linear, −1 from L on. Add it to the reward of correctness.

    Args:
        length: [B] n in tokens.
        max_length: L in tokens; 20480 in DAPO.
        cache: c in tokens, 1 … L; 4096 in DAPO.

    Returns:
        [B] in [−1, 0], float32 or better.

    Yu et al., DAPO, arXiv 2503.14476, eq. 13.
    """
    if not 1 <= cache <= max_length:
        raise ValueError(f"cache must be in 1 … max_length; got cache={cache}, max_length={max_length}.")
    return ((max_length - cache - float32(length)) / cache).clamp(-1, 0)


def filter_overlong(weight: Tensor, truncated: Tensor) -> Tensor:
    """Take completions that were cut off out of the loss: weight_t·[not truncated].

    The reward of a cut-off completion still enters the statistics of its group; mark it as missing
    (`valid=~truncated`) to take it out there too. Count the step's denominators (`count_step`) with the
    result.

    Args:
        weight: [B, T] weight of the decisions.
        truncated: [B] bool, True where the completion met the limit before its end token.

    Returns:
        [B, T], the dtype of weight.

    Raises:
        ValueError: shapes that do not fit, or truncated is not bool.

    Yu et al., DAPO, arXiv 2503.14476, section 3.4.
    """
    if truncated.dtype != torch.bool or weight.ndim != 2 or truncated.shape != weight.shape[:1]:
        raise ValueError(
            f"truncated must be bool [B] for weight [B, T]; got {truncated.dtype} {tuple(truncated.shape)} "
            f"for weight {tuple(weight.shape)}."
        )
    return torch.where(truncated[:, None], torch.zeros_like(weight), weight)


def _number(value: float | Tensor) -> Tensor:
    """A detached tensor, float64 from a plain number."""
    return float32(value.detach()) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
