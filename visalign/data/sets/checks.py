# SPDX-License-Identifier: Apache-2.0
"""Checks of a preference or quality set before anything is trained or measured on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from visalign.errors import UserError

from .image_references import missing_files
from .leaks import SECONDS, refuse_shared_images
from .records import PreferencePair, PreferenceSet, QualitySet
from .tables import listed


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An oddity of a set that is no reason to stop."""

    kind: str
    """ "duplicates", "disagreement", "one_side", "ties" ..."""
    count: int
    message: str


def check_preferences(
    pairs: PreferenceSet, *, files: bool = True, judge_sees_sides: bool = False
) -> list[Finding]:
    """Refuse sets on which a number would mean nothing; report what else is odd.

    Args:
        pairs: The set.
        files: Whether the images will be opened, so that missing ones are refused now.
        judge_sees_sides: Whether the judge sees both images at once and so may prefer a side.

    Returns:
        Repeated pairs, pairs judged differently in different rows, images compared with themselves, all
        winners on one side, ties; and that not all images of several splits could be compared in time.
    """
    images = [(image, pair.split) for pair in pairs.pairs for image in (pair.image_left, pair.image_right)]
    _refuse_missing([image for image, _ in images], files)
    _refuse_leaks(
        ((" ".join(pair.prompt.split()).lower(), pair.split) for pair in pairs.pairs),
        f"prompts of '{pairs.name}'",
        "Training and test would share them. Put each prompt into one split, or read one split alone "
        "(split=..., --split).",
    )
    tied = sum(pair.label == 0.5 for pair in pairs.pairs)
    if tied == len(pairs):
        raise UserError(
            f"All {len(pairs)} pairs of '{pairs.name}' are ties: there is nothing to agree with. Check which "
            "column holds the label (left, right, tie, or the share for the left image)."
        )
    findings = [*_one_side(pairs, judge_sees_sides), *_repeats(pairs)]
    findings += _shared_images(pairs.name, images, files)
    itself = [pairs.row(i) for i, pair in enumerate(pairs.pairs) if pair.image_left == pair.image_right]
    findings += _rows_finding("same_image", itself, "compare an image with itself")
    if tied:
        findings.append(Finding(kind="ties", count=tied, message=f"{tied} of {len(pairs)} labels are ties."))
    return findings


def check_quality(records: QualitySet, *, files: bool = True) -> list[Finding]:
    """Check a quality set: report repeated images, and that not all images could be compared in time."""
    _refuse_missing([record.image for record in records.records], files)
    if len(records) < 2:
        raise UserError(f"'{records.name}' holds {len(records)} image; a correlation needs at least 2.")
    if len({record.mos for record in records.records}) == 1:
        raise UserError(
            f"All {len(records)} scores of '{records.name}' equal {records.records[0].mos:g}: no "
            "correlation is defined. Check which column holds the mean opinion score."
        )
    _refuse_leaks(
        ((record.origin, record.split) for record in records.records),
        f"images or references of '{records.name}'",
        "Put all images of a reference into one split, or read one split alone (--split).",
    )
    repeated, scores = [], {}
    for index, record in enumerate(records.records):
        row = records.row(index)
        first_row, mos = scores.setdefault(record.image, (row, record.mos))
        if mos != record.mos:
            raise UserError(
                f"'{record.image}' has the score {mos:g} in row {first_row} and {record.mos:g} in row "
                f"{row} of '{records.name}'. Keep one of them, or their mean."
            )
        if first_row != row:
            repeated.append(row)
    findings = _shared_images(records.name, [(r.image, r.split) for r in records.records], files)
    return findings + _rows_finding("duplicates", repeated, "repeat an image")


def without_duplicates(pairs: PreferenceSet) -> PreferenceSet:
    """Drop rows that repeat an earlier row, mirrored or not.

    A repeat is the same vote of the same annotator, or the same tally of votes. Rows with a single label and
    without an annotator may be people who agree: they are all kept, as are rows that contradict each other.
    """
    keys, indices = set(), []
    for index, pair in enumerate(pairs.pairs):
        key = _repeat_key(pair)
        if key is None or key not in keys:
            keys.add(key)
            indices.append(index)
    return _subset(pairs, indices, [pairs.pairs[index] for index in indices])


def summed_votes(pairs: PreferenceSet) -> tuple[PreferenceSet, list[Finding]]:
    """Sum the rows of a pair's annotators to votes, one record per pair in the place of its first row.

    The label is the share of the votes. Other columns keep the first row's value; scores that differ between
    the rows of a pair are reported.

    Returns:
        The set, and reports on the sums.
    """
    groups: dict[tuple[str | None, ...], list[int]] = {}
    for index, pair in enumerate(pairs.pairs):
        groups.setdefault((*_statement(pair)[:3], pair.split), []).append(index)
    summed, unequal = [], set()
    for indices in groups.values():
        first = pairs.pairs[indices[0]]
        rows = [pairs.pairs[index] for index in indices]
        rows = [row if row.image_left == first.image_left else row.swapped() for row in rows]
        is_vote = len(rows) > 1 or (first.annotator is not None and not first.ballots)
        summed.append(_sum_votes(rows) if is_vote else first)
        unequal |= {name for row in rows[1:] for name in row.extra if _differs(row, first, name)}
    findings = []
    if len(summed) < len(pairs):
        annotators = {pair.annotator for pair in pairs.pairs} - {None}
        unnamed = sum(pair.annotator is None for pair in pairs.pairs)
        by = f" of {len(annotators)} annotators" if annotators else ""
        note = f" {unnamed} rows name no annotator and count as one vote each." if unnamed else ""
        message = f"{len(pairs)} rows{by} are votes on {len(summed)} pairs; those of a pair are summed.{note}"
        findings.append(Finding(kind="votes", count=len(summed), message=message))
    if unequal:
        message = f"{listed(sorted(unequal))} differ between rows of one pair; the first row's are used."
        findings.append(Finding(kind="columns", count=len(unequal), message=message))
    return _subset(pairs, [indices[0] for indices in groups.values()], summed), findings


def leaks(items: Iterable[tuple[str, str | None]]) -> dict[str, list[str]]:
    """Find keys in more than one split, with their splits, from (key, split or None) of each row."""
    splits: dict[str, set[str]] = {}
    for key, split in items:
        if split is not None:
            splits.setdefault(key, set()).add(split)
    return {key: sorted(names) for key, names in splits.items() if len(names) > 1}


def _subset(pairs: PreferenceSet, indices: list[int], subset: list[PreferencePair]) -> PreferenceSet:
    """Replace the pairs by some with the row numbers of these indices."""
    rows = tuple(pairs.rows[index] for index in indices) if pairs.rows else ()
    return PreferenceSet(name=pairs.name, pairs=tuple(subset), rows=rows)


def _sum_votes(rows: list[PreferencePair]) -> PreferencePair:
    """Sum rows of one pair with the same image on the left."""
    votes = [row.votes or (int(row.label > 0.5), int(row.label < 0.5), int(row.label == 0.5)) for row in rows]
    left, right, tie = (sum(column) for column in zip(*votes, strict=True))
    share = sum(sum(v) * row.label for v, row in zip(votes, rows, strict=True)) / (left + right + tie)
    summed = [ballot for row in rows for ballot in row.ballots]
    ballots = [(row.annotator, row.label) for row in rows if row.annotator is not None]
    return replace(
        rows[0], label=share, votes=(left, right, tie), annotator=None, ballots=(*summed, *ballots)
    )


def _differs(row: PreferencePair, first: PreferencePair, name: str) -> bool:
    try:
        return abs(float(row.extra[name]) - float(first.extra[name])) > 1e-9
    except (KeyError, TypeError, ValueError):  # only numbers are compared
        return False


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


def _refuse_leaks(items: Iterable[tuple[str, str | None]], what: str, remedy: str) -> None:
    if shared := leaks(items):
        names = listed([f"'{key}' ({' and '.join(splits)})" for key, splits in shared.items()])
        raise UserError(f"{len(shared)} {what} are in more than one split: {names}. {remedy}")


def _shared_images(name: str, items: Iterable[tuple[str, str | None]], files: bool) -> list[Finding]:
    """Refuse an image in more than one split: by its file, and by its content where files are opened."""
    splits: dict[str, list[str]] = {}
    for reference, split in items:
        if split is not None:
            splits.setdefault(split, []).append(reference)
    what = f"of '{name}' are in more than one split"
    notes = refuse_shared_images(splits, what=what, seconds=SECONDS if files else 0)
    return [Finding(kind="images", count=1, message=note) for note in notes if files]


def _refuse_missing(references: list[str], files: bool) -> None:
    if missing := missing_files(references) if files else []:
        raise UserError(
            f"{len(missing)} image files do not exist: {listed(missing)}. Relative paths are taken from the "
            "folder of the set's file."
        )


def _one_side(pairs: PreferenceSet, judge_sees_sides: bool) -> list[Finding]:
    lefts = sum(pair.label > 0.5 for pair in pairs.pairs)
    rights = sum(pair.label < 0.5 for pair in pairs.pairs)
    if lefts and rights:
        return []
    side, count = ("left", lefts) if lefts else ("right", rights)
    message = (
        f"All {count} winners of '{pairs.name}' are on the {side}: a judge that always says {side} "
        "would be right every time."
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
        if key is not None and key in keys:
            duplicates.append(pairs.row(index))
        elif key is not None:
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
