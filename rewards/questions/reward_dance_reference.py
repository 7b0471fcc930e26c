# SPDX-License-Identifier: Apache-2.0
"""Reference images for a pairwise judge: scores against them, and the order in which N are good ones.

RewardDance (arXiv 2509.08826) scores an image by P(yes) that it beats a reference of the same prompt: the best of 16
samples of the model before training. A trainer draws them: `rewards.terms.LABEL.references`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core import group_pairs
from visalign.core.preference.ranking import MAX_LOG_ODDS
from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.prompt_files import listed_sources
from visalign.interfaces import Metadata, PairwiseReward, RewardCapabilities, Scores, with_capabilities
from visalign.rewards.base.contract import check_choices, make_scores, read_request
from visalign.rewards.base.identity import Identity, with_options
from visalign.rewards.base.images import as_contract, load_images
from visalign.rewards.pairs.asking import PairAsker, read_preferences
from visalign.rewards.weights.feature_cache import image_key

from .reward_dance import UNITS

_NO_REFERENCE = "there is no readable reference image for this prompt; give one in references or the metadata"


class ReferenceReward:
    """Mean log-odds (or its σ) that an image beats the reference images of its prompt.

    The references are `metadata[i]["references"]`, one image or several, else those of `references`, prompt -> images,
    to which a trainer may add. A failed comparison is left out; without a valid one an image is invalid. Parts:
    "log_odds", "references" (number of valid comparisons) and "spread" (the standard deviation of their log-odds, NaN
    below two).
    """

    higher_is_better = True
    capabilities = RewardCapabilities()

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
        self.judge: Any = with_capabilities(judge)
        self.references, self.value = dict(references or {}), value
        self.unit, self.range = UNITS[value]
        if hasattr(judge, "compare_with_gradient"):  # trainers tell by the attribute whether there is a gradient
            self.score_with_gradient = self._score_with_gradient

    @property
    def identity(self) -> Identity | None:
        """Identity of the scores, the given references included; None if the judge has none."""
        digests = {prompt: [image_key(x).hex() for x in _load(of)] for prompt, of in sorted(self.references.items())}
        return with_options(self.judge.identity, against=self.value, references=digests)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images against the references of their prompts."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        left: list[Tensor] = []
        right: list[Tensor] = []
        pair_rows: list[int] = []
        for row, image in request.images.readable():
            references, readable = (request.metadata[row] or {}).get("references"), list[Tensor]()
            try:
                readable = _load(self.references.get(request.prompts[row]) if references is None else references)
            except (OSError, TypeError, ValueError) as error:  # of the record, which costs its row alone
                reasons[row] = f"its references: {error}"
            if not readable:
                reasons[row] = reasons[row] or _NO_REFERENCE
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

    def _score_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Score images [B, 3, H, W] in [0, 1], differentiably in the pixels: [B], NaN where there is no reference."""
        references = [_load(self.references.get(prompt)) for prompt in prompts]
        rows = [row for row, of in enumerate(references) for _ in of]
        right = [reference.to(images.device) for of in references for reference in of]
        log_odds = torch.full((len(prompts),), torch.nan)
        if rows:
            answers = self.judge.compare_with_gradient(images[rows].unbind(), right, [prompts[row] for row in rows])
            answers = answers.clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)
            valid, index = ~answers.isnan(), torch.tensor(rows)
            total = torch.zeros(len(prompts)).index_add(0, index[valid], answers[valid])
            count = torch.bincount(index[valid], minlength=len(prompts))
            log_odds = torch.where(count > 0, total / count.clamp(min=1), torch.nan)
        return log_odds.sigmoid() if self.value == "prob" else log_odds

    def rank(self, images: Any, prompt: str, record: Mapping[str, Any] | None = None) -> list[int]:
        """Order N images of a prompt by how many others each beats in both orders, then by mean probability."""
        batch = load_images(images)
        rows, readable = [row for row, _ in batch.readable()], [image for _, image in batch.readable()]
        asker = PairAsker(self.judge, readable, [prompt] * len(rows), [record] * len(rows))
        pairs = group_pairs([0] * len(rows), len(rows))
        if self.judge.capabilities.both_orders:
            log_odds = asker.ask(pairs).log_odds
        else:
            first, second = asker.ask(torch.cat([pairs, pairs.flip(1)])).log_odds.view(2, len(pairs))
            log_odds = (first - second) / 2
        table = torch.full((len(batch), len(batch)), torch.nan, dtype=torch.float64)
        left, right = torch.tensor(rows, dtype=torch.int64)[pairs].unbind(1)
        table[left, right], table[right, left] = log_odds, -log_odds
        wins, strength = (table > 0).sum(1).tolist(), table.sigmoid().nanmean(1).nan_to_num(-1.0).tolist()
        return sorted(range(len(batch)), key=lambda row: (strength[row] < 0, -wins[row], -strength[row], row))


def _load(references: Any) -> list[Tensor]:
    """Load those of one or several reference images that can be read; None has none."""
    images = references if getattr(references, "ndim", 0) == 4 else listed_sources(references)
    batch = load_images([resolve_image(image) if isinstance(image, str) else image for image in images])
    return [image for _, image in batch.readable()]
