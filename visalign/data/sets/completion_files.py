# SPDX-License-Identifier: Apache-2.0
"""Completions with what was thought of them: pairs of a chosen and a rejected one, single votes, and pairs
and votes made of completions that a reward has judged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from visalign.core.regression.signals import best_worst_pairs
from visalign.errors import UserError

from .prompt_files import is_prompt, with_answer
from .tables import listed, read_rows, require_columns

Record = dict[str, Any]
PAIR, VOTE, JUDGED = ("chosen", "rejected"), ("completion", "label"), ("completion", "reward")
"""The columns, besides "prompt", of the three layouts; the first two are TRL's."""


@dataclass(frozen=True, kw_only=True)
class JudgedCompletions:
    """Pairs or votes."""

    records: list[Record]
    """Each with "prompt", and "chosen" and "rejected", or "completion" and "label" (bool)."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Why -> how many: prompts whose judged completions are all as good (ties), pairs of equal completions
    (equal), records with an empty completion (empty)."""


def load_pairs(path: str | Path, *, unusable: str = "refuse") -> JudgedCompletions:
    """Pairs of a `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet` file.

    Args:
        path: its columns are prompt, chosen, rejected; or prompt, completion, reward, of which the best and
            the worst completion to each prompt become a pair, and prompts whose completions are all as good
            none. A prompt is a text or a list of messages, a completion a text or a list of one message.
        unusable: a pair of equal completions, or with an empty one, is an error ("refuse") or left out
            ("drop").

    Raises:
        UserError: a file or column that is not there, a row that cannot be read, or no pair.
    """
    rows = _rows(path, PAIR, "pairs")
    judged = PAIR[0] not in rows[0][1]
    pairs, ties = _of_best_and_worst(rows) if judged else (rows, 0)
    reasons = [_fault(record) for _, record in pairs]
    # equal completions of which a judge thinks two things are its noise
    drop = unusable == "drop" or judged
    found = _usable(path, pairs, reasons, drop=drop)
    if judged:
        found.left_out["ties"] = ties
    if not found.records:
        raise UserError(
            f"'{path}' gives no pair of completions of which one is better: left out {_said(found)}."
        )
    return found


def load_votes(path: str | Path, *, threshold: float = 1.0, unusable: str = "refuse") -> JudgedCompletions:
    """Completions with a vote each, of a file as `load_pairs` reads it.

    Args:
        path: its columns are prompt, completion, label (true is good); or prompt, chosen, rejected, of which
            each pair becomes two votes; or prompt, completion, reward.
        threshold: reward from which a completion is good.
        unusable: an empty completion is an error ("refuse") or left out ("drop").

    Raises:
        UserError: as `load_pairs`; a label that is neither true nor false; votes of one kind alone.
    """
    rows = _rows(path, VOTE, "votes")
    votes: list[tuple[int, Record]] = []
    for number, row in rows:
        if PAIR[0] in row:
            kept = {name: value for name, value in row.items() if name not in PAIR}
            both = [{**with_answer(kept, "completion", row, n), "label": n == "chosen"} for n in PAIR]
            votes += [(number, vote) for vote in both]
        elif VOTE[1] in row:
            votes.append((number, {**row, "label": _truth(path, number, row["label"])}))
        else:
            votes.append((number, {**row, "label": row["reward"] >= threshold}))
    found = _usable(path, votes, [_fault(record) for _, record in votes], drop=unusable == "drop")
    check_votes(str(path), found.records)
    return found


def check_votes(where: str, votes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse votes of one kind alone.

    Raises:
        UserError: it says which.
    """
    good = sum(record["label"] for record in votes)
    if good in (0, len(votes)):
        raise UserError(
            f"{where}: all {len(votes)} votes are {'good' if good else 'bad'}; KTO learns from good and bad "
            "completions. Add the others, or move data.threshold where the votes are made of rewards."
        )


def _rows(path: str | Path, wanted: Sequence[str], purpose: str) -> list[tuple[int, Record]]:
    """Numbered rows of one layout, prompts and completions checked."""
    layouts = (wanted, JUDGED) if wanted == PAIR else (wanted, PAIR, JUDGED)
    found: list[tuple[int, Record]] = []
    columns: Sequence[str] = wanted
    for number, row in read_rows(path):
        if not found:
            columns = next((one for one in layouts if all(name in row for name in one)), wanted)
        others = " or ".join(", ".join(one) for one in layouts[1:])
        require_columns(path, row, ("prompt", *columns), purpose=f"{purpose} (or prompt with {others})")
        if not is_prompt(row["prompt"]):
            raise UserError(f"Row {number} of '{path}' has no prompt: a text or a list of messages.")
        read = {**row, **{n: _text(path, number, n, row[n]) for n in columns if n not in ("label", "reward")}}
        if "reward" in columns:
            read["reward"] = _number(path, number, row["reward"])
        found.append((number, read))
    if not found:
        raise UserError(f"'{path}' holds no row.")
    return found


def _text(path: str | Path, number: int, name: str, value: Any) -> str:
    """A completion, of a conversation its one message."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content")
    if not isinstance(value, str):
        raise UserError(
            f"Row {number} of '{path}': {name} is neither a text nor a list of one message; got "
            f"{str(value)[:80]}. Earlier messages of a conversation belong to its prompt."
        )
    return value


def _number(path: str | Path, number: int, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if math.isnan(found):
        raise UserError(f"Row {number} of '{path}': reward {value!r} is no number. Leave the completion out.")
    return found


def _truth(path: str | Path, number: int, value: Any) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())
    if known is None:
        raise UserError(f"Row {number} of '{path}': label {value!r} is neither true (good) nor false (bad).")
    return known


def _of_best_and_worst(rows: Sequence[tuple[int, Record]]) -> tuple[list[tuple[int, Record]], int]:
    """(pairs, prompts without one)."""
    keys = [json.dumps(row["prompt"], sort_keys=True) for _, row in rows]
    rewards = torch.tensor([row["reward"] for _, row in rows], dtype=torch.float64)
    places = best_worst_pairs(rewards, keys).tolist()
    pairs = []
    for best, worst in sorted(places):
        number, record = rows[best][0], {"prompt": rows[best][1]["prompt"]}
        for name, place in zip(PAIR, (best, worst), strict=True):
            record = with_answer(record, name, rows[place][1], "completion")
        pairs.append((number, record))
    return pairs, len(set(keys)) - len(pairs)


def _fault(record: Mapping[str, Any]) -> str | None:
    texts = [record[name] for name in (*PAIR, "completion") if name in record]
    if not all(text.strip() for text in texts):
        return "empty"
    return "equal" if len(texts) == 2 and texts[0] == texts[1] else None


_FAULTS = {"equal": "two equal completions", "empty": "an empty completion"}


def _usable(
    path: str | Path,
    rows: Sequence[tuple[int, Record]],
    reasons: Sequence[str | None],
    *,
    drop: bool,
) -> JudgedCompletions:
    """The records without a fault."""
    found = JudgedCompletions(
        records=[record for (_, record), why in zip(rows, reasons, strict=True) if why is None]
    )
    for fault, words in _FAULTS.items():
        places = [number for (number, _), why in zip(rows, reasons, strict=True) if why == fault]
        if places and not drop:
            raise UserError(
                f"{len(places)} of {len(rows)} records of '{path}' have {words}, of which nothing is learnt: "
                f"rows {listed(places)}. Take them out; data.unusable=drop leaves them out."
            )
        if places:
            found.left_out[fault] = len(places)
    return found


def _said(found: JudgedCompletions) -> str:
    return ", ".join(f"{count} {why}" for why, count in found.left_out.items()) or "none"
