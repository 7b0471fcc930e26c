# SPDX-License-Identifier: Apache-2.0
"""Prompts near a prompt: how similar texts are by their letters, copies of a prompt with changed words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import normalize

from visalign.core.rewards.fusion import convex_vertices
from visalign.interfaces import Prompt

_WORDS = re.compile(r"(\s+)")
_SHORTEST = 4
"""Letters of a word, two of which may be exchanged within it."""


def prompt_text(prompt: Prompt) -> str:
    """The words of a prompt; of a conversation those of all its turns, images left out."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(_content_text(message["content"]) for message in prompt)


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def hashed_ngrams(texts: Sequence[str], *, n: int = 3, size: int = 2048) -> Tensor:
    """How often each run of n letters stands in a text, hashed into `size` places, at length 1.

    Case and repeated blanks do not count. The product of two rows is the cosine of their texts; runs that
    share a place make it a little larger.

    Args:
        texts: N of them.
        n: letters of a run.
        size: D.

    Returns:
        [N, D] float32, a row of zeros for an empty text.

    Example:
        >>> one, same, other = hashed_ngrams(["A red circle", "a  red circle", "two blue squares"])
        >>> bool((one == same).all()), float(one @ other) < 0.2
        (True, True)
    """
    counts = torch.zeros(len(texts), size)
    for row, text in zip(counts, texts, strict=True):
        words = " ".join(text.casefold().split())
        padded = f" {words} " if words else ""
        for start in range(len(padded) - n + 1):
            row[crc32(padded[start : start + n].encode()) % size] += 1
    return normalize(counts, dim=1)


def changed_words(
    text: str, random: Random, *, share: float = 0.05, synonyms: Mapping[str, Sequence[str]] | None = None
) -> str:
    """The text with a share of its words changed, at least one, if there is one that can be.

    Args:
        text: what is changed; its blanks stay.
        random: chooses words and changes.
        share: of the words.
        synonyms: word in lower case -> others for it; only these words change. None: two neighbouring letters
            within a word of four or more change places.

    Example:
        >>> changed_words("a red circle", Random(0))
        'a red cicrle'
    """
    pieces = _WORDS.split(text)
    words = [place for place, piece in enumerate(pieces) if piece.strip()]
    options = {place: _changes(pieces[place], synonyms) for place in words}
    able = [place for place in words if options[place]]
    for place in random.sample(able, min(len(able), max(1, round(share * len(words))))):
        pieces[place] = random.choice(options[place])
    return "".join(pieces)


def _changes(word: str, synonyms: Mapping[str, Sequence[str]] | None) -> list[str]:
    """What may stand for a word."""
    if synonyms is not None:
        return [other for other in synonyms.get(word.casefold(), ()) if other != word]
    if len(word) < _SHORTEST:
        return []
    inner = range(1, len(word) - 2)
    swapped = [word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in inner if word[i : i + 2].isalpha()]
    return [other for other in swapped if other != word]


def convex_variants(
    text: str,
    *,
    seed: int = 0,
    count: int = 5,
    share: float = 0.05,
    synonyms: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """ConvexDA: of `count` copies of a text with changed words, those at the rim of what they span.

    Copies become hashed n-grams, these points of a plane, and the vertices of the convex hull stay
    (`visalign.core.rewards.fusion.convex_vertices`), each different text once. The text itself is not among
    them unless no word of it can be changed. The paper's words come from a model; here letters change places,
    or words of a list of synonyms.

    Args:
        text: of a training example.
        seed: of the changes; they are functions of it, the text and the number of the copy.
        count: copies that are made.
        share: of the words that change.
        synonyms: as in `changed_words`.

    Returns:
        At least one text.

    Shen et al., The trickle-down impact of reward (in-)consistency on RLHF, arXiv 2309.16155.
    """
    copies = [
        changed_words(text, Random(f"{seed} {copy} {text}"), share=share, synonyms=synonyms)
        for copy in range(count)
    ]
    return [copies[place] for place in convex_vertices(hashed_ngrams(copies)).tolist()]
