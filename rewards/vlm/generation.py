# SPDX-License-Identifier: Apache-2.0
"""Answers of a vision-language judge in words, for modes that think before they judge.

An answer is drawn by inverting the cumulative distribution at one uniform number per token; the numbers come
from a generator of the request, the answer's place and the seed, so that neighbours do not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.rewards.base.contract import RewardError

from .network import SeeingNetwork
from .packing import Batch, collate, pack_rows
from .requests import TokenRow


@dataclass(frozen=True)
class JudgeAnswers:
    """K answers to each of B requests."""

    texts: list[list[str]]
    """Without special tokens and what was given as their beginning; [] where there is a reason."""
    finished: list[list[bool]]
    """Whether an answer ended by itself, before max_new_tokens."""
    reasons: list[str | None]
    """Why a request could not be answered; None for the others."""


def check_drawing(answers: int, temperature: float, max_new_tokens: int) -> None:
    """Refuse numbers with which no answers can be drawn."""
    if answers < 1 or max_new_tokens < 1 or not temperature >= 0:
        raise RewardError(
            f"answers is {answers}, max_new_tokens {max_new_tokens}, temperature {temperature}; allowed are "
            "whole numbers from 1, from 1, and numbers from 0."
        )
    if temperature == 0 and answers > 1:
        raise RewardError(
            f"temperature 0 gives the same answer {answers} times; set answers=1, or a temperature above 0."
        )


@torch.no_grad()
def generate_answers(
    network: SeeingNetwork,
    tokenizer: Any,
    rows: Sequence[TokenRow | None],
    reasons: list[str | None],
    *,
    answers: int,
    seed: int,
    temperature: float,
    max_new_tokens: int,
) -> JudgeAnswers:
    """Draw answers; see `VisionLanguageEngine.generate`."""
    check_drawing(answers, temperature, max_new_tokens)
    ends = _ends(network.model, tokenizer)
    different = list(dict.fromkeys(row for row in rows if row is not None))
    drawn: dict[TokenRow, list[list[int]]] = {}
    for part in _parts(different, answers, max_new_tokens, network.max_tokens):
        found = _answer(network, part, answers, seed, temperature, max_new_tokens, ends)
        drawn.update(zip(part, found, strict=True))
    texts, finished = [], []
    for row in rows:
        given = [] if row is None else drawn[row]
        texts.append([tokenizer.decode(ids, skip_special_tokens=True) for ids in given])
        finished.append([bool(ids) and ids[-1] in ends for ids in given])
    return JudgeAnswers(texts, finished, reasons)


def _answer(
    network: SeeingNetwork,
    rows: Sequence[TokenRow],
    answers: int,
    seed: int,
    temperature: float,
    max_new_tokens: int,
    ends: frozenset[int],
) -> list[list[list[int]]]:
    """K lists of tokens, end token included, for each row."""
    from transformers import DynamicCache

    packs = pack_rows(rows, network.image_token, share=False)
    batch, position = _left(collate(packs, network.image_token, network.pad, network.merge))
    device = network.device
    cache = DynamicCache(config=network.trunk.language_model.config)
    mask = batch.mask.to(device)
    passed = network.trunk.language_model(
        **network.inputs(batch), attention_mask=mask, past_key_values=cache, use_cache=True
    )
    cache.batch_repeat_interleave(answers)
    hidden = passed.last_hidden_state[:, -1].repeat_interleave(answers, 0)
    mask, position = mask.repeat_interleave(answers, 0), position.repeat_interleave(answers).to(device)
    uniform = torch.stack(
        [
            _uniforms(seed, rows[number], answer, max_new_tokens)
            for number in batch.numbers
            for answer in range(answers)
        ]
    ).to(device)
    written: list[list[int]] = [[] for _ in range(len(rows) * answers)]
    open_places = torch.arange(len(written), device=device)
    for step in range(max_new_tokens):
        logits = network.model.get_output_embeddings()(hidden).float()
        tokens = _draw(logits, uniform[open_places, step], temperature)
        for place, token in zip(open_places.tolist(), tokens.tolist(), strict=True):
            written[place].append(token)
        left = torch.tensor([token not in ends for token in tokens.tolist()], device=device)
        if step == max_new_tokens - 1 or not left.any():
            break
        if not left.all():
            keep = left.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            open_places, tokens = open_places[keep], tokens[keep]
            mask, position = mask[keep], position[keep]
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
        hidden = _step(network, tokens, position, mask, cache)
        position = position + 1
    of = {number: order for order, number in enumerate(batch.numbers)}
    return [written[of[n] * answers : (of[n] + 1) * answers] for n in range(len(rows))]


def _step(network: SeeingNetwork, tokens: Tensor, position: Tensor, mask: Tensor, cache: Any) -> Tensor:
    """Hidden states [n, H] behind one more token of each answer."""
    positions = position[:, None]
    if network.merge:
        positions = positions.expand(3, -1, -1)
    return network.trunk.language_model(
        inputs_embeds=network.trunk.get_input_embeddings()(tokens[:, None]),
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state[:, -1]


def _left(batch: Batch) -> tuple[Batch, Tensor]:
    """The batch padded on the left, and the positions [b] of the tokens that come next."""
    shift = batch.mask.shape[1] - batch.mask.sum(1)
    index = (torch.arange(batch.mask.shape[1]) - shift[:, None]) % batch.mask.shape[1]
    positions = (
        torch.arange(batch.mask.shape[1]).expand_as(batch.ids) if batch.positions is None else batch.positions
    )
    index_of = index.expand_as(positions)
    moved = positions.gather(-1, index_of)
    mask = batch.mask.gather(1, index)
    turned = Batch(
        ids=batch.ids.gather(1, index),
        mask=mask,
        places=batch.places.gather(1, index),
        positions=moved,
        segments=None,
        shown=batch.shown,
        marks=batch.marks,
        numbers=batch.numbers,
    )
    last = moved[..., -1]  # a text's last token has the same number on all axes
    return turned, (last if last.ndim == 1 else last.amax(0)) + 1


def _draw(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Tokens [n] from logits [n, V] at uniform numbers [n]."""
    if temperature == 0:
        return logits.argmax(-1)
    total = (logits / temperature).softmax(-1).double().cumsum(-1)
    places = torch.searchsorted(total, (uniform * total[:, -1])[:, None], right=True)[:, 0]
    return places.clamp(max=logits.shape[1] - 1)


def _uniforms(seed: int, row: TokenRow, answer: int, count: int) -> Tensor:
    """[count] float64 in [0, 1)."""
    key = repr((seed, row.ids, [shown.digest for shown in row.shown], answer))
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    generator = torch.Generator().manual_seed(number % (1 << 63))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer."""
    found: set[int] = set()
    for given in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        found |= set(given) if isinstance(given, list | tuple) else {given} if given is not None else set()
    if not found:
        raise RewardError("The model has no end-of-sequence token, so no answer would end by itself.")
    return frozenset(found)


def _parts(rows: Sequence[TokenRow], answers: int, new: int, max_tokens: int) -> list[list[TokenRow]]:
    """Rows in parts whose answers take at most so many tokens, one row at least."""
    parts: list[list[TokenRow]] = []
    for row in sorted(rows, key=lambda one: -len(one.ids)):
        if parts and (len(parts[-1]) + 1) * answers * (len(parts[-1][0].ids) + new) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts
