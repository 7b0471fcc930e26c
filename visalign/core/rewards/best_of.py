# SPDX-License-Identifier: Apache-2.0
"""What k attempts are worth: pass@k, majority@k, best-of-k, and how far best-of-n moves a policy.

All of it from n ≥ k samples without resampling: the exact mean over all C(n, k) subsets, which is an unbiased
estimate of the expectation over k fresh samples. Ratios of binomials are taken in log space: any n is safe.
What cannot be estimated (fewer than k samples) is NaN, never 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_same
from visalign.core.groups.labels import Labels, group_index
from visalign.core.groups.moments import present_entries

STIRLING_FROM = 16
"""Where the four-term Stirling series is exact to 1e-14."""


def pass_at_k(samples: Tensor | int, correct: Tensor | int, k: Tensor | int) -> Tensor:
    """Probability that at least one of k samples is correct: pass@k = 1 − C(n − c, k)/C(n, k).

    Small probabilities keep their relative precision, and with n − c < k the result is exactly 1. Its mean
    over prompts is the benchmark's pass@k; 1 − (1 − c/n)^k instead is biased low.

    Args:
        samples: n, samples drawn per prompt, any shape.
        correct: c, how many of them are correct, 0 ≤ c ≤ n; shapes are broadcast.
        k: attempts, ≥ 1.

    Returns:
        [*] float64 in [0, 1]; NaN where 1 ≤ k ≤ n or 0 ≤ c ≤ n does not hold.

    Chen et al., Evaluating Large Language Models Trained on Code, arXiv 2107.03374, eq. 1.
    """
    if isinstance(k, int):
        _check_k(k)
    given = (samples, correct, k)
    device = next((item.device for item in given if isinstance(item, Tensor)), None)
    tensors = [item if isinstance(item, Tensor) else torch.tensor(item, device=device) for item in given]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    try:
        n, c, attempts = torch.broadcast_tensors(*tensors)
    except RuntimeError:
        raise ValueError(
            "samples, correct and k must have shapes that broadcast; got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}."
        ) from None
    n, c, attempts = n.double(), c.double(), attempts.double()
    meant = (attempts >= 1) & (attempts <= n) & (c >= 0) & (c <= n)
    return torch.where(meant, 0.0 - torch.expm1(_log_miss(n, c, attempts)), float("nan"))


def expected_best_of_k(reward: Tensor, k: int, *, valid: Tensor | None = None) -> Tensor:
    """Expected largest of k rewards drawn without replacement: Σ_i C(i − 1, k − 1)/C(n, k) R_(i).

    R_(1) ≤ … ≤ R_(n) are the order statistics. With rewards of 0 and 1 this is pass@k. Together with
    `best_of_n_kl_bound` it draws the best-of-n curve that a trained policy has to beat.

    Args:
        reward: [*, n], the samples of one prompt last, any unit; entries that are not finite count as missing
            (pad ragged prompts with NaN).
        k: attempts, ≥ 1.
        valid: bool, the shape of reward; False means missing.

    Returns:
        [*] float64 in the unit of the reward, no gradient; NaN where fewer than k rewards are present.

    David and Nagaraja, Order Statistics; the estimator of pass@k (arXiv 2107.03374) for real-valued rewards.
    """
    _check_k(k)
    if reward.ndim == 0 or not reward.shape[-1]:
        raise ValueError(f"reward must be [*, n] with n ≥ 1 samples last; got shape {tuple(reward.shape)}.")
    present = present_entries(reward, valid)
    values = torch.where(present, reward.detach().double(), float("inf")).sort(-1).values
    n = present.sum(-1, keepdim=True).double()
    rank = torch.arange(1, values.shape[-1] + 1, dtype=torch.float64, device=values.device)
    share = k / n * torch.exp(_log_miss(n - 1, n - rank, torch.full_like(n, k - 1)))
    counted = (rank >= k) & (rank <= n)
    top = values.gather(-1, (n.long() - 1).clamp(min=0))
    below = torch.where(counted, share * (values - top), 0.0).sum(-1)
    return torch.where(n[..., 0] >= k, top[..., 0] + below, float("nan"))


def majority_at_k(counts: Tensor, correct: Tensor, k: int) -> Tensor:
    """Probability that the most frequent answer among k samples is correct; ties are drawn by lot.

    maj@k = mean over all k-subsets of (correct ones among the answers with the most votes)/(answers with the
    most votes), by generating functions: no resampling, no generator, no dependence on the samples' order.
    Giving a tie to the answer that was seen first has the same expectation.

    Memory is P·L·k² numbers, time P·L·k³; pass prompts in slices where that is much.

    Args:
        counts: [*, L] samples per distinct answer of a prompt, 0 for absent ones; see `answer_counts`.
        correct: bool [*, L], which answers are correct; none or several may be.
        k: votes, ≥ 1.

    Returns:
        [*] float64 in [0, 1]; NaN where a prompt has fewer than k samples.

    Wang et al., Self-Consistency, arXiv 2203.11171, for the vote; the exact expectation is our own.
    """
    _check_k(k)
    if counts.ndim == 0 or not counts.shape[-1] or correct.dtype != torch.bool:
        raise ValueError(
            "counts must be [*, L] with L ≥ 1 and correct bool; got counts "
            f"{tuple(counts.shape)} and correct {correct.dtype}."
        )
    check_same(counts=counts, correct=correct)
    size = counts.double()
    n = size.sum(-1)
    odds = torch.where(n >= k, k / (n + 1), 0.5)
    votes = torch.arange(k + 1, dtype=torch.float64, device=counts.device)
    pmf = _binomial(size[..., None], votes, odds[..., None, None])
    wins = torch.stack([_wins(pmf, correct, j) for j in range(1, k + 1)]).sum(0)
    result = wins / _binomial(n, torch.full_like(n, k), odds)
    return torch.where(n >= k, result.clamp(0, 1), float("nan"))


def answer_counts(answer: Labels, group: Labels, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Count the distinct answers of each prompt, for `majority_at_k`.

    Args:
        answer: [B] labels, equal where the answers are the same.
        group: [B] labels of the prompts.
        correct: bool [B].

    Returns:
        (counts [P, L] int64, correct [P, L] bool), prompts numbered as by `group_index`, L the largest number
        of distinct answers of one prompt, unused places 0 and False.

    Raises:
        ValueError: lengths that differ, or one answer of a prompt that is both correct and wrong.
    """
    if correct.ndim != 1 or correct.dtype != torch.bool:
        raise ValueError(f"correct must be bool [B]; got {correct.dtype} {tuple(correct.shape)}.")
    prompt, prompts = group_index(group, correct.shape[0], correct.device)
    label, labels = group_index(answer, correct.shape[0], correct.device)
    pair, place, number = torch.unique(prompt * labels + label, return_inverse=True, return_counts=True)
    owner = pair.div(max(labels, 1), rounding_mode="floor")
    right = torch.zeros_like(number).index_add(0, place, correct.long())
    if ((right > 0) & (right < number)).any():
        raise ValueError(
            "an answer of one prompt is marked both correct and wrong; give answers with different verdicts "
            "different labels."
        )
    start = torch.searchsorted(owner, torch.arange(prompts, device=owner.device))
    slot = torch.arange(owner.shape[0], device=owner.device) - start[owner]
    width = torch.unique(slot).shape[0]
    counts = number.new_zeros(prompts, width).index_put((owner, slot), number)
    return counts, (right > 0).new_zeros(prompts, width).index_put((owner, slot), right > 0)


def best_of_n_kl_bound(n: Tensor | int) -> Tensor:
    """Upper bound on how far best-of-n moves a policy: KL(π_BoN‖π) ≤ log n − (n − 1)/n.

    Often quoted as an equality, which it is only where every single output is improbable. Otherwise the true
    KL can be arbitrarily smaller: it tends to −log π(best output), while the bound grows with log n.
    `best_of_n_kl_estimate` is the tight one there.

    Args:
        n: ≥ 1, any shape.

    Returns:
        Nats, float64; NaN where n < 1.

    Beirami et al., Theoretical guarantees on the best-of-n alignment policy, arXiv 2401.01879, section 3.
    """
    count = torch.as_tensor(n).double()
    return torch.where(count >= 1, count.log() - (count - 1) / count, float("nan"))


def best_of_n_kl_estimate(log_prob: Tensor, n: Tensor | int) -> Tensor:
    """KL(π_BoN‖π) estimated from the probability ε = π(y) of the output y that best-of-n picked.

    (1 − ε)^n [log n + (n − 1) log(1 − ε) − (n − 1)/n] + [1 − (1 − ε)^n] log([1 − (1 − ε)^n]/ε): exact if y is
    the best output there is and all the others are tiny, the bound as ε → 0, and 0 at ε = 1. Average over
    prompts and draws. Not a bound.

    Args:
        log_prob: log π(y) of the whole output, summed over its decisions, any shape, ≤ 0.
        n: ≥ 1, broadcast with log_prob.

    Returns:
        Nats, float64, no gradient.

    Beirami et al., arXiv 2401.01879, section 4.
    """
    log_eps, count = log_prob.detach().double(), torch.as_tensor(n).double()
    log_rest = torch.log1p(-log_eps.exp())
    rest, hit = torch.exp(count * log_rest), -torch.expm1(count * log_rest)
    spread = count.log() + (count - 1) * log_rest - (count - 1) / count
    atom = torch.where(hit > 0, hit * (hit.log() - log_eps), 0.0)
    return torch.where(rest > 0, rest * spread, 0.0) + atom


def _log_miss(n: Tensor, c: Tensor, k: Tensor) -> Tensor:
    """Log of C(n − c, k)/C(n, k), the chance that k of n samples miss all c; −inf when c + k > n.

    Four log-factorials cancel almost entirely for large n. Their Stirling forms x log x are therefore joined
    in closed form before anything is rounded; few leftovers d = n − c − k need no such care.
    """
    a, b, d = n - c, n - k, n - c - k
    exact = (
        torch.lgamma(a + 1) - torch.lgamma(n + 1) + (torch.lgamma(b + 1) - torch.lgamma(d.clamp(min=0) + 1))
    )
    joined = -(n + 0.5) * torch.log1p(-c * k / (a * b)) - c * torch.log1p(k / d) - k * torch.log1p(c / d)
    rest = (_stirling_rest(a) - _stirling_rest(n)) + (_stirling_rest(b) - _stirling_rest(d))
    return torch.where(d < 0, float("-inf"), torch.where(d >= STIRLING_FROM, joined + rest, exact))


def _stirling_rest(x: Tensor) -> Tensor:
    """Log x! − [(x + ½) log x − x + ½ log 2π] for x ≥ 16."""
    inverse = 1 / x.clamp(min=STIRLING_FROM)
    square = inverse.square()
    return inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680)))


def _binomial(size: Tensor, hits: Tensor, odds: Tensor) -> Tensor:
    """C(size, hits) odds^hits (1 − odds)^(size − hits); 0 where hits > size."""
    miss = (size - hits).clamp(min=0)
    choose = torch.lgamma(size + 1) - torch.lgamma(hits + 1) - torch.lgamma(miss + 1)
    return torch.where(hits > size, 0.0, torch.exp(choose + hits * odds.log() + miss * torch.log1p(-odds)))


def _wins(pmf: Tensor, correct: Tensor, j: int) -> Tensor:
    """Weight of all votes with k = Σ votes in which a correct answer wins with j votes, ties by lot; [*].

    One polynomial Σ x^votes y^leaders per answer [*, L, leaders, votes]; the product over answers is taken
    pairwise, together with its part in which one correct leader is marked as the winner.
    """
    k = pmf.shape[-1] - 1
    leaders = k // j
    votes = torch.arange(k + 1, device=pmf.device)
    every = torch.zeros(*pmf.shape[:-1], leaders + 1, k + 1, dtype=pmf.dtype, device=pmf.device)
    every[..., 0, :] = torch.where(votes < j, pmf, 0.0)
    every[..., 1, :] = torch.where(votes == j, pmf, 0.0)
    marked = torch.zeros_like(every)
    marked[..., 1, :] = every[..., 1, :] * correct[..., None]
    grid = (2 * leaders + 1, 2 * k + 1)
    while every.shape[-3] > 1:
        if every.shape[-3] % 2:
            one = torch.zeros_like(every[..., :1, :, :])
            one[..., 0, 0] = 1.0
            every, marked = torch.cat([every, one], -3), torch.cat([marked, torch.zeros_like(one)], -3)
        e, m = (torch.fft.rfft2(part, s=grid) for part in (every, marked))
        e0, e1, m0, m1 = e[..., ::2, :, :], e[..., 1::2, :, :], m[..., ::2, :, :], m[..., 1::2, :, :]
        every, marked = (
            torch.fft.irfft2(part, s=grid)[..., : leaders + 1, : k + 1]
            for part in (e0 * e1, e0 * m1 + m0 * e1)
        )
    shared = torch.arange(1, leaders + 1, dtype=pmf.dtype, device=pmf.device)
    return (marked[..., 0, 1:, k] / shared).sum(-1)


def _check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k must be at least 1 attempt; got {k}.")
