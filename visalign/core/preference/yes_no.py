# SPDX-License-Identifier: Apache-2.0
"""A judge that answers yes or no: log-odds over the sets of tokens that mean either, and losses on them.

log-odds = ln Σ_{t ∈ yes} P(t) − ln Σ_{t ∈ no} P(t). They do not saturate where P(yes) does, and need no
normalisation over the vocabulary; the mass that neither set holds says how far the judge left the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visalign.core.precision import float32

from .bradley_terry import bradley_terry_loss, paired_scores


@dataclass(frozen=True)
class YesNo:
    """The answer at one position, [*] each, float32 or better."""

    log_odds: Tensor
    """ln P(yes) − ln P(no)."""
    log_yes: Tensor
    """ln P(yes) over the whole vocabulary."""
    log_no: Tensor
    """ln P(no) over the whole vocabulary."""

    @property
    def prob(self) -> Tensor:
        """P(yes)/(P(yes) + P(no)), the answer given that there is one."""
        return torch.sigmoid(self.log_odds)

    @property
    def mass(self) -> Tensor:
        """P(yes) + P(no); 0, not NaN, where there is none of either."""
        return self.log_yes.exp() + self.log_no.exp()

    @property
    def left_over(self) -> Tensor:
        """1 − mass: the probability of anything else."""
        return 1 - self.mass


def yes_no_answer(
    logits: Tensor, yes_ids: Sequence[int], no_ids: Sequence[int], *, normalised: bool = False
) -> YesNo:
    """Read the answer from the logits of its position.

    Args:
        logits: [*, V], differentiable; −inf for a token whose probability is not known.
        yes_ids: places in V that mean yes, e.g. of "yes", " yes", "Yes"; no duplicates, at least one unless
            normalised.
        no_ids: places that mean no, none of them in yes_ids.
        normalised: logits are log-probabilities already, of a whole vocabulary of which V is a part (a
            server's top tokens); they are then taken as they are, and a set may be empty.

    Returns:
        The answer; ±inf log-odds where one set alone has mass, NaN where a set is empty: nothing is known
        of it.

    Raises:
        ValueError: an empty set, an id out of range, repeated or in both sets.

    RewardDance, arXiv 2509.08826, the reward; VQAScore 2404.01291.
    """
    size = logits.shape[-1]
    both = [*yes_ids, *no_ids]
    if not normalised and not (yes_ids and no_ids):
        raise ValueError(
            f"yes_ids and no_ids must each name a token; got {list(yes_ids)} and {list(no_ids)}."
        )
    if len(set(both)) < len(both) or any(not 0 <= number < size for number in both):
        raise ValueError(
            f"yes_ids and no_ids must be different tokens in 0 … {size - 1}; got {list(yes_ids)} and "
            f"{list(no_ids)}."
        )
    value = float32(logits)
    yes, no = (_log_sum(value, ids) for ids in (yes_ids, no_ids))
    odds = yes - no if yes_ids and no_ids else torch.full_like(yes, torch.nan)
    total = 0.0 if normalised else value.logsumexp(-1)
    return YesNo(odds, yes - total, no - total)


def yes_no_loss(
    answer: YesNo, label: Tensor, *, over: Literal["answers", "vocabulary"] = "answers"
) -> Tensor:
    """Negative log-likelihood of the right answer: −p ln P(yes) − (1 − p) ln P(no).

    Args:
        answer: of `yes_no_answer`.
        label: [*] probability p of yes, no gradient; soft labels allowed, NaN gives a loss of 0.
        over: "answers" for the probabilities given that the answer is one of the two; "vocabulary" also
            teaches the judge to answer with one of them: next-token likelihood summed over each set.

    Returns:
        Loss [*], float32 or better.

    RewardDance, arXiv 2509.08826.
    """
    if over == "answers":
        return bradley_terry_loss(answer.log_odds, torch.zeros_like(answer.log_odds), label)
    if over != "vocabulary":
        raise ValueError(f'over must be "answers" or "vocabulary"; got {over!r}.')
    yes, no, prob, labelled = paired_scores(answer.log_yes, answer.log_no, label)
    return torch.where(labelled, -prob * yes - (1 - prob) * no, 0.0)


def yes_no_pair_loss(
    left: YesNo,
    right: YesNo,
    label: Tensor | None = None,
    *,
    on: Literal["log_odds", "probability"] = "log_odds",
    likelihood_weight: float = 0.0,
) -> Tensor:
    """Bradley-Terry between two images that were each asked "is it good?", plus λ times their likelihood.

    Args:
        left: answers for the left images.
        right: answers for the right images.
        label: [*] probability that the left one is better; None means 1; NaN gives a loss of 0.
        on: "log_odds", or "probability", RewardDance's pointwise form: −ln σ(P_l − P_r), which never falls
            below ln(1 + 1/e) = 0.313 and has no slope where both probabilities are near 0 or 1.
        likelihood_weight: λ ≥ 0 of the cross-entropy "yes for the better, no for the other".

    Returns:
        Loss per pair [*], float32 or better.

    RewardDance, arXiv 2509.08826, section 3, the pointwise generative variant.
    """
    if on == "log_odds":
        loss = bradley_terry_loss(left.log_odds, right.log_odds, label)
    elif on == "probability":
        loss = bradley_terry_loss(left.prob, right.prob, label)
    else:
        raise ValueError(f'on must be "log_odds" or "probability"; got {on!r}.')
    if likelihood_weight:
        prob = torch.ones_like(left.log_odds) if label is None else label
        losses = yes_no_loss(left, prob) + yes_no_loss(right, 1 - prob)
        loss = loss + likelihood_weight * losses
    return loss


def both_orders(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Average a comparison asked in both orders, in log-odds, and tell the judge's bias for a place.

    Args:
        first: [*] log-odds that image A is better, A shown first.
        second: [*] log-odds that image B is better, B shown first.

    Returns:
        (log-odds that A is better, (first − second)/2; log-odds of the bias for the first place, half the
        sum).
    """
    first_order, other, _, _ = paired_scores(first, second, None)
    return (first_order - other) / 2, (first_order + other) / 2


def _log_sum(value: Tensor, ids: Sequence[int]) -> Tensor:
    if not ids:
        return value.new_full(value.shape[:-1], float("-inf"))
    return value[..., list(ids)].logsumexp(-1)
