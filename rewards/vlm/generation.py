# SPDX-License-Identifier: Apache-2.0
"""Generated answers of a vision-language judge, for modes that think before they judge.

Tokens are drawn by inverting the cumulative distribution at uniform numbers that depend on the request, the answer's
number and the seed alone, not on the other requests of a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

    texts: list[list[str]]  # Without special tokens and the template's answer prefix; [] where there is a reason
    finished: list[list[bool]]  # True for answers that ended before max_new_tokens
    reasons: list[str | None]  # Why a request could not be answered; None for the others


def check_drawing(answers: int, temperature: float, max_new_tokens: int) -> None:
    """Refuse sampling options that give no answers."""
    if answers < 1 or max_new_tokens < 1 or not temperature >= 0 or (temperature == 0 and answers > 1):
        raise RewardError(
            f"answers is {answers}, tokens {max_new_tokens}, temperature {temperature}; allowed: 1, 1, 0 (one answer)."
        )


@torch.no_grad()
def generate_answers(
    network: SeeingNetwork,
    tokenizer: Any,
    rows: Sequence[TokenRow | None],
    reasons: list[str | None],
    *,
    answers: int = 1,
    seed: int = 0,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
) -> JudgeAnswers:
    """Generate K `answers` to each request; temperature 0 is greedy."""
    check_drawing(answers, temperature, max_new_tokens)
    ends = end_tokens(network.model, tokenizer)
    unique_rows = list(dict.fromkeys(row for row in rows if row is not None))
    answers_of: dict[TokenRow, list[list[int]]] = {}
    for part in _parts(unique_rows, answers, max_new_tokens, network.max_tokens):
        tokens = _generate(network, part, answers, seed, temperature, max_new_tokens, ends)
        answers_of.update(zip(part, tokens, strict=True))
    texts, finished = [], []
    for row in rows:
        tokens = [] if row is None else answers_of[row]
        texts.append([tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens])
        finished.append([bool(ids) and ids[-1] in ends for ids in tokens])
    return JudgeAnswers(texts, finished, reasons)


def _generate(
    network: SeeingNetwork,
    rows: Sequence[TokenRow],
    answers: int,
    seed: int,
    temperature: float,
    max_new_tokens: int,
    end_tokens: frozenset[int],
) -> list[list[list[int]]]:
    from transformers import DynamicCache

    packs = pack_rows(rows, network.image_token, share=False)
    batch, position = _pad_left(collate(packs, network.image_token, network.pad, network.merge))
    device = network.device
    cache = DynamicCache(config=network.language.config)
    mask = batch.mask.to(device)
    passed = network.language(**network.inputs(batch), attention_mask=mask, past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(answers)
    hidden = passed.last_hidden_state[:, -1].repeat_interleave(answers, 0)
    mask, position = mask.repeat_interleave(answers, 0), position.repeat_interleave(answers).to(device)
    numbered = [(rows[number], answer) for number in batch.numbers for answer in range(answers)]
    uniform = torch.stack([_uniforms(seed, row, answer, max_new_tokens) for row, answer in numbered]).to(device)
    written: list[list[int]] = [[] for _ in range(len(rows) * answers)]
    active = torch.arange(len(written), device=device)  # answers that have not ended
    for step in range(max_new_tokens):
        logits = network.model.get_output_embeddings()(hidden).float()
        tokens = _draw(logits, uniform[active, step], temperature)
        for answer, token in zip(active.tolist(), tokens.tolist(), strict=True):
            written[answer].append(token)
        unfinished = torch.tensor([token not in end_tokens for token in tokens.tolist()], device=device)
        if step == max_new_tokens - 1 or not unfinished.any():
            break
        if not unfinished.all():
            keep = unfinished.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            active, tokens = active[keep], tokens[keep]
            mask, position = mask[keep], position[keep]
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
        hidden = network.language(
            inputs_embeds=network.trunk.get_input_embeddings()(tokens[:, None]),
            position_ids=position[:, None].expand(3, -1, -1) if network.merge else position[:, None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        position = position + 1
    order = {number: index * answers for index, number in enumerate(batch.numbers)}
    return [written[order[row] : order[row] + answers] for row in range(len(rows))]


def _pad_left(batch: Batch) -> tuple[Batch, Tensor]:
    """Move the padding to the left; also return the positions [b] of the next tokens."""
    shift = batch.mask.shape[1] - batch.mask.sum(1)
    index = (torch.arange(batch.mask.shape[1]) - shift[:, None]) % batch.mask.shape[1]
    positions = torch.arange(batch.mask.shape[1]).expand_as(batch.ids) if batch.positions is None else batch.positions
    positions = positions.gather(-1, index.expand_as(positions))
    padded = replace(
        batch,
        ids=batch.ids.gather(1, index),
        mask=batch.mask.gather(1, index),
        image_mask=batch.image_mask.gather(1, index),
        positions=positions,
        segments=None,
    )
    last = positions[..., -1]  # the last token of a text has the same position on all axes
    return padded, (last if last.ndim == 1 else last.amax(0)) + 1


def _draw(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = (logits / temperature).softmax(-1).double().cumsum(-1)
    tokens = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
    return tokens.clamp(max=logits.shape[1] - 1)


def _uniforms(seed: int, row: TokenRow, answer: int, count: int) -> Tensor:
    key = repr((seed, row.ids, [image.digest for image in row.images], answer))
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    generator = torch.Generator().manual_seed(number % (1 << 63))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    tokens: set[Any] = set()
    for ids in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        tokens |= set(ids) if isinstance(ids, list | tuple) else {ids}
    tokens.discard(None)
    if not tokens:
        raise RewardError("The model has no end-of-sequence token, so no answer would end by itself.")
    return frozenset(tokens)


def _parts(rows: Sequence[TokenRow], answers: int, new: int, max_tokens: int) -> list[list[TokenRow]]:
    """Split rows, longest first, into parts whose answers take at most `max_tokens`, one row at least."""
    parts: list[list[TokenRow]] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        if parts and (len(parts[-1]) + 1) * answers * (len(parts[-1][0].ids) + new) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts
