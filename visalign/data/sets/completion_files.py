# SPDX-License-Identifier: Apache-2.0
"""Readers of preferences between completions: pairs, votes, and rewards from which both are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from visalign.core.regression.signals import best_worst_pairs
from visalign.errors import UserError, excerpt

from .columns import parse_bool, rename_columns
from .hub_datasets import find_table
from .prompt_files import is_prompt, message_text, with_answer
from .tables import listed, read_rows, require_columns

Record = dict[str, Any]
NumberedRecord = tuple[int, Record]
PAIR, VOTE, SCORED = ("chosen", "rejected"), ("completion", "label"), ("completion", "reward")
"""The columns, besides "prompt", of the three layouts; the first two are TRL's."""


@dataclass(frozen=True, kw_only=True)
class JudgedCompletions:
    """Pairs or votes."""

    records: list[Record]  # Each with "prompt", and "chosen" and "rejected", or "completion" and "label" (bool)
    left_out: dict[str, int] = field(default_factory=dict)
    """Reason -> count: prompts whose completions all have the same reward (ties), pairs of equal completions
    (equal), records with an empty completion (empty)."""


def load_pairs(
    path: str | Path, *, unusable: str = "refuse", names: Mapping[str, str] | None = None
) -> JudgedCompletions:
    """Load pairs from a table of `visalign.data.sets.tables.READERS` or a dataset of the hub (`find_table`).

    Its columns are prompt, chosen, rejected; or prompt, completion, reward, where the best and the worst completion to
    each prompt become a pair, and prompts whose rewards are all equal give none. A prompt is a text or a list of
    messages, a completion a text or a list of one message. A pair of equal completions, or with an empty one, is an
    error (`unusable` "refuse") or left out ("drop"). Without a prompt, chosen and rejected are conversations whose
    last messages differ. `names` is our name of a column -> the file's.
    """
    rows = _read(path, PAIR, "pairs", names)
    is_scored = PAIR[0] not in rows[0][1]
    pairs = _best_and_worst(rows) if is_scored else rows
    # equal completions with different rewards are the reward's noise
    completions = _drop_unusable(path, pairs, drop=unusable == "drop" or is_scored)
    if is_scored:
        completions.left_out["ties"] = len({_key(row) for _, row in rows}) - len(pairs)
    if not completions.records:
        reasons = ", ".join(f"{count} {why}" for why, count in completions.left_out.items()) or "none"
        raise UserError(f"'{path}' gives no pair of completions of which one is better: left out {reasons}.")
    return completions


def load_votes(
    path: str | Path, *, threshold: float = 1.0, unusable: str = "refuse", names: Mapping[str, str] | None = None
) -> JudgedCompletions:
    """Load completions with a vote each, from a file as `load_pairs` reads it.

    Its columns are prompt, completion, label (true is good); or prompt, chosen, rejected, where each pair
    becomes two votes; or prompt, completion, reward, where a good completion has at least the threshold.
    """
    votes: list[NumberedRecord] = []
    for number, row in _read(path, VOTE, "votes", names):
        if PAIR[0] in row:
            rest = {name: value for name, value in row.items() if name not in PAIR}
            for name in PAIR:
                vote = {**with_answer(rest, "completion", row, name), "label": name == "chosen"}
                votes.append((number, vote))
            continue
        label = parse_bool(row["label"]) if "label" in row else row["reward"] >= threshold
        if label is None:
            raise UserError(
                f"Row {number} of '{path}': label {excerpt(row['label'])} is neither true (good) nor false (bad)."
            )
        votes.append((number, {**row, "label": label}))
    completions = _drop_unusable(path, votes, drop=unusable == "drop")
    check_votes(str(path), completions.records)
    return completions


def check_votes(where: str, votes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse votes that are all good or all bad."""
    good = sum(record["label"] for record in votes)
    if good in (0, len(votes)):
        raise UserError(
            f"{where}: all {len(votes)} votes are {'good' if good else 'bad'}; KTO learns from good and bad "
            "completions. Add the others, or move data.threshold where the votes are made of rewards."
        )


def _read(
    path: str | Path, preferred: Sequence[str], purpose: str, names: Mapping[str, str] | None
) -> list[NumberedRecord]:
    """Read numbered rows of one layout and check their prompts and completions."""
    layouts = (preferred, SCORED) if preferred == PAIR else (preferred, PAIR, SCORED)
    alternatives = " or ".join(", ".join(layout) for layout in layouts[1:])
    rows: list[NumberedRecord] = []
    columns: Sequence[str] = preferred
    path = find_table(path)
    for number, row in read_rows(path):
        row = _split_pair(rename_columns(path, row, names or {}))
        if not rows:
            columns = next((layout for layout in layouts if set(layout) <= set(row)), preferred)
        require_columns(path, row, ("prompt", *columns), purpose=f"{purpose} (or prompt with {alternatives})")
        values: Record = {name: _text(row[name]) for name in columns if name not in ("label", "reward")}
        if "reward" in columns:
            values["reward"] = _number(row["reward"])
        checked = {"prompt": row["prompt"] if is_prompt(row["prompt"]) else None, **values}
        if odd := [name for name, value in checked.items() if value is None]:
            raise UserError(
                f"Row {number} of '{path}': {odd[0]} is {excerpt(row[odd[0]])}. A prompt is a text or "
                "a list of messages, a completion a text or a list of one message, a reward a number."
            )
        rows.append((number, {**row, **values}))
    if not rows:
        raise UserError(f"'{path}' holds no row.")
    return rows


def _split_pair(row: Record) -> Record:
    """Take the messages, or without a prompt the text, that two whole conversations begin with as their prompt."""
    chosen, rejected = (row.get(name) for name in PAIR)
    if isinstance(chosen, list) and isinstance(rejected, list) and len(chosen) > 1 and chosen[:-1] == rejected[:-1]:
        return {**row, "prompt": chosen[:-1], PAIR[0]: chosen[-1:], PAIR[1]: rejected[-1:]}
    if "prompt" in row or not (isinstance(chosen, str) and isinstance(rejected, str)):
        return row
    size = next((n for n, pair in enumerate(zip(chosen, rejected, strict=False)) if len({*pair}) > 1), 0)
    size -= chosen[:size].endswith(" ")  # a blank belongs to the word behind it, as in TRL
    return {**row, "prompt": chosen[:size], PAIR[0]: chosen[size:], PAIR[1]: rejected[size:]} if size else row


def _text(value: Any) -> str | None:
    """Read a completion, a text or a conversation of one message; earlier messages belong to the prompt."""
    value = message_text(value)
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    try:
        return None if math.isnan(number := float(value)) else number
    except (TypeError, ValueError):
        return None


def _key(row: Record) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def _best_and_worst(rows: Sequence[NumberedRecord]) -> list[NumberedRecord]:
    """Pair the best and the worst completion of each prompt."""
    rewards = torch.tensor([row["reward"] for _, row in rows], dtype=torch.float64)
    indices = best_worst_pairs(rewards, [_key(row) for _, row in rows]).tolist()
    pairs = []
    for best, worst in sorted(indices):
        record = {"prompt": rows[best][1]["prompt"]}
        for name, index in zip(PAIR, (best, worst), strict=True):
            record = with_answer(record, name, rows[index][1], "completion")
        pairs.append((rows[best][0], record))
    return pairs


def _drop_unusable(path: str | Path, rows: Sequence[NumberedRecord], *, drop: bool) -> JudgedCompletions:
    """Leave out empty and equal completions, or refuse them."""
    records: list[Record] = []
    faults: dict[str, list[int]] = {}
    for number, record in rows:
        texts = [record[name] for name in (*PAIR, "completion") if name in record]
        if not all(text.strip() for text in texts):
            faults.setdefault("empty", []).append(number)
        elif len(texts) == 2 and texts[0] == texts[1]:
            faults.setdefault("equal", []).append(number)
        else:
            records.append(record)
    for fault, numbers in faults.items():
        if not drop:
            raise UserError(
                f"{len(numbers)} of {len(rows)} records of '{path}' have {fault} completions, from which "
                f"nothing is learnt: rows {listed(numbers)}. Remove them; data.unusable=drop leaves them out."
            )
    return JudgedCompletions(records=records, left_out={fault: len(ns) for fault, ns in faults.items()})
