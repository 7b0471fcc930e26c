# SPDX-License-Identifier: Apache-2.0
"""Token selection in two phases: top entropy, Clip-Cov, KL-Cov; micro-batches equal the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from visalign.core.surrogates.ppo import ppo_clip
from visalign.core.tokens.selection import (
    clip_cov_keep,
    clip_cov_thresholds,
    kl_cov_penalty,
    kl_cov_select,
    kl_cov_thresholds,
    top_entropy_keep,
    top_entropy_thresholds,
)
from visalign.core.tokens.statistics import ppo_clipped

NAN = float("nan")
INF = float("inf")


def batch(rows: int = 6, length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """A batch with holes and left padding, NaN wherever nothing is present."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(rows, length, generator=generator, dtype=torch.float64)

    weight = (draw() > -1).double()
    weight[0, :3] = 0
    weight[-1] = 0
    values = {
        "log_prob": -draw().abs() - 0.1,
        "advantage": draw()[:, :1] * draw().abs(),
        "noise": torch.rand(rows, length, generator=generator, dtype=torch.float64),
        "entropy": draw().abs(),
    }
    return {name: torch.where(weight != 0, value, NAN) for name, value in values.items()} | {"weight": weight}


def reference_covariance(b: dict[str, Tensor]) -> np.ndarray:
    """Plain loops and numpy means; NaN where absent."""
    inside = b["weight"].numpy() > 0
    log_prob, advantage = b["log_prob"].numpy(), b["advantage"].numpy()
    mean_lp, mean_a = log_prob[inside].mean(), advantage[inside].mean()
    return np.where(inside, (advantage - mean_a) * (log_prob - mean_lp), np.nan)


def test_clip_cov_draws_the_smallest_noise_inside_the_band() -> None:
    b = batch(8, 10, seed=1)
    covariance = reference_covariance(b)
    arguments = (b["log_prob"], b["advantage"], b["weight"], b["noise"])
    thresholds = clip_cov_thresholds(*arguments, ratio=0.05, cov_low=0.1, cov_high=2.0)
    keep = clip_cov_keep(*arguments, thresholds)
    band = [(b["noise"][i, t].item(), i, t) for i, t in np.argwhere((covariance >= 0.1) & (covariance <= 2.0))]
    number = int(0.05 * b["weight"].sum().item())
    assert 1 < number < len(band)
    expected = b["weight"] != 0
    for _, row, column in sorted(band)[:number]:
        expected[row, column] = False
    assert torch.equal(keep, expected)


def test_clip_cov_takes_the_whole_band_when_it_is_small_and_nothing_at_ratio_zero() -> None:
    b = batch(8, 10, seed=1)
    covariance = reference_covariance(b)
    arguments = (b["log_prob"], b["advantage"], b["weight"], b["noise"])
    everything = clip_cov_thresholds(*arguments, ratio=1.0, cov_low=0.5, cov_high=5.0)
    dropped = (b["weight"].numpy() > 0) & ~clip_cov_keep(*arguments, everything).numpy()
    assert (dropped == ((covariance >= 0.5) & (covariance <= 5))).all() and dropped.any()
    nothing = clip_cov_thresholds(*arguments, ratio=0.0, cov_low=0.5)
    assert torch.equal(clip_cov_keep(*arguments, nothing), b["weight"] != 0)
    single = clip_cov_thresholds(*arguments, ratio=1e-9, cov_low=0.5)
    assert (b["weight"] != 0).sum() - clip_cov_keep(*arguments, single).sum() == 1


def test_what_ppo_has_clipped_can_be_left_out_of_the_draw() -> None:
    b = batch(8, 10, seed=4)
    old = b["log_prob"] + 0.3 * torch.randn(8, 10, generator=torch.Generator().manual_seed(1))
    new = b["log_prob"].clone().requires_grad_()
    bounds: Any = {"eps_low": 0.2, "eps_high": 0.2}
    clipped = ppo_clipped(new - old, b["advantage"], **bounds)
    losses = torch.where(b["weight"] != 0, ppo_clip(new - old, b["advantage"], **bounds), 0.0)
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    assert torch.equal(clipped, (gradient == 0) & (b["weight"] != 0)) and clipped.any()
    arguments = (b["log_prob"], b["advantage"], b["weight"], b["noise"])
    thresholds = clip_cov_thresholds(*arguments, ratio=1.0, cov_low=-INF, excluded=clipped)
    keep = clip_cov_keep(*arguments, thresholds, excluded=clipped)
    within = torch.tensor(reference_covariance(b) > 5)
    assert torch.equal(keep, (clipped | within) & (b["weight"] != 0))
    noise = torch.where(clipped, -1.0, b["noise"])  # would be drawn first if included
    arguments = (*arguments[:3], noise)
    thresholds = clip_cov_thresholds(*arguments, ratio=0.1, cov_low=-INF, excluded=clipped)
    dropped = (b["weight"] != 0) & ~clip_cov_keep(*arguments, thresholds, excluded=clipped)
    assert dropped.sum() == int(0.1 * b["weight"].sum()) and not (dropped & clipped).any()


def test_kl_cov_selects_the_top_and_penalises_only_there() -> None:
    b = batch(8, 10, seed=5)
    thresholds = kl_cov_thresholds(b["log_prob"], b["advantage"], b["weight"], ratio=0.1)
    selected = kl_cov_select(b["log_prob"], b["advantage"], b["weight"], thresholds)
    covariance = np.nan_to_num(reference_covariance(b), nan=-np.inf)
    number = int(0.1 * b["weight"].sum().item())
    expected = np.zeros(80, dtype=bool)
    expected[np.argsort(-covariance.ravel())[:number]] = True
    assert (selected.numpy().ravel() == expected).all() and number > 1
    nothing = kl_cov_thresholds(b["log_prob"], b["advantage"], b["weight"], ratio=0.0)
    assert not kl_cov_select(b["log_prob"], b["advantage"], b["weight"], nothing).any()
    absent = torch.zeros_like(b["weight"])
    empty = kl_cov_thresholds(b["log_prob"], b["advantage"], absent)
    assert not kl_cov_select(b["log_prob"], b["advantage"], absent, empty).any()
    log_r = torch.where(selected, 0.4, NAN).requires_grad_()
    penalty = kl_cov_penalty(log_r, selected, coefficient=2.0)
    (gradient,) = torch.autograd.grad(penalty.sum(), log_r)
    torch.testing.assert_close(penalty, 2 * 0.4 * selected.float())
    torch.testing.assert_close(gradient, 2 * selected.float())
    on_policy = torch.zeros(1).requires_grad_()  # no gradient at r = 1
    assert torch.autograd.grad(kl_cov_penalty(on_policy, torch.ones(1)).sum(), on_policy)[0] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_micro_batches_and_devices_equal_the_whole(dtype: torch.dtype) -> None:
    full_batch = batch(12, 8, seed=6)
    lower = {k: v.to(dtype) for k, v in full_batch.items() if k != "noise"} | {"noise": full_batch["noise"]}
    moved = {k: v.flip(0) for k, v in lower.items()}

    def run(b: dict[str, Tensor], thresholds: list[Any]) -> list[Tensor]:
        arguments = (b["log_prob"], b["advantage"], b["weight"])
        return [
            top_entropy_keep(b["entropy"], b["weight"], thresholds[0]),
            clip_cov_keep(*arguments, b["noise"], thresholds[1]),
            kl_cov_select(*arguments, thresholds[2]),
        ]

    def look(b: dict[str, Tensor]) -> list[Any]:
        arguments = (b["log_prob"], b["advantage"], b["weight"])
        return [
            top_entropy_thresholds(b["entropy"], b["weight"]),
            clip_cov_thresholds(*arguments, b["noise"], ratio=0.1, cov_low=0.1),
            kl_cov_thresholds(*arguments, ratio=0.1),
        ]

    thresholds = look(lower)
    full = run(lower, thresholds)
    parts = [run({k: v[a : a + 3] for k, v in lower.items()}, thresholds) for a in range(0, 12, 3)]
    for mask, pieces, other in zip(full, zip(*parts, strict=True), run(moved, look(moved)), strict=True):
        assert torch.equal(mask, torch.cat(pieces)) and torch.equal(mask, other.flip(0))
        assert not mask[-1].any() and mask.any()
    filled = {k: v.nan_to_num(nan=7.0) for k, v in lower.items()}
    for mask, other in zip(full, run(filled, look(filled)), strict=True):
        assert torch.equal(mask, other), "what stands in absent places must not matter"
    single = run({k: v[:1] for k, v in lower.items()}, look({k: v[:1] for k, v in lower.items()}))
    assert not torch.equal(single[0], full[0][:1]), "a micro-batch's own quantile selects other tokens"
