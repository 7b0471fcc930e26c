# SPDX-License-Identifier: Apache-2.0
"""Selection of training data from sampled completions (all, the best of n, those good enough), and statistics.

Random choices use a generator of (seed, group), so that the choice within a group does not depend on the
rest of the batch. A completion that could not be scored is never chosen.

Sources: best-of-n, arXiv 2112.09332, section 3.2; rejection sampling that keeps several distinct completions
per prompt, arXiv 2308.01825, section 3.3 (there at most one of each reasoning path; here repeats fill up what
distinct completions leave free).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visalign.core import best_of_n_kl_bound, expected_best_of_k, pass_at_k
from visalign.seeds import sample_seed

from .sampling_grid import Completions


def worth_learning(
    completions: Completions, selectable: Tensor, *, threshold: float, skip_solved: bool = False
) -> Tensor:
    """Apply the rules of rejective fine-tuning that precede rewards (SPCT, arXiv 2504.02495, section 3.2).

    Completions with a hint stay where no selectable [B] one without it reaches the threshold. With
    `skip_solved`, prompts go whose scored completions without a hint all reach it.
    """
    hinted = torch.tensor([point.hinted for point in completions.point])
    plain, right = completions.scored & ~hinted, completions.reward >= threshold
    prompt = torch.tensor(completions.prompt)
    prompts = int(prompt.max()) + 1 if len(prompt) else 0

    def count(mask: Tensor) -> Tensor:
        return torch.zeros(prompts).index_add_(0, prompt, mask.float())[prompt]

    keep = ~hinted | (count(plain & right & selectable) == 0)
    solved = (count(plain) > 0) & (count(plain & right) == count(plain))
    return keep & ~solved if skip_solved else keep


def best_of_group(reward: Tensor, group: Sequence[Hashable], *, seed: int, valid: Tensor) -> list[int]:
    """Select the completion of the highest finite reward in each group, ascending; ties are broken at random."""
    chosen = []
    for label, index in _groups(group, torch.isfinite(reward) & valid):
        highest = max(float(reward[i]) for i in index)
        ties = [i for i in index if float(reward[i]) == highest]
        chosen.append(ties[int(_generator(seed, "best", label).integers(len(ties)))])
    return sorted(chosen)


def accepted_completions(
    reward: Tensor,
    group: Sequence[Hashable],
    text: Sequence[str],
    *,
    threshold: float,
    per_group: int | None,
    seed: int,
    valid: Tensor,
) -> list[int]:
    """Rejection sampling: select completions of at least a reward, at most `per_group` of each group, ascending.

    Where more are good enough, chance decides and not the reward: the selection is a sample of the policy's own good
    completions. Distinct completions go before repeats (texts that differ in blanks alone are the same).
    """
    chosen: list[int] = []
    for label, index in _groups(group, (reward >= threshold) & valid):
        order = [index[i] for i in _generator(seed, "accepted", label).permutation(len(index)).tolist()]
        chosen += _distinct_first(order, text)[:per_group]
    return sorted(chosen)


def _distinct_first(index: Sequence[int], text: Sequence[str]) -> list[int]:
    """Sort by repeats: the first of each text, then the second of each, and so on."""
    repeats: dict[str, int] = {}
    turn = {}
    for i in index:
        key = " ".join(text[i].split())
        turn[i] = repeats[key] = repeats.get(key, -1) + 1
    return sorted(index, key=lambda i: turn[i])


def _groups(group: Sequence[Hashable], eligible: Tensor) -> list[tuple[Hashable, list[int]]]:
    groups: dict[Hashable, list[int]] = {}
    for i in eligible.nonzero()[:, 0].tolist():
        groups.setdefault(group[i], []).append(i)
    return [*groups.items()]


def _generator(seed: int, rule: str, label: Hashable) -> np.random.Generator:
    return np.random.default_rng(sample_seed(seed, rule, str(label)))


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
        "distinct_completions": _distinct_texts(completions, groups, scored),
        "distinct_accepted": _distinct_texts(completions, groups, accepted),
        "pass_at_k": {k: float(pass_at_k(scored_count, accepted_count, k).nanmean()) for k in sizes},
        "best_of_n": {
            n: {"reward": float(expected_best_of_k(rewards, n).nanmean()), "kl_bound": float(best_of_n_kl_bound(n))}
            for n in sizes
        },
    }


def _distinct_texts(completions: Completions, groups: Sequence[Sequence[int]], selected: Tensor) -> float:
    texts = [" ".join(text.split()) for text in completions.text]
    counts = [len({texts[i] for i in group if selected[i]}) for group in groups]
    return sum(counts) / len(counts)
