# SPDX-License-Identifier: Apache-2.0
"""The language of the shapes world: prompts in GenEval's six categories, and their held-out split.

A prompt record has GenEval's metadata layout (arXiv 2310.11513): `tag`, `prompt`, `include`, `exclude`. Two
additions: an include entry may carry `size`, and `only: true` says that nothing else may be in the image,
so that a generator cannot win by painting every object at once.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from functools import cache
from typing import Any

from visalign.errors import excerpt

Record = dict[str, Any]

SHAPES = ("circle", "square", "triangle", "cross")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "white")
SIZES = ("small", "big")
RELATIONS = ("left of", "right of", "above", "below")
COUNT_WORDS = {2: "two", 3: "three", 4: "four"}
CATEGORIES = ("single_object", "two_objects", "counting", "colors", "position", "color_attribution")

HELDOUT_SHARE = 0.25  # Share of the combinations of each category that no training prompt contains

_INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
Noun = tuple[str | None, str | None, str]  # Size, color, shape


def _plural(shape: str) -> str:
    return "crosses" if shape == "cross" else shape + "s"


def phrase(noun: Noun) -> str:
    """Write a noun with its article.

    >>> phrase((None, "orange", "circle"))
    'an orange circle'
    """
    words = [word for word in noun if word]
    return " ".join(["an" if words[0][0] in "aeiou" else "a", *words])


def _entry(noun: Noun, count: int = 1) -> Record:
    size, color, shape = noun
    entry: Record = {"class": shape, "count": count}
    if color:
        entry["color"] = color
    if size:
        entry["size"] = size
    return entry


def _record(tag: str, prompt: str, include: list[Record]) -> Record:
    totals: dict[str, int] = {}
    for entry in include:
        totals[entry["class"]] = totals.get(entry["class"], 0) + entry["count"]
    exclude = [{"class": name, "count": total + 1} for name, total in totals.items()]
    return {"tag": tag, "prompt": prompt, "include": include, "exclude": exclude, "only": True}


def _one(tag: str, noun: Noun) -> Record:
    return _record(tag, phrase(noun), [_entry(noun)])


def _pair(tag: str, first: Noun, second: Noun) -> Record:
    return _record(tag, f"{phrase(first)} and {phrase(second)}", [_entry(first), _entry(second)])


def _count(noun: Noun, count: int) -> Record:
    words = [COUNT_WORDS[count], *(word for word in noun[:2] if word), _plural(noun[2])]
    return _record("counting", " ".join(words), [_entry(noun, count)])


def _relation(subject: Noun, relation: str, target: Noun) -> Record:
    prompt = f"{phrase(subject)} {relation} {phrase(target)}"
    return _record("position", prompt, [_entry(target), _entry(subject) | {"position": [relation, 0]}])


def combination(record: Record) -> str:
    """Describe what a prompt asks for, equally for every wording ("a above b" is "b below a")."""
    names = [
        " ".join(str(entry[key]) for key in ("count", "size", "color", "class") if key in entry)
        for entry in record["include"]
    ]
    positions = [entry["position"] for entry in record["include"] if "position" in entry]
    if not positions:
        return record["tag"] + ": " + " + ".join(sorted(names))
    target, subject, relation = names[0], names[1], positions[0][0]
    if relation in ("right of", "below"):
        target, subject, relation = subject, target, _INVERSE[relation]
    return f"{record['tag']}: {subject} {relation} {target}"


def is_heldout(record: Record) -> bool:
    """Check if the record's combination is held out, a fixed function of the combination."""
    digest = hashlib.sha256(combination(record).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELDOUT_SHARE


def all_prompts() -> list[Record]:
    """List every prompt of the world, category by category, in a fixed order."""
    product, pairs = itertools.product, list(itertools.permutations(SHAPES, 2))
    sizes, colors = (None, *SIZES), list(product(COLORS, repeat=2))
    return [
        *(_one("single_object", (size, None, shape)) for size, shape in product(sizes, SHAPES)),
        *(
            _pair("two_objects", (size_a, None, a), (size_b, None, b))
            for (a, b), size_a, size_b in product(pairs, sizes, sizes)
        ),
        *(
            _count((None, color, shape), count)
            for count, color, shape in product(COUNT_WORDS, (None, *COLORS), SHAPES)
        ),
        *(_one("colors", noun) for noun in product(sizes, COLORS, SHAPES)),
        *(
            _relation((None, color_a, a), relation, (None, color_b, b))
            for relation, (a, b) in product(RELATIONS, pairs)
            for color_a, color_b in [(None, None), *colors]
        ),
        *(
            _pair("color_attribution", (None, color_a, a), (None, color_b, b))
            for (a, b), (color_a, color_b) in product(product(SHAPES, repeat=2), colors)
            if color_a != color_b
        ),
    ]


def train_prompts() -> list[Record]:
    """List every prompt whose combination may be trained on."""
    return [dict(record) for record in _divided()[0]]


HELDOUT_PER_CATEGORY = 60  # Largest number of held-out prompts of a category; small categories have fewer


def heldout_prompts() -> list[Record]:
    """List a fixed selection of held-out prompts: none of their combinations occurs in `train_prompts`."""
    return [dict(record) for record in _divided()[1]]


@cache
def _divided() -> tuple[list[Record], list[Record]]:
    """Divide the prompts into those of training and the selection that is held out."""
    trained: list[Record] = []
    heldout: list[Record] = []
    for record in all_prompts():
        (heldout if is_heldout(record) else trained).append(record)
    heldout.sort(key=lambda record: hashlib.sha256(record["prompt"].encode()).digest())
    groups = ([record for record in heldout if record["tag"] == category] for category in CATEGORIES)
    return trained, [record for group in groups for record in group[:HELDOUT_PER_CATEGORY]]


_COLOR, _PLURALS = "|".join(COLORS), "|".join(map(_plural, SHAPES))
_NOUN = rf"(?:an?\s+)?(?:({'|'.join(SIZES)})\s+)?(?:({_COLOR})\s+)?({'|'.join(SHAPES)})"
_COUNTED = rf"({'|'.join(COUNT_WORDS.values())})\s+(?:({_COLOR})\s+)?({_PLURALS})"


def parse_prompt(prompt: str) -> Record:
    """Parse a prompt in the world's language into its record; others are refused."""
    text = " ".join(prompt.lower().strip().rstrip(".").split())
    if match := re.fullmatch(_NOUN, text):
        size, color, shape = match.groups()
        return _one("colors" if color else "single_object", (size, color, shape)) | {"prompt": prompt}
    if match := re.fullmatch(rf"{_NOUN} and {_NOUN}", text):
        size, color, shape, size_b, color_b, shape_b = match.groups()
        first, second = (size, color, shape), (size_b, color_b, shape_b)
        tag = "color_attribution" if first[1] or second[1] else "two_objects"
        return _pair(tag, first, second) | {"prompt": prompt}
    if match := re.fullmatch(rf"{_NOUN} (?:to the )?({'|'.join(RELATIONS)}) {_NOUN}", text):
        size, color, shape, relation, size_b, color_b, shape_b = match.groups()
        subject, target = (size, color, shape), (size_b, color_b, shape_b)
        return _relation(subject, relation, target) | {"prompt": prompt}
    if match := re.fullmatch(_COUNTED, text):
        word, color, plural = match.groups()
        count = next(number for number, name in COUNT_WORDS.items() if name == word)
        shape = next(shape for shape in SHAPES if plural == _plural(shape))
        return _count((None, color, shape), count) | {"prompt": prompt}
    raise ValueError(
        f"{excerpt(prompt)} is not a prompt of the shapes world, such as 'a small red circle', 'two red squares', "
        f"'a circle and a cross', 'a blue square left of a green triangle'. Colors: {', '.join(COLORS)}; "
        f"shapes: {', '.join(SHAPES)}; sizes: {', '.join(SIZES)}; counts: two, three, four."
    )
