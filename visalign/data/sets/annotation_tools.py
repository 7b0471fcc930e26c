# SPDX-License-Identifier: Apache-2.0
"""Exports of Label Studio and Argilla: a row per annotator from their JSON, and votes in their form."""

from __future__ import annotations

import json
import mimetypes
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from visalign.errors import UserError

Row = dict[str, Any]
Annotations = list[tuple[Any, Row]]  # (annotator, question -> answer) of each annotation

_CHOICES = {"left", "right", "tie", "a", "b"}
_VALUES = ("rating", "number", "choices", "selected", "text")  # Keys of Label Studio's values, of which each has one
_FOLDERS = re.compile(r".*/data/(?:upload/(?:\d+/)?(?:[0-9a-f]{8}-)?|local-files/\?d=)")
"""What Label Studio puts in front of a file's own name or path."""
_SHORT = {"id", "annotation_id", "created_at", "updated_at", "lead_time", "annotator", "agreement"}
"""Columns of Label Studio's JSON-MIN and CSV that are no data and no answers."""


def split_annotations(path: Path, rows: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    """Split tasks of Label Studio and records of Argilla into a row per annotator; pass other rows on.

    An only rating becomes `mos`, an only choice of a side `label`; several keep their questions' names.
    """
    tasks = answered = 0
    for number, row in rows:
        if (task := _label_studio_task(row) or _argilla_record(row)) is None:
            yield number, row
            continue
        data, annotations = task
        tasks += 1
        for annotator, answers in annotations:
            if answers or "annotation_id" in row:  # an answer in other words is a column as it is
                answered += 1
                yield number, {**_name_images(data), **_name_answers(answers), "annotator": str(annotator)}
    if tasks and not answered:
        raise UserError(
            f"'{path}' has {tasks} tasks and no submitted annotation of them. Annotate some, then export it again."
        )


def _label_studio_task(row: Row) -> tuple[Row, Annotations] | None:
    """Read a task's data and annotations from JSON, or from a row of JSON-MIN or CSV; None for another row."""
    if isinstance(data := row.get("data"), dict) and isinstance(row.get("annotations"), list):
        valid = [annotation for annotation in row["annotations"] if not annotation.get("was_cancelled")]
        return data, [(_annotator(annotation), _results(annotation.get("result") or ())) for annotation in valid]
    if not {"annotation_id", "annotator"} <= row.keys():
        return None
    answers = {name: value for name, cell in row.items() if (value := _answer(cell)) is not None}
    return {name: v for name, v in row.items() if name not in _SHORT | answers.keys()}, [(row["annotator"], answers)]


def _annotator(annotation: Mapping[str, Any]) -> Any:
    """Return an annotator's e-mail address or number, or the name that `to_label_studio` left in an answer."""
    for entry in annotation.get("result") or ():
        names = (entry.get("meta") or {}).get("text")
        if names and entry.get("type") in ("choices", "number"):  # a region has its notes there
            return names[0]
    user = annotation.get("completed_by")
    return user.get("email", user.get("id")) if isinstance(user, dict) else user


def _results(results: Iterable[Mapping[str, Any]]) -> Row:
    answers = {entry.get("from_name"): _answer(entry.get("value")) for entry in results}
    return {str(name): answer for name, answer in answers.items() if answer is not None}


def _answer(value: Any) -> Any:
    """Return the content of a value of Label Studio, of a list of one, or of its JSON text; None for other cells."""
    if isinstance(value, str) and value.startswith(("[{", "{")):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    value = value[0] if isinstance(value, list) and value else value
    if not isinstance(value, dict):
        return value if _is_side(value) else None
    return next((_only(value[kind]) for kind in _VALUES if kind in value), None)


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _is_side(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in _CHOICES


def _argilla_record(row: Row) -> tuple[Row, Annotations] | None:
    """Read a record's fields and the answers of each user, nested or flattened; None for another row."""
    if isinstance(row.get("fields"), dict) and isinstance(row.get("responses"), dict | None):
        data, responses = {**(row.get("metadata") or {}), **row["fields"]}, row.get("responses") or {}
    else:
        flat = {name.removesuffix(".responses"): name for name in row if name.endswith(".responses")}
        ends = {"value": "", "user_id": ".users", "status": ".status"}  # the last is absent in older exports
        cells = {
            name: {key: row[f"{column}{end}"] or () for key, end in ends.items() if f"{column}{end}" in row}
            for name, column in flat.items()
        }
        responses = {
            name: [dict(zip(lists, entry, strict=True)) for entry in zip(*lists.values(), strict=False)]
            for name, lists in cells.items()
        } or {name: cell for name, cell in row.items() if _are_responses(cell)}
        data = {name: value for name, value in row.items() if name.split(".")[0] not in responses}
        if not responses:
            return None
    answers: dict[str, Row] = {}
    for question, entries in responses.items():
        for entry in entries:
            if entry.get("status", "submitted") in ("submitted", None) and entry.get("value") is not None:
                answers.setdefault(str(entry.get("user_id")), {})[question] = _first_of(entry["value"])
    return data, list(answers.items())


def _are_responses(cell: Any) -> bool:
    entries = cell if isinstance(cell, list) else []
    return bool(entries) and all(isinstance(entry, dict) and {"user_id", "value"} <= entry.keys() for entry in entries)


def _first_of(value: Any) -> Any:
    """Turn a ranking, [{"value": "left", "rank": 1}, ...], into its first; equal first ranks are a tie."""
    if not (isinstance(value, list) and value and all(isinstance(v, dict) and "rank" in v for v in value)):
        return _only(value)
    best = [entry["value"] for entry in value if entry["rank"] == min(v["rank"] for v in value)]
    return str(best[0]).removeprefix("image_") if len(best) == 1 else "tie"


def _name_images(data: Row) -> Row:
    """Strip the tool's folders from files, and give one or two images our names."""
    paths = {name: v for name, v in data.items() if isinstance(v, str) and len(v) < 4096 and _is_image(v)}
    ours = {1: ["image"], 2: ["image_left", "image_right"]}.get(len(paths), list(paths))
    names = dict(zip(paths, ours, strict=True)) if data.keys().isdisjoint(ours) else {}
    files = {name: unquote(_FOLDERS.sub("", path)) if "/data/" in path else path for name, path in paths.items()}
    return {names.get(name, name): value for name, value in {**data, **files}.items()}


def _is_image(path: str) -> bool:
    return str(mimetypes.guess_type(path.split("?d=")[-1].partition("?")[0])[0]).startswith("image/")


def _name_answers(answers: Row) -> Row:
    """Name the only number `mos` and the only side `label`."""
    numbers = [name for name, v in answers.items() if isinstance(v, int | float) and not isinstance(v, bool)]
    sides = [name for name, value in answers.items() if _is_side(value)]
    names = {group[0]: ours for group, ours in ((numbers, "mos"), (sides, "label")) if len(group) == 1}
    return {names.get(name, name): value for name, value in answers.items()}


def to_label_studio(votes: Sequence[Row]) -> list[Row]:
    """Build tasks with annotations from rows of one vote each; the voter's name is in each result's meta."""
    tasks = []
    for data, question, answers in _by_task(votes):
        kind = "choices" if question == "label" else "number"
        control = {"from_name": question, "to_name": next(n for n in data if n.startswith("image")), "type": kind}
        values = [[vote[question]] if kind == "choices" else vote[question] for vote in answers]
        results = [
            {**control, "value": {kind: value}, "meta": {"text": [vote["annotator"]]}}
            for value, vote in zip(values, answers, strict=True)
        ]
        tasks.append({"id": len(tasks) + 1, "data": data, "annotations": [{"result": [r]} for r in results]})
    return tasks


def to_argilla(votes: Sequence[Row]) -> list[Row]:
    """Build records with responses from rows of one vote each.

    Argilla knows users by UUID: each voter's is made of the name, and the record's metadata has the names.
    """
    records = []
    for data, question, answers in _by_task(votes):
        users = {vote["annotator"]: str(uuid.uuid5(uuid.NAMESPACE_OID, vote["annotator"])) for vote in answers}
        responses = [{"value": vote[question], "user_id": users[vote["annotator"]]} for vote in answers]
        metadata = {"voters": ", ".join(f"{user} {name}" for name, user in users.items())}
        record = {"id": str(len(records) + 1), "fields": data, "metadata": metadata}
        records.append({**record, "responses": {question: responses}})
    return records


def _by_task(votes: Sequence[Row]) -> list[tuple[Row, str, list[Row]]]:
    """Group votes by prompt and images; the question is `label` or `mos`."""
    tasks: dict[str, tuple[Row, str, list[Row]]] = {}
    for vote in votes:
        data = {name: value for name, value in vote.items() if name not in ("annotator", "label", "mos")}
        tasks.setdefault(json.dumps(data), (data, "label" if "label" in vote else "mos", []))[2].append(vote)
    return list(tasks.values())
