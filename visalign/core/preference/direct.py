# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation: a policy learns which of two answers is better, without a reward model.

The policy is its own reward model, r(x, y) = β log π(y|x)/π_ref(y|x), and each row of `DIRECT` is a loss of
the lead m = r_w − r_l − γ of the chosen answer over the rejected one; that of `kto` is of single answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from visalign.core.checks import check_axes, check_choice, check_not_negative, check_positive
from visalign.core.precision import float32


@dataclass(frozen=True, kw_only=True)
class DirectRow:
    """A method of direct preference optimisation, with its published constants."""

    source: str
    """Paper, arXiv id, equation."""
    formula: str
    """Of the loss, in m, β and ε; of votes in r and z₀."""
    loss: Callable[[Tensor, float, float], Tensor] | None
    """(m, β, ε) -> loss; None for votes without pairs."""
    beta: float = 0.1
    """β, where none is given."""
    gamma: float = 0.0
    """γ, where none is given."""
    reference: bool = True
    """Whether the reward is measured from a reference."""
    per_token: bool = False
    """Whether the reward is divided by the tokens of the answer."""
    smooths: bool = True
    """Whether it knows wrong labels, ε > 0."""


def _logistic(m: Tensor, beta: float, eps: float) -> Tensor:
    return -(1 - eps) * logsigmoid(m) - eps * logsigmoid(-m)


def _robust(m: Tensor, beta: float, eps: float) -> Tensor:
    return (-(1 - eps) * logsigmoid(m) + eps * logsigmoid(-m)) / (1 - 2 * eps)


def _hinge(m: Tensor, beta: float, eps: float) -> Tensor:
    return (1 - m).clamp(min=0)


def _squared(m: Tensor, beta: float, eps: float) -> Tensor:
    return ((m - 0.5) / beta).square()


_LOGISTIC = "−(1 − ε) ln σ(m) − ε ln σ(−m)"
DIRECT = {
    "sigmoid": DirectRow(
        source="DPO, arXiv 2305.18290, eq. 7; ε > 0: cDPO, Mitchell 2023", formula=_LOGISTIC, loss=_logistic
    ),
    "robust": DirectRow(
        source="robust DPO, arXiv 2403.00409",
        formula="(−(1 − ε) ln σ(m) + ε ln σ(−m)) / (1 − 2ε)",
        loss=_robust,
    ),
    "hinge": DirectRow(
        source="SLiC-HF, arXiv 2305.10425, from a reference as in RSO, 2309.06657",
        formula="max(0, 1 − m)",
        loss=_hinge,
        smooths=False,
    ),
    "ipo": DirectRow(
        source="IPO, arXiv 2310.12036, eq. 17, per token",
        formula="((m − 1/2)/β)²",
        loss=_squared,
        per_token=True,
        smooths=False,
    ),
    "sigmoid_norm": DirectRow(
        source="length-normalised DPO, Tülu 3, arXiv 2411.15124",
        formula=_LOGISTIC,
        loss=_logistic,
        beta=5.0,
        per_token=True,
    ),
    "simpo": DirectRow(
        source="SimPO, arXiv 2405.14734, eq. 6",
        formula=_LOGISTIC,
        loss=_logistic,
        beta=2.0,
        gamma=1.0,
        reference=False,
        per_token=True,
    ),
    "kto": DirectRow(
        source="KTO, arXiv 2402.01306, section 4",
        formula="λ_D σ(β z₀ − r) of good answers, λ_U σ(r − β z₀) of bad ones",
        loss=None,
        smooths=False,
    ),
}
"""Row -> method."""


def implicit_reward(
    log_prob: Tensor,
    ref_log_prob: Tensor | None = None,
    length: Tensor | None = None,
    *,
    row: str = "sigmoid",
    beta: float | None = None,
) -> Tensor:
    """The reward that a policy gives an answer, r = β log π(y|x)/π_ref(y|x), per token where the row says so.

    Args:
        log_prob: [B] log π(y|x), summed over the tokens; differentiable.
        ref_log_prob: [B] of the reference, no gradient; left aside by rows without one.
        length: [B] tokens of the answers; needed by rows per token alone.
        row: of `DIRECT`.
        beta: β > 0; None is the row's own.

    Returns:
        [B], float32 or better.

    Raises:
        ValueError: an unknown row, or one whose reference or lengths are not there.

    DPO, arXiv 2305.18290, eq. 5; per token without a reference: SimPO, arXiv 2405.14734, eq. 4.
    """
    check_choice("row", row, DIRECT)
    chosen = DIRECT[row]
    beta = chosen.beta if beta is None else beta
    check_positive(beta=beta)
    check_axes(log_prob=(log_prob, "B"), ref_log_prob=(ref_log_prob, "B"), length=(length, "B"))
    reward = float32(log_prob)
    if chosen.reference:
        if ref_log_prob is None:
            raise ValueError(f"row {row} measures from a reference; give ref_log_prob, or take simpo.")
        reward = reward - ref_log_prob.detach()
    if chosen.per_token:
        if length is None:
            raise ValueError(f"row {row} divides by the tokens of an answer; give their number as length.")
        reward = reward / length.clamp(min=1)
    return beta * reward


def direct_preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
    *,
    row: str = "sigmoid",
    beta: float | None = None,
    gamma: float | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Loss of each pair by a row of `DIRECT`, of the lead m = r_w − r_l − γ; sigmoid: ℓ = −ln σ(m).

    IPO is divided by the tokens, as its authors' results are; its
    eq. 17 has sums.

    Args:
        chosen: [B] log π(y_w|x), summed over the tokens; differentiable.
        rejected: [B] log π(y_l|x).
        ref_chosen: [B] of the reference, no gradient; needed but by rows without one.
        ref_rejected: [B].
        chosen_length: [B] tokens of y_w; needed by rows per token.
        rejected_length: [B].
        row: one for pairs.
        beta: β > 0; None is the row's own.
        gamma: γ ≥ 0, lead that the chosen answer should have; None is the row's own.
        eps: share of wrong labels, in [0, 1/2).

    Returns:
        [B], float32 or better.

    Raises:
        ValueError: a row for single votes, or one that does not know wrong labels (ε > 0).

    The rows' sources; cDPO: Mitchell 2023, "A note on DPO with noisy preferences".
    """
    check_choice("row", row, (name for name, each in DIRECT.items() if each.loss is not None))
    known = DIRECT[row]
    assert known.loss is not None
    beta, gamma = known.beta if beta is None else beta, known.gamma if gamma is None else gamma
    check_not_negative(gamma=gamma)
    if not 0 <= eps < 0.5:
        raise ValueError(f"eps is a share of wrong labels in [0, 1/2); got {eps}.")
    if eps and not known.smooths:
        smoothing = ", ".join(name for name, each in DIRECT.items() if each.smooths)
        raise ValueError(f"row {row} has no place for wrong labels (eps {eps}); these have: {smoothing}.")
    better = implicit_reward(chosen, ref_chosen, chosen_length, row=row, beta=beta)
    worse = implicit_reward(rejected, ref_rejected, rejected_length, row=row, beta=beta)
    check_axes(chosen=(better, "B"), rejected=(worse, "B"))
    return known.loss(better - worse - gamma, beta, eps)


def kto_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    desirable: Tensor,
    reference_point: Tensor,
    *,
    beta: float | None = None,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO, answers with a vote each: ℓ = λ_D σ(β z₀ − r) for good ones, λ_U σ(r − β z₀) for bad ones.

    Args:
        log_prob: [B] log π(y|x), summed over the tokens; differentiable.
        ref_log_prob: [B] of the reference.
        desirable: bool [B], the votes.
        reference_point: scalar z₀ ≥ 0, see `kto_reference_point`; no gradient.
        beta: β > 0; None is 0.1.
        desirable_weight: λ_D > 0.
        undesirable_weight: λ_U > 0. With n_D and n_U votes, λ_D n_D / (λ_U n_U) should lie in [1, 4/3].

    Returns:
        [B], float32 or better.

    Ethayarajh et al., arXiv 2402.01306, section 4.
    """
    check_positive(desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    check_axes(log_prob=(log_prob, "B"), desirable=(desirable, "B"))
    reward = implicit_reward(log_prob, ref_log_prob, row="kto", beta=beta)
    z = (DIRECT["kto"].beta if beta is None else beta) * reference_point.detach()
    good = desirable.bool()
    return torch.where(
        good, desirable_weight * torch.sigmoid(z - reward), undesirable_weight * torch.sigmoid(reward - z)
    )


def kto_reference_point(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """KTO's z₀ = max(0, mean log π(y'|x)/π_ref(y'|x)), y' the answers to other prompts.

    Args:
        log_prob: [B] log π(y'|x) of mismatched pairs, summed over the tokens; all of an optimizer step.
        ref_log_prob: [B] of the reference.

    Returns:
        Scalar without gradient, nats: an estimate of KL(π‖π_ref) of low variance, biased.

    Ethayarajh et al., arXiv 2402.01306, section 4.
    """
    check_axes(log_prob=(log_prob, "B"), ref_log_prob=(ref_log_prob, "B"))
    return (float32(log_prob) - ref_log_prob).detach().mean().clamp(min=0)
