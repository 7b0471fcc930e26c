# SPDX-License-Identifier: Apache-2.0
"""ICT and HP: an image-text score that richer images do not lose by, and a score of what people prefer.

A triple is three images of one subject, I1 < I2 < I3 (a rejected one, a chosen one, one from a refined prompt), and
two prompts, easy and refined. Where the paper and the released code differ, `mode="upstream"` is the latter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from visalign.core.checks import check_axes, check_choice, check_same
from visalign.core.precision import float32

from .bradley_terry import average_pairs, margin_ranking_loss

IctMode = Literal["paper", "upstream"]
THETA = 0.7  # Not published; what a third-party port assumes for unscaled scores


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
    """Image-text match that stops at "contains all of it": C = min(CLIP/θ, 1). ICT-HP, arXiv 2507.19002."""
    return (float32(clip) / theta).clamp(max=1)


def ict_labels(
    clip1: Tensor, clip2: Tensor, clip_prompts: Tensor, *, theta: float = THETA, mode: IctMode = "paper"
) -> IctLabels:
    """Targets of triples, no gradient, from [N] scores of an ordinary CLIP model: CLIP(I1, easy prompt),
    CLIP(I2, easy prompt) and CLIP(easy prompt, refined prompt), text against text.

    "upstream" gives R1 where E2 is meant: the released loader reads that column. ICT-HP, arXiv 2507.19002;
    released code, `icthp_dataset.py`.
    """
    check_same(clip1=clip1, clip2=clip2, clip_prompts=clip_prompts)
    check_choice("mode", mode, get_args(IctMode))
    easy2 = truncated_score(clip2.detach(), theta=theta)
    easy1 = torch.minimum(truncated_score(clip1.detach(), theta=theta), easy2)
    between = clip_prompts.detach().to(easy2.dtype)
    refined1, refined2, ones = easy1 * between, easy2 * between, torch.ones_like(easy1)
    return IctLabels(easy1, refined1 if mode == "upstream" else easy2, ones, refined1, refined2, ones)


def ict_loss(
    easy: Tensor,
    refined: Tensor,
    images: Tensor,
    labels: IctLabels,
    *,
    negative_weight: float = 0.5,
    mode: IctMode = "paper",
) -> Tensor:
    """Regress the cosines of a triple on its targets, and those with other subjects' images on 0.

    L = mean_{i,n} (cos(I_i, easy) − E_i)² + the same for the refined prompt with R, plus w times the mean squared
    cosine of each prompt with the images of the other triples, for either prompt. `easy` and `refined` are embeddings
    [N, D] of the prompts, `images` [3, N, D] those of I1, I2, I3; they are normalised here.

    "upstream" rounds the cosines to bfloat16 first. The paper sums over the three images, the released code
    averages, as here; its weight of negatives, 1/(1 + e^(20 (|cos| − 6))), is 1 for any cosine and left out.
    ICT-HP, arXiv 2507.19002; released code, `icthp_criterion.py`.
    """
    check_choice("mode", mode, get_args(IctMode))
    check_axes(easy=(easy, "N D"), refined=(refined, "N D"), images=(images, "3 N D"))
    same_triple = torch.eye(easy.shape[0], dtype=torch.bool, device=easy.device)
    targets = (
        (easy, (labels.easy1, labels.easy2, labels.easy3)),
        (refined, (labels.refined1, labels.refined2, labels.refined3)),
    )
    unit_images = F.normalize(float32(images), dim=-1)
    loss = unit_images.new_zeros(())
    for prompt, target in targets:
        cosine = unit_images @ F.normalize(float32(prompt), dim=-1).T
        if mode == "upstream":
            cosine = cosine.bfloat16().to(cosine.dtype)
        error = (cosine[:, same_triple] - torch.stack(target).to(cosine)).square().mean()
        foreign = cosine[:, ~same_triple]  # none with one triple
        loss = loss + error + negative_weight * foreign.square().sum() / max(foreign.numel(), 1)
    return loss


def hp_loss(hp: Tensor, *, margin: float = 0.3) -> Tensor:
    """HP, mean of max(0, m − (HP2 − HP1)) + max(0, m − (HP3 − HP2)) over triples `hp` [3, N]; arXiv 2507.19002."""
    return average_pairs(_triple_hinge(hp, margin))


def ict_hp_loss(
    cosine: Tensor, hp: Tensor, *, margin: float = 0.3, reduction: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """The same margin ranking on the product of ICT's cosine [3, N] with the easy prompt and HP's share,
    softmax over the triple.

    "sum" over triples as released, whose weight grows with the batch. At inference the code multiplies by
    σ(HP). ICT-HP, arXiv 2507.19002; released code, `icthp_criterion.py`.
    """
    check_same(cosine=cosine, hp=hp)
    check_choice("reduction", reduction, ("mean", "sum"))
    share = float32(hp).softmax(0)
    return average_pairs(_triple_hinge(cosine * share, margin), over="weights" if reduction == "mean" else "none")


def _triple_hinge(score: Tensor, margin: float) -> Tensor:
    """[N]: the hinges of I2 over I1 and of I3 over I2."""
    check_axes(score=(score, "3 N"))
    return margin_ranking_loss(score[1:], score[:2], margin=margin).sum(0)
