# SPDX-License-Identifier: Apache-2.0
"""How often a judge agrees with people about pairs, under every tie policy in use, side by side.

The policies differ by points on the same numbers, and bfloat16 scores tie where float32 ones do not; so an
accuracy without its policy says little. A margin d is what the judge says of a pair (left minus right, or
log-odds), y = sign(label − ½) what people said. A pair whose margin is NaN was not judged: it is left out of
every policy and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Credit = tuple[Array, Array]
"""Credit [N] and count [N]: the accuracy is Σ credit / Σ count."""


def _sides(margin: Array, label: Array) -> tuple[Array, Array]:
    return np.sign(margin), np.sign(label - 0.5)


def inversion_score(margin: Array, label: Array) -> Credit:
    """HPSv2: one minus the share of inverted pairs; a tie on either side counts as right."""
    d, y = _sides(margin, label)
    return (d * y >= 0).astype(float), np.ones_like(d)


def image_reward(margin: Array, label: Array) -> Credit:
    """ImageReward's `calc_ImageReward` in HPSv2: tied labels are skipped, predicted ties are wrong."""
    d, y = _sides(margin, label)
    return (d * y > 0).astype(float), (y != 0).astype(float)


def pickscore(margin: Array, label: Array, threshold: float = 0.0) -> Credit:
    """PickScore: |d| ≤ threshold predicts a tie; 1 for the right class of three, ½ where one of two ties.

    The published evaluation takes d = p_left − p_right of a softmax and tunes the threshold on its
    validation split; `threshold` is in the unit of the margin.
    """
    d, y = _sides(np.where(np.abs(margin) <= threshold, 0.0, margin), label)
    return np.where(d == y, 1.0, np.where((d == 0) | (y == 0), 0.5, 0.0)), np.ones_like(d)


def hpsv3(margin: Array, label: Array) -> Credit:
    """HPSv3 as coded: strict >, predicted ties wrong; a tied label adds to the numerator, not to the count.

    The winner of a pair stands on the left there, so a tied label is right where the left scores higher; the
    share can exceed 1 when many labels tie.
    """
    d, y = _sides(margin, label)
    return np.where(y == 0, d > 0, d * y > 0).astype(float), (y != 0).astype(float)


def ties_wrong(margin: Array, label: Array) -> Credit:
    """UnifiedReward's GenAI-Bench script: every pair counts, and a tie on either side is wrong."""
    d, y = _sides(margin, label)
    return (d * y > 0).astype(float), np.ones_like(d)


def dropped(margin: Array, label: Array) -> Credit:
    """imscore: pairs with a tie on either side are left out."""
    d, y = _sides(margin, label)
    return (d * y > 0).astype(float), (d * y != 0).astype(float)


def half_credit(margin: Array, label: Array) -> Credit:
    """Tied labels are skipped, a predicted tie earns ½: the expected accuracy of breaking ties by a coin."""
    d, y = _sides(margin, label)
    return np.where(d == 0, 0.5, d * y > 0) * (y != 0), (y != 0).astype(float)


def visionreward_tau(margin: Array, label: Array, threshold: float = 0.0) -> Credit:
    """VisionReward's τ: three classes, |d| ≤ threshold predicts a tie, right only for the right class.

    With the threshold that maximises it (`best_tie_threshold`) this is acc*_eq.

    Source: Xu et al., arXiv 2412.21059; Deutsch, Foster and Freitag, arXiv 2305.14324.
    """
    d, y = _sides(np.where(np.abs(margin) <= threshold, 0.0, margin), label)
    return (d == y).astype(float), np.ones_like(d)


def visionreward_diff(margin: Array, label: Array) -> Credit:
    """VisionReward's "diff": pairs with a tied label are dropped, predicted ties are wrong."""
    return image_reward(margin, label)


POLICIES: Mapping[str, Callable[[Array, Array], Credit]] = {
    "half_credit": half_credit,
    "inversion_score": inversion_score,
    "calc_ImageReward": image_reward,
    "PickScore": pickscore,
    "HPSv3_strict": hpsv3,
    "UnifiedReward_ties_wrong": ties_wrong,
    "imscore_dropped": dropped,
    "VisionReward_tau": visionreward_tau,
    "VisionReward_diff": visionreward_diff,
}
"""name -> policy, at threshold 0; the first is the one that headlines use."""

HEADLINE = "half_credit"
"""Neither rewards nor punishes a coarse score, and needs no threshold."""


def credits_of(policy: str, margin: Array, label: Array, threshold: float = 0.0) -> Credit:
    """Credit and count [N] of a policy by its name; only PickScore and VisionReward_tau have a threshold."""
    if policy == "PickScore":
        return pickscore(margin, label, threshold)
    if policy == "VisionReward_tau":
        return visionreward_tau(margin, label, threshold)
    return POLICIES[policy](margin, label)


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
    """Every pair of one ranked list as margin and label.

    Args:
        prediction: [n] scores of n images.
        truth: [n] what people said of them, higher is better (negate ranks).

    Returns:
        Margins and labels (0, ½, 1) [n(n−1)/2].
    """
    scores, said = np.asarray(prediction, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    i, j = np.triu_indices(len(scores), k=1)
    return scores[i] - scores[j], (np.sign(said[i] - said[j]) + 1) / 2
