# SPDX-License-Identifier: Apache-2.0
"""Clip_B, Clip_V, STEER and SIREN: worked numbers, exact entropy changes, micro-batches, gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from visalign.core.surrogates.aggregation import aggregate, count_step
from visalign.core.tokens.entropy_terms import (
    anchored_entropy_loss,
    nucleus_entropy,
    nucleus_mask,
    peak_entropy,
    siren_keep,
)
from visalign.core.tokens.selection_rules import clip_v_keep, clip_v_thresholds, discriminator_scores
from visalign.core.tokens.steer import steer_change, steer_thresholds, steer_weights

NAN = float("nan")
INF = float("inf")
WORKED = torch.tensor([0.5, 0.25, 0.15, 0.06, 0.04], dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def entropy_of(logits: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits).entropy()


def test_discriminator_gives_the_exact_entropy_change_of_a_logit_step() -> None:
    logits = random(4, 6)
    change = discriminator_scores(logits).entropy_change()
    p, step = logits.softmax(-1), 1e-6
    for k in range(6):
        direction = torch.nn.functional.one_hot(torch.tensor(k), 6) - p
        exact = (entropy_of(logits + step * direction) - entropy_of(logits - step * direction)) / (2 * step)
        torch.testing.assert_close(change[:, k], exact, rtol=1e-6, atol=1e-9)


def test_clip_v_drops_the_largest_and_never_more_than_allowed() -> None:
    expected = torch.tensor([[3.0, 2.0, 1.0, 5.0, 0.0, -9.0, 2.5, 0.1, 0.1, 0.1]])
    score, weight = torch.zeros_like(expected), torch.ones_like(expected)
    advantage = -torch.ones_like(expected)
    advantage[0, 3] = 1.0

    def dropped(fraction: float, expected: Tensor = expected, mu: float = 0.5) -> list[int]:
        arguments = (score, expected, advantage, weight)
        thresholds = clip_v_thresholds(*arguments, mu=mu, max_fraction=fraction)
        return [i for _, i in (~clip_v_keep(*arguments, thresholds)).nonzero().tolist()]

    std = np.std(expected.numpy())
    assert dropped(1.0) == [i for i, v in enumerate(expected[0]) if v > 0.5 * std and i != 3] == [0, 1, 6]
    assert dropped(0.2) == [0, 6] and dropped(0.29) == [0, 6] and dropped(0.09) == []
    assert dropped(1.0, expected=torch.full_like(expected, 2.0)) == [], "no spread: nothing stands out"
    tie = expected.clone()
    tie[0, 6] = 2.0
    assert dropped(0.2, expected=tie) == [0], "one of two equals would be arbitrary, both would be too many"
    assert dropped(1.0, mu=0.0) == [0, 1, 2, 6, 7, 8, 9]


def test_steer_at_the_edges() -> None:
    change, weight = torch.full((1, 3), 0.4), torch.tensor([[1.0, 1, 0]])
    forms: Any = (("linear", 1.0), ("exponential", 0.8))
    for decay, expected in forms:
        thresholds = steer_thresholds(change, weight)
        weights = steer_weights(change, weight, thresholds, decay=decay)
        assert weights[0].tolist() == pytest.approx([expected, expected, 0.0])
    flat = steer_thresholds(random(2, 3), torch.ones(2, 3), w_min=1.0, w_max=1.0)
    assert (steer_weights(random(2, 3), torch.ones(2, 3), flat) == 1).all()
    small = steer_thresholds(torch.full((1, 2), 1e-4), torch.ones(1, 2))
    assert small.decay.item() == pytest.approx(-math.log(0.8) / 0.02)
    sure, ones = torch.tensor([[0.0, -INF, -1.0, -800.0]]), torch.ones(1, 4)
    extreme = steer_change(sure, torch.tensor([[0.0, -1, -900, 0]]), ones, torch.tensor([1.0]), ones)
    assert extreme.isfinite().all() and extreme[0, :2].abs().sum() == 0
    lost = steer_change(sure, sure[:, [0, 0, 0, 0]], torch.tensor([[NAN, 1, 1, NAN]]), ones[0, :1], weight_last())
    assert lost[0, 0].isnan() and lost[0, 3] == 0
    assert steer_weights(lost, weight_last(), flat)[0, 0].isnan()


def weight_last() -> Tensor:
    return torch.tensor([[1.0, 1, 1, 0]])


def test_nucleus_worked_example() -> None:
    logits = WORKED.log()[[4, 0, 2, 1, 3]]
    assert nucleus_mask(logits, p=0.8).tolist() == [False, True, False, True, False]
    assert nucleus_entropy(logits, p=0.8).item() == pytest.approx(0.636514, abs=1e-6)
    assert nucleus_entropy(logits, p=1.0).item() == pytest.approx(entropy_of(logits).item(), rel=1e-12)
    assert nucleus_entropy(logits, p=0.3) == 0 and nucleus_mask(logits, p=0.0).sum() == 1
    assert nucleus_entropy(logits.half(), p=1.0).dtype == torch.float32


def test_nucleus_entropy_gradient() -> None:
    logits = random(3, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: nucleus_entropy(x, p=0.8), (logits,))
    (gradient,) = torch.autograd.grad(nucleus_entropy(logits, p=0.8).sum(), logits)
    assert (gradient[~nucleus_mask(logits, p=0.8)] == 0).all()
    banned = torch.tensor([0.3, -INF, 0.1, -2.0], dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(nucleus_entropy(banned, p=1.0), banned)
    (short,) = torch.autograd.grad(
        nucleus_entropy(allowed := banned.detach()[[0, 2, 3]].requires_grad_(), p=1.0), allowed
    )
    torch.testing.assert_close(gradient[[0, 2, 3]], short)
    assert gradient[1] == 0


def test_siren_keeps_peaks_of_each_row_and_no_padding() -> None:
    entropy = torch.tensor([[0.1, 0.5, 0.3, 9.0, 9.0], [9.0, 0.2, 0.2, 0.2, 0.7], [NAN] * 5])
    weight = torch.tensor([[1.0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    keep = siren_keep(entropy, weight)
    assert keep.tolist() == [[False, True, False, False, False], [False] * 4 + [True], [False] * 5]
    assert not siren_keep(torch.ones(1, 4), torch.ones(1, 4)).any()
    assert torch.equal(siren_keep(entropy[1:2], weight[1:2]), keep[1:2])


def test_anchored_loss_over_micro_batches_is_the_square_in_value_and_gradient() -> None:
    """H_agg by hand: the mean over completions of the mean over peaks, 0 for a completion without one."""
    logits, weight = random(6, 5, 8), (random(6, 5, seed=1) > -1).double()
    weight[3] = 0
    weight[1, 1:], weight[1, 0] = 0, 1
    full = logits.clone().requires_grad_()
    entropy = nucleus_entropy(full)
    keep = siren_keep(entropy, weight)
    assert not keep[1].any() and int(keep.any(1).sum()) == 4
    by_hand = torch.stack([entropy[i][keep[i]].mean() for i in (0, 2, 4, 5)]).sum() / 5
    square = 0.005 * (by_hand - 0.3) ** 2
    square.backward()
    counts = count_step(weight)
    mode: Any = "seq_mean_token_mean"
    measured = aggregate(peak_entropy(entropy, weight, keep), weight, mode, counts)
    torch.testing.assert_close(measured, by_hand)
    parts = logits.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rows in (slice(0, 1), slice(1, 5), slice(5, 6)):
        peaks = peak_entropy(nucleus_entropy(parts[rows]), weight[rows], keep[rows])
        losses = anchored_entropy_loss(peaks, measured, 0.3)
        share = aggregate(losses, weight[rows], mode, counts)
        share.backward()
        total = total + share.detach()
    torch.testing.assert_close(total, square.detach())
    assert full.grad is not None and parts.grad is not None and full.grad.abs().max() > 1e-5
    torch.testing.assert_close(parts.grad, full.grad)
    assert (parts.grad[~keep] == 0).all()
    at_anchor = anchored_entropy_loss(nucleus_entropy(full), 0.3, 0.3)
    assert (torch.autograd.grad(at_anchor.sum(), full)[0] == 0).all()
    none = peak_entropy(torch.full((1, 3), NAN), torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.bool))
    assert none.tolist() == [[0, 0, 0]]
