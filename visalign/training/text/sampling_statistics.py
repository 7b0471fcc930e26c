# SPDX-License-Identifier: Apache-2.0
"""Statistics of sampled completions: acceptance, pass@k, best-of-n with its KL bound, diversity."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visalign.core import best_of_n_kl_bound, expected_best_of_k, pass_at_k

from .sampling_grid import Completions
from .selection import normalised_text


def failure_reasons(completions: Completions) -> dict[str, int]:
    """Count the three commonest reasons of failed rewards."""
    return dict(Counter(reason for reason in completions.reason if reason is not None).most_common(3))


def statistics(completions: Completions, selectable: Tensor, *, threshold: float) -> dict[str, Any]:
    """Compute shares, pass@k, best-of-n and diversity of completions of whole prompts; NaN where nothing is known.

    A completion is accepted if it is selectable [B] and its reward is at least the threshold; pass@k is the
    probability that k completions to a prompt hold an accepted one. Failed rewards count neither way: pass@k
    and best-of-n are means over the prompts with enough scored completions, exact over all subsets of them,
    for k, n = 1, 2, 4, ... and all completions of a prompt. The KL bound in nats is to the distribution that
    was sampled, so it holds only for completions of one distribution.
    """
    by_prompt: dict[int, list[int]] = {}
    for index, prompt in enumerate(completions.prompt):
        by_prompt.setdefault(prompt, []).append(index)
    groups = list(by_prompt.values())
    size = max(map(len, groups))
    scored = completions.scored
    accepted = scored & selectable & (completions.reward >= threshold)
    rewards = torch.full((len(groups), size), torch.nan, dtype=torch.float64)
    for row, group in enumerate(groups):
        rewards[row, : len(group)] = completions.reward[group].double()
    scored_count = torch.tensor([int(scored[group].sum()) for group in groups])
    accepted_count = torch.tensor([int(accepted[group].sum()) for group in groups])
    reward, total = completions.reward[scored].double(), int(scored.sum())
    sizes = sorted({*(2**i for i in range(int(math.log2(size)) + 1)), size})
    return {
        "completions": len(completions),
        "judged": total,
        "failed": len(completions) - total,
        "truncated": int(completions.truncated.sum()),
        "accepted": int(accepted.sum()),
        "acceptance_rate": float(accepted.sum()) / total if total else math.nan,
        "prompts_accepted": float((accepted_count > 0).double().mean()),
        "reward_mean": float(reward.mean()) if total else math.nan,
        "reward_std": float(reward.std(correction=0)) if total else math.nan,
        "length_mean": sum(completions.tokens) / len(completions),
        "distinct_completions": _distinct(completions, groups, scored),
        "distinct_accepted": _distinct(completions, groups, accepted),
        "pass_at_k": {k: float(pass_at_k(scored_count, accepted_count, k).nanmean()) for k in sizes},
        "best_of_n": {
            n: {
                "reward": float(expected_best_of_k(rewards, n).nanmean()),
                "kl_bound": float(best_of_n_kl_bound(n)),
            }
            for n in sizes
        },
    }


def selectable_completions(completions: Completions, *, truncated: bool) -> Tensor:
    """Return bool [B], completions that may become training data: scored and, unless `truncated`, ended.

    Training on a truncated completion teaches to stop anywhere.
    """
    return completions.scored if truncated else completions.scored & ~completions.truncated


def _distinct(completions: Completions, groups: Sequence[Sequence[int]], selected: Tensor) -> float:
    """Mean over prompts of the number of different texts among the selected completions."""
    counts = [len({normalised_text(completions.text[i]) for i in group if selected[i]}) for group in groups]
    return sum(counts) / len(counts)
