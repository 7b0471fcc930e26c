# SPDX-License-Identifier: Apache-2.0
"""Losses that an uncertainty weighs: Ctrl-U's between two predictions, and Laplace maps with their fusion."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from visalign.core.checks import check_same
from visalign.core.precision import float32, float32_dtype


@dataclass(frozen=True)
class CtrlULoss:
    """The terms of Ctrl-U, numbers."""

    total: Tensor  # λ · reward + uncertainty, to be added to the diffusion loss
    reward: Tensor  # Mean of the weighted reward loss, before λ
    uncertainty: Tensor  # Mean of U


def ctrl_u_loss(
    primary: Tensor,
    auxiliary: Tensor,
    labels: Tensor,
    *,
    counted: Tensor | None = None,
    weight: float = 0.1,
    scale: float = 1.0,
    ignore_index: int = 255,
    detach: bool = False,
) -> CtrlULoss:
    """Cross-entropy of a segmentation of the generated image, weighed by e^(−U), plus U.

    U = `scale` · KL(softmax(auxiliary) ‖ softmax(primary)) per position. Per image, the weighted
    cross-entropy is averaged over the positions whose label is not ignored, U over all positions; both are
    averaged over the images that count.

    `primary` and `auxiliary` [B, C, *] are logits: of the prediction that is trained on, and of another, e.g. of the
    image denoised from the next time step. `labels` [B, *] is the condition that the image should show; `counted` [B]
    is 0 for an image at a noise level too high to judge (Ctrl-U: t > 400). `weight` is λ of `ctrl_u_weight`. With
    `detach` U is a constant in the weight and left out of the total: alone it would only teach the model to make both
    predictions alike.

    Ctrl-U, arXiv 2410.11236, eq. 2 and 3; released code.
    """
    check_same(primary=primary, auxiliary=auxiliary)
    dtype, size = float32_dtype(primary), primary.shape[0]
    log_primary, other = primary.to(dtype).log_softmax(1), auxiliary.to(dtype).log_softmax(1)
    disagreement = scale * (other.exp() * (other - log_primary)).sum(1)
    error = F.cross_entropy(primary.to(dtype), labels, ignore_index=ignore_index, reduction="none")
    labelled = (labels != ignore_index).to(dtype).reshape(size, -1)
    uncertainty = disagreement.detach() if detach else disagreement
    weighted = (error * torch.exp(-uncertainty)).reshape(size, -1)
    reward = (weighted * labelled).sum(1) / labelled.sum(1).clamp(min=1)
    share = error.new_ones(size) if counted is None else counted.to(dtype)
    share = share / share.sum().clamp(min=torch.finfo(dtype).tiny)  # 0 where nothing counts
    reward = (share * reward).sum()
    mean = (share * disagreement.reshape(size, -1).mean(1)).sum()
    return CtrlULoss(weight * reward + (0.0 if detach else 1.0) * mean, reward, mean)


def ctrl_u_weight(step: int, *, scale: float = 0.1, warmup: int = 5000) -> float:
    """λ of Ctrl-U after `step` updates: scale · min(1, step/warmup); released code of arXiv 2410.11236."""
    return scale * min(1.0, step / warmup) if warmup else scale


def laplace_loss(prediction: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """Likelihood of a map whose own uncertainty s = `scale` is predicted: √2/s · |H − H*| + ln s, per position.

    It is least at s = √2 |H − H*|: the map learns where it errs. (A Laplace of standard deviation s, without
    its constant.) HEIE, arXiv 2411.17261.
    """
    check_same(prediction=prediction, target=target, scale=scale)
    s = float32(scale)
    return math.sqrt(2) * (prediction - target).abs() / s + s.log()


def fuse_heatmaps(maps: Tensor, scale: Tensor, *, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge maps [M, *] of one image, position by position, by how sure each is: weights e^(−s_m)/Σ e^(−s).

    `valid` is False where a map does not reach, e.g. a tile beside the map of the whole image. Returns ([*]
    merged map, [M, *] weights); NaN and weights of 0 where no map reaches. HEIE, arXiv 2411.17261, the
    uncertainty fusion of global and local maps.
    """
    check_same(maps=maps, scale=scale, valid=valid)
    dtype = float32_dtype(maps)
    reached = torch.ones_like(maps, dtype=torch.bool) if valid is None else valid
    # a finite stand-in keeps the softmax free of NaN where no map reaches
    level = torch.where(reached, -scale.to(dtype), torch.finfo(dtype).min)
    weight = torch.where(reached, level.softmax(0), 0.0)
    merged = (weight * torch.where(reached, maps, 0.0).to(dtype)).sum(0)
    return torch.where(reached.any(0), merged, torch.nan), weight
