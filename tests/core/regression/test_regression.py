# SPDX-License-Identifier: Apache-2.0
"""Regressions of velocities: hand values, identities, gradients, what the rows make of rewards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import softplus

from tests.support.core import assert_values, f64, normal
from visalign.core.regression.groupwise import dgpo_loss
from visalign.core.regression.losses import (
    covariance_guidance,
    crd_loss,
    matching_error,
    matching_loss,
    nft_loss,
    pair_guidance,
    preference_loss,
    ram_loss,
    reward_probability,
)
from visalign.core.regression.rows import REGRESSIONS, PairOutput, named_regression
from visalign.core.regression.signals import best_share, best_worst_pairs, soft_clip, tilted_weights
from visalign.flow.parametrization import flow_sigma, preserving_scale, velocity_of_prediction

NAN = float("nan")
V, OLD, TARGET = normal(5, 2, 3), normal(5, 2, 3, seed=1), normal(5, 2, 3, seed=2)
SIGMA, A = f64(0.1, 0.4, 0.6, 0.9, 1.0), f64(2, -1, 0, 7, -0.5)


def _gradient(loss: Any, v: torch.Tensor = V) -> torch.Tensor:
    leaf = v.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf).sum(), leaf)[0]


def test_hand_values() -> None:
    v, old, u = (f64(x)[None] for x in (1.0, 0.5, 2.0))
    s = f64(0.5)
    assert_values(ram_loss(v, old, u, f64(0.2)), (1 - (0.5 + 0.2 * (2 - 1))) ** 2)
    for name, value in {"epsilon": 0.25, "v": 0.5, "adaptive": 0.5}.items():
        assert_values(matching_error(v, u, s, weighting=name), value)  # type: ignore[arg-type]
    error, ref = f64(0.3, 0.7)[None], f64(0.4, 0.5)[None]
    soft = preference_loss(error, ref, beta=2, label=f64(0.75))
    assert_values(soft, 0.75 * math.log1p(math.exp(-0.3)) + 0.25 * math.log1p(math.exp(0.3)))
    # ρ = (.1, −.2) and R centred: (.15, −.15), (.5, −.5)
    assert_values(crd_loss(error[0], ref[0], f64(5, -5), beta=2).reshape(1), 5 * (0.3 - 0.5) ** 2 / 2)
    assert_values(covariance_guidance(f64(3, 1)[:, None], f64(1, -1)), -1)


def test_dgpo_has_a_beta_th_of_the_gradient_of_its_group_preference() -> None:
    error, ref, beta = f64(0.2, 0.5, 0.4), f64(0.3, 0.4, 0.4), 100.0
    signal = f64(1.2, -1.0, -0.2)
    ours = _gradient(lambda e: dgpo_loss(e, ref, signal, beta=beta), error)
    paper = _gradient(lambda e: softplus(beta * (signal * (e - ref)).mean()), error)
    torch.testing.assert_close(beta * ours, paper)
    old = f64(0.3, 0.5, 0.4)  # the first has gained, e^0.1; the others stand
    clipped = _gradient(lambda e: dgpo_loss(e, ref, signal, old, beta=beta, eps_low=0.05, eps_high=0.05), error)
    assert_values(clipped, 0.0, *ours[1:].tolist())
    assert named_regression("dgpo", loss_options={"eps_high": 0.1}).asks_old and not REGRESSIONS["dgpo"].asks_old


def test_fdfo_moves_both_branches_along_the_finite_difference_of_the_reward() -> None:
    ends, old = normal(2, 3, seed=3), normal(2, 3, seed=4)
    slope, delta = f64(1, -2, 0.5), ends[0] - ends[1]
    row = named_regression("fdfo")
    signal, _ = row.prepare(ends @ slope, [0, 0])
    assert_values(signal, *((ends @ slope) - (ends @ slope).mean()).tolist())
    guidance = pair_guidance(ends, signal)

    def loss(v: torch.Tensor) -> torch.Tensor:
        pairs = PairOutput(v=v, target=torch.zeros_like(v), sigma=f64(0.5, 0.5), anchor=old, guidance=guidance)
        return row.pair_loss(pairs, signal)

    # x0 = x − σ v goes along −∇v: of each branch the projection of the slope on Δ, 2/D · D · ½ of it
    torch.testing.assert_close(_gradient(loss, old), (delta @ slope / delta.square().sum() * delta).expand(2, 3))
    assert not pair_guidance(torch.ones(2, 3), signal).any()
    assert not named_regression("fdfo").pulls
    with pytest.raises(ValueError, match=r"visited=True learns at .* or always 'fdfo'"):
        named_regression("fdfo", visited=False)


def test_reward_probability_is_affine_inside_its_bound() -> None:
    assert_values(reward_probability(f64(-9, -5, 0, 2.4, 5, 9, NAN)), 0, 0, 0.5, 0.74, 1, 1, NAN)
    assert reward_probability(torch.tensor([1.0]).half(), bound=2).item() == 0.75


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_unweighted_nft_is_the_common_form_and_an_advantage_weighted_step(beta: float) -> None:
    bound, clipped = 5.0, A.clamp(-5, 5)
    e = SIGMA[:, None, None] * (TARGET - OLD)
    d = SIGMA[:, None, None] * (V - OLD)
    products = torch.stack([-2 * e * d, bound * beta * d**2 + bound / beta * e**2]).flatten(2).mean(2)
    closed = clipped * products[0] + products[1]
    loss = nft_loss(V, OLD, TARGET, SIGMA, A, beta=beta, weighted=False)
    torch.testing.assert_close(loss, closed, rtol=1e-12, atol=1e-13)
    gamma, weight = clipped / (bound * beta), bound * beta * SIGMA**2
    torch.testing.assert_close(
        _gradient(lambda v: nft_loss(v, OLD, TARGET, SIGMA, A, beta=beta, weighted=False)),
        _gradient(lambda v: matching_loss(v, OLD, TARGET - OLD, gamma, weight)),
        rtol=1e-12,
        atol=1e-13,
    )


def test_at_the_old_policy_the_forms_agree() -> None:
    """NFT's gradient there is AWM's with w = σ² and RAM's with the old policy as anchor, up to the scale."""
    nft = _gradient(lambda v: nft_loss(v, V, TARGET, SIGMA, A.clamp(-5, 5), weighted=False))
    torch.testing.assert_close(
        nft, _gradient(lambda v: A.clamp(-5, 5) * matching_error(v, TARGET, SIGMA, weighting="x0"))
    )
    ram = _gradient(lambda v: ram_loss(v, V, TARGET, A.clamp(-5, 5)))
    torch.testing.assert_close(SIGMA[:, None, None] ** 2 * ram, nft)


def test_the_prediction_weights_are_the_errors_of_those_predictions() -> None:
    x0, noise, s = normal(5, 2, 3, seed=5), normal(5, 2, 3, seed=6), SIGMA[:, None, None]
    x, u = (1 - s) * x0 + s * noise, noise - x0
    root = torch.hypot(1 - s, s)
    errors = {"x0": x - s * V - x0, "epsilon": x + (1 - s) * V - noise}
    # the v of arXiv 2202.00512 on the preserving path, α ε − s x0, of the predicted and the real noise and x0
    errors["v"] = ((1 - s) * errors["epsilon"] - s * errors["x0"]) / root
    for name, error in errors.items():
        ours = matching_error(V, u, SIGMA, weighting=name)  # type: ignore[arg-type]
        torch.testing.assert_close(ours, error.square().flatten(1).mean(1))


def test_a_network_that_predicts_noise_learns_its_own_form() -> None:
    """On a preserving path by its alphas: RAM's target is in ε̂, DiffusionNFT's in x̂0 = (x_t − s ε̂)/α."""
    alphas_cumprod = f64(0.99, 0.7, 0.4, 0.1, 0.005)
    alpha, s = alphas_cumprod.sqrt()[:, None, None], (1 - alphas_cumprod).sqrt()[:, None, None]
    x0, noise, predicted, other = (normal(5, 2, 3, seed=k) for k in range(4))
    x_t = alpha * x0 + s * noise
    sigma = flow_sigma(alphas_cumprod)
    x = x_t * preserving_scale(sigma)[:, None, None]
    v, anchor = (velocity_of_prediction(e, x, sigma, "epsilon") for e in (predicted, other))
    pairs = PairOutput(v=v, target=noise - x0, sigma=sigma, anchor=anchor)
    a = f64(1, -2, 0.5, 0, 3)
    ram = named_regression("ram", weighting="epsilon", loss_options={"scale": 0.3})
    target = other + 0.3 * a[:, None, None] * (noise - predicted)
    torch.testing.assert_close(ram.pair_loss(pairs, a), (predicted - target).square().flatten(1).mean(1))
    nft = named_regression("diffusion_nft_closed", loss_options={"beta": 0.4})
    r, expected = 0.5 + a / 10, torch.zeros(5).double()
    for share, sign in ((r, 1), (1 - r, -1)):
        clean = (x_t - s * (other + sign * 0.4 * (predicted - other))) / alpha
        expected += 5 / 0.4 * share * (clean - x0).square().flatten(1).mean(1)
    torch.testing.assert_close(nft.pair_loss(pairs, a), expected)


def test_crd_is_still_where_the_implicit_reward_is_the_real_one() -> None:
    reward, old = f64(0.2, 0.9, 0.4), f64(1, 1, 1)
    advantage = 10 * (reward - 0.5)
    error = (old - reward / 2).requires_grad_()
    for temperature in (None, 0.5):
        (gradient,) = torch.autograd.grad(crd_loss(error, old, advantage, beta=2, temperature=temperature), error)
        assert gradient.abs().max() < 1e-12
    bce = crd_loss(error, old, advantage, beta=2, form="bce")
    assert torch.autograd.grad(bce, error)[0].abs().max() < 5e-3


@pytest.mark.parametrize(
    "loss",
    [
        lambda v: nft_loss(v, OLD, TARGET, SIGMA, A, weighted=False),
        lambda v: matching_loss(v, OLD, TARGET, A, SIGMA),
        lambda v: matching_error(v, TARGET, SIGMA, weighting="ghuber"),
        lambda v: preference_loss(matching_error(v, TARGET, SIGMA)[None, :2], f64(1, 2)[None], beta=0.5),
    ],
)
def test_gradients_are_those_of_finite_differences(loss: Any) -> None:
    assert torch.autograd.gradcheck(loss, (V.clone().requires_grad_(),))


def test_nothing_of_an_anchor_or_a_signal_carries_gradient() -> None:
    leaves = [t.clone().requires_grad_() for t in (OLD, TARGET, A)]
    old, u, a = leaves
    v = V.clone().requires_grad_()
    for loss in (nft_loss(v, old, u, SIGMA, a), ram_loss(v, old, u, a.detach())):
        (gradient, *rest) = torch.autograd.grad(loss.sum(), [v, old, u], allow_unused=True)
        assert gradient.abs().sum() > 0 and rest == [None, None]


REWARD, GROUP = f64(1, 0, 1, NAN, 2, 2, 5, 3), [0, 0, 0, 0, 1, 1, 2, 2]


def test_signals() -> None:
    assert_values(best_share(REWARD, GROUP, share=0.5), 1, 0, 1, 0, 0, 0, 1, 0)
    assert_values(best_share(f64(1, 2, 3, 4), [0] * 4, share=0.75), 0, 1, 1, 1)
    assert best_share(torch.arange(25.0), [0] * 25, share=0.28).sum() == 7, "0.28 · 25 is above 7 in floats"
    assert_values(tilted_weights(f64(1, 2, 3, 4), [0] * 4, temperature=1e-3), 0, 0, 0, 4)  # e^1342 is infinite
    weight = tilted_weights(REWARD, GROUP, temperature=0.5)
    assert_values(weight[3:6], 0, 0, 0)
    assert weight[:3].sum() == pytest.approx(3) and weight[6] / weight[7] == pytest.approx(math.exp(4), rel=1e-3)
    assert best_worst_pairs(REWARD, GROUP).tolist() == [[0, 1], [6, 7]]
    assert best_worst_pairs(f64(1, 1), [0, 0]).shape == (0, 2)
    assert_values(soft_clip(f64(0, 3, -300), 3), 0, 3 * math.tanh(1), -3)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_missing_rewards_and_equal_groups_say_nothing(name: str) -> None:
    row = REGRESSIONS[name]
    signal, present = row.prepare(REWARD, GROUP, valid=torch.tensor([True] * 7 + [False]))
    assert present.tolist() == [True] * 3 + [False] + [True] * 3 + [False]
    assert not signal[~present].any() and bool(signal[:3].any())
    if row.signal != "reward":
        assert not signal[4:6].any()


def test_a_row_with_changes() -> None:
    row = named_regression("diffusion_nft", loss_options={"beta": 0.1}, old_decay=[75, 0.0075, 0.999])
    assert row.loss_options == {"beta": 0.1, "bound": 5.0, "weighted": True}
    assert row.old_decay == (75, 0.0075, 0.999) and row.level_count(10) == 9
    other = named_regression("diffusion_nft", signal="best", signal_options={"share": 0.5})
    assert other.signal_options == {"share": 0.5}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("difusion_nft", {}, "no regression 'difusion_nft'. Did you mean 'diffusion_nft'"),
        ("awm", {"loss_options": {"beta": 1}}, "regression loss 'elbo' has no option 'beta'"),
        ("awm", {"weighting": "predicton"}, r"sigma_sqrt, prediction; got 'predicton' .*Did you mean 'prediction'"),
        ("awm", {"level_range": 0.5}, "level_range must be a list; got 0.5"),
        ("awm", {"anchor": "reference"}, "anchor of loss='elbo' must be one of old; got 'reference'"),
        ("diffusion_nft", {"weighting": "epsilon"}, "loss='nft' has a weight of its own"),
        ("awm", {"reference_guidance": 2.0}, "nothing leans on the reference. Set kl"),
        ("diffusion_nft", {"old_decay": [0, 0.1, 1.0]}, r"give \[start, slope, end\]"),
        ("gdro", {"noise": "start"}, "noise='start' gives each its own"),
        ("opd", {"levels": 2}, "visited=True learns at the sampler's own states"),
    ],
)
def test_bad_rows_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named_regression(name, **changes)
