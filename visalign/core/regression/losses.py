# SPDX-License-Identifier: Apache-2.0
"""Losses on velocities at noised end points: a regression towards an anchor, tilted by the reward.

Each sample x0 is noised as in pretraining, x_σ = (1 − σ) x0 + σ ε, and u = ε − x0 is the velocity that
leads back to it. Most published losses are, up to terms without gradient,

    w(σ) · mean |v − (v_anchor + γ(σ) · guidance)|²     (Reward Score Matching, arXiv 2604.17415)

| loss | anchor | γ · guidance | w |
|---|---|---|---|
| DiffusionNFT, unweighted | v_old | A/(A_max β) · (u − v_old) | A_max β σ² |
| RAM | v_ref | s A · (u − v) | 1 |
| AWM, V-GRPO at the old policy; reward-weighted, rejection | u | 0 | A w(σ), negative for A < 0 |
| on-policy distillation, at the sampler's states | v_expert | 0 | w(σ) |
| group covariance; with two samples a finite difference | v_old | −s · mean_k A_k (x0_k − mean x0) | 1 |
| FDFO at the old policy, at the states of two branches | v_old | −(x0 − x0_other) / mean (x0 − x0_other)² | A |

Nothing of an anchor or a guidance carries gradient. One number per row [N]; means are over the latent.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from visalign.core.checks import check_choice, check_same
from visalign.core.precision import float32
from visalign.core.surrogates.forms import drpo
from visalign.core.surrogates.ratios import expand_over_event

Weighting = Literal[
    "uniform", "t", "x0", "epsilon", "v", "huber", "ghuber", "adaptive", "min_snr", "cosmap", "sigma_sqrt"
]  # fmt: skip
Mode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]


def matching_loss(v: Tensor, anchor: Tensor, guidance: Tensor, gamma: Tensor, weight: Tensor) -> Tensor:
    """Common form ℓ = w mean |v − sg(v_anchor + γ guidance)|², γ and w [N]; arXiv 2604.17415."""
    target = (anchor + expand_over_event(gamma, v) * guidance).detach()
    return weight * _mean((float32(v) - target).square())


def ram_loss(v: Tensor, v_ref: Tensor, target: Tensor, advantage: Tensor, *, scale: float = 1.0) -> Tensor:
    """Reinforce Adjoint Matching, ℓ = mean |v − sg(v_ref + s A (u − v))|².

    Its fixed point is v − v_ref = s E[A (u − v) | x_σ], the velocity of the reference tilted by e^{sA} but for the
    path cost, which is left out. The paper has the reward itself for A, in [0, 1]; a baseline changes its variance
    alone. s is one over the strength of the KL to the reference. Bergmeister et al., arXiv 2605.10759, eq. 17.
    """
    return matching_loss(v, v_ref, target - v, scale * advantage, torch.ones_like(advantage))


def covariance_guidance(x0: Tensor, advantage: Tensor) -> Tensor:
    """The group's direction of better end points x0 [K, ...], −mean_k A_k (x0_k − mean x0), as a change [...]
    of velocity.

    With two samples and A = ±1 it is half their difference: a finite difference of the reward. Reward Score
    Matching, arXiv 2604.17415, class of group estimates; FDFO, arXiv 2603.12893 (pairs).
    """
    return -(expand_over_event(advantage, x0) * (float32(x0) - float32(x0).mean(0))).mean(0).detach()


def pair_guidance(x0: Tensor, advantage: Tensor) -> Tensor:
    """The change [2, ...] of velocity towards each of two end points x0 [2, ...] from the other, −Δ / mean Δ².

    Times half the difference of their rewards it is the reward's finite difference. FDFO, arXiv 2603.12893.
    """
    difference = float32(x0).detach() - float32(x0).detach().flip(0)
    square = difference.square().mean()
    return -difference / torch.where(square == 0, 1.0, square)


def fdfo_loss(v: Tensor, anchor: Tensor, guidance: Tensor, signal: Tensor, *, epsilon: float = 0.2) -> Tensor:
    """FDFO: SPO's surrogate, −r A + |A| (r − 1)² / (2ε), of log r = mean |g|² − mean |v − v_old − g|².

    g is the `pair_guidance`, A half the difference of the rewards. At the old policy its gradient is that of
    A mean |v − sg(v_old + g)|². McAllister et al., arXiv 2603.12893; ε is SPO's, arXiv 2401.16025.
    """
    moved = float32(v) - anchor.detach()
    return drpo(_mean(2 * moved * guidance - moved.square()), signal, epsilon=epsilon)


def covariance_loss(v: Tensor, anchor: Tensor, guidance: Tensor, *, scale: float = 1.0) -> Tensor:
    """Mean |v − sg(v_anchor + s · covariance)|²; the signal is in the `covariance_guidance` already."""
    return _mean((float32(v) - (anchor + scale * guidance).detach()).square())


def distillation_loss(v: Tensor, anchor: Tensor) -> Tensor:
    """Mean |v − v_expert|², whatever the reward."""
    return _mean((float32(v) - anchor.detach()).square())


def reward_probability(advantage: Tensor, *, bound: float = 5.0, mode: Mode = "all") -> Tensor:
    """DiffusionNFT's optimality probability of a sample, r = clip(1/2 + A/(2 A_max), 0, 1), without gradient.

    Affine while |A| ≤ A_max = `bound`: there, probabilities of combined advantages are combined
    probabilities. Before, "positive_only" and "negative_only" cut A at 0, "one_only" makes it 1 where A > 0,
    "binary" its sign. Zheng et al., DiffusionNFT, arXiv 2509.16117; MARBLE, arXiv 2605.06507 (A_max = 5).
    """
    a = float32(advantage).detach()
    forms = {"all": a, "positive_only": a.clamp(min=0), "negative_only": a.clamp(max=0)}
    forms |= {"one_only": (a > 0).to(a.dtype), "binary": a.sign()}
    check_choice("mode", mode, forms)
    return (0.5 + forms[mode] / (2 * bound)).clamp(0, 1)


def nft_loss(
    v: Tensor,
    v_old: Tensor,
    target: Tensor,
    sigma: Tensor,
    advantage: Tensor,
    *,
    beta: float = 1.0,
    bound: float = 5.0,
    weighted: bool = True,
    mode: Mode = "all",
) -> Tensor:
    """DiffusionNFT: good samples pull the velocity, bad ones push it, by a mirrored implicit policy.

    v± = v_old ± β (v − v_old), x̂± = x_σ − σ v±, r the `reward_probability`: ℓ = A_max [r mean |x̂₊ − x0|²/w₊
    + (1 − r) mean |x̂₋ − x0|²/w₋] / β, w± = max(mean |x̂± − x0|, 1e-5).

    Without the weights (`weighted` False), with e = x̂_old − x0 and d = σ (v − v_old), it is −2 A mean(e d) + A_max β
    mean d² + (A_max/β) mean e²: β is the strength of the pull to v_old alone. Published β is 1, and 0.1 for text in
    images; A beyond ±A_max = `bound` counts as ±A_max. Zheng et al., arXiv 2509.16117, eq. 5 and its code.
    """
    r = reward_probability(advantage, bound=bound, mode=mode)
    e = (expand_over_event(sigma, v) * (target - v_old)).detach()  # x̂_old − x0 = σ (u − v_old)
    d = expand_over_event(sigma, v) * (float32(v) - v_old.detach())
    plus, minus = e - beta * d, e + beta * d
    if weighted:
        w_plus, w_minus = (_mean(error.detach().abs()).clamp(min=1e-5) for error in (plus, minus))
    else:
        w_plus = w_minus = torch.ones_like(r)
    return bound / beta * (r * _mean(plus.square()) / w_plus + (1 - r) * _mean(minus.square()) / w_minus)


def matching_error(
    v: Tensor, target: Tensor, sigma: Tensor, *, weighting: Weighting = "uniform", power: float = 0.25
) -> Tensor:
    """The pretraining loss at one noise level, whose negative stands in for log π(x0).

    With m = mean |v − u|²: uniform m; t σ m; x0 σ² m = mean |x̂0 − x0|²; epsilon (1 − σ)² m = mean |ε̂ − ε|²; v ((1 −
    σ)² + σ²) m, the error of v-prediction; huber σ (√(m + 1e-10) − 1e-5); ghuber, with p = `power`, σ ((m + 1e-10)^p −
    1e-10^p)/p; adaptive mean |x̂0 − x0|² / sg(mean |x̂0 − x0|). AWM, arXiv 2509.25050 (uniform to ghuber, but for
    epsilon and v); V-GRPO, arXiv 2604.23380, eq. 14 (adaptive); Diffusion-DPO, arXiv 2311.12908 (epsilon).
    """
    difference = float32(v) - target.detach()
    m = _mean(difference.square())
    if weighting == "huber":
        return sigma * ((m + 1e-10).sqrt() - 1e-5)
    if weighting == "ghuber":
        return sigma * ((m + 1e-10) ** power - 1e-10**power) / power
    if weighting == "adaptive":
        return sigma * m / _mean(difference.detach().abs()).clamp(min=1e-5)
    check_choice("weighting", weighting, get_args(Weighting))
    return level_weight(sigma, weighting) * m


def level_weight(sigma: Tensor, weighting: Weighting, *, gamma: float = 5.0) -> Tensor:
    """w(σ) by which mean |v − u|² is the error of another prediction, as in `matching_error`: uniform 1; t σ;
    x0 σ²; epsilon (1 − σ)², as ε̂ = x_σ + (1 − σ) v; v (1 − σ)² + σ².

    min_snr is min((1 − σ)², γσ²), whatever the network predicts: the error of ε times min(snr, γ)/snr, that of v times
    min(snr, γ)/(snr + 1), snr = ((1 − σ)/σ)²; Hang et al., arXiv 2303.09556. cosmap is 2/(π(1 − 2σ + 2σ²)), Esser et
    al., SD3, arXiv 2403.03206, section 3.1; sigma_sqrt, so called in diffusers' scripts, σ⁻².
    """
    factors = {"uniform": torch.ones_like(sigma), "t": sigma, "x0": sigma**2, "epsilon": (1 - sigma) ** 2}
    factors["v"] = factors["epsilon"] + factors["x0"]
    factors["min_snr"] = torch.minimum(factors["epsilon"], gamma * factors["x0"])
    factors |= {"cosmap": 2 / (torch.pi * factors["v"]), "sigma_sqrt": sigma**-2}
    check_choice("weighting", weighting, factors)
    return factors[weighting]


def preference_loss(
    error: Tensor, anchor_error: Tensor, *, beta: float = 2000.0, label: Tensor | None = None
) -> Tensor:
    """Diffusion-DPO, ℓ = −ln σ(m), m = −β/2 [(e_w − e_w^ref) − (e_l − e_l^ref)], e a `matching_error`.

    Errors are [*, 2] of the better and the worse sample, noised to one level, by one noise where the estimate
    is to be steady; β = 2000 is for the mean over the latent. With a label p [*], the share of votes for the
    first sample, both directions count, ℓ = −p ln σ(m) − (1 − p) ln σ(−m), as in conservative DPO of texts.
    Wallace et al., arXiv 2311.12908, eq. 14; online: pairs of the best and the worst of a group.
    """
    check_same(error=error, anchor_error=anchor_error)
    better, worse = (float32(error) - anchor_error.detach()).unbind(-1)
    lost = beta / 2 * (better - worse)
    # −ln σ(m) = softplus(−m), and −ln σ(−m) is that + m
    return softplus(lost) if label is None else softplus(lost) - (1 - label) * lost


def error_log_ratio(error: Tensor, anchor_error: Tensor) -> Tensor:
    """log r = −(e − e_old), as if −e were log π(x0)."""
    return anchor_error.detach() - error


def weighted_error(error: Tensor, signal: Tensor) -> Tensor:
    """Error times the sample's weight."""
    return signal * error


def pair_preference_loss(
    error: Tensor, anchor_error: Tensor, signal: Tensor, *, soft: bool = False, beta: float = 2000.0
) -> Tensor:
    """`preference_loss` of two samples [2], the better first; `soft` takes the signal as the label."""
    return preference_loss(error, anchor_error, label=signal[0] if soft else None, beta=beta)


def crd_loss(
    error: Tensor,
    anchor_error: Tensor,
    advantage: Tensor,
    *,
    bound: float = 5.0,
    beta: float = 1.0,
    temperature: float | None = None,
    form: Literal["mse", "bce"] = "mse",
) -> Tensor:
    """Centred Reward Distillation of the samples [K] of one prompt: the policy's implicit reward matches the
    real one, each less its mean.

    With ρ = −(e − e_old) and R = `reward_probability` of the advantage both centred in the group, the loss is
    A_max mean (β ρ − R)² / β, a number, or the cross-entropy of σ(β ρ) with σ(R). A temperature T takes the
    centres twice, over softmax(R/T) and softmax(−R/T), and averages the two losses. The centre of ρ carries
    no gradient. arXiv 2603.14128; R and the factor A_max = `bound` are of a public implementation.
    """
    check_choice("form", form, ("mse", "bce"))
    implied = anchor_error.detach() - float32(error)
    reward = reward_probability(advantage, bound=bound).to(implied.dtype)
    losses = []
    for sign in (0.0,) if temperature is None else (1 / temperature, -1 / temperature):
        share = (reward * sign).softmax(0)
        actual = beta * (implied - (share * implied).sum().detach())
        target = reward - (share * reward).sum()
        squared = (actual - target).square()
        if form == "bce":
            squared = binary_cross_entropy_with_logits(actual, target.sigmoid(), reduction="none")
        losses.append(squared.mean() / beta)
    return bound * torch.stack(losses).mean()


def _mean(value: Tensor) -> Tensor:
    """[N, ...] -> [N]."""
    return float32(value).flatten(1).mean(1)
