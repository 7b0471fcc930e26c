# SPDX-License-Identifier: Apache-2.0
"""Prompts from files: a prompt per line (`.txt`), a record per row of a table, or captions next to images; and
demonstrations: prompts with their completions."""

from __future__ import annotations

import hashlib
import json
import mimetypes
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from visalign.data.shapes.composed import widened_prompts
from visalign.data.shapes.prompts import heldout_prompts, train_prompts
from visalign.errors import UserError, excerpt, suggestion
from visalign.interfaces import is_message

from .hub_datasets import FORMS, find_table
from .image_references import refer_to_images
from .tables import READERS, listed, nearest_first, plain_name, read_cells

Record = dict[str, Any]

# Names of the embedded prompt sets
EMBEDDED = {"shapes:train": train_prompts, "shapes:composed": widened_prompts, "shapes:heldout": heldout_prompts}
COMPLETION, SOLUTION = "completion", "solution"
COMPLETIONS = (COMPLETION, SOLUTION, "response", "answer")
"""Fields of the completion when none is named: the first of these that a record has."""
CAPTIONS = (".txt", ".caption")  # Endings of the captions next to images, as kohya's trainers read them
_PROMPTS = {False: ("caption", "text"), True: ("question",)}
"""Whether prompts are for a language model -> fields that are read as the prompt where a record has none."""
TOOL_ANSWERS = "tool_answers"  # Field with the [start, end] character spans of a completion that a tool wrote
CHAT = "text or a list of messages"
_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "human": "user", **dict.fromkeys(("observation", "function", "ipython"), "tool")},
    **dict.fromkeys(("gpt", "chatgpt", "bing", "model", "function_call"), "assistant"),
}
"""Role in a file (OpenAI's, ShareGPT's, LLaMA-Factory's, Llama's) -> role that chat templates read."""
EXAMPLE = '{"prompt": "1 + 1 = ?", "completion": "2"}'
_SOURCES = 'Give each prompt one: a .jsonl file of {"prompt": "make it blue", "source": "cup.png"}.'

Edits = Literal["none", "optional", "needed"]
"""Whether a prompt's record has a `source`, the image, or the list of images, that a model edits."""


def record_key(record: str | Mapping[str, Any]) -> tuple[str, ...]:
    """Identify a prompt: (prompt,), or (prompt, source) of a record with images to edit, a line each.

    An image in memory counts by its content; a word that is no path does not count.

    >>> record_key({"prompt": "make it blue", "source": "cup.png"})
    ('make it blue', 'cup.png')
    >>> record_key({"prompt": "a cat", "source": "coco"})
    ('a cat',)
    >>> record_key({"prompt": "put the cup on the table", "source": ["cup.png", "table.png"]})
    ('put the cup on the table', 'cup.png\\ntable.png')
    """
    if isinstance(record, str):
        return (record,)
    prompt = str(record["prompt"])
    names = [_image_name(image) for image in listed_sources(record.get("source"))]
    return (prompt, "\n".join(names)) if any(names) else (prompt,)


def listed_sources(source: Any) -> list[Any]:
    """List the images of a record's "source": none, one, or those of a list."""
    if isinstance(source, list | tuple):
        return list(source)
    return [] if source is None else [source]


def source_of(columns: Mapping[str, Any]) -> Any:
    """Find the image, or list of images, that a row's images are edits of: its "source", else its metadata's.

    Lists and the metadata may be JSON text; None where neither names an image.

    >>> source_of({"source": "coco", "metadata": '{"source": "cup.png"}'})
    'cup.png'
    """
    for record in (columns, metadata_of(columns)):
        source = parse_text(record.get("source"))
        if len(record_key({"prompt": "", "source": source})) > 1:
            return source
    return None


def metadata_of(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row's metadata, an object or its JSON text; empty where there is none."""
    metadata = parse_text(columns.get("metadata"))
    return metadata if isinstance(metadata, Mapping) else {}


def parse_text(value: Any) -> Any:
    """Parse a list or object that a table holds as JSON text; other values stay."""
    if not isinstance(value, str) or not value.startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _image_name(source: Any) -> str:
    """Return a path, or a digest of an image in memory; empty for a word that is no path of an image."""
    if isinstance(source, str | Path):
        is_image = "/" in str(source) or str(mimetypes.guess_type(str(source))[0]).startswith("image/")
        return str(source) if is_image else ""
    pixels = source.detach().cpu().float().numpy() if hasattr(source, "detach") else source
    content = pixels.tobytes() if hasattr(pixels, "tobytes") else repr(pixels).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def is_prompt_source(text: str) -> bool:
    """Tell the name of an embedded set, a file, a folder with "/" in its name or a hf:// address from a prompt."""
    is_file = Path(text).suffix.lower() in (".txt", *READERS) or ("/" in text and Path(text).is_dir())
    return is_file or text.startswith(("shapes:", "hf:", "https://huggingface.co/datasets/"))


def load_prompts(
    source: str | Path,
    *,
    edits: Edits = "none",
    several: bool = True,
    packaged: Sequence[str] = (*EMBEDDED,),
    names: Mapping[str, str] | None = None,
    chat: bool = False,
) -> list[Record]:
    """Load the prompt records of an embedded set, of a file, or of a folder with captions, in its order.

    `source` is one of `EMBEDDED`, a `.txt` file, any table of `read_rows`, a dataset of the hub (`find_table`), or a
    folder of images with their captions. A record needs "prompt", for which `names` (our name of a field -> the
    file's) may name another; its other fields reach the rewards as metadata. Blank lines are
    skipped and repeated prompts kept once; a warning counts both. With `edits` a record's "source" is an image to
    edit, a path relative to the working directory (with `several`, or a list of them): each is decoded once, and
    records of one prompt may differ in it. `packaged` names the sets of the caller in messages.

    With `chat` prompts are for a language model: then a prompt may be a conversation, as in `load_demonstrations`.
    """
    if str(source) in EMBEDDED:
        if edits == "needed":
            raise UserError(f"{source} has no images, and the model edits one. {_SOURCES}")
        return EMBEDDED[str(source)]()
    path, name = find_table(source), f"prompt file {source}"
    has_ending = path.suffix.lower() in (".txt", *READERS)
    if not path.is_dir() and not (has_ending and path.is_file()):
        raise UserError(
            f"no prompt set {str(source)!r}: give an existing file, .txt (a prompt per line) or {', '.join(READERS)} "
            f"(a record per row), a folder of images with captions, {FORMS}, or {', '.join(packaged)} (packaged)."
        )
    records: dict[tuple[str, ...], tuple[int, Record]] = {}
    blank = repeated = 0
    for number, record in _numbered_prompts(path, name, names or {}, chat):
        if record is None:
            blank += 1
            continue
        if not chat or path.suffix == ".txt":
            record["prompt"] = record["prompt"].strip()
        prompt = json.dumps(record["prompt"])
        key = (prompt,) if edits == "none" else (prompt, str(record.get("source")))
        first, earlier = records.setdefault(key, (number, record))
        if earlier != record and _json_text(earlier) != _json_text(record):  # NaN is not equal to itself
            raise UserError(
                f"{name}: lines {first} and {number} give the prompt {excerpt(record['prompt'])} two different "
                "records; keep the right one."
            )
        repeated += first != number
    if not records:
        raise UserError(f"{name} holds no prompt; it needs at least one.")
    if chat:
        warn_of_unread(name, [record for _, record in records.values()])
    if blank or repeated:
        warnings.warn(f"{name}: skipped {blank} blank lines and {repeated} repeated prompts.", stacklevel=2)
    if edits != "none":
        numbered = [(f"{name} line {number}", record) for number, record in records.values()]
        check_sources(numbered, needed=edits == "needed", several=several, remedy=_SOURCES)
    return [record for _, record in records.values()]


def _json_text(record: Record) -> str:
    return json.dumps(record, sort_keys=True, default=repr)


def _numbered_prompts(
    path: Path, name: str, names: Mapping[str, str], chat: bool
) -> Iterator[tuple[int, Record | None]]:
    """Read the numbered records of a file or folder of prompts; None for a blank line."""
    if path.is_dir():
        yield from ((number, {"prompt": caption}) for number, caption in enumerate(_read_captions(path), 1))
    elif path.suffix.lower() == ".txt":
        for number, line in enumerate(_read_lines(path, name), start=1):
            yield number, {"prompt": line} if line.strip() else None
    else:
        for where, number, record in _records(path, name, names):
            yield number, _check_prompt(where, _asked(record, where) if chat else record, names, chat=chat)


def _records(path: Path, name: str, names: Mapping[str, str]) -> Iterator[tuple[str, int, Record]]:
    """Read (where, number, record) of a table; images inside a Parquet file become references."""
    kind = "line" if path.suffix.lower() == ".jsonl" else "row"
    for number, row in read_cells(path):
        empty = [key for key, cell in row.items() if cell is None]
        needed = {key: None for key in empty if key in names.values() or plain_name(key) == "prompt"}
        # an empty one stays, so that no other column stands in for it
        yield f"{name} {kind} {number}", number, refer_to_images(path, number, row, {}) | needed


def _read_captions(folder: Path) -> list[str]:
    """Read the captions of the images in a folder and below: text files of the same name, blank ends stripped."""
    images = [path for path in sorted(folder.rglob("*")) if _image_name(path.name)]
    files = [next(filter(Path.is_file, map(path.with_suffix, CAPTIONS)), None) for path in images]
    captions = ["" if file is None else "\n".join(_read_lines(file, f"'{file}'")).strip() for file in files]
    if not any(captions):
        where = "cat.png has its caption in cat.txt or cat.caption; or give a table of captions"
        raise UserError(f"the folder '{folder}' holds {len(images)} images and no captions: {where}.")
    if missing := [path.name for path, caption in zip(images, captions, strict=True) if not caption]:
        warnings.warn(f"{len(missing)} of {len(images)} images have no caption: {listed(missing)}.", stacklevel=2)
    return list(filter(None, captions))


def check_sources(records: Iterable[tuple[str, Record]], *, needed: bool, several: bool, remedy: str) -> None:
    """Refuse the first record whose source is no image, or with `several` no list of images, that can be read.

    Each record comes with the start of its message; `remedy` ends the message about a record without a source.
    """
    images: dict[str, str] = {}  # path -> where it is named
    for where, record in records:
        if (source := record.get("source")) is None:
            if needed:
                raise UserError(f"{where} has no 'source', the image that the model edits. {remedy}")
            continue
        paths = listed_sources(source)
        if not paths or not all(isinstance(path, str) for path in paths) or (len(paths) > 1 and not several):
            allowed = "or a list of them" if several else "one, since the model edits one image"
            raise UserError(f"{where}: the source is {excerpt(source)}; give the path of an image, {allowed}.")
        for path in paths:
            images.setdefault(path, where)
    with ThreadPoolExecutor() as pool:
        for (path, where), reason in zip(images.items(), pool.map(_why_unreadable, images), strict=True):
            if reason is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                raise UserError(
                    f"{where}: the source {excerpt(path)} is no image that can be read ({reason}). Correct the path, "
                    f"relative to {Path.cwd()}, or remove the line."
                )


_BROKEN = (EOFError, OverflowError, struct.error, zlib.error, Image.DecompressionBombError)


def _why_unreadable(source: str) -> str | None:
    try:
        with Image.open(source) as image:
            image.draft("RGB", (1, 1))  # a JPEG is read whole and decoded small
            image.load()
            return "more than 8 bits a channel" if image.mode[0] in "IF" else None
    except FileNotFoundError:
        return "there is no such file"
    except (OSError, ValueError, SyntaxError, LookupError, RuntimeError, TypeError, *_BROKEN) as error:
        return str(error)


def load_demonstrations(
    path: str | Path, field: str | None = None, names: Mapping[str, str] | None = None
) -> list[Record]:
    """Load the records of a table, each with "prompt" and its "completion"; source and `names` as in `load_prompts`.

    Unlike `load_prompts` this keeps every record of a prompt: sampling gives several completions of one
    prompt. Blank lines are skipped, texts stay unchanged.

    A prompt is a text, or a conversation: a list of messages with "role" and "content". The completion is in
    the field; None is the first of `COMPLETIONS` that a record has. It is a text, or a list of one message. Of a
    record with "messages" (or ShareGPT's "conversations") and no prompt the assistant's last message is the
    completion; messages behind it are left out. A "system" column is a conversation's first message if it has none.
    """
    table, name = find_table(path), f"file of demonstrations '{path}'"
    if table.suffix.lower() not in READERS or not table.is_file():
        raise UserError(f"there is no {name}; give a {', '.join(READERS)} file, or {FORMS}.")
    records = []
    for where, _, row in _records(table, f"'{path}'", names or {}):
        record = _check_prompt(where, _answered(row, where), names or {}, chat=True, example=EXAMPLE)
        records.append(with_completion(record, where, field))
    if not records:
        raise UserError(f"{name} has no record; it needs at least one line such as {EXAMPLE}.")
    warn_of_unread(name, records)
    return records


def warn_of_unread(name: str, records: Sequence[Record]) -> None:
    """Warn of columns that do not reach a language model: "tools" of conversations, "system" of plain prompts."""
    conversations = [record for record in records if isinstance(record["prompt"], list)]
    plain = [record for record in records if isinstance(record["prompt"], str)]
    for rows, kind, column in ((conversations, "conversations", "tools"), (plain, "plain prompts", "system")):
        if count := sum(bool(parse_text(record.get(column))) for record in rows):
            message = f"{name}: {count} {kind} have a column '{column}', which the model does not see."
            remedy = "Write it into a message of the role system; tools that the policy calls are rollout.environment."
            warnings.warn(f"{message} {remedy}", stacklevel=3)


def with_completion(record: Mapping[str, Any], where: str, field: str | None = None) -> Record:
    """Move a record's completion to "completion", with its tool spans; `where` starts the message if it has none."""
    name = field or next((name for name in COMPLETIONS if name in record), COMPLETION)
    value = record.get(name)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = read_messages(value, where)
    text = message_text(value)
    message = value[0] if isinstance(value, list) and text is not value else None
    is_blank = text is None or (isinstance(text, str) and not text.strip())
    if message is not None and (is_blank or message.get("tool_calls") or not _is_answer(message)):
        raise UserError(
            f"{where}: the message {excerpt(message)} is no answer to learn. It must be the assistant's, have text "
            "and call no tool. Add such a message behind it, or remove the record."
        )
    if isinstance(text, str):
        record = {**record, name: text}
        return with_answer(record, COMPLETION, record, name)
    raise UserError(
        f"{where} has no text in the field {name!r}: its fields are {listed(list(record), limit=20)}. Each record "
        f"needs a prompt and its completion, such as {EXAMPLE}."
    )


def tool_answers_field(field: str) -> str:
    """Name of the field with the tool spans of the answer in `field`."""
    return TOOL_ANSWERS if field == COMPLETION else f"{field}_{TOOL_ANSWERS}"


def with_answer(record: Record, field: str, source: Mapping[str, Any], name: str) -> Record:
    """Copy the answer in the field `name` of `source`, with its tool spans, into `field` of the record."""
    spans, spans_field = source.get(tool_answers_field(name)), tool_answers_field(field)
    rest = {key: value for key, value in record.items() if key != spans_field}
    return {**rest, field: source[name], **({spans_field: spans} if spans else {})}


def demonstrations_jsonl(records: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode records as a file that `load_demonstrations` reads."""
    lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) for record in records)
    return "".join(f"{line}\n" for line in lines).encode("utf-8")


def is_prompt(prompt: Any) -> bool:
    """Check for a text that is not blank, or a list of messages."""
    if isinstance(prompt, str):
        return bool(prompt.strip())
    messages = prompt if isinstance(prompt, list) else []
    return bool(messages) and all(map(is_message, messages))


def _read_lines(path: Path, name: str) -> list[str]:
    """Read the lines of a text file; splitlines would also cut at U+0085 and U+2028."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text ({error}); save it as UTF-8.") from error
    lines = [line.lstrip("\ufeff").rstrip("\r") for line in text.split("\n")]  # joined files have marks inside
    return lines if lines[-1] else lines[:-1]


def _check_prompt(
    where: str, fields: Record, names: Mapping[str, str], *, chat: bool, example: str = '{"prompt": "a red circle"}'
) -> Record:
    """Return a record, its fields renamed, whose prompt is a text, or with `chat` perhaps a list of messages."""
    for ours, theirs in names.items():
        if fields.get(theirs) is None and (theirs in fields or ours not in fields):
            problem, hint = ("an empty", "") if theirs in fields else ("no", suggestion(theirs, fields))
            raise UserError(
                f"{where} has {problem} field {theirs!r}, which data.map.{ours} (--map) names. "
                f"{hint}Its fields are {listed(nearest_first(theirs, fields), limit=20)}."
            )
    renamed = {ours: fields[theirs] for ours, theirs in names.items() if theirs in fields}
    result = {name: value for name, value in fields.items() if name not in names.values()} | renamed
    plain = {plain_name(name): name for name in result}
    if usual := [plain[name] for name in ("prompt", *_PROMPTS[chat]) if name in plain and "prompt" not in result]:
        result["prompt"] = result.pop(usual[0])
    result = read_conversation(result, where) if chat else result
    prompt = result.get("prompt")
    if not is_prompt(prompt) or not (chat or isinstance(prompt, str)):
        got = "an empty one" if "prompt" in result else f"the fields {listed(list(fields), limit=20) or 'none'}"
        got = f"the prompt {excerpt(prompt)}" if prompt else got
        raise UserError(
            f'{where} needs a "prompt" that is {CHAT if chat else "text"}, such as {example}; it has {got}. '
            'Call the field that holds it "prompt", or name it: data.map={prompt: FIELD} in a configuration, --map '
            "prompt=FIELD of commands that have it."
        )
    return {name: cell for name, cell in result.items() if not isinstance(cell, bytes)}


def message_text(value: Any) -> Any:
    """Return the content of a list of one message, text parts joined; other values as they are."""
    if not (isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict)):
        return value
    content = value[0].get("content")
    parts = content if isinstance(content, list) else [None]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n\n".join(texts) if all(isinstance(text, str) for text in texts) else content


def _asked(record: Record, where: str) -> Record:
    """Take the conversation of a record without a prompt as its prompt; the assistant's last message is "answer"."""
    fields, messages = _split_messages(record, where)
    if not messages:
        return record
    answer = {"answer": message_text([messages.pop()])} if _is_answer(messages[-1]) else {}
    return {**answer, **fields, "prompt": messages}


def _answered(record: Record, where: str) -> Record:
    """Split the conversation of a record without a prompt at the assistant's last message, the completion."""
    fields, messages = _split_messages(record, where)
    last = next((index for index in reversed(range(len(messages))) if _is_answer(messages[index])), None)
    if last is not None:
        return {**fields, "prompt": messages[:last], COMPLETION: [messages[last]]}
    if messages:
        raise UserError(
            f"{where} has {len(messages)} messages, and none is the assistant's, which training would learn. Add "
            '{"role": "assistant", "content": "…"}, or remove the record.'
        )
    return record


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _split_messages(record: Record, where: str) -> tuple[Record, list[Record]]:
    """Split a record without a prompt into its other fields and its conversation; no messages where it has none."""
    name = next((name for name in ("messages", "conversations") if parse_text(record.get(name))), None)
    conversation = parse_text(record[name]) if name and record.get("prompt") is None else None
    if not isinstance(conversation, list):
        return record, []
    return {key: value for key, value in record.items() if key != name}, read_messages(conversation, where)


def read_conversation(record: Record, where: str) -> Record:
    """Read a prompt that is a conversation, or its JSON text, with the record's "system"; other records stay."""
    messages = parse_text(record.get("prompt"))
    if not isinstance(messages, list) or not messages:
        return record
    if not all(is_message(m) or (isinstance(m, Mapping) and {"from", "value"} <= m.keys()) for m in messages):
        return record
    messages, rest = read_messages(messages, where), dict(record)
    if rest.get("system") and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": rest.pop("system")})
    return {**rest, "prompt": messages}


def read_messages(messages: Iterable[Any], where: str) -> list[Record]:
    """Read messages of OpenAI's or ShareGPT's form with the roles of chat templates; `where` starts the errors.

    >>> read_messages([{"from": "human", "value": "Hi"}, {"role": "developer", "content": "Be brief."}], "Row 1")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'system', 'content': 'Be brief.'}]
    """
    return [_read_message(message, where) for message in messages]


def _read_message(message: Any, where: str) -> Record:
    fields = dict(message) if isinstance(message, Mapping) else {}
    if {"from", "value"} <= fields.keys():
        fields = {"role": fields["from"], "content": fields["value"]}
    if (role := str(fields.get("role"))) not in _ROLES:
        raise UserError(
            f"{where} has the message {excerpt(message)}, whose role is none of {', '.join(_ROLES)}; a chat template "
            "may leave it out. Rename the role, or remove the message."
        )
    fields["role"] = _ROLES[role]
    if role == "function_call":
        fields |= {"content": "", "tool_calls": _read_calls(fields.get("content"), where)}
    return fields


def _read_calls(text: Any, where: str) -> list[Record]:
    """Read the tool calls of LLaMA-Factory's role function_call: JSON text of one call or a list of them."""
    calls = parse_text(text.strip() if isinstance(text, str) else text)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise UserError(
            f"{where} has the function_call {excerpt(text)}; needed is JSON text such as "
            '{"name": "add", "arguments": {"a": 1}}, or a list of such calls.'
        )
    return [{"type": "function", "function": call} for call in calls]
