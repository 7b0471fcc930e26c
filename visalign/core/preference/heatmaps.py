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


def uncertainty_weight(uncertainty: Tensor, *, detach: bool = True) -> Tensor:
    """e^(−U), the weight of a loss term whose judge disagrees with itself by U ≥ 0, any shape.

    With detach False, as Ctrl-U trains, the loss can be lowered by raising U; it then needs + U as a term of
    its own (`ctrl_u_loss`).

    Args:
        uncertainty: [*] U.
        detach: whether U is a constant here.

    Ctrl-U, arXiv 2410.11236.
    """
    return torch.exp(-(uncertainty.detach() if detach else uncertainty))


def class_disagreement(primary: Tensor, auxiliary: Tensor) -> Tensor:
    """Compute the divergence of two class predictions, KL(softmax(auxiliary) ‖ softmax(primary)), per
    position.

    Args:
        primary: [B, C, *] logits of the prediction that is trained on.
        auxiliary: [B, C, *] logits of the other one, e.g. of the image denoised from the next time step.

    Returns:
        [B, *] ≥ 0, float32 or better: taken in float16 the softmax of far logits is 0.

    Ctrl-U, arXiv 2410.11236, eq. 2; released code.
    """
    if primary.shape != auxiliary.shape or primary.ndim < 2:
        raise ValueError(
            "primary and auxiliary must both be [B, C, *]; got "
            f"{tuple(primary.shape)} and {tuple(auxiliary.shape)}."
        )
    dtype = float32_dtype(primary)
    log_primary, other = primary.to(dtype).log_softmax(1), auxiliary.to(dtype).log_softmax(1)
    return (other.exp() * (other - log_primary)).sum(1)


@dataclass(frozen=True)
class CtrlULoss:
    """The terms of Ctrl-U, numbers."""

    total: Tensor
    """λ · reward + uncertainty, to be added to the diffusion loss."""
    reward: Tensor
    """Mean of the weighted reward loss, before λ."""
    uncertainty: Tensor
    """Mean of U."""


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

    U = scale · `class_disagreement`. Per image, the weighted cross-entropy is averaged over the places whose
    label is not ignored, U over all places; both are averaged over the images that count.

    Args:
        primary: [B, C, *] logits.
        auxiliary: [B, C, *] logits.
        labels: [B, *] int64, the condition that the image should show.
        counted: [B], 0 for an image at a noise level too high to judge (Ctrl-U: t > 400); None: all count.
        weight: λ ≥ 0, see `ctrl_u_weight`.
        scale: of U.
        ignore_index: label of places without one.
        detach: treat U as a constant in the weight; then + U is left out of the total: alone it would only
            teach the model to make both predictions alike.

    Returns:
        The total and its two terms, float32 or better; 0 where nothing counts.

    Ctrl-U, arXiv 2410.11236, eq. 2 and 3; released code.
    """
    disagreement = scale * class_disagreement(primary, auxiliary)
    size = primary.shape[0]
    if labels.shape != disagreement.shape or (counted is not None and counted.shape != (size,)):
        raise ValueError(
            f"labels must be {tuple(disagreement.shape)} and counted [{size}]; got {tuple(labels.shape)} "
            f"and {None if counted is None else tuple(counted.shape)}."
        )
    logits = primary.to(disagreement.dtype)
    error = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")
    labelled = (labels != ignore_index).to(error.dtype).reshape(size, -1)
    weighted = (error * uncertainty_weight(disagreement, detach=detach)).reshape(size, -1)
    reward = (weighted * labelled).sum(1) / labelled.sum(1).clamp(min=1)
    share = error.new_ones(size) if counted is None else counted.to(error.dtype)
    share = share / share.sum().clamp(min=torch.finfo(error.dtype).tiny)
    reward = (share * reward).sum()
    mean = (share * disagreement.reshape(size, -1).mean(1)).sum()
    return CtrlULoss(weight * reward + (0.0 if detach else 1.0) * mean, reward, mean)


def ctrl_u_weight(step: int, *, scale: float = 0.1, warmup: int = 5000) -> float:
    """λ of Ctrl-U after `step` updates: scale · min(1, step/warmup); released code of arXiv 2410.11236."""
    return scale * min(1.0, step / warmup) if warmup else scale


def laplace_loss(prediction: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """Likelihood of a map whose own uncertainty is predicted: √2/s · |H − H*| + ln s, per place.

    It is least at s = √2 |H − H*|: the map learns where it errs. (A Laplace of standard deviation s, without
    its constant.)

    Args:
        prediction: [*] H.
        target: [*] H*.
        scale: [*] s > 0, e.g. exp of a soft-clamped output.

    Returns:
        [*], float32 or better.

    HEIE, arXiv 2411.17261.
    """
    check_same(prediction=prediction, target=target, scale=scale)
    s = float32(scale)
    return math.sqrt(2) * (prediction - target).abs() / s + s.log()


def fuse_heatmaps(maps: Tensor, scale: Tensor, *, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge maps of one image, place by place, by how sure each is: weights e^(−s_m)/Σ e^(−s).

    Args:
        maps: [M, *] e.g. the map of the whole image, and the maps of its tiles put together, at one size.
        scale: [M, *] s of each, in the unit of the maps.
        valid: bool [M, *], False where a map does not reach; None: everywhere.

    Returns:
        ([*] merged map, [M, *] weights), float32 or better; NaN and weights of 0 where no map reaches.

    HEIE, arXiv 2411.17261, the uncertainty fusion of global and local maps.
    """
    check_same(maps=maps, scale=scale, valid=valid)
    dtype = float32_dtype(maps)
    reached = torch.ones_like(maps, dtype=torch.bool) if valid is None else valid
    some = reached.any(0)
    # A finite stand-in keeps the softmax of places that no map reaches free of NaN.
    level = torch.where(reached, -scale.to(dtype), torch.finfo(dtype).min)
    weight = torch.where(reached, level.softmax(0), 0.0)
    merged = (weight * torch.where(reached, maps, 0.0).to(dtype)).sum(0)
    return torch.where(some, merged, torch.nan), weight
