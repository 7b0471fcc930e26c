# SPDX-License-Identifier: Apache-2.0
"""Pairwise agreement of a reward with people under every published tie policy, and of people with each other.

The policies differ by points on the same numbers, and bfloat16 scores tie where float32 scores do not, so an
accuracy without its policy says little. A margin d is the reward's preference in a pair (left minus right, or
log-odds); y = sign(label − ½) is that of people. Pairs with a NaN margin must be left out before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .intervals import ratio

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Policy:
    """Credit of a pair with a tie on either side; without ties the right side earns 1, the wrong 0."""

    meaning: str
    predicted: float | None = 0.0  # Credit where the reward ties and people do not; None leaves the pair out
    label: float | None = None
    """Credit where people tie and the reward does not; None leaves pairs that people tied out."""
    both: float = 0.0  # Credit where both tie, if such pairs are counted
    left: bool = False  # A tied label adds to the numerator where the left scores higher, though it is not counted
    has_threshold: bool = False  # |d| ≤ a threshold, in the unit of the margin, predicts a tie


POLICIES: Mapping[str, Policy] = {
    "half_credit": Policy(
        "Tied labels are skipped, a predicted tie earns ½: the expected accuracy of breaking ties by a coin.",
        predicted=0.5,
    ),
    "inversion_score": Policy(
        "HPSv2: one minus the share of inverted pairs; a tie on either side counts as right.",
        predicted=1.0,
        label=1.0,
        both=1.0,
    ),
    "calc_ImageReward": Policy(
        "ImageReward's calc_ImageReward in HPSv2: tied labels are skipped, predicted ties are wrong."
    ),
    # As published: d = p_left − p_right of a softmax, the threshold tuned on the validation split.
    "PickScore": Policy(
        "PickScore: |d| ≤ threshold predicts a tie; 1 for the right class of three, ½ where one of two ties.",
        predicted=0.5,
        label=0.5,
        both=1.0,
        has_threshold=True,
    ),
    # There the winner of a pair is on the left.
    "HPSv3_strict": Policy(
        "HPSv3 as coded: strict >, predicted ties wrong; a tied label adds to the numerator alone, so that the "
        "share is above 100 % where many labels tie.",
        left=True,
    ),
    "UnifiedReward_ties_wrong": Policy(
        "UnifiedReward's GenAI-Bench script: every pair counts, and a tie on either side is wrong.", label=0.0
    ),
    "imscore_dropped": Policy("imscore: pairs with a tie on either side are left out.", predicted=None),
    # acc*_eq with `best_tie_threshold`: Xu et al., arXiv 2412.21059; Deutsch et al., arXiv 2305.14324.
    "VisionReward_tau": Policy(
        "VisionReward's τ: three classes, |d| ≤ threshold predicts a tie, right only for the right class.",
        label=0.0,
        both=1.0,
        has_threshold=True,
    ),
    "VisionReward_diff": Policy(
        'VisionReward\'s "diff": pairs with a tied label are dropped, predicted ties are wrong.'
    ),
}
"""name -> policy; the first is the one that headlines use."""

HEADLINE = "half_credit"
"""Neither rewards nor punishes a coarse score, and needs no threshold."""


def policy_credit(name: str, margin: Array, label: Array, threshold: float = 0.0) -> tuple[Array, Array]:
    """Return credit and count [N] of pairs under a policy: the accuracy is Σ credit / Σ count."""
    policy = POLICIES[name]
    predicted_tie = np.abs(margin) <= (threshold if policy.has_threshold else 0.0)
    d, y = np.where(predicted_tie, 0.0, np.sign(margin)), np.sign(label - 0.5)
    tied_credit = np.where(d == 0, policy.both, policy.label) if policy.label is not None else policy.left * (d > 0)
    decided_credit = np.where(d == 0, policy.predicted or 0.0, d * y > 0)
    counts = np.where(y == 0, policy.label is not None, (d != 0) | (policy.predicted is not None))
    return np.where(y == 0, tied_credit, decided_credit).astype(float), counts.astype(float)


def best_tie_threshold(margin: ArrayLike, label: ArrayLike, *, half: bool = False) -> float:
    """Find the smallest threshold on |d| that maximises the three-class accuracy; NaN margins are left out.

    With `half` PickScore's: ½ where exactly one of label and prediction ties. It flatters a reward on the
    pairs it was chosen on: tune it on a validation split, or say so.
    """
    margins, labels = np.asarray(margin, dtype=np.float64), np.asarray(label, dtype=np.float64)
    valid = np.isfinite(margins)
    if not valid.any():
        return 0.0
    size, y = np.abs(margins[valid]), np.sign(labels[valid] - 0.5)
    without_tie = np.where(y == 0, 0.5 if half else 0.0, np.sign(margins[valid]) == y)
    with_tie = np.where(y == 0, 1.0, 0.5 if half else 0.0)
    order = np.argsort(size, kind="stable")
    # credit with the k smallest margins predicted as ties, for every k that ends a block of equal margins
    total = np.append(without_tie.sum(), without_tie.sum() + np.cumsum((with_tie - without_tie)[order]))
    thresholds = np.append(0.0, size[order])
    ends = np.append(thresholds[1:] != thresholds[:-1], True)
    return float(thresholds[ends][np.argmax(total[ends])])


def majority_credit(votes: Array, voters: Array) -> tuple[Array, Array]:
    """Credit and count [N] of votes [N, K + 1] (left and right, or K places, and tie) that the majority of `voters`
    predicts. Of k places that lead together each earns 1/k; votes for a tie are not predicted.
    """
    options, counted = voters[:, :-1], voters.sum(1) > 0
    leads = options == options.max(1, keepdims=True)
    credit = (votes[:, :-1] * leads).sum(1) / leads.sum(1)
    return credit * counted, votes[:, :-1].sum(1) * counted


def leave_one_out(votes: Array) -> tuple[Array, Array]:
    """Return credit and count [N] of votes [N, 3] (left, right, tie), each against the others of its pair.

    Σ credit / Σ count is how often other people predict one person's vote: ½ for people who flip coins,
    however many there are. Agreement with a majority that includes the vote itself would be 1, ¾, ¾, 11/16
    for one to four of them. Pairs with a single vote count nowhere.
    """
    credit, count = np.zeros(len(votes)), np.zeros(len(votes))
    for side in (0, 1):
        one_side = np.zeros_like(votes)
        one_side[:, side] = votes[:, side]
        side_credit, side_count = majority_credit(one_side, np.maximum(votes - np.eye(3)[side], 0.0))
        credit, count = credit + side_credit, count + side_count
    return credit, count


def alpha_sums(votes: Array) -> Array:
    """Return the terms [N, 3] of `alpha_of_sums` for votes [N, K + 1] (K places, tie), to sum over tasks.

    Disagreement Σ_{c≠k} n_c n_k / (m − 1) of the m votes, votes for a place, votes for a tie; 0 where m < 2.
    """
    count = votes.sum(1)
    disagreement = ratio(count**2 - (votes**2).sum(1), count - 1)
    table = np.stack([disagreement, votes[:, :-1].sum(1), votes[:, -1]], axis=1)
    return np.where((count >= 2)[:, None], table, 0.0)


def alpha_of_sums(sums: Array, options: int = 2) -> Array:
    """Compute Krippendorff's α [R] for nominal votes from sums [R, 3] of `alpha_sums`; NaN without variation.

    α = 1 − (n − 1) Σ_u Σ_{c≠k} n_uc n_uk / (m_u − 1) / Σ_{c≠k} n_c n_k, over the tasks and their images
    at every other of the K `places`, as it means nothing where an image was.

    Source: Krippendorff, Content Analysis (2004), 11.3.
    """
    disagreement, sides, ties = options * sums[:, 0], sums[:, 1], options * sums[:, 2]
    total = options * sides + ties
    return 1 - ratio((total - 1) * disagreement, total**2 - options * sides**2 - ties**2)
