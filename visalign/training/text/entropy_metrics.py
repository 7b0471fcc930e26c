# SPDX-License-Identifier: Apache-2.0
"""Metrics of the entropy mechanism: what drives a token policy's entropy, from numbers that a run has anyway.

Sources: Cui et al., The Entropy Mechanism, arXiv 2505.22617: eq. 5 (entropy), section 3 (covariance), table 1 (its
largest shares); Wu et al., The Invisible Leash, arXiv 2507.14843 (entropy of answers next to that of tokens).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visalign.core import Prepared
from visalign.core.advantages.copo import consistency_entropy
from visalign.core.tokens.entropy import covariance_statistics, token_covariance

SHARES = (0.0002, 0.002, 0.02, 0.2, 0.5)  # Shares of the tokens whose mean covariance is reported, as in table 1


def policy_entropy(total: Tensor, length: Tensor) -> dict[str, float]:
    """Average the entropy over completions of their tokens' mean (eq. 5), and over all tokens alike.

    `total` [B] is Σ_t H_t, `length` [B] the tokens; 0 without any.
    """
    drawn = length > 0
    if not bool(drawn.any()):
        return {"entropy": 0.0, "entropy_token": 0.0}
    per_token = total[drawn].sum() / length[drawn].sum()
    return {"entropy": float((total / length)[drawn].mean()), "entropy_token": float(per_token)}


def answer_entropy(answer: Tensor, group: Sequence[int]) -> dict[str, float]:
    """Average over prompts the entropy of the answers [B] within a group; completions without one share a label."""
    labels = torch.tensor(group)
    entropy = consistency_entropy(answer, labels)
    first = torch.unique(labels, return_inverse=True)[1]
    return {"entropy_answer": float(torch.zeros(int(first.max()) + 1).scatter(0, first, entropy.float()).mean())}


def covariance_metrics(prepared: Sequence[Prepared]) -> dict[str, float]:
    """Measure Cov(log π_old, A) over the tokens of some updates, and the mean of its largest shares."""
    tensors = ("old_log_prob", "advantage", "weight")
    log_prob, advantage, weight = (torch.cat([getattr(p, name) for p in prepared]) for name in tensors)
    statistics = covariance_statistics(log_prob, advantage, weight)
    parts = token_covariance(log_prob, advantage, weight, statistics)[weight != 0].sort(descending=True).values
    if not len(parts):
        return {}
    tops = {f"covariance/top_{100 * share:g}": parts[: max(1, int(share * len(parts)))].mean() for share in SHARES}
    return {name: float(value) for name, value in {"covariance/mean": statistics.covariance, **tops}.items()}


def entropy_drop(entropy: float, memory: dict[str, Any]) -> dict[str, float]:
    """Compare the entropy with that before the last updates: −ΔH, and η Cov, which foresees it (arXiv 2505.22617).

    `memory` is the run's own state, which holds η Cov of the last updates.
    """
    before, foreseen = memory.pop("entropy", None), memory.pop("entropy_drop_foreseen", None)
    if not math.isfinite(entropy):  # a server may report none
        return {}
    memory["entropy"] = entropy
    if before is None or foreseen is None:
        return {}
    return {"entropy_drop": before - entropy, "entropy_drop_foreseen": foreseen}
