# SPDX-License-Identifier: Apache-2.0
"""The tokenizer and the CLIP-type text encoders of the embedded generator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from visalign.data.shapes.prompts import all_prompts

MAX_TOKENS = 12
"""Begin, at most eight words, end, and room for two unknown pieces."""

_MERGES_LIMIT = 400


def new_tokenizer() -> CLIPTokenizer:
    """A byte-level BPE in CLIP's layout whose merges make each word of the world one token.

    Other text still has an encoding: the 256 bytes and their word-final forms are in the vocabulary.
    """
    letters = _byte_symbols()
    vocabulary = [*letters, *(letter + "</w>" for letter in letters)]
    words = sorted({word for record in all_prompts() for word in record["prompt"].split()})
    ranks: dict[tuple[str, str], int] = {}
    for word in words:
        while len(pieces := _apply_merges(word, ranks)) > 1:
            ranks[pieces[0], pieces[1]] = len(ranks)
            if pieces[0] + pieces[1] not in vocabulary:
                vocabulary.append(pieces[0] + pieces[1])
    if len(ranks) > _MERGES_LIMIT:
        raise ValueError(f"{len(ranks)} merges; the tokenizer is meant to stay below {_MERGES_LIMIT}.")
    # CLIP pools at the highest id, so the end token comes last.
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    ids = {token: i for i, token in enumerate(vocabulary)}
    pairs: Any = list(ranks)  # annotated as text, takes pairs
    return CLIPTokenizer(vocab=ids, merges=pairs, model_max_length=MAX_TOKENS)


def _apply_merges(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """The pieces that BPE leaves of a word: the pair of lowest rank is joined until none is left."""
    pieces = [*word[:-1], word[-1] + "</w>"]
    while True:
        pairs = [pair for pair in itertools.pairwise(pieces) if pair in ranks]
        if not pairs:
            return pieces
        first = min(pairs, key=ranks.__getitem__)
        i = next(i for i, pair in enumerate(itertools.pairwise(pieces)) if pair == first)
        pieces[i : i + 2] = [first[0] + first[1]]


def _byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes in byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def new_text_encoder(tokenizer: CLIPTokenizer, layers: int) -> CLIPTextModelWithProjection:
    """A CLIP text encoder of width 64; SD3 reads the states before its last layer and the end token."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        projection_dim=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        initializer_factor=1.0,
    )
    return CLIPTextModelWithProjection(config)


def token_ids(tokenizer: CLIPTokenizer, prompts: Sequence[str]) -> Tensor:
    """Ids [B, MAX_TOKENS] int64."""
    batch = tokenizer(
        list(prompts), padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    )
    return batch.input_ids


class TextSide(nn.Module):
    """Two text encoders as SD3's pipeline uses them, trainable."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.first = new_text_encoder(tokenizer, layers=2)
        self.second = new_text_encoder(tokenizer, layers=3)

    def token_ids(self, prompts: Sequence[str]) -> Tensor:
        """Ids [B, MAX_TOKENS] int64."""
        return token_ids(self.tokenizer, prompts)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Context [B, MAX_TOKENS, 128] and pooled [B, 128]."""
        outputs = [encoder(ids, output_hidden_states=True) for encoder in (self.first, self.second)]
        context = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        return context, torch.cat([output.text_embeds for output in outputs], dim=-1)
