# SPDX-License-Identifier: Apache-2.0
"""ICT and HP: an image-text score that richer pictures do not lose by, and a score of what people prefer.

A triple is three images of one subject, I1 < I2 < I3 (a rejected one, a chosen one, one from a refined
prompt), and two prompts, easy and refined. Where the paper and the released code differ, `mode="upstream"` is
the latter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from visalign.core.precision import float32

from .bradley_terry import average_pairs, margin_ranking_loss

IctMode = Literal["paper", "upstream"]
THETA = 0.7
"""Not published; what a third-party port assumes for unscaled scores."""


@dataclass(frozen=True)
class IctLabels:
    """Targets [N] of the cosines of the three images with the easy and with the refined prompt."""

    easy1: Tensor
    """E1 = min(C(I1, easy), E2)."""
    easy2: Tensor
    """E2 = C(I2, easy)."""
    easy3: Tensor
    """E3 = 1."""
    refined1: Tensor
    """R1 = E1 · CLIP(easy, refined)."""
    refined2: Tensor
    """R2 = E2 · CLIP(easy, refined)."""
    refined3: Tensor
    """R3 = 1."""


def truncated_score(clip: Tensor, *, theta: float = THETA) -> Tensor:
    """Image-text match that stops at "contains all of it": C = min(CLIP/θ, 1), any shape, float32 or better.

    Args:
        clip: CLIP score, in the unit of θ.
        theta: θ > 0, the score from which an image counts as containing all of its prompt.

    Raises:
        ValueError: θ not positive and finite.

    ICT-HP, arXiv 2507.19002, the definition of ICT.
    """
    if not 0 < theta < float("inf"):
        raise ValueError(f"theta must be positive and finite; got {theta}.")
    return (float32(clip) / theta).clamp(max=1)


def ict_labels(
    clip1: Tensor, clip2: Tensor, clip_prompts: Tensor, *, theta: float = THETA, mode: IctMode = "paper"
) -> IctLabels:
    """Targets of a triple from the scores of an ordinary CLIP model.

    Args:
        clip1: [N] CLIP(I1, easy prompt).
        clip2: [N] CLIP(I2, easy prompt).
        clip_prompts: [N] CLIP(easy prompt, refined prompt), text against text.
        theta: θ of the truncation, in the unit of the first two.
        mode: "upstream" gives R1 where E2 is meant: the released loader reads that column.

    Returns:
        The six targets, no gradient.

    Raises:
        ValueError: shapes that differ, θ not positive, or an unknown mode.

    ICT-HP, arXiv 2507.19002; released code, `icthp_dataset.py`.
    """
    shapes = [tuple(given.shape) for given in (clip1, clip2, clip_prompts)]
    if len(set(shapes)) > 1:
        raise ValueError(f"The three scores of a triple must have one shape; got {shapes}.")
    _check_mode(mode)
    easy2 = truncated_score(clip2.detach(), theta=theta)
    easy1 = torch.minimum(truncated_score(clip1.detach(), theta=theta), easy2)
    between = clip_prompts.detach().to(easy2.dtype)
    refined1, refined2, one = easy1 * between, easy2 * between, torch.ones_like(easy1)
    if mode == "upstream":
        easy2 = refined1
    return IctLabels(easy1, easy2, one, refined1, refined2, one)


def ict_loss(
    easy: Tensor,
    refined: Tensor,
    images: Tensor,
    labels: IctLabels,
    *,
    negative_weight: float = 0.5,
    logit_scale: float | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    mode: IctMode = "paper",
) -> Tensor:
    """Regress the cosines of a triple on its targets, and those with other subjects' images on 0.

    L = mean_{i,n} (cos(I_i, easy) − E_i)² + the same for the refined prompt with R, plus w times the mean
    squared cosine of each prompt with the images of the other triples, for either prompt.

    Args:
        easy: [N, D] embeddings of the easy prompts; they are normalised here.
        refined: [N, D] of the refined prompts.
        images: [3, N, D] of I1, I2, I3.
        labels: of `ict_labels`.
        negative_weight: w ≥ 0.
        logit_scale: κ: weigh each negative by 1/(1 + e^(20 (|κ cos| − 6))), which lets go of images that
            match a foreign prompt so well that they may truly show it. The released code has the rule with
            κ = 1, where it is 1 for any cosine, as it is here without κ.
        reduction: over the three images: "mean" as released, "sum" as the paper writes it.
        mode: "upstream" rounds the cosines to bfloat16 first.

    Returns:
        A number, float32 or better. With one triple there are no negatives.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction or mode.

    ICT-HP, arXiv 2507.19002; released code, `icthp_criterion.py`.
    """
    _check_mode(mode)
    _check_triples(easy, refined, images)
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum"; got {reduction!r}.')
    size = easy.shape[0]
    own = torch.eye(size, dtype=torch.bool, device=easy.device)
    targets = (
        (easy, (labels.easy1, labels.easy2, labels.easy3)),
        (refined, (labels.refined1, labels.refined2, labels.refined3)),
    )
    pictures = _unit(images)
    loss, negatives = pictures.new_zeros(()), pictures.new_zeros(())
    for prompt, target in targets:
        cosine = pictures @ _unit(prompt).T
        if mode == "upstream":
            cosine = cosine.bfloat16().to(cosine.dtype)
        error = (cosine[:, own] - torch.stack(target).to(cosine)).square()
        loss = loss + (error.mean() if reduction == "mean" else error.mean(1).sum())
        foreign = cosine[:, ~own]
        if logit_scale is not None:
            foreign = foreign * torch.sigmoid(20 * (6 - (logit_scale * foreign.detach()).abs())).sqrt()
        negatives = negatives + foreign.square().sum() / max(foreign.numel(), 1)
    return loss + negative_weight * negatives


def hp_loss(hp: Tensor, *, margin: float = 0.3) -> Tensor:
    """HP's margin ranking, mean of max(0, m − (HP2 − HP1)) + max(0, m − (HP3 − HP2)) over triples.

    Args:
        hp: [3, N] scores of I1, I2, I3.
        margin: m.

    Returns:
        A number, float32 or better.

    Raises:
        ValueError: hp is not [3, N].

    ICT-HP, arXiv 2507.19002.
    """
    return average_pairs(_triple_hinge(hp, margin))


def ict_hp_loss(
    cosine: Tensor, hp: Tensor, *, margin: float = 0.3, reduction: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """The same margin ranking on the product of ICT's cosine and HP's share, softmax over the triple.

    Args:
        cosine: [3, N] of I1, I2, I3 with the easy prompt.
        hp: [3, N].
        margin: m.
        reduction: over triples: "mean", or "sum" as released, whose weight grows with the batch.

    Returns:
        A number, float32 or better.

    Raises:
        ValueError: shapes that differ or are not [3, N], an unknown reduction.

    ICT-HP, arXiv 2507.19002; released code, `icthp_criterion.py`. At inference the code multiplies by σ(HP).
    """
    if cosine.shape != hp.shape:
        raise ValueError(f"cosine {tuple(cosine.shape)} and hp {tuple(hp.shape)} must have one shape.")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum"; got {reduction!r}.')
    share = float32(hp).softmax(0)
    return average_pairs(
        _triple_hinge(cosine * share, margin), over="weights" if reduction == "mean" else "none"
    )


def _triple_hinge(score: Tensor, margin: float) -> Tensor:
    """[N]: the hinges of I2 over I1 and of I3 over I2."""
    if score.ndim != 2 or score.shape[0] != 3:
        raise ValueError(f"Scores of triples must be [3, N]; got {tuple(score.shape)}.")
    return margin_ranking_loss(score[1:], score[:2], margin=margin).sum(0)


def _unit(embedding: Tensor) -> Tensor:
    return F.normalize(float32(embedding), dim=-1)


def _check_triples(easy: Tensor, refined: Tensor, images: Tensor) -> None:
    if (
        images.ndim != 3
        or images.shape[0] != 3
        or easy.shape != images.shape[1:]
        or refined.shape != easy.shape
    ):
        raise ValueError(
            "Expected easy and refined [N, D] and images [3, N, D]; got "
            f"{tuple(easy.shape)}, {tuple(refined.shape)}, {tuple(images.shape)}."
        )


def _check_mode(mode: str) -> None:
    if mode not in ("paper", "upstream"):
        raise ValueError(f'mode must be "paper" or "upstream"; got {mode!r}.')
