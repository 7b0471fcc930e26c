# SPDX-License-Identifier: Apache-2.0
"""Value of k attempts: pass@k, best-of-k, and how far best-of-n moves a policy.

All from n ≥ k samples without resampling: the exact mean over all C(n, k) subsets, an unbiased estimate of
the expectation over k fresh samples. Ratios of binomials are taken in log space: any n is safe. Results are
float64; NaN, never 0, where fewer than k samples are present.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from visalign.core.groups.moments import present_entries

Filtration = Literal["pow", "max_min", "max_random"]
STIRLING_FROM = 16  # Where the four-term Stirling series is exact to 1e-14


def pass_at_k(samples: Tensor | int, correct: Tensor | int, k: Tensor | int) -> Tensor:
    """Estimate the probability that at least one of k samples is correct: pass@k = 1 − C(n − c, k)/C(n, k).

    `samples` n, `correct` c and k broadcast. Small probabilities keep their relative precision, and with n −
    c < k the result is exactly 1. Its mean over prompts is the benchmark's pass@k; 1 − (1 − c/n)^k instead is
    biased low. NaN unless 1 ≤ k ≤ n and 0 ≤ c ≤ n. Chen et al., Evaluating Large Language Models Trained on
    Code, arXiv 2107.03374, eq. 1.
    """
    device = next((item.device for item in (samples, correct, k) if isinstance(item, Tensor)), None)
    n, c, attempts = torch.broadcast_tensors(
        *(torch.as_tensor(item, dtype=torch.float64, device=device) for item in (samples, correct, k))
    )
    defined = (attempts >= 1) & (attempts <= n) & (c >= 0) & (c <= n)
    return torch.where(defined, 0.0 - torch.expm1(_log_miss(n, c, attempts)), float("nan"))


def expected_best_of_k(reward: Tensor, k: int, *, valid: Tensor | None = None) -> Tensor:
    """Estimate the largest of k rewards drawn without replacement: Σ_i C(i − 1, k − 1)/C(n, k) R_(i).

    R_(1) ≤ … ≤ R_(n) are the order statistics of the rewards [*, n] of one prompt; missing ones pad ragged
    prompts. With rewards of 0 and 1 this is pass@k. Together with `best_of_n_kl_bound` it draws the best-of-n
    curve that a trained policy has to beat. David and Nagaraja, Order Statistics; the estimator of pass@k
    (arXiv 2107.03374) for real-valued rewards.
    """
    if k < 1 or reward.ndim == 0 or not reward.shape[-1]:
        raise ValueError(f"k must be ≥ 1 and reward [*, n] with n ≥ 1; got {k} and {tuple(reward.shape)}.")
    present = present_entries(reward, valid)
    values = torch.where(present, reward.detach().double(), float("inf")).sort(-1).values
    n = present.sum(-1, keepdim=True).double()
    rank = torch.arange(1, values.shape[-1] + 1, dtype=torch.float64, device=values.device)
    share = k / n * torch.exp(_log_miss(n - 1, n - rank, torch.full_like(n, k - 1)))
    counted = (rank >= k) & (rank <= n)
    top = values.gather(-1, (n.long() - 1).clamp(min=0))
    below = torch.where(counted, share * (values - top), 0.0).sum(-1)
    return torch.where(n[..., 0] >= k, top[..., 0] + below, float("nan"))


def best_response_reward(scores: Tensor, rewards: Tensor) -> Tensor:
    """Reward a judge's scores [*, n] of n responses: 1 if the best one alone has the highest score, else −1.

    r̂ = 1 where S_j > S_i for all i ≠ j, with j = argmax of the true `rewards` [*, n]. The score of a single response
    (n = 1) must equal its true reward. A missing score (NaN, an unreadable answer) gives −1. Rule-based reward of
    SPCT, DeepSeek-GRM, arXiv 2504.02495, section 3.2.
    """
    if scores.shape != rewards.shape or scores.ndim == 0 or not scores.shape[-1]:
        shapes = f"{tuple(scores.shape)} and {tuple(rewards.shape)}"
        raise ValueError(f"scores and rewards are both [*, n] with n ≥ 1; got {shapes}.")
    if scores.shape[-1] == 1:
        right = (scores == rewards)[..., 0]
    else:
        best = rewards.argmax(-1, keepdim=True)
        right = (scores.gather(-1, best) > scores.scatter(-1, best, -torch.inf)).all(-1)
    return torch.where(right, 1.0, -1.0)


def best_of_n_kl_bound(n: Tensor | int) -> Tensor:
    """Bound how far best-of-n moves a policy: KL(π_BoN‖π) ≤ log n − (n − 1)/n, in nats.

    Often quoted as an equality, which it is only where every single output is improbable. Otherwise the true
    KL can be arbitrarily smaller: it tends to −log π(best output), while the bound grows with log n.
    `best_of_n_kl_estimate` is the tight one there. Beirami et al., Theoretical guarantees on the best-of-n
    alignment policy, arXiv 2401.01879, section 3.
    """
    count = torch.as_tensor(n).double()
    return torch.where(count >= 1, count.log() - (count - 1) / count, float("nan"))


def best_of_n_kl_estimate(log_prob: Tensor, n: Tensor | int) -> Tensor:
    """Estimate KL(π_BoN‖π) in nats from the probability ε = π(y) of the output y that best-of-n picked.

    (1 − ε)^n [log n + (n − 1) log(1 − ε) − (n − 1)/n] + [1 − (1 − ε)^n] log([1 − (1 − ε)^n]/ε): exact if y is
    the best output there is and all the others are tiny, the bound as ε → 0, and 0 at ε = 1. `log_prob` is
    summed over the decisions of the whole output. Average over prompts and draws. Not a bound. Beirami et
    al., arXiv 2401.01879, section 4.
    """
    log_eps, count = log_prob.detach().double(), torch.as_tensor(n).double()
    log_rest = torch.log1p(-log_eps.exp())
    rest, hit = torch.exp(count * log_rest), -torch.expm1(count * log_rest)
    spread = count.log() + (count - 1) * log_rest - (count - 1) / count
    atom = torch.where(hit > 0, hit * (hit.log() - log_eps), 0.0)
    return torch.where(rest > 0, rest * spread, 0.0) + atom


def _log_miss(n: Tensor, c: Tensor, k: Tensor) -> Tensor:
    """Compute log of C(n − c, k)/C(n, k), the chance that k of n samples miss all c; −inf when c + k > n.

    Four log-factorials cancel almost entirely for large n. Their Stirling forms x log x are therefore joined
    in closed form before anything is rounded; few leftovers d = n − c − k need no such care.
    """
    a, b, d = n - c, n - k, n - c - k
    exact = torch.lgamma(a + 1) - torch.lgamma(n + 1) + (torch.lgamma(b + 1) - torch.lgamma(d.clamp(min=0) + 1))
    joined = -(n + 0.5) * torch.log1p(-c * k / (a * b)) - c * torch.log1p(k / d) - k * torch.log1p(c / d)
    rest = (_stirling_rest(a) - _stirling_rest(n)) + (_stirling_rest(b) - _stirling_rest(d))
    return torch.where(d < 0, float("-inf"), torch.where(d >= STIRLING_FROM, joined + rest, exact))


def _stirling_rest(x: Tensor) -> Tensor:
    """Compute log x! − [(x + ½) log x − x + ½ log 2π] for x ≥ 16."""
    inverse = 1 / x.clamp(min=STIRLING_FROM)
    square = inverse.square()
    return inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680)))


def filtration_weights(reward: Tensor, *, method: Filtration = "pow", power: float = 2.0) -> Tensor:
    """Weigh the samples of an iteration for a draw with replacement, by rewards [B]; 0 where one is missing.

    pow: |R|^p; max_min: 1 at the largest and the smallest reward, else 0; max_random: 0.4 at the largest, else 0.1;
    each plus 1e-8. PF-PPO, arXiv 2409.06957, as verl has it: the paper filters the answers to each prompt by rank.
    """
    present, value = torch.isfinite(reward), reward.detach().double().nan_to_num()
    largest = value == torch.where(present, value, -torch.inf).max()
    smallest = value == torch.where(present, value, torch.inf).min()
    weights = {
        "pow": value.abs() ** power,
        "max_min": (largest | smallest).double(),
        "max_random": torch.where(largest, 0.4, 0.1).double(),
    }
    return torch.where(present, weights[method] + 1e-8, 0.0)
