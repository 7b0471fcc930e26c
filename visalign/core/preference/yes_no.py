# SPDX-License-Identifier: Apache-2.0
"""A judge that answers yes or no: log-odds over the sets of tokens that mean either, and losses on them.

log-odds = ln Σ_{t ∈ yes} P(t) − ln Σ_{t ∈ no} P(t). They do not saturate where P(yes) does, and need no
normalisation over the vocabulary; the mass that neither set holds says how far the judge left the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def yes_no_answer(logits: Tensor, yes_ids: Sequence[int], no_ids: Sequence[int], *, normalised: bool = False) -> YesNo:
    """Read the answer from the logits [*, V] of its position; −inf for a token of unknown probability.

    `yes_ids` and `no_ids` are the tokens that mean either, e.g. of "yes", " yes", "Yes"; none is in both. `normalised`
    logits are log-probabilities already, of a whole vocabulary of which V is a part (a server's top tokens); they are
    then taken as they are, and a set may be empty. The log-odds are ±inf where one set alone has mass, NaN where a set
    is empty: nothing is known of it. RewardDance, arXiv 2509.08826, the reward; VQAScore 2404.01291.
    """
    size, both = logits.shape[-1], [*yes_ids, *no_ids]
    empty = not normalised and not (yes_ids and no_ids)
    if empty or len(set(both)) < len(both) or any(not 0 <= number < size for number in both):
        raise ValueError(
            f"yes_ids and no_ids must each name a token, different ones in 0 … {size - 1}; got "
            f"{list(yes_ids)} and {list(no_ids)}."
        )
    value = float32(logits)
    # ln Σ over no token is −∞
    yes, no = (value[..., list(ids)].logsumexp(-1) for ids in (yes_ids, no_ids))
    odds = yes - no if yes_ids and no_ids else torch.full_like(yes, torch.nan)
    total = 0.0 if normalised else value.logsumexp(-1)
    return YesNo(odds, yes - total, no - total)


def yes_no_loss(answer: YesNo, label: Tensor) -> Tensor:
    """Cross-entropy −p ln P(yes) − (1 − p) ln P(no), given that the answer is one of the two; `label` [*] is
    the probability p of yes.

    RewardDance, arXiv 2509.08826.
    """
    return bradley_terry_loss(answer.log_odds, torch.zeros_like(answer.log_odds), label)


def yes_no_pair_loss(
    left: YesNo, right: YesNo, label: Tensor | None = None, *, likelihood_weight: float = 0.0
) -> Tensor:
    """Bradley-Terry between two images that were each asked "is it good?", plus λ times the cross-entropy
    "yes for the better, no for the other".

    RewardDance, arXiv 2509.08826, section 3, the pointwise generative variant. On log-odds: the paper's
    difference of probabilities never costs less than ln(1 + 1/e) and has no slope where both are near 0 or 1.
    """
    loss = bradley_terry_loss(left.log_odds, right.log_odds, label)
    if likelihood_weight:
        prob = torch.ones_like(left.log_odds) if label is None else label
        loss = loss + likelihood_weight * (yes_no_loss(left, prob) + yes_no_loss(right, 1 - prob))
    return loss


def both_orders(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Average a comparison asked in both orders, in log-odds [*], and measure the bias for the first position.

    `first`: log-odds that image A is better, A shown first; `second`: that B is better, B shown first.
    Returns (log-odds that A is better, (first − second)/2; log-odds of the bias, half the sum).
    """
    first_order, other, _, _ = paired_scores(first, second, None)
    return (first_order - other) / 2, (first_order + other) / 2
