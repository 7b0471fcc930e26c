# SPDX-License-Identifier: Apache-2.0
"""How often a judge agrees with people about pairs, under every tie policy in use, side by side.

The policies differ by points on the same numbers, and bfloat16 scores tie where float32 ones do not; so an
accuracy without its policy says little. A margin d is what the judge says of a pair (left minus right, or
log-odds), y = sign(label − ½) what people said. A pair whose margin is NaN was not judged: it is left out of
every policy and counted.
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
    """What a pair earns where somebody ties; where nobody does, 1 for the right side and 0 for the wrong."""

    meaning: str
    predicted: float | None = 0.0
    """Credit where the judge ties and people do not; None leaves the pair out."""
    label: float | None = None
    """Credit where people tie and the judge does not; None leaves pairs that people tied out."""
    both: float = 0.0
    """Credit where both tie, if such pairs are counted."""
    left: bool = False
    """A tied label adds to the numerator where the left scores higher, though it is not counted."""
    has_threshold: bool = False
    """|d| ≤ a threshold, in the unit of the margin, predicts a tie."""


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
    # The winner of a pair stands on the left there; the share can exceed 1 when many labels tie.
    "HPSv3_strict": Policy(
        "HPSv3 as coded: strict >, predicted ties wrong; a tied label adds to the numerator alone.",
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


def credits_of(name: str, margin: Array, label: Array, threshold: float = 0.0) -> tuple[Array, Array]:
    """Credit and count [N] under a policy: the accuracy is Σ credit / Σ count."""
    policy = POLICIES[name]
    tied = np.abs(margin) <= (threshold if policy.has_threshold else 0.0)
    d, y = np.where(tied, 0.0, np.sign(margin)), np.sign(label - 0.5)
    of_ties = (
        np.where(d == 0, policy.both, policy.label) if policy.label is not None else policy.left * (d > 0)
    )
    decided = np.where(d == 0, policy.predicted or 0.0, d * y > 0)
    counts = np.where(y == 0, policy.label is not None, (d != 0) | (policy.predicted is not None))
    return np.where(y == 0, of_ties, decided).astype(float), counts.astype(float)


def best_tie_threshold(margin: ArrayLike, label: ArrayLike, *, half: bool = False) -> float:
    """The threshold on |d| that maximises the three-class accuracy (or PickScore's, with half credit).

    Args:
        margin: [N]; NaN are left out.
        label: [N].
        half: Give ½ where exactly one of label and prediction ties.

    Returns:
        The smallest best one among 0 and the values of |d|. Chosen on the pairs it is used on, it flatters
        the judge: tune it on a validation split, or say so.
    """
    margins, labels = np.asarray(margin, dtype=np.float64), np.asarray(label, dtype=np.float64)
    known = np.isfinite(margins)
    size, y = np.abs(margins[known]), np.sign(labels[known] - 0.5)
    if not len(size):
        return 0.0
    right = np.sign(margins[known]) == y
    lost = np.where(y == 0, 0.5 if half else 0.0, right)  # credit while the pair is not predicted to tie
    won = np.where(y == 0, 1.0, 0.5 if half else 0.0)
    order = np.argsort(size, kind="stable")
    total = lost.sum() + np.cumsum((won - lost)[order])
    last = np.append(size[order][1:] != size[order][:-1], True)
    values, totals = size[order][last], total[last]
    if values[0] > 0:
        values, totals = np.append(0.0, values), np.append(lost.sum(), totals)
    return float(values[np.argmax(totals)])


def ranking_pairs(prediction: ArrayLike, truth: ArrayLike) -> tuple[Array, Array]:
    """Every pair of a ranked list: margins of n scores, labels (0, ½, 1) of what people said, [n(n−1)/2].

    Higher is better on both sides: negate ranks.
    """
    scores, said = np.asarray(prediction, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    i, j = np.triu_indices(len(scores), k=1)
    return scores[i] - scores[j], (np.sign(said[i] - said[j]) + 1) / 2


def against_the_rest(said: Array, rest: Array) -> tuple[Array, Array]:
    """Credit and count [N] of single votes, each predicted by the majority of others; a tie there earns ½.

    Args:
        said: [N, 3] votes for left, right, tie that are predicted one by one; votes for a tie are not.
        rest: [N, 3] the votes that predict each of them. Where there are none, nothing is counted.
    """
    ahead = np.sign(rest[:, 0] - rest[:, 1])
    known = rest.sum(1) > 0
    credit = said[:, 0] * (1 + ahead) / 2 + said[:, 1] * (1 - ahead) / 2
    return credit * known, (said[:, 0] + said[:, 1]) * known


def leave_one_out(votes: Array) -> tuple[Array, Array]:
    """Credit and count [N] of the votes [N, 3] (left, right, tie), each against the others of its pair.

    Σ credit / Σ count is how often other people predict one person's vote: ½ for people who flip coins,
    however many they are, where agreement with a majority that holds the vote itself would be 1, ¾, ¾, 11/16
    for one to four of them. Pairs with a single vote count nowhere.
    """
    parts = []
    for side in (0, 1):
        said = np.zeros_like(votes)
        said[:, side] = votes[:, side]
        parts.append(against_the_rest(said, np.maximum(votes - np.eye(3)[side], 0.0)))
    return parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]


def alpha_sums(votes: Array) -> Array:
    """[N, 3] what `alpha_of_sums` needs of each pair's votes [N, 3] (left, right, tie), summed over pairs.

    Disagreement Σ_{c≠k} n_c n_k / (m − 1) of the m votes, votes for a side, votes for a tie; 0 where m < 2.
    """
    count = votes.sum(1)
    apart = ratio(count**2 - (votes**2).sum(1), count - 1)
    table = np.stack([apart, votes[:, 0] + votes[:, 1], votes[:, 2]], axis=1)
    return np.where((count >= 2)[:, None], table, 0.0)


def alpha_of_sums(sums: Array) -> Array:
    """Krippendorff's α [R] for nominal votes, from sums [R, 3] of `alpha_sums`; NaN where nothing varies.

    α = 1 − (n − 1) Σ_u Σ_{c≠k} n_uc n_uk / (m_u − 1) / Σ_{c≠k} n_c n_k, over the pairs and their mirror
    images, as which image stood on the left means nothing.

    Source: Krippendorff, Content Analysis (2004), 11.3.
    """
    apart, sides, ties = 2 * sums[:, 0], sums[:, 1], 2 * sums[:, 2]
    total = 2 * sides + ties
    return 1 - ratio((total - 1) * apart, total**2 - 2 * sides**2 - ties**2)
