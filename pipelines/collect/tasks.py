# SPDX-License-Identifier: Apache-2.0
"""Questions to voters: two images side by side, or one, from tables, folders and sets."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from visalign.data.sets.columns import read_table, usual_names
from visalign.data.sets.hub_datasets import find_table
from visalign.data.sets.image_references import absolute_reference, missing_files
from visalign.data.sets.prompt_files import record_key
from visalign.data.sets.records import PreferencePair, PreferenceSet
from visalign.data.sets.sources import is_named_set, load_source
from visalign.data.sets.tables import READERS, Row, first_row, listed
from visalign.data.sets.text_rows import refer_to_texts
from visalign.errors import UserError
from visalign.evaluation.pages.base import short_names
from visalign.pipelines.score.image_rows import SAMPLED, ImageRow, image_rows, shared_metadata
from visalign.settings import settings

SIDES = ("left", "right")
QUALITY_WORDS = ("bad", "poor", "fair", "good", "excellent")  # Words of the slider: the five grades of ITU-T P.910
Words = Annotated[str, Field(max_length=200, pattern=r"\S")]
PAIR_COLUMNS = ("generator_left", "generator_right", "resolution", "category", "split", "prompt_id")
"""Columns of a pair that its votes keep."""
_DROPPED = "prompt image_left image_right label votes votes_left votes_right votes_tie annotator ballots".split()


@settings("form")
class Form:
    """Questions besides the choice of an image, or about the single image."""

    slider: Annotated[tuple[Words, ...], Field(max_length=11)] = ()  # Words of the grades 1, 2, ...; empty: no slider
    checklist: Annotated[tuple[Words, ...], Field(max_length=40)] = ()
    """Questions that are answered yes, no, or not at all."""
    boxes: bool = False  # Whether voters can draw boxes around faults
    text: bool = False  # Whether voters can write a comment

    def __post_init__(self) -> None:
        if len(self.slider) == 1:
            raise UserError(f"A slider has 2 to 11 words; got 1: {self.slider[0]}.")
        for words in (self.slider, self.checklist):
            if len(set(words)) < len(words):
                raise UserError(f"Words and questions are distinct; got {listed(words)}.")


@dataclass(frozen=True, kw_only=True)
class Task:
    prompt: str
    images: tuple[str, ...]
    """One image, the left and the right one, or the 3 to 9 of a choice; as `resolve_image` reads them, with absolute
    paths."""
    gold: str | None = None  # "left", "right" or "tie" where the answer is known; such votes only measure the voter
    extra: Mapping[str, Any] = field(default_factory=dict)  # Other columns, which the export writes again

    @property
    def places(self) -> tuple[str, ...]:
        """Names of the images' places: left and right, or from three on their numbers."""
        count = len(self.images)
        return SIDES[:count] if count < 3 else tuple(map(str, range(1, count + 1)))

    @property
    def key(self) -> str:
        """Hash of the prompt and the images in any order."""
        text = json.dumps([self.prompt, sorted(self.images), self.gold is not None])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def read_tasks(
    sources: Sequence[str],
    *,
    single: bool,
    best_of: int | None = None,
    prompt: str | None = None,
    per_prompt: int = 10,
    seed: int = 0,
) -> list[Task]:
    """Read distinct tasks from sources of images; labels that a set already has are not shown.

    Sources are images, folders of images, also those of `visalign sample`, tables (prompt, `image_left`,
    `image_right`; or prompt, image), "LAYOUT:FOLDER", "shapes:pairs", "shapes:quality". Unless `single`, tasks are
    at most `per_prompt` pairs of images of one prompt, across the sources where there are several; with `best_of` as
    many groups of so many images.
    """
    tasks: list[Task] = []
    by_source: dict[str, list[ImageRow]] = {}
    for source in sources:
        for item in _read(source, prompt):
            if isinstance(item, Task):
                tasks.append(item)
            else:
                by_source.setdefault(_model_name(source), []).append(item)
    rows = [row for part in by_source.values() for row in part]
    if (single or best_of) and tasks:
        option = "--single shows one image" if single else f"--best-of shows {best_of} images"
        raise UserError(f"{option}, and the set holds pairs. Leave {option.split()[0]} out.")
    if best_of:
        tasks = _group_images(rows, best_of, per_prompt, seed)
    elif single:
        tasks = [Task(prompt=r.prompt, images=(absolute_reference(r.image),), extra=_metadata(r)) for r in rows]
    elif len(by_source) > 1:
        tasks += _pair_models(by_source, per_prompt, seed)
    else:
        tasks += _pair_images(rows, per_prompt, seed)
    if not tasks:
        raise UserError("No two images share a prompt. Give such images, a table of pairs, or --single.")
    return _checked(list({task.key: task for task in reversed(tasks)}.values())[::-1])


def gold_tasks(source: str) -> list[Task]:
    """Read pairs with known answers from a preference set."""
    pairs = load_source(source)
    if not isinstance(pairs, PreferenceSet):
        raise UserError(f"--gold is '{source}', which holds no pairs; needed are pairs with a label.")
    sides = {1.0: "left", 0.0: "right", 0.5: "tie"}
    tasks: dict[str, Task] = {}
    for index, pair in enumerate(pairs.pairs):
        task = replace(_pair_task(pair), gold=sides.get(pair.label))
        if task.gold is None or tasks.setdefault(task.key, task).gold != task.gold:
            fault = "is a split vote, or has another answer to an earlier pair. Give one answer to each"
            raise UserError(f"Row {pairs.row(index)} of '{source}' {fault}.")
    return _checked(list(tasks.values()))


def _checked(tasks: list[Task]) -> list[Task]:
    if same := [task.images[0] for task in tasks if len(set(task.images)) < len(task.images)]:
        raise UserError(f"{len(same)} pairs show the same image twice: {listed(same)}.")
    if missing := missing_files([image for task in tasks for image in task.images]):
        raise UserError(f"{len(missing)} images do not exist: {listed(missing)}.")
    return tasks


def _read(source: str, prompt: str | None) -> Sequence[Task | ImageRow]:
    if is_named_set(source):
        records = load_source(source)
        if isinstance(records, PreferenceSet):
            return [_pair_task(pair) for pair in records.pairs]
        return [ImageRow(image=record.image, prompt=record.prompt) for record in records.records]
    path = find_table(source)
    if not path.exists():
        raise UserError(f"There is no folder, table or image '{source}'.")
    if (path / SAMPLED).is_file():
        path /= SAMPLED
    first = refer_to_texts(first_row(path))
    if "image_left" in usual_names(first, {}, is_judged=False) or "image_left" in first:
        return [_row_task(path, number, row, prompt) for number, row in read_table(path, {})]  # they need no label
    return image_rows([path], prompt)


def _pair_task(pair: PreferencePair) -> Task:
    columns = {name: getattr(pair, name) for name in PAIR_COLUMNS if getattr(pair, name) is not None}
    images = (absolute_reference(pair.image_left), absolute_reference(pair.image_right))
    return Task(prompt=pair.prompt, images=images, extra=columns | dict(pair.extra))


def _row_task(path: Path, number: int, row: Row, default: str | None) -> Task:
    prompt, images = row.get("prompt", default), (row.get("image_left"), row.get("image_right"))
    if not isinstance(prompt, str) or not all(isinstance(image, str) and image for image in images):
        raise UserError(f"Row {number} of '{path}' needs texts in prompt, image_left and image_right.")
    extra = {name: value for name, value in row.items() if name not in _DROPPED}
    return Task(prompt=prompt, images=tuple(absolute_reference(str(i), path.parent) for i in images), extra=extra)


def _model_name(source: str) -> str:
    """Return the path of a folder, or of a table without its ending; images named one by one have no model."""
    path = Path(source)
    if path.is_file() and path.suffix.lower() not in READERS:
        return ""
    return str(path.parent if path.name == SAMPLED else path.with_suffix("") if path.is_file() else path)


def _metadata(*rows: ImageRow) -> dict[str, Any]:
    """Keep the metadata that are equal in all rows of a task."""
    equal = shared_metadata(rows)
    return {"metadata": equal} if equal else {}


def _pair_images(rows: Iterable[ImageRow], limit: int, seed: int) -> list[Task]:
    """Form at most `limit` pairs of each prompt (and source): all its images appear about as often."""
    tasks = []
    for prompt, circle, images in _by_prompt(rows, seed):
        count = len(circle)
        steps = ((i, (i + gap) % count) for gap in range(1, count // 2 + 1) for i in range(count))
        pairs = dict.fromkeys(tuple(sorted((circle[i], circle[j]))) for i, j in steps)  # the store draws the sides
        for pair in islice(pairs, limit):
            tasks.append(Task(prompt=prompt, images=pair, extra=_metadata(*(images[image] for image in pair))))
    return tasks


def _group_images(rows: Iterable[ImageRow], size: int, limit: int, seed: int) -> list[Task]:
    """Form at most `limit` groups of `size` images of each prompt; no image is in two."""
    tasks, largest, left_out = [], 0, 0
    for prompt, circle, images in _by_prompt(rows, seed):
        groups = [tuple(circle[start : start + size]) for start in range(0, len(circle) - size + 1, size)][:limit]
        tasks += [Task(prompt=prompt, images=g, extra=_metadata(*(images[image] for image in g))) for g in groups]
        largest, left_out = max(largest, len(circle)), left_out + len(circle) - size * len(groups)
    if not tasks:
        raise UserError(f"--best-of is {size}, and no prompt has so many images: {largest} at most. Give less.")
    if left_out:
        limits = f"a group has {size} images of one prompt, and a prompt {limit} groups at most (--per-prompt)"
        warnings.warn(f"{left_out} images are left out: {limits}.", stacklevel=3)
    return tasks


def _by_prompt(rows: Iterable[ImageRow], seed: int) -> Iterator[tuple[str, list[str], dict[str, ImageRow]]]:
    """Yield each prompt (and source) with its images in an order by lot, and their rows."""
    by_prompt: dict[tuple[str, ...], dict[str, ImageRow]] = {}
    for row in rows:
        key = record_key({**(row.metadata or {}), "prompt": row.prompt})
        by_prompt.setdefault(key, {})[absolute_reference(row.image)] = row
    for (prompt, *_), images in by_prompt.items():
        yield prompt, sorted(images, key=lambda image: draw(seed, prompt, image)), images


def _pair_models(models: Mapping[str, Sequence[ImageRow]], limit: int, seed: int) -> list[Task]:
    """Form at most `limit` pairs of each prompt across two sources: of one seed or file name where there are any."""
    names, by_prompt = short_names(models), {}
    for model, rows in models.items():
        for row in rows:
            key = record_key({**(row.metadata or {}), "prompt": row.prompt})
            number = _relative(row.image, model) if row.seed is None else f"seed {row.seed}"
            by_prompt.setdefault(key, {}).setdefault(model, {})[number] = row
    tasks, unpaired = [], sum(map(len, models.values()))
    for (prompt, *_), images in by_prompt.items():
        pairs, paired = [], set()
        for (first, left), (second, right) in combinations(images.items(), 2):
            same = [(number, number) for number in left if number in right]
            for numbers in same or product(left, right):
                paired |= {(first, numbers[0]), (second, numbers[1])}
                pairs.append(((first, left[numbers[0]]), (second, right[numbers[1]])))
        unpaired -= len(paired)
        for pair in sorted(pairs, key=lambda pair: draw(seed, prompt, *(row.image for _, row in pair)))[:limit]:
            (first, left), (second, right) = pair[:: -1 if draw(seed, prompt, pair[0][1].image, "side") % 2 else 1]
            extra = {"generator_left": names[first], "generator_right": names[second], **_metadata(left, right)}
            extra |= {"seed": left.seed} if left.seed is not None and left.seed == right.seed else {}
            sides = absolute_reference(left.image), absolute_reference(right.image)
            tasks.append(Task(prompt=prompt, images=sides, extra=extra))
    if not tasks:
        raise UserError(
            f"{listed(list(names.values()))} share no prompt. Sample the same prompts into each, or give one folder."
        )
    if unpaired:
        warnings.warn(f"{unpaired} images have no counterpart of their prompt and seed: left out.", stacklevel=2)
    return tasks


def _relative(image: str, model: str) -> str:
    """Return an image's path inside its source without the ending; a table's folder may hold the images."""
    path = Path(image)
    base = next((base for base in (Path(model), Path(model).parent) if path.is_relative_to(base)), Path())
    return str(path.relative_to(base).with_suffix("")) if path.is_relative_to(base) else image


def draw(*key: object) -> int:
    """Draw a number from a hash, so that the seed determines every order, side and assignment."""
    text = repr(key).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
