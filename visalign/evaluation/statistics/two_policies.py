# SPDX-License-Identifier: Apache-2.0
"""A policy before and after training on the same problems: pass@k, and what reward costs in KL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.core import best_of_n_kl_bound, best_of_n_kl_estimate, expected_best_of_k, pass_at_k

from .intervals import Interval, paired_bootstrap


@dataclass(frozen=True, kw_only=True)
class AttemptsPoint:
    """pass@k of both policies, with intervals over problems."""

    k: int
    base: Interval
    tuned: Interval
    change: Interval
    """Tuned less base, problem by problem."""


@dataclass(frozen=True, kw_only=True)
class BestOfPoint:
    """What the best of n completions of a policy is worth, and how far from the policy it is."""

    n: int
    reward: Interval
    kl_bound: float
    """Nats, log n − (n − 1)/n."""
    kl_estimate: float
    """Nats, from the probabilities of the completions that were picked."""


def doublings(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    steps = [2**i for i in range(most.bit_length())]
    return steps if steps[-1] == most else [*steps, most]


def pass_at_k_curves(base: Tensor, tuned: Tensor, *, generator: torch.Generator) -> list[AttemptsPoint]:
    """pass@k of two policies at k = 1, 2, 4, ..., n, exact over the subsets of n samples.

    Args:
        base: [P, n] 1 where a sample solves its problem, 0 where not, NaN where nobody knows.
        tuned: [P, n] of the same problems. A problem counts at the k for which both have so many known ones.
        generator: of the bootstrap over problems.

    Returns:
        A point per k for which some problem has k known samples of both.

    Yue et al., Does Reinforcement Learning Really Incentivize Reasoning Capacity, arXiv 2504.13837, figure 2.
    """
    if base.ndim != 2 or base.shape != tuned.shape or not base.numel():
        raise ValueError(
            "base and tuned must be [P, n], the samples of the same problems; got "
            f"{tuple(base.shape)} and {tuple(tuned.shape)}."
        )
    points = []
    for k in doublings(base.shape[1]):
        both = torch.stack([pass_at_k(x.isfinite().sum(1), x.nansum(1), k) for x in (base, tuned)])
        both = both[:, both.isfinite().all(0)]
        if not both.numel():
            break
        first, second = both
        points.append(
            AttemptsPoint(
                k=k,
                base=mean_interval(first, generator=generator),
                tuned=mean_interval(second, generator=generator),
                change=mean_interval(second - first, generator=generator),
            )
        )
    return points


def crossing(points: Sequence[AttemptsPoint]) -> tuple[int | None, bool]:
    """The first k at which the curve that led is behind, and whether the intervals show it.

    Returns:
        (k or None, True where one change before k and one from k on lie on opposite sides of 0 with their
        whole intervals). Curves that touch, or that meet at 1, have not crossed.
    """
    changes = [round(point.change.estimate, 12) for point in points]  # equal curves differ by rounding
    led = next((value for value in changes if value), 0.0)
    place = next((i for i, value in enumerate(changes) if value * led < 0), None)
    if place is None:
        return None, False
    before, after = (
        any(point.change.excludes_zero and point.change.estimate * sign > 0 for point in part)
        for part, sign in ((points[:place], led), (points[place:], -led))
    )
    return points[place].k, before and after


def best_of_n_curve(reward: Tensor, log_prob: Tensor, *, generator: torch.Generator) -> list[BestOfPoint]:
    """Reward and KL of the best of 1, 2, 4, ..., N completions of a policy.

    The reward is exact over all subsets. The KL is estimated from N/n picks of a prompt, each the first best
    of n neighbours.

    Args:
        reward: [P, N], any unit; prompts with a NaN are left out.
        log_prob: [P, N] log π(y) of the whole completion.
        generator: of the bootstrap over prompts.

    Returns:
        A point per n; nothing where no prompt has all its rewards.

    Gao et al., Scaling Laws for Reward Model Overoptimization, arXiv 2210.10760; Beirami et al., 2401.01879.
    """
    if reward.ndim != 2 or reward.shape != log_prob.shape:
        raise ValueError(
            "reward and log_prob must be [P, N], the same completions; got "
            f"{tuple(reward.shape)} and {tuple(log_prob.shape)}."
        )
    known = reward.isfinite().all(1)
    reward, log_prob, points = reward[known], log_prob[known], []
    for n in doublings(reward.shape[1]) if known.any() else []:
        blocks = reward.shape[1] // n
        paid, likely = (values[:, : blocks * n].unflatten(1, (blocks, n)) for values in (reward, log_prob))
        picked = likely.gather(2, paid.argmax(2, keepdim=True))
        points.append(
            BestOfPoint(
                n=n,
                reward=mean_interval(expected_best_of_k(reward, n), generator=generator),
                kl_bound=float(best_of_n_kl_bound(n)),
                kl_estimate=float(best_of_n_kl_estimate(picked, n).mean()),
            )
        )
    return points


def matching_n(points: Sequence[BestOfPoint], reward: float) -> int | None:
    """The first n whose best completion is worth `reward`; None where none is."""
    return next((point.n for point in points if point.reward.estimate >= reward), None)


def mean_interval(values: Tensor, *, generator: torch.Generator) -> Interval:
    """The mean of a number per prompt [P], with its interval over prompts; NaN is left out."""
    one = values.double().numpy()
    return paired_bootstrap(0 * one, one, list(range(len(one))), generator=generator)


def runner_up_gap(log_p: Tensor) -> Tensor:
    """How far the second choice is behind the first: log p₍₁₎ − log p₍₂₎, which is the gap of their logits.

    Args:
        log_p: [*, V] log-probs or logits, V ≥ 2.

    Returns:
        [*] nats, ≥ 0; 0 at a tie. An argmax changes only where noise moves two logits by more than this.
    """
    first, second = log_p.topk(2, -1).values.unbind(-1)
    return first - second


def clip_bias(low: Tensor, high: Tensor) -> dict[str, float]:
    """What a clip took away, by the sign of the advantage, over I iterations.

    Args:
        low: [I] share of decisions with A < 0 that the clip left without gradient.
        high: [I] the same with A > 0.

    Returns:
        `low` and `high`, the means; `net`, high − low, above 0 where the clip held back more of what raises a
        completion's probability than of what lowers it; `iterations`, the share with a clip of either sign.

    After Chen et al., arXiv 2512.16912, on clipping under rewards by lot.
    """
    if low.ndim != 1 or low.shape != high.shape or not len(low):
        raise ValueError(f"low and high must be [I]; got {tuple(low.shape)} and {tuple(high.shape)}.")
    under, over = float(low.double().mean()), float(high.double().mean())
    return {
        "low": under,
        "high": over,
        "net": over - under,
        "iterations": float((low + high > 0).double().mean()),
    }


def advantage_at_stake(right: Tensor, samples: int) -> Tensor:
    """Σ over right completions of r − mean(r) = n_c (G − n_c)/G: what a reward by lot withholds from them.

    Args:
        right: [P] n_c, right completions of a prompt.
        samples: G.

    Returns:
        [P] float64; under rewards by lot the expectation of the same sum is 0.

    Chen et al., arXiv 2512.16912, on random rewards.
    """
    count = right.double()
    return count * (samples - count) / samples
