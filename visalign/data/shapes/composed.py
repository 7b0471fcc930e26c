# SPDX-License-Identifier: Apache-2.0
"""Composed prompts: pairs with a size and also a color or a relation.

"a big red circle and a small cross" or "a small circle above a blue cross" is no prompt of the world's own lists,
but what it says of pairs is what the packaged generator fails at most.
"""

from __future__ import annotations

import random

from .prompts import COLORS, RELATIONS, SHAPES, SIZES, Noun, Record, is_heldout, parse_prompt, phrase, train_prompts


def contained_prompts(first: Noun, relation: str | None, second: Noun) -> list[str]:
    """List the prompts of the world's own lists that a composed prompt contains."""
    (size_a, color_a, a), (size_b, color_b, b) = first, second
    pairs: list[tuple[Noun, str, Noun]] = [((size_a, None, a), "and", (size_b, None, b))]
    if color_a and color_b and color_a != color_b:
        pairs.append(((None, color_a, a), "and", (None, color_b, b)))
    if relation:
        pairs.append(((None, None, a), relation, (None, None, b)))
    if relation and color_a and color_b:
        pairs.append(((None, color_a, a), relation, (None, color_b, b)))
    colored = [phrase(noun) for noun in (first, second) if noun[1]]
    return colored + [f"{phrase(left)} {word} {phrase(right)}" for left, word, right in pairs]


def composed_prompts(count: int, seed: int = 1) -> list[Record]:
    """Draw prompts with a size and also a color or a relation; no pair, relation, colored noun is held out."""
    draw, records = random.Random(seed), dict[str, Record]()
    sizes, colors = (None, *SIZES), (None, *COLORS)
    while len(records) < count:
        first, second = (
            (draw.choice(sizes), draw.choice(colors) if draw.random() < 0.6 else None, shape)
            for shape in draw.sample(SHAPES, 2)
        )
        relation = draw.choice(RELATIONS) if draw.random() < 0.5 else None
        if not (first[0] or second[0]) or not (relation or first[1] or second[1]):
            continue
        contained = map(parse_prompt, contained_prompts(first, relation, second))
        if not any(map(is_heldout, contained)):
            prompt = f"{phrase(first)} {relation or 'and'} {phrase(second)}"
            records[prompt] = parse_prompt(prompt)
    return list(records.values())


def widened_prompts(count: int = 800) -> list[Record]:
    """List the training prompts and `count` composed ones, whose tag is "composed"."""
    return [*train_prompts(), *(record | {"tag": "composed"} for record in composed_prompts(count))]
