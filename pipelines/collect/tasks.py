# SPDX-License-Identifier: Apache-2.0
"""What voters are asked: two images side by side, or one, from tables, folders and sets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from visalign.data.sets.image_references import missing_files
from visalign.data.sets.layouts import PAIR_LAYOUTS, QUALITY_LAYOUTS
from visalign.data.sets.prompt_files import record_key
from visalign.data.sets.records import PreferencePair, PreferenceSet, QualityRecord
from visalign.data.sets.sources import GENERATED, load_source
from visalign.data.sets.tables import READERS, listed, read_rows
from visalign.errors import UserError
from visalign.pipelines.score.image_rows import SAMPLED, ImageRow, image_rows

QUALITY_WORDS = ("bad", "poor", "fair", "good", "excellent")
"""Of the slider: the five grades of ITU-T P.910."""
MOST_QUESTIONS, MOST_LETTERS = 40, 200
KEPT = ("generator_left", "generator_right", "resolution", "category", "split", "prompt_id")
"""Columns of a pair that its votes keep."""
NOT_KEPT = ("prompt", "image_left", "image_right", "label", "votes", "votes_left", "votes_right", "votes_tie")


@dataclass(frozen=True, kw_only=True)
class Form:
    """What is asked beside the choice of an image, or of the one image."""

    slider: tuple[str, ...] = ()
    """Words of the grades 1, 2, ...; none: no slider."""
    checklist: tuple[str, ...] = ()
    """Questions that are answered yes, no, or not at all."""
    boxes: bool = False
    """Whether faults are boxed."""
    text: bool = False
    """Whether something may be written."""

    def __post_init__(self) -> None:
        if len(self.slider) == 1 or len(self.slider) > 11:
            raise UserError(f"A slider has 2 to 11 words; got {len(self.slider)}: {', '.join(self.slider)}.")
        if len(self.checklist) > MOST_QUESTIONS:
            raise UserError(f"{len(self.checklist)} questions; a checklist has at most {MOST_QUESTIONS}.")
        for name, words in (("slider", self.slider), ("checklist", self.checklist)):
            wrong = [word for word in words if not word.strip() or len(word) > MOST_LETTERS]
            if wrong or len(set(words)) < len(words):
                raise UserError(
                    f"Each entry of the {name} is said once, in 1 to {MOST_LETTERS} letters; got "
                    f"{listed(list(words))}."
                )

    def to_json(self) -> str:
        """As the store keeps it."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Form:
        """Back."""
        found = json.loads(text)
        return Form(**found | {name: tuple(found[name]) for name in ("slider", "checklist")})


@dataclass(frozen=True, kw_only=True)
class Task:
    """One question to a voter."""

    prompt: str
    images: tuple[str, ...]
    """One image, or the left and the right one; as `resolve_image` reads them, paths whole."""
    gold: str | None = None
    """ "left", "right" or "tie" where the answer is known; such votes measure the voter alone."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other columns, which the export writes again."""

    @property
    def key(self) -> str:
        """Of a prompt and its images, whichever stands first."""
        said = json.dumps([self.prompt, sorted(self.images), self.gold is not None])
        return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def read_tasks(
    sources: Sequence[str], *, single: bool, prompt: str | None = None, per_prompt: int = 10, seed: int = 0
) -> list[Task]:
    """Tasks of what a user names.

    Args:
        sources: images, folders of images, also those of `visalign sample`, tables (prompt, `image_left`,
            `image_right`; or prompt, image), "LAYOUT:FOLDER", "shapes:pairs", "shapes:quality". What a set
            says of them already is not shown.
        single: one image at a time; else pairs, which images of one prompt make with one another.
        prompt: of images that have none.
        per_prompt: most pairs that the images of one prompt make, drawn so that each comes about as often.
        seed: of that draw.

    Returns:
        Distinct tasks.

    Raises:
        UserError: nothing to ask, missing files, an image beside itself, or what cannot be read.
    """
    pairs: list[Task] = []
    rows: list[ImageRow] = []
    for source in sources:
        found = _read(source, prompt)
        pairs += [task for task in found if isinstance(task, Task)]
        rows += [row for row in found if isinstance(row, ImageRow)]
    if single and pairs:
        raise UserError("--single shows one image, and the set holds pairs. Leave --single out.")
    if single:
        pairs = [Task(prompt=row.prompt, images=(_whole(row.image),), more=_record(row)) for row in rows]
    else:
        pairs += _paired(rows, per_prompt, seed)
    _check_images(pairs)
    tasks = list({task.key: task for task in reversed(pairs)}.values())[::-1]
    if not tasks:
        raise UserError(
            "There is nothing to ask: no two images share a prompt. Give images of one prompt, a table "
            "with the columns prompt, image_left, image_right, or --single."
        )
    return tasks


def gold_tasks(source: str) -> list[Task]:
    """Pairs whose answer is known, from a preference set.

    Raises:
        UserError: no preference set, a label that is no side, two labels of one pair, missing files, or an
            image beside itself.
    """
    found = load_source(source)
    if not isinstance(found, PreferenceSet):
        raise UserError(f"--gold is '{source}', which holds no pairs; needed are pairs with a label.")
    sides = {1.0: "left", 0.0: "right", 0.5: "tie"}
    unclear = [found.row(number) for number, pair in enumerate(found.pairs) if pair.label not in sides]
    if unclear:
        raise UserError(
            f"Rows {listed(unclear)} of '{source}' are split votes; the answer to a gold pair is left, right "
            "or tie."
        )
    tasks: dict[str, Task] = {}
    for pair in found.pairs:
        task = replace(_of_pair(pair), gold=sides[pair.label])
        if tasks.setdefault(task.key, task).gold != task.gold:
            raise UserError(
                f"'{source}' has two answers to the pair {listed(task.images)}; a gold pair has one."
            )
    _check_images(list(tasks.values()))
    return list(tasks.values())


def _check_images(tasks: Sequence[Task]) -> None:
    itself = [task.images[0] for task in tasks if len(set(task.images)) < len(task.images)]
    if itself:
        raise UserError(f"{len(itself)} pairs show an image beside itself: {listed(itself)}.")
    if missing := missing_files([image for task in tasks for image in task.images]):
        raise UserError(f"{len(missing)} images do not exist: {listed(missing)}.")


def _read(source: str, prompt: str | None) -> list[Task] | list[ImageRow]:
    layout = source.partition(":")[0]
    if source in GENERATED or (layout in (*PAIR_LAYOUTS, *QUALITY_LAYOUTS) and ":" in source):
        found = load_source(source)
        if isinstance(found, PreferenceSet):
            return [_of_pair(pair) for pair in found.pairs]
        return [_of_record(record) for record in found.records]
    path = Path(source)
    if (path / SAMPLED).is_file():
        path /= SAMPLED
    if path.suffix.lower() in READERS and path.is_file() and _has_pairs(path):
        return [_of_row(path, number, row, prompt) for number, row in read_rows(path)]
    return image_rows([path], prompt)


def _has_pairs(path: Path) -> bool:
    return any("image_left" in row for _, row in [next(read_rows(path), (0, {}))])


def _of_pair(pair: PreferencePair) -> Task:
    more = {name: getattr(pair, name) for name in KEPT if getattr(pair, name) is not None}
    images = (_whole(pair.image_left), _whole(pair.image_right))
    return Task(prompt=pair.prompt, images=images, more=more | dict(pair.extra))


def _of_record(record: QualityRecord) -> ImageRow:
    return ImageRow(image=record.image, prompt=record.prompt)


def _of_row(path: Path, number: int, row: Mapping[str, Any], prompt: str | None) -> Task:
    """A pair of a table that need not say who won."""
    said = row.get("prompt", prompt)
    places = [row.get("image_left"), row.get("image_right")]
    if not isinstance(said, str) or not all(isinstance(place, str) and place for place in places):
        raise UserError(
            f"Row {number} of '{path}' needs texts in prompt, image_left and image_right; found: "
            f"{', '.join(row) or 'none'}."
        )
    more = {name: value for name, value in row.items() if name not in (*NOT_KEPT, "annotator", "ballots")}
    return Task(prompt=said, images=tuple(_whole(str(place), path.parent) for place in places), more=more)


def _record(row: ImageRow) -> dict[str, Any]:
    return {} if row.metadata is None else {"metadata": dict(row.metadata)}


def _whole(image: str, folder: Path | None = None) -> str:
    """A path from the root, so that the store can be served from anywhere; a reference stays."""
    if "://" in image:
        return image
    return str(((folder or Path()) / image).resolve())


def _paired(rows: Iterable[ImageRow], most: int, seed: int) -> list[Task]:
    """At most so many pairs of the images of each prompt, and of the same source where they are edits:
    neighbours in a shuffled circle, then those two apart, and so on, so that all are shown about as often."""
    by_prompt: dict[tuple[str, ...], dict[str, ImageRow]] = {}
    for row in rows:
        key = record_key({**(row.metadata or {}), "prompt": row.prompt})
        by_prompt.setdefault(key, {})[_whole(row.image)] = row
    tasks = []
    for (prompt, *_), images in by_prompt.items():
        circle = sorted(images, key=lambda image: _digest(seed, prompt, image))
        count = len(circle)
        steps = ((i, (i + apart) % count) for apart in range(1, count // 2 + 1) for i in range(count))
        pairs = dict.fromkeys(tuple(sorted((circle[i], circle[j]))) for i, j in steps)
        for pair in islice(pairs, most):
            tasks.append(Task(prompt=prompt, images=pair, more=_record(images[pair[0]])))
    return tasks


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
