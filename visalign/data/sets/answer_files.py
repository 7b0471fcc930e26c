# SPDX-License-Identifier: Apache-2.0
"""Given answers in files: one JSON record per line with a prompt and its answer; a prompt may come again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from visalign.errors import UserError

Record = dict[str, Any]

COMPLETION, SOLUTION = "completion", "solution"
"""Where an answer stands when no field is named: the first of these that a record has."""


def load_answers(path: str | Path, field: str | None = None) -> list[Record]:
    """Records of a `.jsonl` file, each with "prompt" and its answer as "completion".

    Unlike `load_prompts` this keeps a prompt's every record: several answers to one prompt are what sampling
    makes. Blank lines are skipped, texts are left as they are.

    Args:
        path: a file in UTF-8. A prompt is a text, or a conversation: a list of messages with "role" and
            "content".
        field: where the answer stands; None is "completion", or "solution" where a record has no
            completion.

    Returns:
        At least one record, in the order of the file.

    Raises:
        UserError: no such file, another kind of file, a line that is no record, a record without prompt or
            answer, or no record at all; the message names the line.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"there is no file of answers '{file}'; give the path of a .jsonl file.")
    if file.suffix != ".jsonl":
        raise UserError(
            f"file of answers '{file}' ends in {file.suffix!r}; use .jsonl, one record with a prompt and its "
            "completion per line."
        )
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"file of answers '{file}' is not UTF-8 text ({error}); save it as UTF-8.") from error
    lines = enumerate(text.split("\n"), start=1)  # splitlines would cut at U+0085 and U+2028
    found = [_record(f"'{file}' line {number}", line, field) for number, line in lines if line.strip()]
    if not found:
        raise UserError(
            f"file of answers '{file}' has no record; it needs at least one line such as "
            f"{EXAMPLE}. Where it was made by selecting samples, none was accepted."
        )
    return found


EXAMPLE = '{"prompt": "1 + 1 = ?", "completion": "2"}'


def with_completion(record: Mapping[str, Any], where: str, field: str | None = None) -> Record:
    """The record with its answer as "completion".

    Args:
        record: has the answer.
        where: the record's name in messages.
        field: see `load_answers`.

    Raises:
        UserError: there is no text in the field.
    """
    name = field or (COMPLETION if COMPLETION in record or SOLUTION not in record else SOLUTION)
    if not isinstance(record.get(name), str):
        raise UserError(
            f"{where} has no text in the field {name!r}: its fields are {', '.join(record)}. Each record "
            f"needs a prompt and its answer, such as {EXAMPLE}."
        )
    return {**record, COMPLETION: record[name]}


def answers_jsonl(records: Iterable[Mapping[str, Any]]) -> bytes:
    """The content of a file that `load_answers` reads.

    Args:
        records: JSON values.
    """
    return "".join(
        json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records
    ).encode("utf-8")


def _record(where: str, line: str, field: str | None) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error}.") from error
    if not isinstance(record, dict) or not _is_prompt(record.get("prompt")):
        raise UserError(
            f'{where} needs a JSON object with a "prompt" that is text or a list of messages, such as '
            f"{EXAMPLE}; got {line.strip()[:80]}."
        )
    return with_completion(record, where, field)


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt.strip())
    messages = prompt if isinstance(prompt, list) else []
    return bool(messages) and all(isinstance(m, dict) and "role" in m and "content" in m for m in messages)
