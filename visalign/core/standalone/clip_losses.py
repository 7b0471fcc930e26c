# SPDX-License-Identifier: Apache-2.0
"""Losses of CLIP rewards: PickScore's, and HPSv2's over the several images of a prompt.

HPSv2's pair loss is `bradley_terry_loss` on logit_scale × cosine, summed.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from visalign.core.checks import check_axes, check_choice
from visalign.core.groups.labels import Labels, group_index, group_min, group_sum
from visalign.core.preference.bradley_terry import average_pairs, margin_ranking_loss, paired_scores


def paired_cosine(first: Tensor, second: Tensor) -> Tensor:
    """Cosine [*] of two [*, D]; ICT's score is that of image and prompt (arXiv 2507.19002's code)."""
    first, second, _, _ = paired_scores(first, second, None)
    return (F.normalize(first, dim=-1) * F.normalize(second, dim=-1)).sum(-1)


def pickscore_loss(
    text: Tensor,
    left: Tensor,
    right: Tensor,
    label: Tensor,
    pairs_per_prompt: Tensor | None = None,
    *,
    logit_scale: Tensor | float,
    in_batch_negatives: bool = False,
) -> Tensor:
    """Soft cross-entropy between the two images of a prompt, each prompt weighing alike; a number.

    ℓ = −p ln softmax(s)_l − (1 − p) ln softmax(s)_r, s = scale × cosine; from a tie (p = ½) its own entropy
    ln 2 is taken off, so that 0 is best there too. Weights (1/n_i)/Σ_j (1/n_j), n_i `pairs_per_prompt`. With
    in-batch negatives, as released, the softmax runs over all 2N images, and is averaged with the one over
    the N prompts per image. Embeddings are [N, D], normalised; `logit_scale` is exp of the learned parameter
    (about 100). Kirstain et al., PickScore, arXiv 2305.01569, section 4; released code.
    """
    size = text.shape[0]
    check_axes(
        text=(text, "N D"),
        left=(left, "N D"),
        right=(right, "N D"),
        label=(label, "N"),
        pairs_per_prompt=(pairs_per_prompt, "N"),
    )
    count = torch.ones_like(label) if pairs_per_prompt is None else pairs_per_prompt
    texts, images, _, _ = paired_scores(torch.cat([text, text]), torch.cat([left, right]), None)
    prob = label.detach().to(texts.dtype)
    shares = torch.stack([prob, 1 - prob])
    if in_batch_negatives:
        logits = logit_scale * images @ texts[:size].T
        pair = torch.arange(size, device=text.device)
        by_image = -(shares * logits.log_softmax(1).reshape(2, size, size)[:, pair, pair]).sum(0)
        by_text = -(shares * logits.T.log_softmax(1).reshape(size, 2, size)[pair, :, pair].T).sum(0)
    else:
        logits = logit_scale * (images * texts).sum(1).reshape(2, size)
        by_image, by_text = None, -(shares * logits.log_softmax(0)).sum(0)
    by_text = by_text - math.log(2) * (prob == 0.5).to(prob.dtype)
    loss = by_text if by_image is None else (by_image + by_text) / 2
    return average_pairs(loss, 1 / count)


def listwise_choice_loss(score: Tensor, share: Tensor, group: Labels) -> Tensor:
    """Cross-entropy [P] of the chosen image of each prompt: −Σ_i q_i ln softmax over the prompt's images.

    `score` [N] is logit_scale × cosine, `share` q [N] 1 for the chosen image, or the share of the votes;
    `group` labels the prompts, which may have different numbers of images. Its mean is HPSv2's
    `PreferenceLoss`. Wu et al., HPS v2, arXiv 2306.09341, released code.
    """
    value, target, _, _ = paired_scores(score, share, None)
    check_axes(score=(score, "N"))
    index, groups = group_index(group, value.shape[0], value.device)
    target = target.detach()[:, None]
    total = group_sum(target, index, groups)
    if not bool(torch.isclose(total, torch.ones_like(total), atol=1e-4).all()):
        raise ValueError(f"The shares of each prompt must sum to 1; got {total[:, 0].tolist()[:8]}.")
    top = -group_min(-value.detach()[:, None], index, groups)
    shifted = value[:, None] - top[index]
    normaliser = group_sum(shifted.exp(), index, groups).log()
    return (normaliser * total - group_sum(target * shifted, index, groups))[:, 0]


def rank_margin_loss(
    score: Tensor, rank: Tensor, group: Labels, *, margin: float = 1.0, mode: Literal["paper", "upstream"] = "paper"
) -> Tensor:
    """Hinge loss [P] over the pairs of a prompt, whose lead must grow with the difference of their ranks.

    Mean over pairs i, j of one prompt of max(0, m − (s_j − s_i)(rank_i − rank_j)), rank 0 the best; 0 without
    a pair. "upstream", for comparison with the released code alone: every prompt is padded to the largest
    number of images with score −1 and rank 10, and all i ≥ j count, the pair and padding with m. Released
    code of HPS v2 (arXiv 2306.09341), `RankingLoss`.
    """
    check_choice("mode", mode, ("paper", "upstream"))
    value, ranks, _, _ = paired_scores(score, rank, None)
    check_axes(score=(score, "N"))
    index, groups = group_index(group, value.shape[0], value.device)
    losses = []
    for number in range(groups):
        members = index == number
        s, r = value[members], ranks[members].detach()
        if mode == "upstream":
            short = int(torch.bincount(index).max()) - s.shape[0]
            s, r = F.pad(s, (0, short), value=-1.0), F.pad(r, (0, short), value=10.0)
        later, earlier = torch.tril_indices(s.shape[0], s.shape[0], device=s.device)
        apart = r[later] - r[earlier]
        lead = (s[earlier] - s[later]) * apart
        counted = apart != 0 if mode == "paper" else torch.ones_like(apart, dtype=torch.bool)
        losses.append(average_pairs(margin_ranking_loss(lead, torch.zeros_like(lead), margin=margin), counted))
    return torch.stack(losses)
