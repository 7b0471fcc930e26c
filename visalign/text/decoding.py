# SPDX-License-Identifier: Apache-2.0
"""Tokens to text: with every token spelled out, or as rewards and datasets read a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode tokens, special ones as they are spelled, without tidying of blanks."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def completion_text(tokenizer: Any, ids: Sequence[int], *, ended: bool) -> str:
    """Decode a completion without start, end and padding tokens; other special tokens may be a reward's tags.

    With `ended` the last token is left out if it is special.
    """
    if ended and ids and not tokenizer.decode([ids[-1]], skip_special_tokens=True):
        ids = ids[:-1]
    silent = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    return decode(tokenizer, [token for token in ids if token not in silent])
