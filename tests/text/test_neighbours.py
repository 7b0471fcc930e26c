# SPDX-License-Identifier: Apache-2.0
"""Prompts near a prompt: cosines by hand, changed words, the copies at the rim."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from visalign.core.rewards.fusion import convex_vertices
from visalign.text.messages import prompt_text
from visalign.text.neighbours import changed_words, convex_variants, hashed_ngrams

LONG = "a small red circle stands to the left of two large yellow squares on a plain white ground"


def test_the_cosine_of_letters_by_hand() -> None:
    """ " abab " has ab twice of 5 runs of two; " ab " has it once of 3."""
    one, other, empty = hashed_ngrams(["abab", "ab", " "], n=2, size=1 << 16)
    assert float(one @ other) == pytest.approx((1 + 2 + 1) / math.sqrt((1 + 4 + 1 + 1) * 3))
    assert not empty.any() and float(one.norm()) == pytest.approx(1)


def test_the_words_of_a_conversation() -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert prompt_text(chat, images=False) == "Be brief.\nWhat?" and prompt_text("What?") == "What?"


def test_a_share_of_the_words_changes() -> None:
    for share, count in ((0.05, 1), (0.5, 9), (1.0, 10)):  # of 18 words 10 have four letters or more
        changed = changed_words(LONG, Random(1), share=share)
        pairs = [(a, b) for a, b in zip(LONG.split(), changed.split(), strict=True) if a != b]
        assert len(pairs) == count
        assert all(sorted(a) == sorted(b) and (a[0], a[-1]) == (b[0], b[-1]) for a, b in pairs)
    assert changed_words("a red cat", Random(0)) == "a red cat"
    words = {"circle": ["disc", "ring"], "red": ["red"]}
    assert changed_words("a red  Circle", Random(0), synonyms=words) in {"a red  disc", "a red  ring"}


def test_the_copies_at_the_rim_are_learnt_from() -> None:
    copies = [changed_words(LONG, Random(f"4 {n} {LONG}")) for n in range(5)]
    variants = convex_variants(LONG, seed=4)
    assert variants == [copies[index] for index in convex_vertices(hashed_ngrams(copies)).tolist()]
    assert 1 <= len(variants) == len(set(variants)) <= 5 and LONG not in variants
    assert variants == convex_variants(LONG, seed=4) != convex_variants(LONG, seed=5)
    assert convex_variants("a red cat") == ["a red cat"]
    assert torch.equal(hashed_ngrams([]), torch.zeros(0, 2048))
