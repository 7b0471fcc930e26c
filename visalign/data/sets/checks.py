# SPDX-License-Identifier: Apache-2.0
"""What is odd about a preference or quality set before anything is trained or measured on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from visalign.errors import UserError

from .image_references import missing_files
from .leaks import SECONDS, refuse_shared_images
from .records import PreferencePair, PreferenceSet, QualitySet
from .tables import listed


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is odd but can be worked with."""

    kind: str
    """ "duplicates", "disagreement", "one_side", "ties" ..."""
    count: int
    message: str


def check_preferences(
    pairs: PreferenceSet, *, files: bool = True, judge_sees_sides: bool = False
) -> list[Finding]:
    """Refuse sets on which a number would mean nothing; report what else is odd.

    With `files` the images will be opened, so missing ones are refused now; `judge_sees_sides` says that the
    judge gets both at once and so may prefer a side.

    Returns what is no reason to stop: repeated pairs, pairs judged differently in different rows, images
    compared with themselves, all winners on one side, ties; and that not all images of several splits could
    be compared in time.

    Raises:
        UserError: Missing files; a prompt or an image in more than one split; all labels tie; or all winners
            stand on one side and the judge sees sides.
    """
    _refuse_missing([ref for pair in pairs.pairs for ref in (pair.image_left, pair.image_right)], files)
    _refuse_leaks(pairs)
    tied = sum(pair.label == 0.5 for pair in pairs.pairs)
    if tied == len(pairs):
        raise UserError(
            f"All {len(pairs)} pairs of '{pairs.name}' are ties: there is nothing to agree with. Check which "
            "column holds the label (left, right, tie, or the share for the left image)."
        )
    sides = [(ref, pair.split) for pair in pairs.pairs for ref in (pair.image_left, pair.image_right)]
    found = [*_one_side(pairs, judge_sees_sides), *_repeats(pairs), *_shared(pairs.name, sides, files)]
    numbered = zip(_numbers(pairs.rows, len(pairs)), pairs.pairs, strict=True)
    itself = [row for row, pair in numbered if pair.image_left == pair.image_right]
    if itself:
        found.append(_finding("same_image", itself, "compare an image with itself"))
    if tied:
        found.append(Finding(kind="ties", count=tied, message=f"{tied} of {len(pairs)} labels are ties."))
    return found


def check_quality(records: QualitySet, *, files: bool = True) -> list[Finding]:
    """The same for a quality set: repeated images, and that not all images could be compared in time.

    Raises:
        UserError: Missing files, one image with two scores, an image or images of one reference in more than
            one split, all scores equal, or fewer than two images.
    """
    _refuse_missing([record.image for record in records.records], files)
    if len(records) < 2:
        raise UserError(f"'{records.name}' holds {len(records)} image; a correlation needs at least 2.")
    if len({record.mos for record in records.records}) == 1:
        raise UserError(
            f"All {len(records)} scores of '{records.name}' equal {records.records[0].mos:g}: no "
            "correlation is defined. Check which column holds the mean opinion score."
        )
    _refuse_quality_leaks(records)
    repeated, scores = [], {}
    for row, record in zip(_numbers(records.rows, len(records)), records.records, strict=True):
        first = scores.setdefault(record.image, (row, record.mos))
        if first[0] != row and first[1] != record.mos:
            raise UserError(
                f"'{record.image}' has the score {first[1]:g} in row {first[0]} and {record.mos:g} in row "
                f"{row} of '{records.name}'. Keep one of them, or their mean."
            )
        if first[0] != row:
            repeated.append(row)
    found = _shared(records.name, [(record.image, record.split) for record in records.records], files)
    return found + ([_finding("duplicates", repeated, "repeat an image")] if repeated else [])


def without_duplicates(pairs: PreferenceSet) -> PreferenceSet:
    """The set without rows that say again what an earlier row says, mirrored or not.

    Again is what the same annotator says again, and a tally of votes that stands twice. Rows with a single
    label and without an annotator may be people who agree: they are all kept, as is what contradicts.
    """
    seen, kept = set(), []
    for place, pair in enumerate(pairs.pairs):
        key = _repeatable(pair)
        if key is None or key not in seen:
            seen.add(key)
            kept.append(place)
    return _at(pairs, kept, [pairs.pairs[place] for place in kept])


def summed_votes(pairs: PreferenceSet) -> tuple[PreferenceSet, list[Finding]]:
    """One record per pair: the rows of its annotators summed to votes, at the place of the first of them.

    The label is the share of the votes. Of the other columns the first row's are kept; numbers of a judge
    that differ between the rows of a pair are reported.

    Returns:
        The set, and what was summed.
    """
    groups: dict[tuple[str | None, ...], list[int]] = {}
    for place, pair in enumerate(pairs.pairs):
        groups.setdefault((*_statement(pair)[:3], pair.split), []).append(place)
    kept, found, unlike = [], [], set()
    for places in groups.values():
        first = pairs.pairs[places[0]]
        rows = [pairs.pairs[place] for place in places]
        rows = [row if row.image_left == first.image_left else row.swapped() for row in rows]
        kept.append(places[0])
        is_vote = len(rows) > 1 or (first.annotator is not None and not first.ballots)
        found.append(_sum(rows) if is_vote else first)
        unlike |= {name for row in rows[1:] for name in row.extra if _differ(row.extra[name], first, name)}
    findings = []
    if len(found) < len(pairs):
        names = {pair.annotator for pair in pairs.pairs if pair.annotator is not None}
        unnamed = sum(pair.annotator is None for pair in pairs.pairs)
        by = f" of {len(names)} annotators" if names else ""
        without = f" {unnamed} rows name no annotator and count as one vote each." if unnamed else ""
        message = (
            f"{len(pairs)} rows{by} are votes on {len(found)} pairs; those of a pair are summed.{without}"
        )
        findings.append(Finding(kind="votes", count=len(found), message=message))
    if unlike:
        message = f"{listed(sorted(unlike))} differ between rows of one pair; the first row's are used."
        findings.append(Finding(kind="columns", count=len(unlike), message=message))
    return _at(pairs, kept, found), findings


def _at(pairs: PreferenceSet, places: list[int], kept: list[PreferencePair]) -> PreferenceSet:
    """The set with other pairs, which stand in the rows of these places."""
    rows = tuple(pairs.rows[place] for place in places) if pairs.rows else ()
    return PreferenceSet(name=pairs.name, pairs=tuple(kept), rows=rows)


def _sum(rows: list[PreferencePair]) -> PreferencePair:
    """Rows of one pair with the same side on the left as one record."""
    votes = [row.votes or (int(row.label > 0.5), int(row.label < 0.5), int(row.label == 0.5)) for row in rows]
    left, right, tie = (sum(column) for column in zip(*votes, strict=True))
    weights = [sum(row) for row in votes]
    share = sum(w * row.label for w, row in zip(weights, rows, strict=True)) / sum(weights)
    ballots = [(row.annotator, row.label) for row in rows if row.annotator is not None]
    earlier = [ballot for row in rows for ballot in row.ballots]
    return replace(
        rows[0], label=share, votes=(left, right, tie), annotator=None, ballots=(*earlier, *ballots)
    )


def _differ(value: Any, first: PreferencePair, name: str) -> bool:
    """Whether a number is another one than the first row's."""
    try:
        return abs(float(value) - float(first.extra[name])) > 1e-9
    except (KeyError, TypeError, ValueError):
        return False


def _repeatable(pair: PreferencePair) -> tuple[object, ...] | None:
    """What a row must share with an earlier one to say the same again; None for a label without a name."""
    if pair.annotator is None and pair.votes is None:
        return None
    mine = pair if pair.image_left <= pair.image_right else pair.swapped()
    return (*_statement(mine), mine.annotator, mine.votes, mine.ballots)


def leaks(items: Iterable[tuple[str, str | None]]) -> dict[str, list[str]]:
    """Keys that stand in more than one split, with its splits, from (key, split or None) of each row."""
    splits: dict[str, set[str]] = {}
    for key, split in items:
        if split is not None:
            splits.setdefault(key, set()).add(split)
    return {key: sorted(names) for key, names in splits.items() if len(names) > 1}


def _refuse_leaks(pairs: PreferenceSet) -> None:
    found = leaks((" ".join(pair.prompt.split()).lower(), pair.split) for pair in pairs.pairs)
    if found:
        shown = listed([f"'{prompt}' ({' and '.join(names)})" for prompt, names in found.items()])
        raise UserError(
            f"{len(found)} prompts of '{pairs.name}' stand in more than one split: {shown}. What was "
            "trained on would be tested on. Put each prompt into one split, or read one split alone "
            "(split=..., --split)."
        )


def _refuse_quality_leaks(records: QualitySet) -> None:
    found = leaks((record.origin, record.split) for record in records.records)
    if found:
        shown = listed([f"'{name}' ({' and '.join(names)})" for name, names in found.items()])
        raise UserError(
            f"{len(found)} images or references of '{records.name}' stand in more than one split: "
            f"{shown}. Put all images of a reference into one split, or read one split alone (--split)."
        )


def _shared(name: str, items: Iterable[tuple[str, str | None]], files: bool) -> list[Finding]:
    """Refuse an image in more than one split: by its file, and by its content where files are opened."""
    sets: dict[str, list[str]] = {}
    for reference, split in items:
        if split is not None:
            sets.setdefault(split, []).append(reference)
    what = f"of '{name}' stand in more than one split"
    notes = refuse_shared_images(sets, what=what, seconds=SECONDS if files else 0)
    return [Finding(kind="images", count=1, message=note) for note in notes if files]


def _refuse_missing(references: list[str], files: bool) -> None:
    missing = missing_files(references) if files else []
    if missing:
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
        f"All {count} winners of '{pairs.name}' stand on the {side}: a judge that always says {side} "
        "would be right every time."
    )
    if judge_sees_sides:
        raise UserError(f"{message} Mix the sides first (swap_sides, --swap-sides).")
    return [Finding(kind="one_side", count=count, message=message)]


def _repeats(pairs: PreferenceSet) -> list[Finding]:
    """Rows that say again what an earlier row says, and rows of one voice that contradict an earlier one."""
    said: dict[tuple[object, ...], dict[float, int]] = {}
    seen: set[tuple[object, ...]] = set()
    duplicates, contradictions = [], []
    for row, pair in zip(_numbers(pairs.rows, len(pairs)), pairs.pairs, strict=True):
        *key, label = _statement(pair)
        again = _repeatable(pair)
        if again is not None and again in seen:
            duplicates.append(row)
        elif again is not None:
            seen.add(again)
        labels = said.setdefault((*key, pair.annotator), {})
        if any((float(label) - 0.5) * (other - 0.5) < 0 for other in labels):
            contradictions.append(row)
        labels.setdefault(float(label), row)
    found = []
    if duplicates:
        found.append(_finding("duplicates", duplicates, "say again what an earlier row says"))
    if contradictions:
        found.append(
            _finding("disagreement", contradictions, "prefer the other side of an earlier row's pair")
        )
    return found


def _statement(pair: PreferencePair) -> tuple[str, str, str, float]:
    """Prompt, images in a fixed order, and the label for the first of them."""
    if pair.image_left <= pair.image_right:
        return pair.prompt, pair.image_left, pair.image_right, pair.label
    return pair.prompt, pair.image_right, pair.image_left, 1.0 - pair.label


def _finding(kind: str, rows: list[int], what: str) -> Finding:
    return Finding(kind=kind, count=len(rows), message=f"{len(rows)} rows {what}: {listed(rows)}.")


def _numbers(rows: tuple[int, ...], count: int) -> Iterable[int]:
    """Row numbers in the file, or 1 to N for a set that was made in memory."""
    return rows or range(1, count + 1)
