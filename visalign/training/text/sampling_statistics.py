# SPDX-License-Identifier: Apache-2.0
"""What sampled completions are worth: acceptance, pass@k, best-of-n with its KL bound, diversity."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visalign.core import best_of_n_kl_bound, expected_best_of_k, pass_at_k

from .sampling_grid import Completions
from .selection import same_completion


def failure_reasons(completions: Completions) -> dict[str, int]:
    """The three commonest reasons of failed judgements, with their counts."""
    return dict(Counter(reason for reason in completions.reason if reason is not None).most_common(3))


def statistics(completions: Completions, selectable: Tensor, *, threshold: float) -> dict[str, Any]:
    """What the completions are worth: shares, pass@k, best-of-n, diversity; NaN where nothing is known.

    A completion is accepted where it may be chosen and its reward is at least the threshold; pass@k says how
    often k completions to a prompt hold an accepted one. Failed judgements count neither way: pass@k and
    best-of-n are means over the prompts that have enough judged completions, exact over all subsets of them.

    Args:
        completions: B completions of whole prompts.
        selectable: bool [B], which may be chosen; see `may_be_chosen`.
        threshold: smallest reward that is accepted.

    Returns:
        Counts (completions, judged, failed, truncated, accepted), acceptance_rate (of the judged ones),
        prompts_accepted (share of prompts with an accepted completion), reward_mean and reward_std,
        length_mean in tokens, distinct_completions and distinct_accepted per prompt, pass_at_k {k: share} and
        best_of_n {n: {reward, kl_bound}} for k, n = 1, 2, 4, ... and all completions of a prompt; the bound
        in nats is to the distribution that was sampled, so it means something where the completions are all
        of one.
    """
    rows = _by_prompt(completions)
    size = max(map(len, rows))
    judged = completions.judged
    accepted = judged & selectable & (completions.reward >= threshold)
    table = torch.full((len(rows), size), torch.nan, dtype=torch.float64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = completions.reward[row].double()
    known = torch.tensor([int(judged[row].sum()) for row in rows])
    right = torch.tensor([int(accepted[row].sum()) for row in rows])
    reward, total = completions.reward[judged].double(), int(judged.sum())
    steps = [2**i for i in range(int(math.log2(size)) + 1)]
    steps = steps if steps[-1] == size else [*steps, size]
    return {
        "completions": len(completions),
        "judged": total,
        "failed": len(completions) - total,
        "truncated": int(completions.truncated.sum()),
        "accepted": int(accepted.sum()),
        "acceptance_rate": float(accepted.sum()) / total if total else math.nan,
        "prompts_accepted": float((right > 0).double().mean()),
        "reward_mean": float(reward.mean()) if total else math.nan,
        "reward_std": float(reward.std(correction=0)) if total else math.nan,
        "length_mean": sum(completions.tokens) / len(completions),
        "distinct_completions": _distinct(completions, rows, judged),
        "distinct_accepted": _distinct(completions, rows, accepted),
        "pass_at_k": {k: float(pass_at_k(known, right, k).nanmean()) for k in steps},
        "best_of_n": {
            n: {
                "reward": float(expected_best_of_k(table, n).nanmean()),
                "kl_bound": float(best_of_n_kl_bound(n)),
            }
            for n in steps
        },
    }


def may_be_chosen(completions: Completions, *, truncated: bool) -> Tensor:
    """Bool [B], which completions may become training data: those that were judged and, unless `truncated`
    ones are wanted, came to an end.

    Trained on as a whole completion, one that met the length limit teaches to stop anywhere.
    """
    return completions.judged if truncated else completions.judged & ~completions.truncated


def _by_prompt(completions: Completions) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for place, prompt in enumerate(completions.prompt):
        rows.setdefault(prompt, []).append(place)
    return list(rows.values())


def _distinct(completions: Completions, rows: Sequence[Sequence[int]], wanted: Tensor) -> float:
    """Mean over prompts of the number of different texts among the wanted completions."""
    counts = [len({same_completion(completions.text[i]) for i in row if wanted[i]}) for row in rows]
    return sum(counts) / len(counts)
