# SPDX-License-Identifier: Apache-2.0
"""Training a reward on pairs and rankings: votes as soft labels, Bradley-Terry in its variants, Plackett-Luce."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from visalign.core.checks import check_choice, check_same
from visalign.core.precision import float32

TieModel = Literal["rao_kupper", "davidson"]


def soft_labels(left: Tensor, right: Tensor, ties: Tensor | None = None, *, smoothing: float = 0.0) -> Tensor:
    """Turn votes [N] into the probability that the left sample is better: p = (v_l + v_t/2 + a)/(n + 2a).

    With a = 1/2 (Jeffreys) or 1 (Laplace), votes added to either side, few votes do not claim certainty. NaN
    where n + 2a is 0; fractions of votes are allowed.
    """
    won, equal, lost = _votes(left, right, ties)
    total = won + lost + equal + 2 * smoothing
    return torch.where(total > 0, (won + equal / 2 + smoothing) / total.clamp(min=1e-30), math.nan)


def vote_shares(left: Tensor, right: Tensor, ties: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Shares [N, 3] of (left better, equal, right better) votes, `smoothing` added to each; NaN without votes."""
    counts = torch.stack(_votes(left, right, ties), -1) + smoothing
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total.clamp(min=1e-30), math.nan)


def bradley_terry_loss(
    left: Tensor,
    right: Tensor,
    label: Tensor | None = None,
    *,
    margin: Tensor | float = 0.0,
    centre: float = 0.0,
    displacement: float = 1.0,
    sign: float = 0.0,
    l2: float = 0.0,
) -> Tensor:
    """Negative log-likelihood of a pair: −p ln σ(l − τ r − m) − (1 − p) ln σ(r − τ l − m) + c (l + r)².

    τ = 1, m = 0, c = 0 is Bradley-Terry; HPSv2's loss is its sum over pairs. `margin` m, a number or [*], is the lead
    of the better sample in TRL, HPSv3's constant 0.57; `centre` c keeps scores, of which a likelihood knows
    differences only, near 0 (TRL: 0.01); `displacement` τ ≠ 1 is HPSv3's "likelihood displacement". `sign` s adds s
    (max(0, −b) + max(0, w)), which pulls the better score b above 0 and the worse one w below; `l2` adds l2 (l² + r²).
    Give pairs without a label weight 0 in `average_pairs`. Bradley and Terry 1952; InstructGPT, arXiv 2203.02155, eq.
    1; margin: Llama 2, 2307.09288, eq. 2; centring: 2312.09244; HPSv3, 2508.03789, released code.
    """
    first, other, prob, labelled = paired_scores(left, right, label)
    lead = float32(margin) if isinstance(margin, Tensor) else margin
    loss = -prob * F.logsigmoid(first - displacement * other - lead)
    loss = loss - (1 - prob) * F.logsigmoid(other - displacement * first - lead)
    loss = loss + centre * (first + other).square() + l2 * (first.square() + other.square())
    if sign:  # relu(−b) + relu(w), the sides in their shares of the label
        loss = loss + sign * (prob * (F.relu(-first) + F.relu(other)) + (1 - prob) * (F.relu(first) + F.relu(-other)))
    return torch.where(labelled, loss, 0.0)


def plackett_luce_loss(score: Tensor, rank: Tensor) -> Tensor:
    """Negative log-likelihood [P] of rankings: Σ_i [ln Σ_{j = i or rank_j > rank_i} e^{s_j} − s_i].

    `score` and `rank` are [P, K]; rank 0 is the best, NaN an absent sample. Samples of equal rank are not compared
    with one another, so a best-of-K label (rank 0, the others 1) is the cross-entropy of the chosen one, and two
    samples give Bradley-Terry's −ln σ(s_best − s_worst). Plackett 1975; Luce 1959.
    """
    check_same(score=score, rank=rank)
    present = torch.isfinite(rank)
    value = torch.where(present, float32(score), 0.0)
    itself = torch.eye(rank.shape[-1], dtype=torch.bool, device=rank.device)
    worse = rank[..., None, :] > rank[..., :, None]  # False beside NaN
    total = torch.where(worse | itself, value[..., None, :], float("-inf")).logsumexp(-1)
    return torch.where(present, total - value, 0.0).sum(-1)


def tie_log_prob(left: Tensor, right: Tensor, strength: Tensor | float, *, model: TieModel = "rao_kupper") -> Tensor:
    """Log-probabilities [*, 3] of (left better, equal, right better) under a model that knows ties.

    Rao-Kupper, threshold θ > 1, d = l − r: σ(d − ln θ), (θ² − 1) σ(d − ln θ) σ(−d − ln θ), σ(−d − ln θ).
    Davidson, ν > 0: e^{d/2}, ν, e^{−d/2}, over their sum. `strength` is θ or ν, and may be learned. Rao and
    Kupper 1967; Davidson 1970. HPSv3's "btt" (arXiv 2508.03789, released code) is Rao-Kupper, θ = 5.
    """
    first, other, _, _ = paired_scores(left, right, None)
    check_choice("model", model, get_args(TieModel))
    theta = torch.as_tensor(strength, dtype=first.dtype, device=first.device)
    difference = first - other
    if model == "davidson":
        rows = torch.broadcast_tensors(difference / 2, theta.log(), -difference / 2)
        return torch.stack(rows, -1).log_softmax(-1)
    won, lost = F.logsigmoid(difference - theta.log()), F.logsigmoid(-difference - theta.log())
    equal = (theta.square() - 1).log() + won + lost
    return torch.stack(torch.broadcast_tensors(won, equal, lost), -1)


def outcome_loss(log_prob: Tensor, share: Tensor) -> Tensor:
    """−Σ_k q_k ln P_k of the outcomes (left, equal, right), q [*, 3] of `vote_shares`; 0 where q is NaN."""
    check_same(log_prob=log_prob, share=share)
    return -(share.detach().nan_to_num(0.0) * log_prob).sum(-1)


def margin_ranking_loss(better: Tensor, worse: Tensor, *, margin: float) -> Tensor:
    """Hinge on a difference: max(0, m − (better − worse)). ICT-HP, arXiv 2507.19002, the HP loss, m = 0.3."""
    first, other, _, _ = paired_scores(better, worse, None)
    return (margin - (first - other)).clamp(min=0)


def average_pairs(
    loss: Tensor, weight: Tensor | None = None, *, over: Literal["weights", "pairs", "none"] = "weights"
) -> Tensor:
    """Reduce losses of pairs: Σ w ℓ / Σ w, Σ w ℓ / N, or Σ w ℓ; 0 where all weights are 0.

    `weight` w: votes, or 1/(pairs of the prompt) as PickScore has it. "pairs" divides by N whatever the weights, as
    HPSv3 averages with its tie mask; "none" sums, as HPSv2 and ICT-HP do: the gradient then grows with the batch.
    """
    check_choice("over", over, ("weights", "pairs", "none"))
    check_same(weight=weight, loss=loss)
    factor = torch.ones_like(loss) if weight is None else weight.detach().to(loss)
    total = (loss * factor).sum()
    if over == "weights":
        return total / factor.sum().clamp(min=torch.finfo(loss.dtype).tiny)
    return total / max(loss.numel(), 1) if over == "pairs" else total


def _votes(left: Tensor, right: Tensor, ties: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    equal = torch.zeros_like(left) if ties is None else ties
    check_same(left=left, right=right, ties=equal)
    return float32(left).detach(), float32(equal).detach(), float32(right).detach()


def paired_scores(left: Tensor, right: Tensor, label: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (left, right, p, has a label), float32 or better; scores are 0 without a label: no NaN gradient."""
    check_same(left=left, right=right, label=label)
    first, other = float32(left), float32(right)
    if label is None:
        return first, other, torch.ones_like(first), torch.ones_like(first, dtype=torch.bool)
    labelled = ~torch.isnan(label)
    prob = torch.where(labelled, label, 0.5).detach().to(first.dtype)
    if bool(((prob < 0) | (prob > 1)).any()):
        low, high = float(prob.min()), float(prob.max())
        raise ValueError(f"label must lie in [0, 1], or be NaN where unknown; got {low:g} to {high:g}.")
    return torch.where(labelled, first, 0.0), torch.where(labelled, other, 0.0), prob, labelled
