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

_CHOICES = {"left", "right", "tie", "a", "b"}
_VALUES = ("rating", "number", "choices", "selected", "text")
"""Keys of Label Studio's values, of which each has one."""
_FOLDERS = re.compile(r".*/data/(?:upload/(?:\d+/)?(?:[0-9a-f]{8}-)?|local-files/\?d=)")
"""What Label Studio puts in front of a file's own name or path."""
_MIN = {"id", "annotation_id", "created_at", "updated_at", "lead_time", "annotator", "agreement"}
"""Columns of Label Studio's JSON-MIN and CSV that are no data and no answers."""


def split_annotations(path: Path, rows: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    """Split tasks of Label Studio and records of Argilla into a row per annotator; pass other rows on.

    An only rating becomes `mos`, an only choice of a side `label`; more than one keep the names of their questions.
    One image is `image`, two are `image_left` and `image_right`.
    """
    tasks = answered = 0
    for number, row in rows:
        task = _read_task(row)
        if task is None:
            yield number, row
            continue
        data, answers = task
        tasks += 1
        for annotator, values in answers:
            answered += 1
            yield number, {**_name_images(data), **_name_answers(values), "annotator": annotator}
    if tasks and not answered:
        raise UserError(
            f"'{path}' has {tasks} tasks and no submitted annotation of them. Annotate some, then export it again."
        )


def _read_task(row: Row) -> tuple[Row, list[tuple[str, Row]]] | None:
    """Return a task's data and (annotator, question -> answer) of each annotation; None for a row of another table."""
    if isinstance(data := row.get("data"), dict) and isinstance(annotations := row.get("annotations"), list):
        valid = [entry for entry in annotations if not entry.get("was_cancelled")]
        answers = [(_annotator(entry), _results(entry.get("result") or ())) for entry in valid]
    elif "annotation_id" in row and "annotator" in row:
        data = {name: value for name, value in row.items() if name not in _MIN}
        values = {name: _answer(value) for name, value in data.items() if _is_answer(value)}
        values |= {name: value for name, value in data.items() if _is_side(value)}
        data = {name: value for name, value in data.items() if name not in values}
        answers = [(str(row["annotator"]), values)]
    elif isinstance(fields := row.get("fields"), dict) and "responses" in row:
        data = {**(row.get("metadata") or {}), **fields}
        answers = _group_responses(row["responses"] or {})
    elif responses := {name: value for name, value in row.items() if _are_responses(value)}:  # version 1, as a dataset
        data = {name: value for name, value in row.items() if name not in responses}
        answers = _group_responses(responses)
    elif questions := [name.removesuffix(".responses") for name in row if name.endswith(".responses")]:
        data = {name: value for name, value in row.items() if name.split(".")[0] not in (*questions, "_server_id")}
        columns = {name: (row[f"{name}.responses"], row.get(f"{name}.responses.users")) for name in questions}
        responses = {
            name: [{"value": v, "user_id": u} for v, u in zip(values, users or [""] * len(values), strict=True)]
            for name, (values, users) in columns.items()
            if values
        }
        answers = _group_responses(responses)
    else:
        return None
    return data, [(annotator, values) for annotator, values in answers if values]


def _annotator(annotation: Mapping[str, Any]) -> str:
    """Return who annotated: an e-mail address or number, or the name that `to_label_studio` left in the results."""
    names = [text for entry in annotation.get("result") or () for text in (entry.get("meta") or {}).get("text", ())]
    user = annotation.get("completed_by")
    return str(next(iter(names), user.get("email", user.get("id")) if isinstance(user, dict) else user))


def _results(results: Iterable[Mapping[str, Any]]) -> Row:
    return {entry["from_name"]: _answer(entry["value"]) for entry in results if _is_answer(entry.get("value"))}


def _is_answer(value: Any) -> bool:
    """Check for a value of Label Studio, a list of one, or its JSON text."""
    if isinstance(value, str) and value.startswith(("[{", "{")):
        value = _parsed(value)
    value = value[0] if isinstance(value, list) and value else value
    return isinstance(value, dict) and any(kind in value for kind in _VALUES)


def _answer(value: Any) -> Any:
    value = _parsed(value) if isinstance(value, str) else value
    value = value[0] if isinstance(value, list) else value
    content = next(value[kind] for kind in _VALUES if kind in value)
    return content[0] if isinstance(content, list) and len(content) == 1 else content


def _is_side(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in _CHOICES


def _are_responses(value: Any) -> bool:
    entries = value if isinstance(value, list) else []
    return bool(entries) and all(isinstance(entry, dict) and {"user_id", "value"} <= entry.keys() for entry in entries)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _group_responses(responses: Any) -> list[tuple[str, Row]]:
    """Group Argilla's responses by user: {question: [{value, user_id}]}, or version 1's [{values, user_id}]."""
    users: dict[str, Row] = {}
    if isinstance(responses, list):
        entries = [(r, q, v) for r in responses for q, v in (r.get("values") or {}).items()]
    else:
        entries = [(entry, question, entry) for question, of_question in responses.items() for entry in of_question]
    for entry, question, answer in entries:
        if entry.get("status", "submitted") in ("submitted", None) and answer.get("value") is not None:
            users.setdefault(str(entry.get("user_id") or "unknown"), {})[question] = _side(answer["value"])
    return list(users.items())


def _side(value: Any) -> Any:
    """Turn a ranking, [{"value": "left", "rank": 1}, ...], into its first; equal first ranks are a tie."""
    if not (isinstance(value, list) and value and all(isinstance(v, dict) and "rank" in v for v in value)):
        return value[0] if isinstance(value, list) and len(value) == 1 else value
    best = [entry["value"] for entry in value if entry["rank"] == min(v["rank"] for v in value)]
    return str(best[0]).removeprefix("image_") if len(best) == 1 else "tie"


def _name_images(data: Row) -> Row:
    """Strip the tool's folders from files, and give one or two images our names."""
    data = {
        name: unquote(_FOLDERS.sub("", v)) if isinstance(v, str) and "/data/" in v else v for name, v in data.items()
    }
    images = [name for name, v in data.items() if isinstance(v, str) and _is_image(v)]
    ours = {1: ["image"], 2: ["image_left", "image_right"]}.get(len(images), [])
    if set(ours) & data.keys():
        return data
    return {dict(zip(images, ours, strict=False)).get(name, name): value for name, value in data.items()}


def _is_image(value: str) -> bool:
    return len(value) < 4096 and str(mimetypes.guess_type(value.partition("?")[0])[0]).startswith("image/")


def _name_answers(values: Row) -> Row:
    """Name the only number `mos` and the only side `label`."""
    numbers = [name for name, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)]
    sides = [name for name, value in values.items() if _is_side(value)]
    names = {group[0]: ours for group, ours in ((numbers, "mos"), (sides, "label")) if len(group) == 1}
    return {names.get(name, name): value for name, value in values.items()}


def to_label_studio(votes: Sequence[Row]) -> list[Row]:
    """Build tasks with annotations from rows of one vote each; the voter's name is in each result's meta."""
    tasks = []
    for data, answers in _by_task(votes):
        image = next(name for name in data if name.startswith("image"))
        annotations = []
        for vote in answers:
            is_choice = "label" in vote
            value = {"choices": [vote["label"]]} if is_choice else {"number": vote["mos"]}
            result = {"from_name": "label" if is_choice else "mos", "to_name": image, "value": value}
            kind = "choices" if is_choice else "number"
            annotations.append({"result": [{**result, "type": kind, "meta": {"text": [vote["annotator"]]}}]})
        tasks.append({"id": len(tasks) + 1, "data": data, "annotations": annotations})
    return tasks


def to_argilla(votes: Sequence[Row]) -> list[Row]:
    """Build records with responses from rows of one vote each.

    Argilla knows users by UUID: each voter's is made of the name, and the record's metadata has the names.
    """
    records = []
    for number, (data, answers) in enumerate(_by_task(votes), 1):
        question = "label" if "label" in answers[0] else "mos"
        users = {vote["annotator"]: str(uuid.uuid5(uuid.NAMESPACE_OID, vote["annotator"])) for vote in answers}
        responses = [{"value": vote[question], "user_id": users[vote["annotator"]]} for vote in answers]
        metadata = {"voters": ", ".join(f"{user} {name}" for name, user in users.items())}
        record = {"id": str(number), "fields": data, "metadata": metadata, "suggestions": {}, "vectors": {}}
        records.append({**record, "responses": {question: responses}})
    return records


def _by_task(votes: Sequence[Row]) -> list[tuple[Row, list[Row]]]:
    """Group votes by what was shown: prompt and images."""
    tasks: dict[str, tuple[Row, list[Row]]] = {}
    for vote in votes:
        data = {name: value for name, value in vote.items() if name not in ("annotator", "label", "mos")}
        tasks.setdefault(json.dumps(data), (data, []))[1].append(vote)
    return list(tasks.values())
