# SPDX-License-Identifier: Apache-2.0
"""The same request in other words: spellings that must not move a reward, and what a mirror would change."""

from __future__ import annotations

import re
from collections.abc import Callable

from visalign.data.shapes.prompts import COLORS, RELATIONS, SHAPES, SIZES

ARTICLE = re.compile(r"\b(?:an?|the)\s+", re.IGNORECASE)
HORIZONTAL = re.compile(
    r"\b(?:left|right|clockwise|text|sign|words?|letters?|says|written)\b|[\"“”]", re.IGNORECASE
)
"""Words that an image and its mirror image do not satisfy alike."""

_INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_NOUN = rf"(?:an?\s+)?(?:(?:{'|'.join(SIZES)})\s+)?(?:(?:{'|'.join(COLORS)})\s+)?(?:{'|'.join(SHAPES)})"
_RELATED = re.compile(rf"({_NOUN}) (?:to the )?({'|'.join(RELATIONS)}) ({_NOUN})")
_JOINED = re.compile(rf"({_NOUN}) and ({_NOUN})")


def reversed_order(prompt: str) -> str | None:
    """For prompts of the shapes world that name two things: the other one first, with the same meaning.

    >>> reversed_order("a red circle left of a square"), reversed_order("a circle and a cross")
    ('a square right of a red circle', 'a cross and a circle')
    >>> reversed_order("a photo of a cat") is None
    True
    """
    if found := _RELATED.fullmatch(prompt):
        return f"{found[3]} {_INVERSE[found[2]]} {found[1]}"
    if found := _JOINED.fullmatch(prompt):
        return f"{found[2]} and {found[1]}"
    return None


def to_the(prompt: str) -> str | None:
    """ "left of" as "to the left of", for prompts of the shapes world.

    >>> to_the("a circle left of a square")
    'a circle to the left of a square'
    """
    found = _RELATED.fullmatch(prompt)
    if found is None or found[2] not in ("left of", "right of"):
        return None
    return f"{found[1]} to the {found[2]} {found[3]}"


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
"""Name -> another way to write a prompt, None where it does not apply."""


def respelled(prompt: str, name: str) -> str | None:
    """The prompt written as `SPELLINGS` names it; None where that changes nothing or does not apply."""
    found = SPELLINGS[name](prompt)
    return None if found is None or found == prompt or not found.strip() else found


def survives_mirror(prompt: str) -> bool:
    """Whether an image and its mirror image satisfy the prompt alike, as far as its words tell.

    >>> survives_mirror("a red circle"), survives_mirror("a cat left of a dog")
    (True, False)
    """
    return HORIZONTAL.search(prompt) is None
