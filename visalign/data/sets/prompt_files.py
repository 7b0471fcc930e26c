# SPDX-License-Identifier: Apache-2.0
"""Prompts and demonstrations from files: one prompt per line (`.txt`), or one JSON record per line (`.jsonl`,
GenEval's layout), which may name an image to edit; a demonstration is a prompt with its completion, and a
prompt may have several."""

from __future__ import annotations

import hashlib
import json
import mimetypes
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from visalign.data.shapes.prompts import heldout_prompts, train_prompts
from visalign.errors import UserError

from .tables import check_characters

Record = dict[str, Any]

EMBEDDED = {"shapes:train": train_prompts, "shapes:heldout": heldout_prompts}
"""Names of the embedded prompt sets."""

COMPLETION, SOLUTION = "completion", "solution"
"""Where a completion stands when no field is named: the first of these that a record has."""

TOOL_ANSWERS = "tool_answers"
"""Field of a record: beginnings and ends of the characters of its completion that a tool wrote."""

EXAMPLE = '{"prompt": "1 + 1 = ?", "completion": "2"}'
_SOURCES = 'Give each prompt one: a .jsonl file of {"prompt": "make it blue", "source": "cup.png"}.'

Edits = Literal["none", "optional", "needed"]
"""Whether a prompt's record has a `source`, the image, or the list of images, that a model edits."""


def record_key(asked: str | Mapping[str, Any]) -> tuple[str, ...]:
    """What tells a prompt from others: (prompt,), or (prompt, source) of a record with an image to edit, or
    several, a line each.

    An image in memory counts by its content; a word that is no path of an image, such as the name of a
    dataset, does not count.

    >>> record_key({"prompt": "make it blue", "source": "cup.png"})
    ('make it blue', 'cup.png')
    >>> record_key({"prompt": "a cat", "source": "coco"})
    ('a cat',)
    >>> record_key({"prompt": "put the cup on the table", "source": ["cup.png", "table.png"]})
    ('put the cup on the table', 'cup.png\\ntable.png')
    """
    if isinstance(asked, str):
        return (asked,)
    prompt, source = str(asked["prompt"]), asked.get("source")
    names = [_image_name(each) for each in listed_sources(source)]
    return (prompt, "\n".join(names)) if any(names) else (prompt,)


def listed_sources(source: Any) -> list[Any]:
    """The images of a record's "source": none, one, or those of a list."""
    if isinstance(source, list | tuple):
        return list(source)
    return [] if source is None else [source]


def source_of(columns: Mapping[str, Any]) -> Any:
    """What the images of a row are edits of: its "source", a path or a list of them, else that of its
    "metadata", an object or JSON text; None where neither names an image.

    >>> source_of({"source": "coco", "metadata": '{"source": "cup.png"}'})
    'cup.png'
    """
    metadata = _of_text(columns.get("metadata"))
    for said in (columns, metadata if isinstance(metadata, Mapping) else {}):
        source = _of_text(said.get("source"))
        if len(record_key({"prompt": "", "source": source})) > 1:
            return source
    return None


def _of_text(value: Any) -> Any:
    """The list or object that a text is, as tables of text write it; what is none stays as it is."""
    if not isinstance(value, str) or not value.startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _image_name(source: Any) -> str:
    """A path, or a digest of an image in memory; empty for a word that is no path of an image."""
    if isinstance(source, str | Path):
        is_image = "/" in str(source) or str(mimetypes.guess_type(str(source))[0]).startswith("image/")
        return str(source) if is_image else ""
    pixels = source.detach().cpu().float().numpy() if hasattr(source, "detach") else source
    content = pixels.tobytes() if hasattr(pixels, "tobytes") else repr(pixels).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def load_prompts(source: str | Path, *, edits: Edits = "none", several: bool = True) -> list[Record]:
    """Prompt records of an embedded set or of a file.

    Blank lines are skipped and repeated prompts kept once; both are reported in a warning that names the
    lines.

    Args:
        source: "shapes:train", "shapes:heldout", or the path of a `.txt` or `.jsonl` file in UTF-8. A JSON
            record needs "prompt"; its other fields are handed to the rewards as metadata.
        edits: whether a record's "source" is an image to edit, a file from where the command runs: then each
            is decoded once, and records of one prompt may differ in it.
        several: whether a source may be a list of such files.

    Returns:
        At least one record, in the order of the file.

    Raises:
        UserError: no such set or file, another kind of file, no prompt in it, a line that is no record, or
            one prompt with two different records; a source that is missing or cannot be read.
    """
    if str(source) in EMBEDDED:
        if edits == "needed":
            raise UserError(f"{source} has no images, and the model edits one. {_SOURCES}")
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
    found: dict[tuple[str, ...], tuple[int, Record]] = {}
    blank, repeated = [], []
    for number, line in enumerate(lines := _lines(path, f"prompt file {path}"), start=1):
        if not line.strip():
            blank.append(number)
            continue
        record = {"prompt": line} if path.suffix == ".txt" else _prompt_record(path, number, line)
        record["prompt"] = record["prompt"].strip()
        key = (record["prompt"],) if edits == "none" else (record["prompt"], str(record.get("source")))
        first, known = found.setdefault(key, (number, record))
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
    _warn_of_skipped(path, blank, "which are blank")
    _warn_of_skipped(path, repeated, "whose prompts stand further up; each counts once")
    if edits != "none":
        named = [(f"prompt file {path} line {number}", record) for number, record in found.values()]
        check_sources(named, needed=edits == "needed", several=several, remedy=_SOURCES)
    return [record for _, record in found.values()]


def _warn_of_skipped(path: Path, numbers: list[int], why: str) -> None:
    if numbers:
        shown = ", ".join(str(n) for n in numbers[:10]) + (" ..." if len(numbers) > 10 else "")
        warnings.warn(f"prompt file {path}: skipped {len(numbers)} line(s) ({shown}), {why}.", stacklevel=3)


def check_sources(found: Iterable[tuple[str, Record]], *, needed: bool, several: bool, remedy: str) -> None:
    """Refuse the first record whose source is no image that can be read.

    Args:
        found: where each record stands, and the record.
        needed: whether one without a source is refused.
        several: whether a source may be a list of images.
        remedy: what to do about a record without one.

    Raises:
        UserError: with where it stands.
    """
    places: dict[str, str] = {}
    for where, record in found:
        source = record.get("source")
        if source is None and needed:
            raise UserError(f"{where} has no 'source', the image that the model edits. {remedy}")
        images = listed_sources(source)
        if source is not None and not (images and all(isinstance(each, str) for each in images)):
            raise UserError(f"{where}: the source is {source!r:.80}; give the path of an image.")
        if len(images) > 1 and not several:
            raise UserError(
                f"{where}: the source is {source!r:.80}, and the model edits one image. Give one path, or "
                "take a model that joins several (FLUX.2, Qwen-Image-Edit-2509)."
            )
        for image in images:
            places.setdefault(image, where)
    with ThreadPoolExecutor() as pool:
        for (source, where), reason in zip(places.items(), pool.map(_unreadable, places), strict=True):
            if reason is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                raise UserError(
                    f"{where}: the source {source!r} is no image that can be read ({reason}). Correct the "
                    f"path, which begins where the command runs ({Path.cwd()}), or take the line out."
                )


def _unreadable(source: str) -> str | None:
    """Why an image cannot be read."""
    try:
        with Image.open(source) as opened:
            opened.draft("RGB", (1, 1))  # a JPEG is read whole and decoded small
            opened.load()
            return "more than 8 bits a channel" if opened.mode[0] in "IF" else None
    except FileNotFoundError:
        return "there is no such file"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return str(error)


def load_demonstrations(path: str | Path, field: str | None = None) -> list[Record]:
    """Records of a `.jsonl` file, each with "prompt" and its "completion".

    Unlike `load_prompts` this keeps a prompt's every record: several completions of one prompt are what
    sampling makes. Blank lines are skipped, texts are left as they are.

    Args:
        path: a file in UTF-8. A prompt is a text, or a conversation: a list of messages with "role" and
            "content".
        field: where the completion stands; None is "completion", or "solution" where a record has no
            completion.

    Returns:
        At least one record, in the order of the file.

    Raises:
        UserError: no such file, another kind of file, a line that is no record, a record without prompt or
            completion, or no record at all; the message names the line.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"there is no file of demonstrations '{file}'; give the path of a .jsonl file.")
    if file.suffix != ".jsonl":
        raise UserError(
            f"file of demonstrations '{file}' ends in {file.suffix!r}; use .jsonl, one record with a prompt "
            "and its completion per line."
        )
    lines = enumerate(_lines(file, f"file of demonstrations '{file}'"), start=1)
    found = [_demonstration(f"'{file}' line {number}", line, field) for number, line in lines if line.strip()]
    if not found:
        raise UserError(
            f"file of demonstrations '{file}' has no record; it needs at least one line such as {EXAMPLE}. "
            "Where it was made by selecting samples, none was accepted."
        )
    return found


def with_completion(record: Mapping[str, Any], where: str, field: str | None = None) -> Record:
    """The record with its field (see `load_demonstrations`) as "completion", and what a tool wrote of it;
    `where` names it."""
    name = field or (COMPLETION if COMPLETION in record or SOLUTION not in record else SOLUTION)
    if not isinstance(record.get(name), str):
        raise UserError(
            f"{where} has no text in the field {name!r}: its fields are {', '.join(record)}. Each record "
            f"needs a prompt and its completion, such as {EXAMPLE}."
        )
    return with_answer({**record}, COMPLETION, record, name)


def tool_answers_field(field: str) -> str:
    """Where a record says what a tool wrote of the answer in its `field`."""
    return TOOL_ANSWERS if field == COMPLETION else f"{field}_{TOOL_ANSWERS}"


def with_answer(record: Record, field: str, source: Mapping[str, Any], name: str) -> Record:
    """The record with the answer in the field `name` of `source` as its `field`, and what a tool wrote of
    it."""
    spans, own = source.get(tool_answers_field(name)), tool_answers_field(field)
    kept = {key: value for key, value in record.items() if key != own}
    return {**kept, field: source[name], **({own: spans} if spans else {})}


def demonstrations_jsonl(records: Iterable[Mapping[str, Any]]) -> bytes:
    """The content of a file that `load_demonstrations` reads, from records of JSON values."""
    lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) for record in records)
    return "".join(f"{line}\n" for line in lines).encode("utf-8")


def _lines(path: Path, name: str) -> list[str]:
    """The lines of a text file; splitlines would also cut at U+0085 and U+2028."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text ({error}); save it as UTF-8.") from error
    lines = [line.rstrip("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def _json(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error}.") from error
    check_characters(where, line, value)
    return value


def _prompt_record(path: Path, number: int, line: str) -> Record:
    record = _json(line, f"prompt file {path} line {number}")
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(
            f'prompt file {path} line {number} needs a JSON object with a "prompt" that is text, '
            f'e.g. {{"prompt": "a red circle"}}; got {line.strip()[:80]}.'
        )
    return record


def _demonstration(where: str, line: str, field: str | None) -> Record:
    record = _json(line, where)
    if not isinstance(record, dict) or not is_prompt(record.get("prompt")):
        raise UserError(
            f'{where} needs a JSON object with a "prompt" that is text or a list of messages, such as '
            f"{EXAMPLE}; got {line.strip()[:80]}."
        )
    return with_completion(record, where, field)


def is_prompt(prompt: Any) -> bool:
    """Whether it is a text that is not blank, or a list of messages."""
    if isinstance(prompt, str):
        return bool(prompt.strip())
    messages = prompt if isinstance(prompt, list) else []
    return bool(messages) and all(isinstance(m, dict) and "role" in m and "content" in m for m in messages)
