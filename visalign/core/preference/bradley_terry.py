# SPDX-License-Identifier: Apache-2.0
"""Training a judge on pairs: votes as soft labels, Bradley-Terry in its variants, and how pairs are averaged.

Pairs [N] are scores of two samples, `left` and `right`, and `label`, the probability that the left one is
better: 1 and 0 for clear pairs, between them where people disagreed, NaN where nobody said anything.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from visalign.core.checks import check_choice, check_not_negative, check_same
from visalign.core.precision import float32

TieModel = Literal["rao_kupper", "davidson"]


def soft_labels(left: Tensor, right: Tensor, ties: Tensor | None = None, *, smoothing: float = 0.0) -> Tensor:
    """Turn votes into the probability that the left sample is better: p = (v_l + v_t/2 + a)/(n + 2a).

    With a = 1/2 (Jeffreys) or 1 (Laplace) few votes do not claim certainty.

    Args:
        left: [N] votes v_l for the left sample, ≥ 0; fractions allowed.
        right: [N] votes for the right sample.
        ties: [N] votes for "equal", or None.
        smoothing: a ≥ 0, votes added to either side.

    Returns:
        [N] in [0, 1], float32 or better; NaN where n + 2a is 0.
    """
    won, lost, equal = _votes(left, right, ties)
    check_not_negative(smoothing=smoothing)
    total = won + lost + equal + 2 * smoothing
    return torch.where(total > 0, (won + equal / 2 + smoothing) / total.clamp(min=1e-30), math.nan)


def vote_shares(left: Tensor, right: Tensor, ties: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Shares [N, 3] of (left better, equal, right better) among the votes; NaN where there is none.

    Args:
        left: [N] votes for the left sample.
        right: [N] votes for the right sample.
        ties: [N] votes for "equal".
        smoothing: votes added to each of the three.
    """
    won, lost, equal = _votes(left, right, ties)
    check_not_negative(smoothing=smoothing)
    counts = torch.stack([won, equal, lost], -1) + smoothing
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
) -> Tensor:
    """Negative log-likelihood of a pair: −p ln σ(l − τ r − m) − (1 − p) ln σ(r − τ l − m) + c (l + r)².

    τ = 1, m = 0, c = 0 is Bradley-Terry; HPSv2's loss is its sum over pairs. m is TRL's margin per pair or
    HPSv3's constant 0.57, c TRL's centring, τ ≠ 1 HPSv3's "likelihood displacement".

    Args:
        left: [*] scores of the left samples (the chosen ones, if label is None).
        right: [*] scores of the right samples.
        label: [*] p in [0, 1], no gradient; None means 1. Where NaN, the loss is 0 and has no gradient: give
            such pairs weight 0 in `average_pairs`.
        margin: m, a number or [*], by which the better sample should lead, in units of the score.
        centre: c ≥ 0; keeps scores, of which a likelihood knows differences only, near 0. TRL uses 0.01.
        displacement: τ; HPSv3's code multiplies the rejected score by it.

    Returns:
        Loss per pair [*], float32 or better.

    Bradley and Terry 1952; InstructGPT, arXiv 2203.02155, eq. 1; margin: Llama 2, 2307.09288, eq. 2;
    centring: 2312.09244; HPSv3, 2508.03789, released code.
    """
    first, other, prob, labelled = paired_scores(left, right, label)
    lead = float32(margin) if isinstance(margin, Tensor) else margin
    loss = -prob * F.logsigmoid(first - displacement * other - lead)
    loss = loss - (1 - prob) * F.logsigmoid(other - displacement * first - lead)
    return torch.where(labelled, loss + centre * (first + other).square(), 0.0)


def tie_log_prob(
    left: Tensor, right: Tensor, strength: Tensor | float, *, model: TieModel = "rao_kupper"
) -> Tensor:
    """Log-probabilities of (left better, equal, right better) under a model that knows ties.

    Rao-Kupper, threshold θ > 1, d = l − r: σ(d − ln θ), (θ² − 1) σ(d − ln θ) σ(−d − ln θ), σ(−d − ln θ).
    Davidson, ν > 0: e^{d/2}, ν, e^{−d/2}, over their sum.

    Args:
        left: [*] scores.
        right: [*] scores.
        strength: θ or ν, a number or a tensor that broadcasts (it may be learned).
        model: "rao_kupper" or "davidson".

    Returns:
        [*, 3], float32 or better; each row's exponentials sum to 1.

    Rao and Kupper 1967; Davidson 1970. HPSv3's "btt" (arXiv 2508.03789, released code) is Rao-Kupper, θ = 5.
    """
    first, other, _, _ = paired_scores(left, right, None)
    smallest = {"rao_kupper": 1.0, "davidson": 0.0}
    check_choice("model", model, smallest)
    if not isinstance(strength, Tensor) and not smallest[model] < strength < math.inf:
        name = "θ of Rao-Kupper" if model == "rao_kupper" else "ν of Davidson"
        raise ValueError(f"strength, the {name}, must be finite and > {smallest[model]:g}; got {strength}.")
    theta = torch.as_tensor(strength, dtype=first.dtype, device=first.device)
    difference = first - other
    if model == "davidson":
        rows = torch.broadcast_tensors(difference / 2, theta.log(), -difference / 2)
        return torch.stack(rows, -1).log_softmax(-1)
    won, lost = F.logsigmoid(difference - theta.log()), F.logsigmoid(-difference - theta.log())
    equal = (theta.square() - 1).log() + won + lost
    return torch.stack(torch.broadcast_tensors(won, equal, lost), -1)


def outcome_loss(log_prob: Tensor, share: Tensor) -> Tensor:
    """Cross-entropy −Σ_k q_k ln P_k of the outcomes (left, equal, right); 0 where the shares are NaN.

    Args:
        log_prob: [*, 3] of `tie_log_prob`.
        share: [*, 3] q, one-hot or of `vote_shares`, no gradient.

    Returns:
        Loss per pair [*].
    """
    check_same(log_prob=log_prob, share=share)
    return -(share.detach().nan_to_num(0.0) * log_prob).sum(-1)


def margin_ranking_loss(better: Tensor, worse: Tensor, *, margin: float) -> Tensor:
    """Hinge on a difference: max(0, m − (better − worse)), per pair, float32 or better.

    Args:
        better: [*] scores of what should rank above.
        worse: [*] scores of what should rank below.
        margin: m, the lead at which a pair is content; ICT-HP trains HP with 0.3.

    ICT-HP, arXiv 2507.19002, the HP loss.
    """
    first, other, _, _ = paired_scores(better, worse, None)
    return (margin - (first - other)).clamp(min=0)


def average_pairs(
    loss: Tensor, weight: Tensor | None = None, *, over: Literal["weights", "pairs", "none"] = "weights"
) -> Tensor:
    """Reduce losses of pairs: Σ w ℓ / Σ w, Σ w ℓ / N, or Σ w ℓ.

    Args:
        loss: [*] per pair.
        weight: [*] ≥ 0, no gradient: votes, or 1/(pairs of the prompt) as PickScore has it; None means 1.
        over: "weights" divides by Σ w; "pairs" by N whatever the weights, as HPSv3 averages with its tie
            mask; "none" sums, as HPSv2 and ICT-HP do: the gradient then grows with the batch.

    Returns:
        A number; 0 where all weights are 0.
    """
    factor = torch.ones_like(loss) if weight is None else weight.detach().to(loss)
    check_same(weight=factor, loss=loss)
    total = (loss * factor).sum()
    if over == "weights":
        return total / factor.sum().clamp(min=torch.finfo(loss.dtype).tiny)
    if over == "pairs":
        return total / max(loss.numel(), 1)
    if over == "none":
        return total
    raise ValueError(f'over must be "weights", "pairs" or "none"; got {over!r}.')


def _votes(left: Tensor, right: Tensor, ties: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    equal = torch.zeros_like(left) if ties is None else ties
    counts = {"left": left, "right": right, "ties": equal}
    check_same(**counts)
    for name, count in counts.items():
        if not bool((torch.isfinite(count) & (count >= 0)).all()):
            bad = count[~(count >= 0) | torch.isinf(count)]
            raise ValueError(f"Votes must be finite and ≥ 0; {name} holds {float(bad[0]):g}.")
    won, lost, equal = (float32(count).detach() for count in counts.values())
    return won, lost, equal


def paired_scores(left: Tensor, right: Tensor, label: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check pairs for the losses here and in the files beside this one.

    Args:
        left: [*] scores.
        right: [*] scores.
        label: [*] p in [0, 1] or NaN; None means 1.

    Returns:
        (left, right, p without gradient, bool: has a label), [*] in float32 or better; where there is no
        label the scores are 0, so that a NaN there cannot reach a gradient.
    """
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
