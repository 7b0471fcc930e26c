# SPDX-License-Identifier: Apache-2.0
"""Paraphrases of a prompt that must not move a reward, and prompts that a mirror image does not satisfy."""

from __future__ import annotations

import re
from collections.abc import Callable

from visalign.data.shapes.prompts import COLORS, RELATIONS, SHAPES, SIZES

ARTICLE = re.compile(r"\b(?:an?|the)\s+", re.IGNORECASE)
HORIZONTAL = re.compile(r"\b(?:left|right|clockwise|text|sign|words?|letters?|says|written)\b|[\"“”]", re.IGNORECASE)
"""Words that an image and its mirror image do not satisfy alike."""

_INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_NOUN = rf"(?:an?\s+)?(?:(?:{'|'.join(SIZES)})\s+)?(?:(?:{'|'.join(COLORS)})\s+)?(?:{'|'.join(SHAPES)})"
_RELATED = re.compile(rf"({_NOUN}) (?:to the )?({'|'.join(RELATIONS)}) ({_NOUN})")
_JOINED = re.compile(rf"({_NOUN}) and ({_NOUN})")


def reversed_order(prompt: str) -> str | None:
    """Name the other thing first, with the same meaning, in prompts of the shapes world with two things.

    >>> reversed_order("a red circle left of a square"), reversed_order("a circle and a cross")
    ('a square right of a red circle', 'a cross and a circle')
    >>> reversed_order("a photo of a cat") is None
    True
    """
    if match := _RELATED.fullmatch(prompt):
        return f"{match[3]} {_INVERSE[match[2]]} {match[1]}"
    if match := _JOINED.fullmatch(prompt):
        return f"{match[2]} and {match[1]}"
    return None


def to_the(prompt: str) -> str | None:
    """Write "left of" as "to the left of" in prompts of the shapes world.

    >>> to_the("a circle left of a square")
    'a circle to the left of a square'
    """
    match = _RELATED.fullmatch(prompt)
    if match is None or match[2] not in ("left of", "right of"):
        return None
    return f"{match[1]} to the {match[2]} {match[3]}"


SPELLINGS: dict[str, Callable[[str], str | None]] = {
    "lower case": str.lower,
    "upper case": str.upper,
    "first letter large": lambda prompt: prompt[:1].upper() + prompt[1:],
    "full stop": lambda prompt: prompt.rstrip().rstrip(".") + ".",
    "space at the end": lambda prompt: prompt + " ",
    "space at the start": lambda prompt: " " + prompt,
    "double spaces": lambda prompt: prompt.replace(" ", "  "),
    "no articles": lambda prompt: ARTICLE.sub("", prompt),
    "other thing first": reversed_order,
    "to the left of": to_the,
}
"""Name -> rewriting of a prompt, None where it does not apply."""


def respelled(prompt: str, name: str) -> str | None:
    """Rewrite a prompt by a name of `SPELLINGS`; None where that changes nothing or does not apply."""
    rewritten = SPELLINGS[name](prompt)
    return None if rewritten in (None, prompt) or not rewritten.strip() else rewritten


def survives_mirror(prompt: str) -> bool:
    """Return True where an image and its mirror image satisfy the prompt alike, as far as its words tell.

    >>> survives_mirror("a red circle"), survives_mirror("a cat left of a dog")
    (True, False)
    """
    return HORIZONTAL.search(prompt) is None
