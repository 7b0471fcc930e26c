# SPDX-License-Identifier: Apache-2.0
"""Sampling with a key-value cache: our own loop, because the log-probs of what is drawn must come out.

Prompts are padded on the left; each different prompt is read once, however many completions it gets;
completions that have ended leave the batch. A sample draws from its own numbers, so its tokens depend on its
neighbours through float rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.text import (
    Sampling,
    StopReason,
    StopStrings,
    chosen_log_prob,
    draw_tokens,
    kept_tokens,
    log_distribution,
)
from visalign.text.distribution import check_usable

from .captured import CHECK_EVERY, CapturedDecoder, attention_by_key_head, can_capture
from .network import CausalNetwork, PromptCache
from .prompts import EncodedPrompt, left_pad

COMPACT_BELOW = 0.8  # ended completions leave the cache when fewer than this share of its rows is still growing


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Rules that end the completions of a batch."""

    eos_ids: frozenset[int]
    limit: Sequence[int]  # [b] tokens of each completion at most
    strings: StopStrings

    def reason(self, row: int, ids: Sequence[int]) -> StopReason | None:
        """Return why completion `row` ends with its newest token, or None if it goes on."""
        if ids[-1] in self.eos_ids:
            return "eos"
        if self.strings.found(ids):
            return "stop string"
        return "length" if len(ids) >= self.limit[row] else None


@dataclass
class Completion:
    """Completion of n tokens, on the CPU."""

    ids: list[int]
    reason: StopReason
    log_prob: Tensor  # [n] float32
    full_log_prob: Tensor
    entropy: Tensor
    kept: list[Tensor]  # Per token the ids that could be drawn; empty without truncation


@torch.no_grad()
def generate_completions(
    network: CausalNetwork,
    prompts: Sequence[EncodedPrompt],
    uniform: Tensor,
    *,
    sampling: Sampling,
    ending: Ending,
    pad_id: int,
) -> list[Completion]:
    """Draw one completion per prompt, in their order; equal prompts share their first pass. `uniform` [b, T]
    float64 in [0, 1) decides the tokens; `pad_id` is any id of the vocabulary, masked wherever it stands.
    """
    device, longest = network.model.device, max(ending.limit)
    uniform = uniform.to(device)
    logits, cache, mask = _first_pass(network, prompts, longest, pad_id)
    growth = _Growth(ending, len(prompts))
    if can_capture(network, cache, sampling):
        decoder = CapturedDecoder(network, cache, mask, uniform, ending.limit, sampling)
        del cache
        _decode_captured(network, decoder, logits, growth)
        return growth.completions(decoder.numbers)
    numbers = torch.zeros(3, len(prompts), longest, device=device)  # log_prob, full_log_prob, entropy
    width = mask.shape[1] - longest
    rows = torch.arange(len(prompts), device=device)
    growing = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for step in range(longest):
        token, numbers[:, rows, step], sets = _draw(logits, uniform[rows, step], sampling)
        live = zip(rows.tolist(), token.tolist(), growing.tolist(), strict=True)
        for index, (row, drawn, still_growing) in enumerate(live):
            if still_growing:
                if sets:
                    growth.kept[row].append(sets[index])
                growing[index] = growth.add(row, drawn)
        if step + 1 == longest or not bool(growing.any()):
            break
        if int(growing.sum()) < COMPACT_BELOW * len(rows):
            remaining = growing.nonzero()[:, 0]
            cache.reorder(remaining)
            rows, mask, token, growing = (rows[remaining], mask[remaining], token[remaining], growing[remaining])
        # masked tokens of ended completions do not move their position, so none walks past the context's end
        mask[:, width + step] = growing
        features, cache = network.features(token[:, None], mask[:, : width + step + 1], cache=cache, caching=True)
        logits = network.logits(features[:, -1])
    return growth.completions(numbers)


def _decode_captured(network: CausalNetwork, decoder: CapturedDecoder, logits: Tensor, growth: _Growth) -> None:
    """Decode until all completions have ended, looking at them every `CHECK_EVERY` tokens."""
    longest, growing = decoder.ids.shape[1], set(range(len(decoder.ids)))
    decoder.draw(logits)
    drawn, checked = 1, 0
    with attention_by_key_head(network.model):
        for advance in decoder.steps():
            if drawn == longest or drawn - checked >= CHECK_EVERY:
                check_usable(decoder.numbers[0, :, checked:drawn].isfinite().all(1))
                for row, tokens in enumerate(decoder.ids[:, checked:drawn].tolist()):
                    if row in growing and not all(growth.add(row, token) for token in tokens):
                        growing.remove(row)
                checked = drawn
                if drawn == longest or not growing:
                    return
            advance()
            drawn += 1


class _Growth:
    """Tokens of completions so far, and why those that have ended did."""

    def __init__(self, ending: Ending, count: int) -> None:
        self._ending = ending
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self.kept: list[list[Tensor]] = [[] for _ in range(count)]
        self.reasons: list[StopReason] = ["length"] * count

    def add(self, row: int, token: int) -> bool:
        """Append a token to a completion; return False if it ends with it."""
        self.ids[row].append(token)
        reason = self._ending.reason(row, self.ids[row])
        self.reasons[row] = reason or "length"
        return reason is None

    def completions(self, numbers: Tensor) -> list[Completion]:
        """Return all completions with their numbers (log_prob, full_log_prob, entropy) [3, n, T]."""
        columns = numbers.cpu()
        return [
            Completion(tokens, self.reasons[row], *columns[:, row, : len(tokens)], kept=self.kept[row])
            for row, tokens in enumerate(self.ids)
        ]


def _first_pass(
    network: CausalNetwork, prompts: Sequence[EncodedPrompt], longest: int, pad_id: int
) -> tuple[Tensor, PromptCache, Tensor]:
    """Logits after each prompt, the cache of the prompts, and a mask with room for the completions."""
    row_of = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    ids, mask = (block.to(network.model.device) for block in left_pad([prompt.ids for prompt in row_of], pad_id))
    encoded_images = [prompt.encoded_images for prompt in row_of]
    features, cache = network.features(ids, mask, encoded_images=encoded_images, caching=True)
    if not hasattr(cache.keys, "reorder_cache"):
        raise UserError(
            f"{type(network.model).__name__} has no key-value cache that completions can share. Use a server for it."
        )
    index = torch.tensor([row_of[prompt] for prompt in prompts], device=ids.device)
    cache.reorder(index)
    room = torch.zeros(len(prompts), longest, dtype=mask.dtype, device=mask.device)
    return network.logits(features[:, -1])[index], cache, torch.cat((mask[index], room), 1)


def _draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Draw the tokens [n] of one step; with their log-prob, full log-prob and entropy [3, n], and token sets."""
    log_full = log_distribution(logits, sampling.scale)
    token_sets = kept_tokens(log_full, sampling)
    log_p = log_full if token_sets is None else log_distribution(log_full, kept=token_sets)
    token = log_p.argmax(-1) if sampling.greedy else draw_tokens(log_p, uniform)
    chosen = chosen_log_prob(log_p, token)
    full = log_full.gather(-1, token[:, None])[:, 0]
    numbers = torch.stack([part.float() for part in (chosen.log_prob, full, chosen.entropy)])
    if token_sets is None:
        return token, numbers, ()
    return token, numbers, token_sets.nonzero()[:, 1].to(torch.int32).cpu().split(token_sets.sum(1).tolist())
