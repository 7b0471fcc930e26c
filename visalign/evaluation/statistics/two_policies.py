# SPDX-License-Identifier: Apache-2.0
"""A policy before and after training on the same problems: pass@k, and KL against reward."""

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
    change: Interval  # Tuned minus base, problem by problem


@dataclass(frozen=True, kw_only=True)
class BestOfPoint:
    """Reward of the best of n completions of a policy, and its distance from the policy."""

    n: int
    reward: Interval
    kl_bound: float  # Nats, log n − (n − 1)/n
    kl_estimate: float  # Nats, from the probabilities of the completions that were picked


def doublings(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most` itself."""
    steps = [2**i for i in range(most.bit_length())]
    return steps if steps[-1] == most else [*steps, most]


def pass_at_k_curves(base: Tensor, tuned: Tensor, *, generator: torch.Generator) -> list[AttemptsPoint]:
    """Compute pass@k of two policies at k = 1, 2, 4, ..., n, exact over the subsets of n samples.

    Values [P, n] are 1 where a sample solves its problem, 0 where not, NaN where unknown. A problem counts at
    the k for which both policies have k known samples.

    Yue et al., Does Reinforcement Learning Really Incentivize Reasoning Capacity, arXiv 2504.13837, figure 2.
    """
    points = []
    for k in doublings(base.shape[1]):
        solved = torch.stack([pass_at_k(x.isfinite().sum(1), x.nansum(1), k) for x in (base, tuned)])
        solved = solved[:, solved.isfinite().all(0)]
        if not solved.numel():
            break
        columns = {"base": solved[0], "tuned": solved[1], "change": solved[1] - solved[0]}
        means = {n: mean_interval(v, generator=generator, share=n != "change") for n, v in columns.items()}
        points.append(AttemptsPoint(k=k, **means))
    return points


def crossing(points: Sequence[AttemptsPoint]) -> tuple[int | None, bool]:
    """Find the first k at which the curve that led is behind (or None), and whether the intervals show it.

    They do where a change before k and one from k on lie on opposite sides of 0 with their whole intervals.
    Curves that touch, or that meet at 1, have not crossed.
    """
    changes = [round(point.change.estimate, 12) for point in points]  # equal curves differ by rounding
    lead = next((value for value in changes if value), 0.0)
    turn = next((i for i, value in enumerate(changes) if value * lead < 0), None)
    if turn is None:
        return None, False
    before, after = (
        any(point.change.excludes_zero and point.change.estimate * sign > 0 for point in part)
        for part, sign in ((points[:turn], lead), (points[turn:], -lead))
    )
    return points[turn].k, before and after


def best_of_n_curve(reward: Tensor, log_prob: Tensor, *, generator: torch.Generator) -> list[BestOfPoint]:
    """Compute reward and KL of the best of 1, 2, 4, ..., N completions of a policy.

    The reward [P, N] is exact over all subsets; prompts with a NaN are left out. The KL is estimated from N/n
    picks of a prompt, each the first best of n neighbours, with log-probs [P, N] of whole completions.

    Gao et al., Scaling Laws for Reward Model Overoptimization, arXiv 2210.10760; Beirami et al., 2401.01879.
    """
    complete = reward.isfinite().all(1)
    reward, log_prob, points = reward[complete], log_prob[complete], []
    for n in doublings(reward.shape[1]) if complete.any() else []:
        blocks = reward.shape[1] // n
        rewards, log_probs = (x[:, : blocks * n].unflatten(1, (blocks, n)) for x in (reward, log_prob))
        picked = log_probs.gather(2, rewards.argmax(2, keepdim=True))
        points.append(
            BestOfPoint(
                n=n,
                reward=mean_interval(expected_best_of_k(reward, n), generator=generator),
                kl_bound=float(best_of_n_kl_bound(n)),
                kl_estimate=float(best_of_n_kl_estimate(picked, n).mean()),
            )
        )
    return points


def mean_interval(values: Tensor, *, generator: torch.Generator, share: bool = False) -> Interval:
    """Compute the mean of a number, or share, per prompt [P] with its interval over prompts; NaN are left out."""
    numbers = values.double().numpy()
    return paired_bootstrap(0 * numbers, numbers, range(len(numbers)), generator=generator, share=share)


def runner_up_gap(log_p: Tensor) -> Tensor:
    """Gap log p₍₁₎ − log p₍₂₎ [*] in nats of the two largest logits [*, V]: noise below it moves no argmax."""
    first, second = log_p.topk(2, -1).values.unbind(-1)
    return first - second


def clip_bias(low: Tensor, high: Tensor) -> dict[str, float]:
    """Summarise the share [I] of decisions clipped over I iterations, with A < 0 (low) and A > 0 (high).

    `low` and `high` are the means; `net` = high − low is above 0 where the clip held back more of what raises
    a completion's probability than of what lowers it; `iterations` is the share with a clip of either sign.
    After Chen et al., arXiv 2512.16912, on clipping under random rewards.
    """
    mean_low, mean_high = float(low.double().mean()), float(high.double().mean())
    clipped = float((low + high > 0).double().mean())
    return {"low": mean_low, "high": mean_high, "net": mean_high - mean_low, "iterations": clipped}


def advantage_at_stake(right: Tensor, samples: int) -> Tensor:
    """Compute Σ over the n_c right of G = samples completions of r − mean(r) = n_c (G − n_c)/G, [P].

    A random reward withholds it: there the expectation of the sum is 0 (Chen et al., arXiv 2512.16912).
    """
    count = right.double()
    return count * (samples - count) / samples
