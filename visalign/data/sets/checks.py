# SPDX-License-Identifier: Apache-2.0
"""Checks of preference and quality sets before anything is trained or measured on them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from visalign.errors import UserError

from .image_references import TEXT, file_and_position, missing_files
from .ratings import UNKNOWN_AGREEMENT, describe_ratings
from .records import PreferencePair, PreferenceSet, QualitySet
from .tables import listed

Item = tuple[str, str]  # (reference of an image, name of its set)

PACKAGED_JUDGE = "packaged judge"
"""Kind of the finding that a judge does not know the prompts, so that its numbers mean nothing."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An oddity of a set that is no reason to stop."""

    kind: str  # "duplicates", "disagreement", "one_side", "ties" ...
    count: int
    message: str


def check_preferences(pairs: PreferenceSet, *, files: bool = True, judge_sees_sides: bool = False) -> list[Finding]:
    """Refuse sets on which a number would mean nothing, or whose `files` are missing; report what else is odd.

    Winners on one side (refused where `judge_sees_sides`), repeats, contradictions, equal images, ties.
    """
    _refuse_leaks(
        pairs.name,
        [(image, pair.split) for pair in pairs.pairs for image in (pair.image_left, pair.image_right)],
        [(" ".join(pair.prompt.split()).lower(), pair.split) for pair in pairs.pairs],
        what="prompts",
        remedy="Put each prompt into one split, or read one split alone (--split).",
        files=files,
    )
    tied = sum(pair.label == 0.5 for pair in pairs.pairs)
    if tied == len(pairs):
        raise UserError(
            f"All {len(pairs)} pairs of '{pairs.name}' are ties: there is nothing to agree with. Check which column "
            "holds the label."
        )
    itself = [pairs.row(i) for i, pair in enumerate(pairs.pairs) if pair.image_left == pair.image_right]
    against = [pairs.row(i) for i, pair in enumerate(pairs.pairs) if pair.label_against_votes]
    findings = [*_one_side(pairs, judge_sees_sides), *_repeats(pairs)]
    findings += _rows_finding(
        "label_against_votes", against, "have votes that do not favour their label, which counts"
    )
    findings += _rows_finding("same_image", itself, "compare an image with itself")
    if tied:
        findings.append(Finding(kind="ties", count=tied, message=f"{tied} of {len(pairs)} labels are ties."))
    return findings


def check_quality(records: QualitySet, *, files: bool = True) -> list[Finding]:
    """Refuse a quality set on which no correlation is defined or that leaks; report what else is odd."""
    if len({record.mos for record in records.records}) < 2:
        count = f"The {len(records)} images of '{records.name}' have one score"
        raise UserError(f"{count}; a correlation needs two. Check which column holds the mean opinion score.")
    _refuse_leaks(
        records.name,
        [(record.image, record.split) for record in records.records],
        [(record.origin, record.split) for record in records.records],
        what="images or references",
        remedy="Put all images of a reference into one split, or read one split alone (--split).",
        files=files,
    )
    repeated, scores = [], {}
    for index, record in enumerate(records.records):
        row = records.row(index)
        # one completion may answer several prompts
        key = (record.image, record.prompt if record.image.startswith(TEXT) else "")
        first_row, mos = scores.setdefault(key, (row, record.mos))
        if mos != record.mos:
            raise UserError(
                f"'{record.image}' has the score {mos:g} in row {first_row} and {record.mos:g} in row {row} of "
                f"'{records.name}'. Keep one, or name the column of the raters: --map annotator=COLUMN."
            )
        if first_row != row:
            repeated.append(row)
    odd = describe_ratings(records.ratings or records)
    findings = [Finding(kind=kind, count=count, message=message) for kind, count, message in odd]
    return [*findings, *_rows_finding("duplicates", repeated, "repeat an image")]


def shared_images(sets: Mapping[str, Iterable[str]]) -> list[tuple[Item, Item]]:
    """Find images that are in more than one set: one file under several names, or files of equal bytes.

    Images in a Parquet or tar file are compared by their place in it; one that was saved again is another.
    """
    items = [(reference, name) for name, references in sets.items() for reference in dict.fromkeys(references)]
    states = {reference: _file_state(reference) for reference, _ in items}
    if groups := _across_sets([(states[reference][0], (reference, name)) for reference, name in items]):
        return groups
    sizes = [(states[item[0]][1], item) for item in items if states[item[0]][1] is not None]
    shared_sizes = {states[item[0]][1] for pair in _across_sets(sizes) for item in pair}
    return _across_sets([(_digest(item[0]), item) for size, item in sizes if size in shared_sizes])


def refuse_shared_images(sets: Mapping[str, Iterable[str]], *, what: str) -> None:
    """Refuse sets that share an image; `what` says which, e.g. "of data.heldout are also in data.train"."""
    if shared := shared_images(sets):
        names = [f"'{file}' ({name}) is '{other}' ({other_name})" for (file, name), (other, other_name) in shared]
        raise UserError(f"{len(names)} images {what}: {listed(names)}. Take each out of one of them.")


def without_duplicates(pairs: PreferenceSet) -> PreferenceSet:
    """Drop rows that repeat an earlier row, mirrored or not: the same vote of an annotator, or the same tally.

    Rows with a single label and no annotator may be people who agree: they are kept.
    """
    keys, indices = set(), []
    for index, pair in enumerate(pairs.pairs):
        key = _repeat_key(pair)
        if key is None or key not in keys:
            keys.add(key)
            indices.append(index)
    return _subset(pairs, indices, [pairs.pairs[index] for index in indices])


def summed_votes(pairs: PreferenceSet) -> tuple[PreferenceSet, list[Finding]]:
    """Sum the rows of a pair's annotators to votes, one record per pair in the place of its first row; report on it.

    The label is the share of the votes. Other columns keep the first row's value.
    """
    groups: dict[tuple[str | None, ...], list[int]] = {}
    for index, pair in enumerate(pairs.pairs):
        groups.setdefault((*_statement(pair)[:3], pair.split), []).append(index)
    summed = []
    for indices in groups.values():
        first = pairs.pairs[indices[0]]
        rows = [pairs.pairs[index] for index in indices]
        rows = [row if row.image_left == first.image_left else row.swapped() for row in rows]
        is_vote = len(rows) > 1 or (first.annotator is not None and not first.ballots)
        summed.append(_sum_votes(rows) if is_vote else first)
    findings = []
    annotators = {pair.annotator for pair in pairs.pairs} - {None}
    if len(annotators) == 1 and not any(pair.annotator is None for pair in pairs.pairs):
        message = f"All {len(pairs)} votes are by one annotator, {next(iter(annotators))}: {UNKNOWN_AGREEMENT}."
        findings.append(Finding(kind="one rater", count=len(pairs), message=message))
    if len(summed) < len(pairs):
        unnamed = sum(pair.annotator is None for pair in pairs.pairs)
        by = f" of {len(annotators)} annotators" if annotators else ""
        note = f" {unnamed} rows name no annotator and count as one vote each." if unnamed else ""
        message = f"{len(pairs)} rows{by} are votes on {len(summed)} pairs; those of a pair are summed.{note}"
        findings.append(Finding(kind="votes", count=len(summed), message=message))
    return _subset(pairs, [indices[0] for indices in groups.values()], summed), findings


def _subset(pairs: PreferenceSet, indices: list[int], subset: list[PreferencePair]) -> PreferenceSet:
    rows = tuple(pairs.rows[index] for index in indices) if pairs.rows else ()
    return PreferenceSet(name=pairs.name, pairs=tuple(subset), rows=rows)


def _sum_votes(rows: list[PreferencePair]) -> PreferencePair:
    """Sum rows of one pair with the same image on the left."""
    votes = [row.votes or (int(row.label > 0.5), int(row.label < 0.5), int(row.label == 0.5)) for row in rows]
    left, right, tie = (sum(column) for column in zip(*votes, strict=True))
    are_shares = any(row.votes is None and row.label not in (0.0, 0.5, 1.0) for row in rows)  # no counts of votes
    share = sum(sum(v) * row.label for v, row in zip(votes, rows, strict=True)) / (left + right + tie)
    summed = [ballot for row in rows for ballot in row.ballots]
    ballots = [(row.annotator, row.label) for row in rows if row.annotator is not None]
    return replace(
        rows[0],
        label=share,
        votes=None if are_shares else (left, right, tie),
        annotator=None,
        ballots=(*summed, *ballots),
    )


def _repeat_key(pair: PreferencePair) -> tuple[object, ...] | None:
    """Key that a repeat shares with the earlier row; None for a label without an annotator."""
    if pair.annotator is None and pair.votes is None:
        return None
    ordered = pair if pair.image_left <= pair.image_right else pair.swapped()
    return (*_statement(ordered), ordered.annotator, ordered.votes, ordered.ballots)


def _statement(pair: PreferencePair) -> tuple[str, str, str, float]:
    """Prompt, images in a fixed order, and the label for the first of them."""
    if pair.image_left <= pair.image_right:
        return pair.prompt, pair.image_left, pair.image_right, pair.label
    return pair.prompt, pair.image_right, pair.image_left, 1.0 - pair.label


def _refuse_leaks(
    name: str,
    images: Iterable[tuple[str, str | None]],
    keys: Iterable[tuple[str, str | None]],
    *,
    what: str,
    remedy: str,
    files: bool,
) -> None:
    """Refuse missing image files, and images or keys in more than one split; both come with their split or None."""
    if missing := missing_files([reference for reference, _ in images]) if files else []:
        where = "Relative paths are taken from the folder of the set's file."
        raise UserError(f"{len(missing)} image files do not exist: {listed(missing)}. {where}")
    of_key: dict[str, set[str]] = {}
    in_split: dict[str, list[str]] = {}
    for key, split in keys:
        if split is not None:
            of_key.setdefault(key, set()).add(split)
    if shared := [f"'{key}' ({' and '.join(sorted(names))})" for key, names in of_key.items() if len(names) > 1]:
        raise UserError(f"{len(shared)} {what} of '{name}' are in more than one split: {listed(shared)}. {remedy}")
    for reference, split in images:
        if split is not None:
            in_split.setdefault(split, []).append(reference)
    refuse_shared_images(in_split, what=f"of '{name}' are in more than one split")


def _file_state(reference: str) -> tuple[Hashable, int | None]:
    """(identity of the image's file and its place in it, bytes of a file that holds this image alone)."""
    if reference.startswith(TEXT):
        return reference, None
    path, position = file_and_position(reference)
    try:
        stat = os.stat(path)
    except OSError:  # a URL, an image of the shapes world, or a set of scores without its images
        return reference, None
    return (stat.st_dev, stat.st_ino, position), None if position else stat.st_size


def _digest(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


def _across_sets(keyed: Iterable[tuple[Hashable, Item]]) -> list[tuple[Item, Item]]:
    """Find, for each key in several sets, its first item and the first of another set."""
    groups: dict[Hashable, list[Item]] = {}
    for key, item in keyed:
        groups.setdefault(key, []).append(item)
    by_group = [(group[0], [item for item in group if item[1] != group[0][1]]) for group in groups.values()]
    return [(first, rest[0]) for first, rest in by_group if rest]


def _one_side(pairs: PreferenceSet, judge_sees_sides: bool) -> list[Finding]:
    lefts = sum(pair.label > 0.5 for pair in pairs.pairs)
    rights = sum(pair.label < 0.5 for pair in pairs.pairs)
    if lefts and rights:
        return []
    side, count = ("left", lefts) if lefts else ("right", rights)
    message = (
        f"All {count} winners of '{pairs.name}' are on the {side}: always saying {side} would be right every time."
    )
    if judge_sees_sides:
        raise UserError(f"{message} Mix the sides first (swap_sides, --swap-sides).")
    return [Finding(kind="one_side", count=count, message=message)]


def _repeats(pairs: PreferenceSet) -> list[Finding]:
    """Report rows that repeat an earlier row, and rows of one annotator that contradict an earlier one."""
    labels: dict[tuple[object, ...], set[float]] = {}
    keys: set[tuple[object, ...]] = set()
    duplicates, contradictions = [], []
    for index, pair in enumerate(pairs.pairs):
        *statement, label = _statement(pair)
        key = _repeat_key(pair)
        if key is not None:
            duplicates += [pairs.row(index)] * (key in keys)
            keys.add(key)
        earlier = labels.setdefault((*statement, pair.annotator), set())
        if any((float(label) - 0.5) * (other - 0.5) < 0 for other in earlier):
            contradictions.append(pairs.row(index))
        earlier.add(float(label))
    return [
        *_rows_finding("duplicates", duplicates, "repeat an earlier row"),
        *_rows_finding("disagreement", contradictions, "prefer the other side of an earlier row's pair"),
    ]


def _rows_finding(kind: str, rows: list[int], what: str) -> list[Finding]:
    message = f"{len(rows)} rows {what}: {listed(rows)}."
    return [Finding(kind=kind, count=len(rows), message=message)] if rows else []
