# SPDX-License-Identifier: Apache-2.0
"""ICT and HP: an image-text score that richer images do not lose by, and a score of what people prefer.

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

from visalign.core.checks import check_choice, check_positive, check_same
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

    ICT-HP, arXiv 2507.19002, the definition of ICT.
    """
    check_positive(theta=theta)
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

    ICT-HP, arXiv 2507.19002; released code, `icthp_dataset.py`.
    """
    check_same(clip1=clip1, clip2=clip2, clip_prompts=clip_prompts)
    check_choice("mode", mode, ("paper", "upstream"))
    easy2 = truncated_score(clip2.detach(), theta=theta)
    easy1 = torch.minimum(truncated_score(clip1.detach(), theta=theta), easy2)
    between = clip_prompts.detach().to(easy2.dtype)
    refined1, refined2, ones = easy1 * between, easy2 * between, torch.ones_like(easy1)
    if mode == "upstream":
        easy2 = refined1
    return IctLabels(easy1, easy2, ones, refined1, refined2, ones)


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

    ICT-HP, arXiv 2507.19002; released code, `icthp_criterion.py`.
    """
    check_choice("mode", mode, ("paper", "upstream"))
    _check_triples(easy, refined, images)
    check_choice("reduction", reduction, ("mean", "sum"))
    size = easy.shape[0]
    same_triple = torch.eye(size, dtype=torch.bool, device=easy.device)
    targets = (
        (easy, (labels.easy1, labels.easy2, labels.easy3)),
        (refined, (labels.refined1, labels.refined2, labels.refined3)),
    )
    unit_images = _unit(images)
    loss, negatives = unit_images.new_zeros(()), unit_images.new_zeros(())
    for prompt, target in targets:
        cosine = unit_images @ _unit(prompt).T
        if mode == "upstream":
            cosine = cosine.bfloat16().to(cosine.dtype)
        error = (cosine[:, same_triple] - torch.stack(target).to(cosine)).square()
        loss = loss + (error.mean() if reduction == "mean" else error.mean(1).sum())
        foreign = cosine[:, ~same_triple]
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

    ICT-HP, arXiv 2507.19002; released code, `icthp_criterion.py`. At inference the code multiplies by σ(HP).
    """
    check_same(cosine=cosine, hp=hp)
    check_choice("reduction", reduction, ("mean", "sum"))
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
    if images.shape[:1] != (3,) or not images.shape[1:] == easy.shape == refined.shape or easy.ndim != 2:
        raise ValueError(
            "Expected easy and refined [N, D] and images [3, N, D]; got "
            f"{tuple(easy.shape)}, {tuple(refined.shape)}, {tuple(images.shape)}."
        )
