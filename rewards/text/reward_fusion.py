# SPDX-License-Identifier: Apache-2.0
"""RewardFusion: a reward for text averaged over similar prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from visalign.core.rewards.fusion import neighbour_weights, reward_fusion
from visalign.data.sets.prompt_files import load_prompts
from visalign.interfaces import (
    Metadata,
    Prompt,
    RewardCapabilities,
    Scores,
    TextReward,
    score_named,
    with_capabilities,
)
from visalign.rewards.base.contract import check_rules, make_scores
from visalign.rewards.base.failure import failure_reasons
from visalign.text.messages import prompt_text
from visalign.text.neighbours import hashed_ngrams

from .contract import TextRequest, is_prompt, read_text_request

Embed = Callable[[Sequence[str]], Tensor]  # N texts -> [N, D]; similar texts have a large cosine


class RewardFusion:
    """Average a reward over the prompts of a fixed pool that are nearest to a completion's own prompt.

    R′ = (R + Σ_m w_m R_m)/(1 + Σ_m w_m): R_m is the reward of the same completion under the m-th neighbour, with the
    neighbour's record as metadata, and w_m the similarity of the two prompts. A prompt is no neighbour of itself, and
    one that cannot be scored is left out. The released code changes the pool; here it is fixed, so that scores do not
    depend on their order. Parts are "own", R, and "neighbours", their number.

    Shen et al., The trickle-down impact of reward (in-)consistency on RLHF, arXiv 2309.16155.

    Args:
        reward: the reward, or its name for `load_text_reward`.
        pool: a .txt or .jsonl file of prompts, such as that of data.train; or prompts, or records with "prompt", whose
            other fields are the metadata under it.
        threshold: least cosine of a neighbour, in (0, 1].
        top: most neighbours.
        embed: texts to vectors, or the name of such a function (package.module:name, file.py:name); hashed runs of
            three letters when None.
    """

    def __init__(
        self,
        reward: TextReward | str,
        pool: str | Path | Sequence[Prompt | Mapping[str, Any]],
        *,
        threshold: float = 0.9,
        top: int = 5,
        embed: Embed | str | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        from visalign.rewards.catalogue import find_target, load_text_reward

        entries = load_prompts(pool) if isinstance(pool, str | Path) else pool
        records = [entry if isinstance(entry, Mapping) else {"prompt": entry} for entry in entries]
        are_prompts = bool(records) and all(is_prompt(record.get("prompt")) for record in records)
        rules = {
            f"threshold is {threshold} and top {top}; allowed are 0 to 1, and from 1": 0 < threshold <= 1 <= top,
            'the pool must hold prompts (texts or lists of messages), or records with "prompt"': are_prompts,
            f"{', '.join(options)}: options are of a reward given by name": isinstance(reward, str) or not options,
        }
        check_rules("reward_fusion", rules)
        if isinstance(reward, str):
            reward = load_text_reward(reward, run_device=device, **options)
        self.reward, self.threshold, self.top = with_capabilities(reward), threshold, top
        self.name, self.unit, self.range = f"{reward.name}_fused", reward.unit, reward.range
        self.higher_is_better = reward.higher_is_better
        needs = self.reward.capabilities
        self.capabilities = RewardCapabilities(needs_group=needs.needs_group, needs_batch=needs.needs_batch)
        self.embed: Embed = find_target(embed) if isinstance(embed, str) else embed or hashed_ngrams
        record_of = {_pool_key(record["prompt"]): record for record in reversed(records)}
        self.pool = tuple(record_of.values())
        self._pool_index = {text: index for index, text in enumerate(record_of)}
        self._pool_vectors = self._unit_vectors(list(record_of))

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Score under the own prompts, then in one call under all neighbours, and fuse."""
        request = read_text_request(self.name, completions, prompts, metadata)
        scores = request.score_with(self.reward.name, self.reward)
        reward = torch.where(scores.valid.cpu(), scores.value.detach().cpu().float(), math.nan)
        similarity, neighbours = self._nearest(request)
        similarity = torch.where(reward.isnan()[:, None], math.nan, similarity)
        neighbour_reward = self._score_neighbours(request, similarity, neighbours)
        limits = {"threshold": self.threshold, "top": self.top}
        fused = reward_fusion(reward, neighbour_reward, similarity, **limits)
        weight = neighbour_weights(similarity, neighbour_reward.isfinite(), **limits)
        parts = {"own": reward, "neighbours": (weight > 0).sum(1).float()}
        return make_scores(fused, failure_reasons(scores), self.unit, parts=parts, text=scores.text)

    def _nearest(self, request: TextRequest) -> tuple[Tensor, Tensor]:
        """Cosines [B, M] of the nearest prompts of the pool, NaN below the threshold, and their indices."""
        texts = [_pool_key(prompt) for prompt in request.prompts]
        row_of = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        if not row_of:
            return torch.zeros(0, 0), torch.zeros(0, 0)
        cosine = self._unit_vectors(list(row_of)) @ self._pool_vectors.T
        for text in row_of.keys() & self._pool_index.keys():  # a prompt is no neighbour of itself
            cosine[row_of[text], self._pool_index[text]] = -1.0
        values, indices = (part[:, : self.top] for part in cosine.sort(dim=1, descending=True, stable=True))
        rows = torch.tensor([row_of[text] for text in texts])
        return torch.where(values >= self.threshold, values, math.nan)[rows], indices[rows]

    def _score_neighbours(self, request: TextRequest, similarity: Tensor, neighbours: Tensor) -> Tensor:
        """Rewards [B, M] under the neighbours; NaN where there is none, or its score is invalid."""
        rewards, present = torch.full_like(similarity, math.nan), similarity.isfinite()
        if not present.any():
            return rewards
        completions = [request.completions[row] for row in present.nonzero()[:, 0].tolist()]
        records = [dict(self.pool[index]) for index in neighbours[present].tolist()]
        prompts = [record.pop("prompt") for record in records]
        scores = score_named(self.reward, completions, prompts, records, name=self.reward.name)
        rewards[present] = torch.where(scores.valid, scores.value.detach(), math.nan).cpu().float()
        return rewards

    def _unit_vectors(self, texts: Sequence[str]) -> Tensor:
        return normalize(self.embed(texts).detach().cpu().float(), dim=1)


def _pool_key(prompt: Prompt) -> str:
    """Text of a prompt without the blanks at its ends, which a file of prompts loses."""
    return prompt_text(prompt, images=False).strip()
