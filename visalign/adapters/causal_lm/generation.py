# SPDX-License-Identifier: Apache-2.0
"""Sampling with a key-value cache: our own loop, because the log-probs of what is drawn must come out.

Prompts are padded on the left; each different prompt is read once, however many completions it gets;
completions that have ended leave the batch. A sample draws from its own numbers, so its tokens depend on its
neighbours through float rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from visalign.text import (
    Sampling,
    StopReason,
    StopStrings,
    chosen_log_prob,
    draw_tokens,
    kept_tokens,
    log_distribution,
)

from .network import CausalNetwork, PromptCache
from .prompts import EncodedPrompt, left_pad

COMPACT_BELOW = 0.8
"""Ended completions leave the cache when fewer than this share of its rows is still growing."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Rules that end the completions of a batch."""

    eos_ids: frozenset[int]
    limit: Sequence[int]
    """[b] tokens of each completion at most."""
    strings: Sequence[str] = ()
    decode: Callable[[list[int]], str] | None = None
    """Ids to text, for stop strings."""


@dataclass
class Completions:
    """Completions of b samples, filled while they are generated."""

    log_prob: Tensor
    """[b, T] float32; as long as the completion it holds, the rest is to be ignored."""
    full_log_prob: Tensor
    entropy: Tensor
    ids: list[list[int]]
    reason: list[StopReason]
    kept: list[list[Tensor]] = field(default_factory=list)
    """Per sample and token the ids that could be drawn; empty lists without truncation."""


@torch.no_grad()
def generate_completions(
    network: CausalNetwork,
    prompts: Sequence[EncodedPrompt],
    uniform: Tensor,
    *,
    sampling: Sampling,
    ending: Ending,
    pad_id: int,
) -> Completions:
    """Draw one completion per prompt, in their order; equal prompts share their first pass. `uniform` [b, T]
    float64 in [0, 1) decides the tokens; `pad_id` is any id of the vocabulary, masked wherever it stands.
    """
    device, count, longest = network.model.device, len(prompts), max(ending.limit)
    completions = _empty(count, longest, device)
    strings = StopStrings(ending.strings, ending.decode or (lambda ids: ""))
    uniform = uniform.to(device)
    logits, cache, mask = _first_pass(network, prompts, longest, pad_id)
    width = mask.shape[1] - longest
    rows = torch.arange(count, device=device)
    growing = torch.ones(count, dtype=torch.bool, device=device)
    for step in range(longest):
        token = _draw(completions, logits, rows, uniform[rows, step], sampling, step)
        _take(completions, rows, token, growing, ending, strings)
        if step + 1 == longest or not bool(growing.any()):
            break
        if int(growing.sum()) < COMPACT_BELOW * len(rows):
            still = growing.nonzero()[:, 0]
            cache.reorder(still)
            rows, mask, token, growing = rows[still], mask[still], token[still], growing[still]
        # masked tokens of ended completions do not move their position, so none walks past the context's end
        mask[:, width + step] = growing
        features, cache = network.features(
            token[:, None], mask[:, : width + step + 1], cache=cache, caching=True
        )
        logits = network.logits(features[:, -1])
    return completions


def _empty(count: int, longest: int, device: torch.device) -> Completions:
    blank = torch.zeros(count, longest, dtype=torch.float32, device=device)
    return Completions(
        log_prob=blank,
        full_log_prob=blank.clone(),
        entropy=blank.clone(),
        ids=[[] for _ in range(count)],
        reason=["length"] * count,
        kept=[[] for _ in range(count)],
    )


def _first_pass(
    network: CausalNetwork, prompts: Sequence[EncodedPrompt], longest: int, pad_id: int
) -> tuple[Tensor, PromptCache, Tensor]:
    """Logits after each prompt, the cache of the prompts, and a mask with room for the completions."""
    row_of: dict[EncodedPrompt, int] = {}
    for prompt in prompts:
        row_of.setdefault(prompt, len(row_of))
    padded = left_pad([prompt.ids for prompt in row_of], pad_id)
    ids, mask = (block.to(network.model.device) for block in padded)
    encoded_images = [prompt.encoded_images for prompt in row_of]
    features, cache = network.features(ids, mask, encoded_images=encoded_images, caching=True)
    cache.check(type(network.model).__name__)
    index = torch.tensor([row_of[prompt] for prompt in prompts], device=ids.device)
    cache.reorder(index)
    room = torch.zeros(len(prompts), longest, dtype=mask.dtype, device=mask.device)
    return network.logits(features[:, -1])[index], cache, torch.cat((mask[index], room), 1)


def _draw(
    completions: Completions, logits: Tensor, rows: Tensor, uniform: Tensor, sampling: Sampling, step: int
) -> Tensor:
    """Draw the tokens [n] of one step and write down their log-probs."""
    log_full = log_distribution(logits, sampling.scale)
    token_sets = kept_tokens(log_full, sampling)
    log_p = log_full if token_sets is None else log_distribution(log_full, kept=token_sets)
    token = log_p.argmax(-1) if sampling.greedy else draw_tokens(log_p, uniform)
    chosen = chosen_log_prob(log_p, token)
    completions.log_prob[rows, step] = chosen.log_prob.float()
    completions.entropy[rows, step] = chosen.entropy.float()
    completions.full_log_prob[rows, step] = log_full.gather(-1, token[:, None])[:, 0].float()
    if token_sets is not None:
        sets = token_sets.nonzero()[:, 1].to(torch.int32).cpu().split(token_sets.sum(1).tolist())
        for row, ids in zip(rows.tolist(), sets, strict=True):
            completions.kept[row].append(ids)
    return token


def _take(
    completions: Completions,
    rows: Tensor,
    token: Tensor,
    growing: Tensor,
    ending: Ending,
    strings: StopStrings,
) -> None:
    """Append the tokens to the completions that still grow, and mark those that end with them."""
    for index, (row, drawn, open_) in enumerate(
        zip(rows.tolist(), token.tolist(), growing.tolist(), strict=True)
    ):
        if not open_:
            continue
        ids = completions.ids[row]
        ids.append(drawn)
        if drawn in ending.eos_ids:
            completions.reason[row] = "eos"
        elif strings.found(ids):
            completions.reason[row] = "stop string"
        elif len(ids) < ending.limit[row]:
            continue
        growing[index] = False
