# SPDX-License-Identifier: Apache-2.0
"""A pairwise judge with reference images: a score against them, and the choice of good ones among N.

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
from visalign.rewards.base.contract import make_scores, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import as_contract, load_images
from visalign.rewards.pairs.asking import PairAsker, read_preferences
from visalign.rewards.weights.feature_cache import image_key

from .reward_dance import UNITS


class ReferenceReward:
    """Mean log-odds (or its σ) that an image beats the reference images of its prompt.

    References stand in `metadata[i]["references"]`, else in the mapping given at the start, under the prompt.
    A comparison that failed is left out; an image without references, or without a valid comparison, is
    invalid. Parts: "log_odds", "references" (how many valid comparisons) and "spread" (the standard deviation
    of their log-odds, NaN below two).

    Args:
        judge: any pairwise judge, e.g. `RewardDancePairs`.
        references: prompt -> its reference images, in any form of `load_images`.
        value: "log_odds" or "prob".
        name: for messages and logs.

    Raises:
        ValueError: an unknown value.
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
        if value not in UNITS:
            raise ValueError(f"value is {value!r}; allowed are {', '.join(UNITS)}.")
        self.judge, self.references, self.value = with_capabilities(judge), dict(references or {}), value
        self.name = name or f"{judge.name}_reference"
        self.unit, self.range = UNITS[value]

    @property
    def identity(self) -> Identity | None:
        """What the scores depend on, the given references too; None where the judge does not say."""
        found = self.judge.identity
        if not isinstance(found, Identity):
            return None
        shown = {prompt: _digests(images) for prompt, images in sorted(self.references.items())}
        return replace(found, options={**found.options, "against": self.value, "references": shown})

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score per image against its references."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        shown: list[Tensor] = []
        against: list[Tensor] = []
        owner: list[int] = []
        for row, image in request.images.readable():
            found = self._of(request.prompts[row], request.metadata[row])
            if not found:
                reasons[row] = (
                    "there is no readable reference image for this prompt; give it in references or in the "
                    "metadata under 'references'"
                )
            for reference in found:
                shown.append(image)
                against.append(reference)
                owner.append(row)
        odds = torch.zeros(0, dtype=torch.float64)
        said: list[str | None] = []
        if owner:
            answer = self.judge.compare(
                as_contract(shown),
                as_contract(against),
                [request.prompts[row] for row in owner],
                [request.metadata[row] for row in owner],
            )
            answers = read_preferences(answer)
            odds, said = answers.log_odds, answers.reasons
        return self._scores(odds, said, owner, reasons)

    def _scores(
        self, odds: Tensor, said: list[str | None], owner: list[int], reasons: list[str | None]
    ) -> Scores:
        value = torch.full((len(reasons),), torch.nan)
        std, count = value.clone(), torch.zeros(len(reasons))
        places = torch.tensor(owner, dtype=torch.int64)
        for row in sorted(set(owner)):
            mine = odds[places == row]
            valid = mine[~torch.isnan(mine)]
            if not len(valid):
                reasons[row] = next(
                    (
                        f"no reference could be compared: {why}"
                        for why, of in zip(said, owner, strict=True)
                        if of == row
                    ),
                    None,
                )
                continue
            count[row] = len(valid)
            value[row] = valid.mean()
            if len(valid) > 1:
                std[row] = valid.std()
        parts = {"log_odds": value, "references": count, "spread": std}
        wanted = value.sigmoid() if self.value == "prob" else value
        return make_scores(wanted, reasons, self.unit, parts=parts)

    def _of(self, prompt: str, record: Mapping[str, Any] | None) -> list[Tensor]:
        given = (record or {}).get("references", self.references.get(prompt))
        if given is None:
            return []
        return [image for _, image in load_images(given).readable()]


def _digests(images: Any) -> list[str | None]:
    """Of reference images, None for those that cannot be read."""
    return [None if image is None else image_key(image).hex() for image in load_images(images).images]


@dataclass(frozen=True)
class ReferenceChoice:
    """The best of N images of one prompt."""

    chosen: list[int]
    """Numbers of the images, best first."""
    wins: Tensor
    """[N] how many others each beats; NaN where no comparison was valid."""
    strength: Tensor
    """[N] mean probability of beating another one; settles equal numbers of wins."""


def select_references(
    judge: PairwiseReward,
    images: Any,
    prompt: str,
    *,
    top_k: int = 2,
    metadata: Mapping[str, Any] | None = None,
) -> ReferenceChoice:
    """Rank N images of a prompt by the number of others that they beat, and take the first.

    All pairs are asked in both orders and their log-odds averaged; a failed comparison counts for neither.

    Args:
        judge: any pairwise judge.
        images: N ≥ 2 images in any form of `load_images`; unreadable ones are never chosen.
        prompt: of all of them.
        top_k: how many to take, in 1 … N; the paper takes 2 of 16.
        metadata: the prompt's record.

    Raises:
        ValueError: fewer than two images, or a top_k outside 1 … N, or more than could be ranked.
    """
    batch = load_images(images)
    size = len(batch)
    if size < 2 or not 1 <= top_k <= size:
        raise ValueError(f"{size} images and top_k={top_k}; needed are at least 2 images and 1 ≤ top_k ≤ N.")
    rows = [row for row, _ in batch.readable()]
    readable = [image for _, image in batch.readable()]
    asker = PairAsker(judge, readable, [prompt] * len(rows), [metadata] * len(rows))
    pairs = group_pairs([0] * len(rows), len(rows))
    both = asker.ask(torch.cat([pairs, pairs.flip(1)])).log_odds.view(2, -1)
    odds = (both[0] - both[1]) / 2
    table = torch.full((size, size), torch.nan, dtype=torch.float64)
    at = torch.tensor(rows)[pairs]
    table[at[:, 0], at[:, 1]], table[at[:, 1], at[:, 0]] = odds, -odds
    met = ~torch.isnan(table)
    wins = torch.where(met.any(1), (table > 0).sum(1).double(), torch.nan)
    strength = torch.where(met, table.sigmoid(), 0.0).sum(1) / met.sum(1)
    order = sorted(
        (row for row in range(size) if met[row].any()),
        key=lambda row: (-float(wins[row]), -float(strength[row]), row),
    )
    if len(order) < top_k:
        raise ValueError(f"Only {len(order)} of {size} images could be compared, and top_k is {top_k}.")
    return ReferenceChoice(order[:top_k], wins.float(), strength.float())
