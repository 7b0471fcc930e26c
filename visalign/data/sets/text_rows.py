# SPDX-License-Identifier: Apache-2.0
"""Rows of tables of completions, as commands of images and texts read them: each completion is a reference."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from visalign.errors import UserError, excerpt
from visalign.interfaces import Prompt

from .image_references import TEXT
from .prompt_files import is_prompt, message_text, parse_text, read_conversation
from .records import swap_column
from .tables import Row

PAIR = ("chosen", "rejected")
SIDES = ("left", "right")
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"  # Marks of the turns of a transcript of HH-RLHF


def completion_text(value: Any) -> str | None:
    """Read a completion, a text or a conversation of one message; earlier messages belong to the prompt."""
    value = message_text(value)
    return value if isinstance(value, str) else None


def split_pair(row: Row) -> Row:
    """Take the messages, or without a prompt the text, that two whole conversations begin with as their prompt."""
    chosen, rejected = (row.get(name) for name in PAIR)
    if isinstance(chosen, list) and isinstance(rejected, list) and len(chosen) > 1 and chosen[:-1] == rejected[:-1]:
        return {**row, "prompt": chosen[:-1], PAIR[0]: chosen[-1:], PAIR[1]: rejected[-1:]}
    if row.get("prompt") is not None or not (isinstance(chosen, str) and isinstance(rejected, str)):
        return row
    ends = (n for n, pair in enumerate(zip(chosen, rejected, strict=False)) if len({*pair}) > 1)
    size = next(ends, min(len(chosen), len(rejected)))
    word = re.search(r"\w+$", chosen[:size])
    if word and any(re.match(r"\w", text[size:]) for text in (chosen, rejected)):
        size = word.start()  # both share a part of this word
    size -= chosen[:size].endswith(" ")  # a blank belongs to the word behind it, as in TRL
    answer = chosen.rfind(ASSISTANT, 0, size)
    if answer >= 0 and chosen.startswith(HUMAN) and HUMAN not in chosen[answer:size]:
        size = answer + len(ASSISTANT)  # the words that both answers begin with are theirs
    return {**row, "prompt": chosen[:size], PAIR[0]: chosen[size:], PAIR[1]: rejected[size:]} if size else row


def pair_answers(number: int, row: Row) -> list[Row]:
    """Pair each right with each wrong answer of a row of RewardBench 2 (lists of texts); another row stays one."""
    right, wrong = (row.get(name) for name in PAIR)
    for ours, other in (PAIR, PAIR[::-1]):
        answers = row.get(ours) if isinstance(row.get(other), str) else None
        if isinstance(answers, list) and answers and all(isinstance(answer, str) for answer in answers):
            raise UserError(
                f"Row {number} has a list of answers as {ours} and one text as {other}. Write {other} as a list too, "
                f"such as [{excerpt(row[other])}]; each in {PAIR[0]} is paired with each in {PAIR[1]}."
            )
    if not isinstance(right, list) or not isinstance(wrong, list):
        return [row]
    if right and wrong and any(isinstance(answer, Mapping) for answer in (*right, *wrong)):
        return [row]  # two conversations
    if not right or not wrong or not all(isinstance(answer, str) for answer in (*right, *wrong)):
        raise UserError(
            f"Row {number} has chosen {excerpt(right)} and rejected {excerpt(wrong)}; each needs one text or more."
        )
    names = {"id": "prompt_id", "subset": "category"}
    columns = {**row, **{ours: row[name] for name, ours in names.items() if name in row}}
    columns["distinct_pairs"] = len({*right}) * len({*wrong})
    return [{**columns, PAIR[0]: first, PAIR[1]: second} for first in right for second in wrong]


def refer_to_texts(row: Row, where: str = "A row") -> Row:
    """Name the completions of a row as images are named; a reward next to one is its mos. `where` starts the errors.

    Chosen and rejected are left and right, or the reverse, by a hash of the row. NAME_left and NAME_right of such a
    row are scores of chosen and rejected, and go with them.
    """
    if "image" in row or "image_left" in row:
        return row
    row = read_conversation(split_pair(row), where)
    texts = {name: completion_text(row[name]) for name in ("completion", *PAIR) if name in row}
    if None in texts.values() or not (texts.keys() >= {*PAIR} or "completion" in texts):
        return row
    rest = {name: value for name, value in row.items() if name not in texts}
    if not isinstance(rest.get("prompt", ""), str):
        rest["prompt"] = json.dumps(rest["prompt"], ensure_ascii=False)
    references = {name: f"{TEXT}{text}" for name, text in texts.items()}
    if "completion" in texts:
        score = {"mos": row["reward"]} if "reward" in row and "mos" not in row else {}
        return {**rest, **score, "image": references["completion"]}
    order = SIDES[:: 1 - 2 * (zlib.crc32(json.dumps(texts, sort_keys=True).encode()) % 2)]
    if order != SIDES:
        rest = dict(swap_column(name, value, rest) for name, value in rest.items()) | _swapped_votes(rest)
    sides = {f"image_{side}": references[name] for side, name in zip(order, PAIR, strict=True)}
    return {**rest, **sides, "label": order[0]}


def _swapped_votes(row: Row) -> Row:
    """Exchange the sides of a row's lists of votes and ballots; what is none stays, and its reader refuses it."""
    swapped = {}
    for name in {"votes", "ballots"} & row.keys():
        with suppress(TypeError, ValueError, RecursionError):
            cells = json.loads(row[name]) if isinstance(row[name], str) else row[name]
            if name == "votes":
                left, right, *tie = cells
                swapped[name] = [right, left, *tie]
            else:
                swapped[name] = [[annotator, 1 - share] for annotator, share in cells]
    return swapped


def text_prompt(prompt: str) -> Prompt:
    """Read the prompt of a completion back: a conversation stands in a row as JSON."""
    messages = parse_text(prompt.lstrip())
    return messages if is_prompt(messages) and isinstance(messages, list) else prompt


def text_record(reference: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a reward of a completion reads; none for an image."""
    return dict(columns) if reference.startswith(TEXT) else {}
