# SPDX-License-Identifier: Apache-2.0
"""Readers of preferences between completions: pairs, votes, rankings, and rewards from which all are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from visalign.core.regression.signals import best_worst_pairs
from visalign.errors import UserError, excerpt

from .columns import is_number, parse_bool, rename_columns
from .hub_datasets import find_table
from .prompt_files import is_prompt, read_conversation, warn_of_unread, with_answer
from .tables import listed, read_cells, require_columns
from .text_rows import PAIR, completion_text, split_pair

Record = dict[str, Any]
NumberedRecord = tuple[int, Record]
VOTE, SCORED = ("completion", "label"), ("completion", "reward")
RANKED = ("completions", "scores")  # The columns, besides "prompt", of the layouts but PAIR; PAIR and VOTE are TRL's


@dataclass(frozen=True, kw_only=True)
class JudgedCompletions:
    """Pairs, votes or rankings."""

    records: list[Record]
    """Each with "prompt", and "chosen" and "rejected", or "completion" and "label" (bool), or "completions" and
    "scores"."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Reason -> count: equal rewards (ties), pairs of equal completions (equal), empty completions (empty)."""


def load_pairs(
    path: str | Path, *, unusable: str = "refuse", names: Mapping[str, str] | None = None
) -> JudgedCompletions:
    """Load pairs from a table of `visalign.data.sets.tables.READERS` or a dataset of the hub (`find_table`).

    Its columns are prompt, chosen, rejected; or prompt, completion, reward, where the best and the worst completion to
    each prompt become a pair, and prompts whose rewards are all equal give none. A prompt is a text or a list of
    messages, a completion a text or a list of one message. A pair of equal completions, or with an empty one, is an
    error (`unusable` "refuse") or left out ("drop"). Without a prompt, chosen and rejected are conversations whose
    last messages differ, transcripts of HH-RLHF whose last answers do, or texts that begin with the same words.
    `names` is our name of a column -> the file's.
    """
    rows = _read(path, (PAIR, SCORED), "pairs", names)
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

    Columns: prompt, completion, label (true is good); or prompt, chosen, rejected (two votes); or prompt, completion,
    reward (good from the threshold).
    """
    votes: list[NumberedRecord] = []
    for number, row in _read(path, (VOTE, PAIR, SCORED), "votes", names):
        if PAIR[0] in row:
            rest = {name: value for name, value in row.items() if name not in PAIR}
            for name in PAIR:
                votes.append((number, {**with_answer(rest, "completion", row, name), "label": name == "chosen"}))
            continue
        label = _label(f"Row {number} of '{path}'", row) if "label" in row else row["reward"] >= threshold
        votes.append((number, {**row, "label": label}))
    completions = _drop_unusable(path, votes, drop=unusable == "drop")
    check_votes(str(path), completions.records)
    return completions


def load_rankings(
    path: str | Path, *, unusable: str = "refuse", names: Mapping[str, str] | None = None
) -> JudgedCompletions:
    """Load prompts with completions and their scores (higher is better), from a file as `load_pairs` reads it.

    Columns: prompt, chosen, rejected (1 and 0, with "margin"); or prompt, completion, and reward or label; or prompt,
    completions, and scores or ranks (1 the best); or UltraFeedback's. Equal completions become one of their mean.
    """
    rows = _read(path, (PAIR, RANKED, SCORED, VOTE), "rankings", names)
    usable = _drop_unusable(path, rows, drop=unusable == "drop")
    rankings: dict[Any, Record] = {}
    for index, row in enumerate(usable.records):
        if PAIR[0] in row:
            margin = {} if row.get("margin") is None else {"margin": _number(row["margin"])}
            if margin and (margin["margin"] is None or margin["margin"] < 0):
                raise UserError(f"'{path}': the margin {excerpt(row['margin'])} is no number of 0 or more.")
            rankings[index] = {
                "prompt": row["prompt"],
                "completions": [row[name] for name in PAIR],
                "scores": [1.0, 0.0],
                **margin,
            }
        elif RANKED[0] in row and RANKED[1] in row:
            rankings[index] = {name: row[name] for name in ("prompt", *RANKED)}
        else:
            score = row["reward"] if "reward" in row else _label(f"'{path}'", row)
            entry = rankings.setdefault(_key(row), {"prompt": row["prompt"], "completions": [], "scores": []})
            entry["completions"].append(row["completion"])
            entry["scores"].append(float(score))
    for ranking in rankings.values():
        scores: dict[str, list[float]] = {}
        for text, score in zip(ranking["completions"], ranking["scores"], strict=True):
            scores.setdefault(text, []).append(score)
        ranking |= {"completions": [*scores], "scores": [sum(s) / len(s) for s in scores.values()]}
    return JudgedCompletions(records=[*rankings.values()], left_out=usable.left_out)


def _label(where: str, row: Record) -> bool:
    if (label := parse_bool(row["label"])) is None:
        raise UserError(f"{where}: label {excerpt(row['label'])} is neither true nor false.")
    return label


def check_votes(where: str, votes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse votes that are all good or all bad."""
    good = sum(record["label"] for record in votes)
    if good in (0, len(votes)):
        raise UserError(
            f"{where}: all {len(votes)} votes are {'good' if good else 'bad'}; KTO learns from both. Add the others, "
            "or move data.threshold where votes are made of rewards."
        )


def _read(
    path: str | Path, layouts: Sequence[Sequence[str]], purpose: str, names: Mapping[str, str] | None
) -> list[NumberedRecord]:
    alternatives = " or ".join(", ".join(layout) for layout in layouts[1:])
    rows: list[NumberedRecord] = []
    columns: Sequence[str] = layouts[0]
    path = find_table(path)
    for number, cells in read_cells(path):
        row = split_pair(rename_columns(path, cells, names or {}))
        row = read_conversation(_scored_list(row) if RANKED in layouts else row, f"Row {number} of '{path}'")
        if not rows:
            matching = [layout for layout in layouts if set(layout) <= set(row)]
            columns = next(
                (layout for layout in matching if None not in map(row.get, layout)), (matching or layouts)[0]
            )
        require_columns(path, row, ("prompt", *columns), purpose=f"{purpose} (or prompt with {alternatives})")
        values: Record = {name: _CELLS.get(name, completion_text)(row[name]) for name in columns if name != "label"}
        if columns == RANKED and len(values["completions"] or "") != len(values["scores"] or ""):
            values["scores"] = None
        checked = {"prompt": row["prompt"] if is_prompt(row["prompt"]) else None, **values}
        if odd := [name for name, value in checked.items() if value is None]:
            raise UserError(
                f"Row {number} of '{path}': {odd[0]} is {excerpt(row[odd[0]])}. A prompt is a text or "
                "a list of messages, a completion a text or a list of one message, a reward a number"
                f"{', completions and scores are lists of equal length' if columns == RANKED else ''}."
            )
        unread = {*PAIR, *RANKED, *SCORED, *VOTE} - {*columns}  # columns of other layouts
        record = {**{k: v for k, v in row.items() if k not in unread}, **values}
        rows.append((number, record))
    if not rows:
        raise UserError(f"'{path}' holds no row.")
    warn_of_unread(f"'{path}'", [record for _, record in rows])
    return rows


def _scored_list(row: Record) -> Record:
    """Read UltraFeedback's answers with their scores, and ranks (1 the best) as scores."""
    answers = row.get("completions")
    if "instruction" in row and isinstance(answers, list) and all(isinstance(answer, dict) for answer in answers):
        # the released overall_score has slips (1 for 10), so that the mean of the four aspects comes first
        scores = [answer.get("fine-grained_score", answer.get("overall_score")) for answer in answers]
        texts = [answer.get("response") for answer in answers]
        return {**row, "prompt": row["instruction"], "completions": texts, "scores": scores}
    ranks = _list(row.get("ranks"), _number)
    return row if ranks is None or "scores" in row else {**row, "scores": [-rank for rank in ranks]}


def _list(values: Any, read: Callable[[Any], Any]) -> list[Any] | None:
    """Read each entry of a list; None if one cannot be read."""
    entries = [read(value) for value in values] if isinstance(values, list) else [None]
    return None if None in entries else entries


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


_CELLS: dict[str, Callable[[Any], Any]] = {
    "reward": _number,
    "completions": lambda cell: _list(cell, completion_text),
    "scores": lambda cell: _list(cell, _number),
}
"""Column -> reader of its cells, None for one that cannot be read; others hold a completion."""


def _key(row: Record) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def _best_and_worst(rows: Sequence[NumberedRecord]) -> list[NumberedRecord]:
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
    records: list[Record] = []
    faults: dict[str, list[int]] = {}
    for number, record in rows:
        texts = [record[name] for name in (*PAIR, "completion") if name in record]
        texts += record.get("completions", []) if RANKED[1] in record else []
        if not texts or not all(text.strip() for text in texts):
            faults.setdefault("empty", []).append(number)
        elif len(texts) == 2 and texts[0] == texts[1]:
            faults.setdefault("equal", []).append(number)
        else:
            records.append(record)
    for fault, numbers in faults.items():
        if not drop:
            raise UserError(
                f"{len(numbers)} of {len(rows)} records of '{path}' have {fault} completions: rows {listed(numbers)}. "
                "Remove them; data.unusable=drop leaves them out."
            )
    return JudgedCompletions(records=records, left_out={fault: len(ns) for fault, ns in faults.items()})
