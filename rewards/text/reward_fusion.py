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
from visalign.interfaces import Metadata, Prompt, RewardCapabilities, Scores, TextReward, with_capabilities
from visalign.rewards.base.contract import RewardError, make_scores
from visalign.rewards.base.failure import Naming, failure_reasons
from visalign.text.neighbours import hashed_ngrams, prompt_text

from .contract import TextRequest, read_text_request

Embed = Callable[[Sequence[str]], Tensor]
"""N texts -> [N, D]; similar are those of a large cosine."""


class RewardFusion:
    """A reward for text averaged over the prompts nearest to a completion's own, out of a fixed pool.

    R′ = (R + Σ_m w_m R_m)/(1 + Σ_m w_m): R_m is what the reward says of the same completion under the m-th
    neighbour, with the neighbour's record for its metadata, and w_m the similarity of the two prompts. A
    prompt is no neighbour of itself. Where the neighbour cannot be judged it is none, and without neighbours
    R stays as it is. The pool never changes while it is used, so that scores do not depend on their order; in
    the released code it does.

    Parts are "own", R, and "neighbours", how many took part. Unit, range and direction are the reward's.

    Shen et al., The trickle-down impact of reward (in-)consistency on RLHF, arXiv 2309.16155.
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
        """Read the pool.

        Args:
            reward: the reward, or its name for `load_text_reward`.
            pool: a .txt or .jsonl file of prompts, such as that of data.train; or prompts, or records with
                "prompt", as those of a run. Other fields of a record are the metadata under that prompt.
            threshold: least cosine of a neighbour, in (0, 1].
            top: most neighbours.
            embed: texts to vectors, or a name of such a function, package.module:name or file.py:name; hashed
                runs of three letters when None.
            device: where a reward given by name runs, if it has a network.
            **options: of a reward given by name.

        Raises:
            ValueError: a number out of range, or a pool without a prompt.
            UserError: the file cannot be read.
            RewardError: the reward or `embed` cannot be loaded.
        """
        from visalign.rewards.catalogue import find_target, load_text_reward

        if not 0 < threshold <= 1 or top < 1:
            raise ValueError(
                f"reward_fusion: threshold is {threshold} and top {top}; needed are a cosine above 0, at "
                "most 1, and at least one neighbour."
            )
        if isinstance(reward, str):
            reward = load_text_reward(reward, run_device=device, **options)
        elif options:
            raise ValueError(f"reward_fusion: {', '.join(options)}: options are of a reward given by name.")
        self.reward, self.threshold, self.top = with_capabilities(reward), threshold, top
        self.name, self.unit, self.range = f"{reward.name}_fused", reward.unit, reward.range
        self.higher_is_better = reward.higher_is_better
        needs = self.reward.capabilities
        self.capabilities = RewardCapabilities(needs_group=needs.needs_group, needs_batch=needs.needs_batch)
        records = load_prompts(pool) if isinstance(pool, str | Path) else pool
        whole = [record if isinstance(record, Mapping) else {"prompt": record} for record in records]
        if not whole:
            raise ValueError("reward_fusion: the pool is empty; give a file of prompts, or records.")
        for place, record in enumerate(whole):
            _check_prompt(place, record.get("prompt"))
        first = {_words(record["prompt"]): record for record in reversed(whole)}
        self.pool = tuple(first.values())
        self.embed: Embed = find_target(embed) if isinstance(embed, str) else embed or hashed_ngrams
        self._places = {text: place for place, text in enumerate(first)}
        self._vectors = self._embedded(list(first))

    def score(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Scores:
        """The reward's scores, fused; the own ones and those under neighbours are asked for one by one."""
        request = read_text_request(self.name, completions, prompts, metadata)
        with Naming(self.reward.name):
            scores = self.reward.score(completions, prompts, metadata)
        own, reasons = scores.value.detach().cpu().float(), failure_reasons(scores)
        own = torch.where(scores.valid.cpu(), own, math.nan)
        similarity, nearest = self._nearest(request)
        similarity = torch.where(own.isnan()[:, None], math.nan, similarity)
        judged = self._judged(request, similarity, nearest)
        fused = reward_fusion(own, judged, similarity, threshold=self.threshold, top=self.top)
        weight = neighbour_weights(similarity, judged.isfinite(), threshold=self.threshold, top=self.top)
        parts = {"own": own, "neighbours": (weight > 0).sum(1).float()}
        return make_scores(fused, reasons, self.unit, parts=parts, text=scores.text)

    def _nearest(self, request: TextRequest) -> tuple[Tensor, Tensor]:
        """Cosines [B, M] of the nearest prompts of the pool, NaN below the threshold, and their places."""
        texts = [_words(prompt) for prompt in request.prompts]
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        cosine = self._embedded(list(places)) @ self._vectors.T if places else torch.zeros(0, len(self.pool))
        for text in places.keys() & self._places.keys():
            cosine[places[text], self._places[text]] = -1.0
        value, place = cosine.sort(dim=1, descending=True, stable=True)
        value, place = value[:, : self.top], place[:, : self.top]
        rows = torch.tensor([places[text] for text in texts], dtype=torch.int64)
        return torch.where(value >= self.threshold, value, math.nan)[rows], place[rows]

    def _judged(self, request: TextRequest, similarity: Tensor, nearest: Tensor) -> Tensor:
        """[B, M] what the reward says under the neighbours; NaN where there is none, or it fails."""
        judged = torch.full_like(similarity, math.nan)
        pairs = similarity.isfinite().nonzero().tolist()
        if not pairs:
            return judged
        records = [self.pool[int(nearest[row, column])] for row, column in pairs]
        others = [{key: value for key, value in record.items() if key != "prompt"} for record in records]
        with Naming(self.reward.name):
            scores = self.reward.score(
                [request.completions[row] for row, _ in pairs], [r["prompt"] for r in records], others
            )
        value = torch.where(scores.valid, scores.value.detach(), math.nan).cpu().float()
        rows, columns = torch.tensor(pairs).T
        judged[rows, columns] = value
        return judged

    def _embedded(self, texts: Sequence[str]) -> Tensor:
        vectors = self.embed(texts)
        if not isinstance(vectors, Tensor) or vectors.ndim != 2 or len(vectors) != len(texts):
            given = tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
            raise RewardError(
                f"{self.name}: embed gave {given} for {len(texts)} texts; needed is a tensor [N, D]."
            )
        return normalize(vectors.detach().cpu().float(), dim=1)


def _words(prompt: Prompt) -> str:
    """What a prompt is known by; blanks at its ends, which a file of prompts loses, play no part."""
    return prompt_text(prompt).strip()


def _check_prompt(place: int, prompt: Any) -> None:
    messages = prompt if isinstance(prompt, list | tuple) else ()
    is_chat = bool(messages) and all(isinstance(m, Mapping) and "content" in m for m in messages)
    if not (isinstance(prompt, str) or is_chat):
        raise ValueError(
            f"reward_fusion: entry {place} of the pool has the prompt {prompt!r}; needed is text or a list "
            'of messages, by itself or as "prompt" of a record.'
        )
