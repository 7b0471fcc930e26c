# SPDX-License-Identifier: Apache-2.0
"""Similar prompts: cosine similarity of texts by letter n-grams, copies of a prompt with changed words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import normalize

from visalign.core.rewards.fusion import convex_vertices

_WORDS = re.compile(r"(\s+)")
_SHORTEST = 4  # Letters of the shortest word in which two may be swapped


def hashed_ngrams(texts: Sequence[str], *, n: int = 3, size: int = 2048) -> Tensor:
    """Count letter n-grams of N texts, hashed into D = size buckets, rows [N, D] normalised to length 1.

    Case and repeated blanks do not count. The product of two rows is the cosine similarity of their texts;
    n-grams that share a bucket make it a little larger. An empty text gets zeros.

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
    """Change a share of a text's words, at least one that can be changed; blanks stay.

    With synonyms (word in lower case -> substitutes) only these words change; without, two neighbouring
    letters within a word of four or more are swapped.

    >>> changed_words("a red circle", Random(0))
    'a red cicrle'
    """
    pieces = _WORDS.split(text)
    words = [i for i, piece in enumerate(pieces) if piece.strip()]
    substitutes = {i: _substitutes(pieces[i], synonyms) for i in words}
    changeable = [i for i in words if substitutes[i]]
    for i in random.sample(changeable, min(len(changeable), max(1, round(share * len(words))))):
        pieces[i] = random.choice(substitutes[i])
    return "".join(pieces)


def _substitutes(word: str, synonyms: Mapping[str, Sequence[str]] | None) -> list[str]:
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
    """Generate ConvexDA's variants of a text: copies with changed words on the convex hull of all copies.

    Hashed n-grams of the copies are projected to a plane, and the vertices of their convex hull stay
    (`visalign.core.rewards.fusion.convex_vertices`), each distinct text once. Deviation: the paper takes the words
    from a model; here letters are swapped, or words come from a list of synonyms. The seed's changes also depend on
    the text and the number of the copy. The original is a variant only where no word of it can be changed.

    Shen et al., The trickle-down impact of reward (in-)consistency on RLHF, arXiv 2309.16155.
    """
    copies = [
        changed_words(text, Random(f"{seed} {copy} {text}"), share=share, synonyms=synonyms) for copy in range(count)
    ]
    return [copies[i] for i in convex_vertices(hashed_ngrams(copies)).tolist()]
