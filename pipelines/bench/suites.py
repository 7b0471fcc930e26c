# SPDX-License-Identifier: Apache-2.0
"""Suites of `visalign bench`: prompts with their rule and licence, packaged or in a benchmark's published file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from visalign.data.assets import assets_folder
from visalign.data.sets.prompt_files import Edits, is_prompt_source, load_prompts
from visalign.data.sets.tables import read_rows, require_columns
from visalign.errors import UserError, suggestion
from visalign.evaluation.heldout.correctness import record_tags
from visalign.pipelines.shared.parts import check_texts


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark: where its prompts are, and the rule that scores their images."""

    title: str
    source: str  # Where the prompts are published
    licence: str = "that of the file"
    people: str = "not measured"  # How far the rule agrees with people
    prompts: str | None = None  # Packaged set or file; None: a local file in the published layout
    fields: Mapping[str, str] = field(default_factory=dict)  # Our name of a field -> that of the published file
    has_graph: bool = False  # A row of the file is a question, not a prompt
    tag: str = "{tag}"  # Category of a prompt, by the fields of its record
    seeds: Sequence[int] = (0,)  # Seeds; each gives an image of each prompt
    rewards: Sequence[str] = ()  # Rule of the benchmark
    options: Sequence[str] = ()  # Options of the rewards
    correctness: str | None = None  # Reward that says correct or wrong
    question_model: str | None = None  # Model that the published scores ask; the user has to name one


def suite_files() -> dict[str, Path]:
    return {path.stem: path for path in sorted((assets_folder() / "suites").glob("*.yaml"))}


def read_suite(name: str) -> Suite:
    return Suite(**yaml.safe_load(suite_files()[name].read_text("utf-8")))


def load_suite(
    text: str, limit: int | None = None, edits: Edits = "none"
) -> tuple[Suite, Sequence[Mapping[str, Any]]]:
    """Load NAME, NAME:FILE, or any set of prompts; of its records `limit`, evenly, since categories follow each other.

    With `edits` a record's "source" is an image to edit, as `load_prompts` has it.

    >>> [record["prompt"] for record in load_suite("world", limit=2)[1]]
    ['a square', 'a purple square below an orange circle']
    """
    (name, _, file), files = text.partition(":"), suite_files()
    if name in files:
        suite = read_suite(name)
        if suite.prompts is None and not file:
            raise UserError(
                f"The prompts of suite {name} are not part of visalign (licence: {suite.licence}). Get them from "
                f"{suite.source}, and write --suite {name}:FILE."
            )
        if suite.prompts is not None and file:
            raise UserError(f"The prompts of suite {name} are packaged. Write --suite {name}, without :{file}.")
    elif is_prompt_source(text):
        suite, file = Suite(title=text, source=text), text
    else:
        hint = (
            f"{suggestion(name, files)}Give one of {', '.join(files)}, or a file of prompts (.txt, .jsonl, .csv ...)."
        )
        raise UserError(f"There is no suite '{text}'. {hint}")
    packaged = files["world"].parent / str(suite.prompts)
    source = file or (str(packaged) if packaged.is_file() else str(suite.prompts))
    records = _graphs(source, suite) if suite.has_graph else load_prompts(source, edits=edits, names=suite.fields)
    count = min(limit or len(records), len(records))
    records = [records[i * len(records) // count] for i in range(count)]
    tags = (suite.tag.format(**{"tag": record_tags([record])[0], **record}) for record in records)
    return suite, check_texts([{**record, "tag": tag} for record, tag in zip(records, tags, strict=True)])


def _graphs(source: str, suite: Suite) -> list[dict[str, Any]]:
    """Gather the questions of each item, a row each, as GenEval 2 has them, with the indices of their parents."""
    items: dict[str, dict[str, dict[str, str]]] = {}
    for _, columns in read_rows(source):
        require_columns(source, columns, suite.fields.values(), purpose=suite.title)
        row = {ours: str(columns[theirs]).strip() for ours, theirs in suite.fields.items()}
        if items.setdefault(row["item"], {}).setdefault(row["id"], row) != row:
            raise UserError(f"'{source}': item {row['item']} has two questions {row['id']}. Number them differently.")
    records = []
    for item, rows in items.items():
        index = {key: number for number, key in enumerate(rows)}
        parents = [[key.strip() for key in row["parents"].split(",") if key.strip() != "0"] for row in rows.values()]
        if missing := sorted({key for keys in parents for key in keys} - index.keys()):
            raise UserError(f"'{source}': item {item} has no question {', '.join(missing)}, on which another depends.")
        questions = [[row["question"], "Yes"] for row in rows.values()]
        record = {"prompt": next(iter(rows.values()))["prompt"], "vqa_list": questions}
        records.append(record | {"vqa_parents": [[index[key] for key in keys] for keys in parents]})
    return records
