# SPDX-License-Identifier: Apache-2.0
"""Terms of a reward before the advantage: position, KL penalty, constraints, PAR, length.

Coefficients are fixed, or move by a rule: new coefficient from the old one and the measured value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_same
from visalign.core.precision import float32


def place_terminal(reward: Tensor, weight: Tensor) -> Tensor:
    """Put the score of a sample on its last present decision, [B, T]: r_t = R·[t = last present].

    A missing score is NaN at that one place. Ziegler et al., arXiv 1909.08593, section 2: a score at the end
    of the completion, KL on every token.
    """
    check_axes(reward=(reward, "B"), weight=(weight, "B T"))
    present = weight != 0
    after = present.flip(1).cumsum(1).flip(1)
    last = present & (after == 1)
    return torch.where(last, float32(reward.detach())[:, None], 0.0)


def kl_in_reward(
    reward: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, *, beta: float | Tensor, weight: Tensor | None = None
) -> Tensor:
    """Charge each decision for leaving the reference: r_t − β (log π_old − log π_ref), [B, T].

    The estimator is k1, the only one of the usual estimators whose sum over a completion, taken as a reward,
    has the gradient of KL(π‖π_ref). RLOO takes the sum over t of the result as one reward per sample. Where
    the KL of a decision is known exactly (Gaussian steps), subtract β·KL directly. β ≥ 0 is in units of the
    reward per nat. Ouyang et al., InstructGPT, arXiv 2203.02155, eq. 2; Ziegler et al., arXiv 1909.08593, eq.
    2. β = 0.04 in GRPO, arXiv 2402.03300 (there in the loss), 0.02 in InstructGPT.
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

    The paper has K_β = 0.1 in place of samples/horizon; the released code ties it to the completions of the
    step. `kl` is the measured KL(π‖π_ref) in nats per completion; NaN, not measured, leaves β. A step so
    large that β could turn negative is refused. Ziegler et al., arXiv 1909.08593, section 2.2.
    """
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
    beta: float | Tensor, kl: float | Tensor, *, target: float, tolerance: float = 1.5, factor: float = 2.0
) -> Tensor:
    """Halve or double the coefficient of PPO's KL penalty when the step was far from its target.

    β' = β/factor if KL < target/tolerance; β·factor if KL > target·tolerance; else β. `kl` is the measured
    mean KL(π_old‖π) in nats per decision; NaN, not measured, leaves β. Schulman et al., PPO, arXiv
    1707.06347, section 4, eq. 8 and below.
    """
    old, measured = _number(beta), _number(kl)
    lowered = torch.where(measured < target / tolerance, old / factor, old)
    return torch.where(measured > target * tolerance, old * factor, lowered)


def constraint_multiplier(multiplier: float | Tensor, value: float | Tensor, *, bound: float, rate: float) -> Tensor:
    """Ascend the dual of max R under C ≥ b: λ' = max(0, λ + η (b − C)), of the Lagrangian R + λ (C − b).

    `value` C is the measured mean of the constrained reward; NaN, not measured, leaves λ. Tessler et al.,
    RCPO, arXiv 1805.11074, section 4, for a cost that is to stay below its bound.
    """
    old, measured = _number(multiplier), _number(value)
    return torch.where(measured.isnan(), old, (old + rate * (bound - measured)).clamp(min=0))


def preference_as_reward(reward: Tensor, reference: Tensor, *, k: float = 1.0) -> Tensor:
    """Compute the probability of being preferred to the reference model's samples of the same prompt (PAR).

    R′_b = mean_m σ(k (R_b − R_bm^ref)), differentiable in R. Bounded in (0, 1), steepest at the reference:
    the excess that a hacked reward reports is worth little. An affine map of R would leave a standardised
    group as it is; this one does not. Of the `reference` rewards [B, M] one is enough; missing ones leave the
    mean. k = 1/std of the reference rewards makes reward models comparable. Fu et al., Reward shaping to
    mitigate reward hacking in RLHF, arXiv 2502.18770 (k = 1, M ≤ 10).
    """
    check_axes(reward=(reward, "B"), reference=(reference, "B M"))
    value, anchor = float32(reward)[:, None], float32(reference).detach()
    present = torch.isfinite(value) & torch.isfinite(anchor)
    # both are finite before σ, so that no NaN reaches its gradient
    gap = torch.where(torch.isfinite(value), value, 0.0) - torch.where(torch.isfinite(anchor), anchor, 0.0)
    preferred = torch.where(present, torch.sigmoid(k * gap), 0.0).sum(1)
    count = present.sum(1)
    return torch.where(count > 0, preferred / count.clamp(min=1), float("nan"))


def soft_overlong(length: Tensor, *, max_length: int, cache: int) -> Tensor:
    """Punish a completion that comes near its length limit: clip(((L − c) − n)/c, −1, 0), [B].

    0 up to L − c tokens, then linear, −1 from `max_length` L on (20480 in DAPO, `cache` c 4096). Add it to
    the reward of correctness. Yu et al., DAPO, arXiv 2503.14476, eq. 13.
    """
    if not 1 <= cache <= max_length:
        raise ValueError(f"cache must be in 1 … max_length; got cache={cache}, max_length={max_length}.")
    return ((max_length - cache - float32(length)) / cache).clamp(-1, 0)


def filter_overlong(weight: Tensor, truncated: Tensor) -> Tensor:
    """Take completions that were cut off out of the loss: weight_t·[not truncated].

    The reward of a cut-off completion still enters the statistics of its group; mark it as missing
    (`valid=~truncated`) to take it out there too. Count the step's denominators (`count_step`) with the
    result. Yu et al., DAPO, arXiv 2503.14476, section 3.4.
    """
    check_axes(weight=(weight, "B T"), truncated=(truncated, "B"))
    return torch.where(truncated[:, None], torch.zeros_like(weight), weight)


def _number(value: float | Tensor) -> Tensor:
    return float32(value.detach()) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
