# SPDX-License-Identifier: Apache-2.0
"""Prompt sets from files: one prompt per line (`.txt`), or one JSON record per line (`.jsonl`, GenEval's
layout)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from visalign.data.shapes.prompts import heldout_prompts, train_prompts
from visalign.errors import UserError

Record = dict[str, Any]

EMBEDDED = {"shapes:train": train_prompts, "shapes:heldout": heldout_prompts}
"""Names of the embedded prompt sets."""


def load_prompts(source: str | Path) -> list[Record]:
    """Prompt records of an embedded set or of a file.

    Blank lines are skipped and repeated prompts kept once; both are reported in a warning that names the
    lines.

    Args:
        source: "shapes:train", "shapes:heldout", or the path of a `.txt` or `.jsonl` file in UTF-8. A JSON
            record needs "prompt"; its other fields are handed to the rewards as metadata.

    Returns:
        At least one record, in the order of the file.

    Raises:
        UserError: no such set or file, another kind of file, no prompt in it, a line that is no record, or
            one prompt with two different records.
    """
    if str(source) in EMBEDDED:
        return EMBEDDED[str(source)]()
    path = Path(source)
    if not path.is_file():
        raise UserError(
            f"no prompt set {str(source)!r}: it is no file, and the embedded sets are {', '.join(EMBEDDED)}."
        )
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(
            f"prompt file {path} ends in {path.suffix!r}; use .txt (one prompt per line) or .jsonl (one "
            f"record per line)."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"prompt file {path} is not UTF-8 text ({error}); save it as UTF-8.") from error
    lines = [line.rstrip("\r") for line in text.split("\n")]  # splitlines would cut at U+0085 and U+2028
    return _records(path, lines if lines[-1] else lines[:-1])


def _records(path: Path, lines: list[str]) -> list[Record]:
    found: dict[str, tuple[int, Record]] = {}
    blank, repeated = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            blank.append(number)
            continue
        record = _record(path, number, line)
        first, known = found.setdefault(record["prompt"], (number, record))
        if known != record:
            raise UserError(
                f"prompt file {path}: lines {first} and {number} give the prompt {record['prompt']!r} two "
                "different records; keep the right one."
            )
        if first != number:
            repeated.append(number)
    if not found:
        kind = "empty" if not lines else "nothing but blank lines"
        raise UserError(f"prompt file {path} is {kind}; it needs at least one prompt, one per line.")
    if blank:
        warnings.warn(f"prompt file {path}: skipped {_lines(blank)}, which are blank.", stacklevel=3)
    if repeated:
        warnings.warn(
            f"prompt file {path}: skipped {_lines(repeated)}, whose prompts stand further up; each "
            f"counts once.",
            stacklevel=3,
        )
    return [record for _, record in found.values()]


def _record(path: Path, number: int, line: str) -> Record:
    if path.suffix == ".txt":
        return {"prompt": line.strip()}
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"prompt file {path} line {number} is not JSON: {error}.") from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(
            f'prompt file {path} line {number} needs a JSON object with a "prompt" that is text, '
            f'e.g. {{"prompt": "a red circle"}}; got {line.strip()[:80]}.'
        )
    return record | {"prompt": prompt.strip()}


def _lines(numbers: list[int]) -> str:
    shown = ", ".join(str(n) for n in numbers[:10]) + (" ..." if len(numbers) > 10 else "")
    return f"{len(numbers)} line(s) ({shown})"
