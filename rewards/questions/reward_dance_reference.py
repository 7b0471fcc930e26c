# SPDX-License-Identifier: Apache-2.0
"""Reference images for a pairwise judge: scores against them, and the choice of the best among N.

RewardDance (arXiv 2509.08826) scores an image by P(yes) that it beats a reference of the same prompt, and
takes as references the best of 16 samples of the model before training, ranked by how many others they beat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core import group_pairs
from visalign.interfaces import Metadata, PairwiseReward, Scores, with_capabilities
from visalign.rewards.base.contract import check_choices, make_scores, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import as_contract, load_images
from visalign.rewards.pairs.asking import PairAsker, read_preferences
from visalign.rewards.weights.feature_cache import image_key

from .reward_dance import UNITS

_NO_REFERENCE = (
    "there is no readable reference image for this prompt; give it in references or in the metadata under 'references'"
)


class ReferenceReward:
    """Mean log-odds (or its σ) that an image beats the reference images of its prompt.

    The references are `metadata[i]["references"]`, else those given at the start for the prompt. A failed comparison
    is left out; an image without references, or without a valid comparison, is invalid. Parts: "log_odds",
    "references" (number of valid comparisons) and "spread" (the standard deviation of their log-odds, NaN below two).

    Args:
        judge: any pairwise judge, e.g. `RewardDancePairs`.
        references: prompt -> its reference images, in any form of `load_images`.
        value: "log_odds" or "prob".
    """

    higher_is_better = True

    def __init__(
        self,
        judge: PairwiseReward,
        references: Mapping[str, Any] | None = None,
        *,
        value: Literal["log_odds", "prob"] = "log_odds",
        name: str | None = None,
    ) -> None:
        self.name = name or f"{judge.name}_reference"
        check_choices(self.name, value=(value, UNITS))
        self.judge, self.references, self.value = with_capabilities(judge), dict(references or {}), value
        self.unit, self.range = UNITS[value]

    @property
    def identity(self) -> Identity | None:
        """Identity of the scores, the given references included; None if the judge has none."""
        identity = self.judge.identity
        if not isinstance(identity, Identity):
            return None
        digests = {}
        for prompt, references in sorted(self.references.items()):
            images = load_images(references).images
            digests[prompt] = [None if image is None else image_key(image).hex() for image in images]
        return replace(identity, options={**identity.options, "against": self.value, "references": digests})

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images against the references of their prompts."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        left: list[Tensor] = []
        right: list[Tensor] = []
        pair_rows: list[int] = []
        for row, image in request.images.readable():
            record = request.metadata[row] or {}
            references = record.get("references", self.references.get(request.prompts[row]))
            readable = [] if references is None else [ref for _, ref in load_images(references).readable()]
            if not readable:
                reasons[row] = _NO_REFERENCE
            left += [image] * len(readable)
            right += readable
            pair_rows += [row] * len(readable)
        value, std = (torch.full((len(request),), torch.nan) for _ in range(2))
        count = torch.zeros(len(request))
        if pair_rows:
            texts = [request.prompts[row] for row in pair_rows], [request.metadata[row] for row in pair_rows]
            answers = read_preferences(self.judge.compare(as_contract(left), as_contract(right), *texts))
            for row in sorted(set(pair_rows)):
                index = [number for number, pair_row in enumerate(pair_rows) if pair_row == row]
                log_odds = answers.log_odds[index]
                valid = log_odds[~log_odds.isnan()]
                if not len(valid):
                    reasons[row] = f"no reference could be compared: {answers.reasons[index[0]]}"
                    continue
                count[row], value[row] = len(valid), valid.mean()
                std[row] = valid.std() if len(valid) > 1 else torch.nan
        parts = {"log_odds": value, "references": count, "spread": std}
        value = value.sigmoid() if self.value == "prob" else value
        return make_scores(value, reasons, self.unit, parts=parts)


@dataclass(frozen=True)
class ReferenceChoice:
    """Best of N images of one prompt."""

    chosen: list[int]  # Numbers of the images, best first
    wins: Tensor  # [N] number of other images that each beats; NaN without a valid comparison
    strength: Tensor  # [N] mean probability of beating another image; breaks ties of wins


def select_references(
    judge: PairwiseReward, images: Any, prompt: str, *, top_k: int = 2, metadata: Mapping[str, Any] | None = None
) -> ReferenceChoice:
    """Rank N ≥ 2 images of a prompt by the number of others that they beat, and take the first (the paper: 2 of 16).

    All pairs are asked in both orders and their log-odds averaged; a failed comparison counts for neither. Unreadable
    images are never chosen.
    """
    batch = load_images(images)
    size, rows = len(batch), [row for row, _ in batch.readable()]
    readable = [image for _, image in batch.readable()]
    asker = PairAsker(judge, readable, [prompt] * len(rows), [metadata] * len(rows))
    pairs = group_pairs([0] * len(rows), len(rows))
    orders = asker.ask(torch.cat([pairs, pairs.flip(1)])).log_odds.view(2, -1)
    log_odds = (orders[0] - orders[1]) / 2
    table = torch.full((size, size), torch.nan, dtype=torch.float64)
    left, right = torch.tensor(rows)[pairs].unbind(1)
    table[left, right], table[right, left] = log_odds, -log_odds
    is_compared = ~torch.isnan(table)
    wins = torch.where(is_compared.any(1), (table > 0).sum(1).double(), torch.nan)
    strength = torch.where(is_compared, table.sigmoid(), 0.0).sum(1) / is_compared.sum(1)
    ranked = [row for row in range(size) if is_compared[row].any()]
    order = sorted(ranked, key=lambda row: (-float(wins[row]), -float(strength[row]), row))
    if len(order) < top_k:
        raise ValueError(f"Only {len(order)} of {size} images could be compared, and top_k is {top_k}.")
    return ReferenceChoice(order[:top_k], wins.float(), strength.float())
