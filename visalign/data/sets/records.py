# SPDX-License-Identifier: Apache-2.0
"""Human judgements of images: pairs with a preferred side, and single images with a quality score."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from visalign.errors import UserError

from .tables import Row


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Two images of one prompt and what people said of them."""

    prompt: str
    image_left: str
    """A path, or any reference that `visalign.data.sets.image_references.resolve_image` reads."""
    image_right: str
    label: float
    """Share of the judgement in favour of the left image: 1 left, 0 right, 0.5 a tie, between them votes."""
    votes: tuple[int, int, int] | None = None
    """How many people preferred left, preferred right, saw a tie; None where only the label is known."""
    annotator: str | None = None
    """Who judged, in a table with a row per annotator; such rows of a pair are summed (`summed_votes`)."""
    ballots: tuple[tuple[str, float], ...] = ()
    """What each named annotator said of it, 1 left, 0 right, 0.5 a tie, where votes were summed from rows."""
    generator_left: str | None = None
    """Name of the model that made the left image."""
    generator_right: str | None = None
    resolution: str | None = None
    """ "WIDTHxHEIGHT" of the images, where it is known."""
    category: str | None = None
    """Kind of prompt, e.g. "counting"."""
    split: str | None = None
    """ "train", "test" ...; None where the source has no splits."""
    prompt_id: str | None = None
    """What groups the pairs of one prompt; the prompt itself where the source gives none."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other columns: scores of judges, GenEval's metadata."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.label <= 1.0:  # also refuses NaN
            raise UserError(
                f"A label is the share in favour of the left image, 0 to 1 (or left, right, tie); got "
                f"{self.label}."
            )
        if self.votes is not None and (min(self.votes) < 0 or sum(self.votes) == 0):
            raise UserError(
                f"Votes are counts (left, right, tie), at least one of them positive; got {self.votes}."
            )

    @property
    def group(self) -> str:
        """What the pair shares with the other pairs of its prompt."""
        return self.prompt if self.prompt_id is None else self.prompt_id

    def swapped(self) -> PreferencePair:
        """The same judgement with the sides exchanged, and so the columns of `extra` that have sides.

        NAME_left and NAME_right change places; of a probability for the left image, NAME_prob, so do its two
        orders where NAME_prob_swapped is there, and else it becomes 1 − p.
        """
        return replace(
            self,
            image_left=self.image_right,
            image_right=self.image_left,
            label=1.0 - self.label,
            votes=None if self.votes is None else (self.votes[1], self.votes[0], self.votes[2]),
            ballots=tuple((name, 1.0 - said) for name, said in self.ballots),
            generator_left=self.generator_right,
            generator_right=self.generator_left,
            extra=dict(_other_side(name, value, self.extra) for name, value in self.extra.items()),
        )

    def to_row(self) -> Row:
        """The record as one object of a JSONL file, None left out; `load_preferences` reads it back equal."""
        return _to_row(self)


@dataclass(frozen=True, kw_only=True)
class QualityRecord:
    """One image with its mean opinion score."""

    image: str
    mos: float
    """Mean opinion score in the unit of the set."""
    std: float | None = None
    """Standard deviation of the opinions in the same unit."""
    prompt: str = ""
    generator: str | None = None
    resolution: str | None = None
    category: str | None = None
    """Kind of image or of distortion."""
    split: str | None = None
    reference: str | None = None
    """The undistorted image that this one was made from: images that share it belong into one split."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.mos):
            raise UserError(f"mos must be a number; got {self.mos}.")
        if self.std is not None and not self.std >= 0:
            raise UserError(f"std must be a number, at least 0; got {self.std}.")

    @property
    def origin(self) -> str:
        """What must stay in one split: the reference, else the image."""
        return self.image if self.reference is None else self.reference

    def to_row(self) -> Row:
        """The record as one object of a JSONL file, None left out."""
        return _to_row(self)


@dataclass(frozen=True, kw_only=True)
class PreferenceSet:
    """Pairs of one source."""

    name: str
    pairs: tuple[PreferencePair, ...]
    rows: tuple[int, ...] = ()
    """Number of each pair in its file, for messages; empty for a set that was not read from one."""

    def __len__(self) -> int:
        return len(self.pairs)

    def row(self, number: int) -> int:
        """The row of record 0, 1, 2, ... as its file counts them; from 1 where there is none."""
        return self.rows[number] if self.rows else number + 1


@dataclass(frozen=True, kw_only=True)
class QualitySet:
    """Scored images of one source."""

    name: str
    records: tuple[QualityRecord, ...]
    higher_is_better: bool = True
    """Direction of `mos`: False for difference scores (DMOS) where 0 is perfect."""
    rows: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    def row(self, number: int) -> int:
        """As of a `PreferenceSet`."""
        return self.rows[number] if self.rows else number + 1

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """[N] what is resampled together: images that share a prompt or a reference, also through others.

        A prompt or reference that all images share parts nothing and is not counted. Where each prompt comes
        with each reference, so that all hang together, those of the two that are fewer are the groups.
        """
        columns = [
            column
            for column in ([r.prompt or None for r in self.records], [r.reference for r in self.records])
            if len(set(column)) > 1
        ]
        found = _components([r.image for r in self.records], columns)
        if len(columns) > 1 and len(set(found)) == 1:
            fewer = min(columns, key=lambda column: len(set(column)))
            found = _components([r.image for r in self.records], [fewer])
        return found


def _components(images: Sequence[str], columns: Sequence[Sequence[str | None]]) -> tuple[int, ...]:
    """[N] number of what hangs together by a value of a column (None is no value) or by the image."""
    root: dict[tuple[int, str], tuple[int, str]] = {}

    def top(key: tuple[int, str]) -> tuple[int, str]:
        while root.setdefault(key, key) != key:
            root[key] = root[root[key]]
            key = root[key]
        return key

    for row, image in enumerate(images):
        for kind, column in enumerate(columns, 1):
            value = column[row]
            if value is not None:
                root[top((kind, value))] = top((0, image))
    number: dict[tuple[int, str], int] = {}
    return tuple(number.setdefault(top((0, image)), len(number)) for image in images)


SIDES = {"left": 1.0, "right": 0.0, "tie": 0.5}
"""Words for a label."""

_VOTE_COLUMNS = ("votes_left", "votes_right", "votes_tie")
_READ = ("prompt", "image_left", "image_right", "label", "votes", "ballots")


def pair_from_row(row: Row, *, folder: Path | None = None) -> PreferencePair:
    """One pair from the columns that `load_preferences` names; numbers may be strings, as CSV has them.

    Relative image paths start at the folder; None leaves them as they are.

    Raises:
        UserError: A column is missing or cannot be read, or label and votes contradict one another.
    """
    votes = _votes(row)
    if "label" not in row and votes is None:
        raise UserError(
            f"neither 'label' nor votes ({', '.join(_VOTE_COLUMNS)}) in it. Found: {', '.join(row)}."
        )
    from_votes = None if votes is None else (votes[0] + votes[2] / 2) / max(sum(votes), 1)
    label = from_votes if "label" not in row else _label(row["label"])
    assert label is not None
    if from_votes is not None and (label - 0.5) * (from_votes - 0.5) < 0:
        raise UserError(
            f"the label {label:g} contradicts the votes {votes} (left, right, tie), whose share for the left "
            f"image is {from_votes:.3g}."
        )
    return PreferencePair(
        prompt=_text(row, "prompt"),
        image_left=_place(_text(row, "image_left"), folder),
        image_right=_place(_text(row, "image_right"), folder),
        label=label,
        votes=votes,
        ballots=_ballots(row.get("ballots")),
        **_others(PreferencePair, _with_generators(row), (*_READ, *_VOTE_COLUMNS)),
    )


def quality_from_row(row: Row, *, folder: Path | None = None) -> QualityRecord:
    """One scored image from the columns that `load_quality` names, as `pair_from_row` reads a pair."""
    return QualityRecord(
        image=_place(_text(row, "image"), folder),
        mos=_number(row, "mos"),
        std=None if row.get("std") is None else _number(row, "std"),
        prompt=str(row.get("prompt", "")),
        **_others(QualityRecord, row, ("image", "mos", "std", "prompt", "higher_is_better")),
    )


def mixed_side(pair: PreferencePair) -> PreferencePair:
    """The pair, or its mirror image, by a hash of prompt and images: half of a set, always the same."""
    images = sorted((pair.image_left, pair.image_right))
    names = (Path(image).name for image in images)  # so that a set that was moved keeps its sides
    digest = zlib.crc32("\n".join((pair.prompt, *names)).encode())
    wanted = images[digest % 2]
    return pair if pair.image_left == wanted else pair.swapped()


def _other_side(name: str, value: Any, extra: Mapping[str, Any]) -> tuple[str, Any]:
    """A column and its value when the sides are exchanged."""
    for mine, other in (("_left", "_right"), ("_right", "_left")):
        if name.endswith(mine):
            return name.removesuffix(mine) + other, value
    if name.endswith("_prob_swapped") and name.removesuffix("_swapped") in extra:
        return name.removesuffix("_swapped"), value
    if name != "prob" and not name.endswith("_prob"):
        return name, value
    if f"{name}_swapped" in extra:
        return f"{name}_swapped", value
    try:
        return name, 1.0 - float(value)
    except (TypeError, ValueError):
        return name, value


def _to_row(record: PreferencePair | QualityRecord) -> Row:
    own = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "extra"}
    if own.get("votes") is not None:
        own["votes"] = list(own["votes"])
    if "ballots" in own:
        own["ballots"] = [list(ballot) for ballot in own["ballots"]] or None
    return {**record.extra, **{name: value for name, value in own.items() if value is not None}}


def _others(kind: type, row: Row, read: Sequence[str]) -> dict[str, Any]:
    """The fields of a record beside those read already: texts, and all that it does not know as `extra`."""
    texts = [field.name for field in fields(kind) if field.name not in (*read, "extra")]
    extra = {name: value for name, value in row.items() if name not in (*read, *texts)}
    return {"extra": extra, **{name: str(row[name]) for name in texts if row.get(name) is not None}}


def _label(value: Any) -> float:
    if isinstance(value, str) and value.strip().lower() in SIDES:
        return SIDES[value.strip().lower()]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(
            f"the label {value!r} is neither {', '.join(SIDES)} nor a number 0 to 1 (the share for the left "
            "image)."
        ) from None


def _votes(row: Row) -> tuple[int, int, int] | None:
    given: Any = row.get("votes")
    if given is None and ("votes_left" in row or "votes_right" in row):
        given = [row.get(name, 0) for name in _VOTE_COLUMNS]
    if given is None:
        return None
    try:
        counts = json.loads(given) if isinstance(given, str) else list(given)
        numbers = [float(count) for count in counts]
        if len(numbers) not in (2, 3) or any(n != int(n) for n in numbers):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"votes must be whole counts [left, right] or [left, right, tie]; got {given!r}."
        ) from None
    left, right, tie = (int(n) for n in [*numbers, 0.0][:3])
    if min(left, right, tie) < 0 or left + right + tie == 0:
        raise UserError(f"votes must be counts, at least one of them positive; got {given!r}.")
    return left, right, tie


def _ballots(given: Any) -> tuple[tuple[str, float], ...]:
    """What `PreferencePair.to_row` writes; as text too, as CSV has it."""
    try:
        entries = json.loads(given) if isinstance(given, str) else given or ()
        found = tuple((str(name), float(said)) for name, said in entries)
    except (TypeError, ValueError):
        found = (("", -1.0),)
    if not all(0 <= said <= 1 for _, said in found):
        raise UserError(f"ballots must be pairs [annotator, share for the left, 0 to 1]; got {given!r}.")
    return found


def _with_generators(row: Row) -> Row:
    """model_left and model_right name the generators where no generator_left does; scores of a judge that is
    called "model" stay what they are."""
    names = [row.get(f"model_{side}") for side in ("left", "right")]
    if {"generator_left", "generator_right"} & set(row) or not any(_is_name(name) for name in names):
        return row
    return {
        f"generator_{key.removeprefix('model_')}" if key in ("model_left", "model_right") else key: value
        for key, value in row.items()
    }


def _is_name(value: Any) -> bool:
    try:
        float(value)
    except ValueError:
        return True
    except TypeError:
        return False
    return False


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise UserError(f"'{name}' is {'missing' if value is None else repr(value)}, needed is a text.")
    return value


def _number(row: Row, name: str) -> float:
    try:
        value = float(row[name])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"'{name}' is {row.get(name)!r}, needed is a number.") from None
    if not math.isfinite(value):
        raise UserError(f"'{name}' is {value}, needed is a finite number.")
    return value


def truth(value: Any) -> bool:
    """A truth value as files write it: true, false, 1, 0."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, bool):
        return value
    if str(value).strip().lower() in words:
        return words[str(value).strip().lower()]
    raise UserError(f"higher_is_better is {value!r}, needed is true or false.")


def _place(reference: str, folder: Path | None) -> str:
    if folder is None or Path(reference).is_absolute() or "://" in reference:
        return reference
    return str(folder / reference)
