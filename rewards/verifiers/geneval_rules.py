# SPDX-License-Identifier: Apache-2.0
"""GenEval's evaluation rules as pure functions on boxes: include, exclude, count, colour, position.

Ghosh et al., GenEval, arXiv 2310.11513; the thresholds and the order of the rules are those of its released
code. A record is {"tag", "include": [{"class", "count", "color"?, "position"?}], "exclude": [{"class",
"count"}]}; a position is [relation, number of an earlier clause].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from visalign.errors import excerpt

THRESHOLD = 0.3
"""Least confidence of a box."""
COUNTING_THRESHOLD = 0.9
"""The same for records with the tag "counting"."""
MAX_OBJECTS = 16
"""Most boxes per class."""
POSITION_THRESHOLD = 0.1
"""Share of both sizes by which the distance of two centres shrinks before their relation is read."""
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")

Box = Sequence[float]


@dataclass(frozen=True)
class Detected:
    """Box of a detected object."""

    box: tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels, y downwards
    score: float
    color: str | None = None  # One of `COLORS`; None if not needed


@dataclass(frozen=True, kw_only=True)
class GenEvalVerdict:
    """Result of the rules for one image."""

    correct: bool  # GenEval's verdict: at least `count` boxes of each included class, the most confident of them right
    strict: bool  # The same with exactly `count` boxes of each included class
    partial: float  # Mean of the checks in [0, 1]; a number (of boxes, of right colours) off by k of n earns 1 − k/n
    checks: dict[str, bool]  # Name of the check -> whether it holds, as `correct` reads it
    reason: str  # What is wrong, in words; empty when correct


def box_iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes whose last pixel counts: areas (x1 − x0 + 1)(y1 − y0 + 1)."""
    shared = _area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    union = _area(a) + _area(b) - shared
    return shared / union if union else 0.0


def _area(box: Box) -> float:
    return max(box[2] - box[0] + 1, 0) * max(box[3] - box[1] + 1, 0)


def relative_position(a: Box, b: Box, *, threshold: float = POSITION_THRESHOLD) -> list[str]:
    """Relations of box a to b; none for boxes too close to each other.

    o' = max(|o| − t (size_a + size_b), 0) sgn(o), (dx, dy) = o'/‖o‖, with o the offset of the centres and t
    the threshold; "left of" for dx < −½, "right of" for dx > ½, "above" for dy < −½, "below" for dy > ½.
    """
    offset = [(a[k] + a[k + 2] - b[k] - b[k + 2]) / 2 for k in (0, 1)]
    margin = [threshold * (abs(a[k + 2] - a[k]) + abs(b[k + 2] - b[k])) for k in (0, 1)]
    shrunk = [max(abs(o) - m, 0.0) * (1 if o > 0 else -1) for o, m in zip(offset, margin, strict=True)]
    if max(abs(part) for part in shrunk) < 1e-3:
        return []
    length = (offset[0] ** 2 + offset[1] ** 2) ** 0.5
    dx, dy = (part / length for part in shrunk)
    holds = (dx < -0.5, dx > 0.5, dy < -0.5, dy > 0.5)
    return [relation for relation, true in zip(RELATIONS, holds, strict=True) if true]


def keep_boxes(boxes: Sequence[Box], scores: Sequence[float], *, threshold: float, nms: float = 1.0) -> list[int]:
    """Indices of the boxes of one class that count, most confident first.

    Boxes need a confidence above the threshold; of the first `MAX_OBJECTS` those are dropped that overlap an
    earlier one with IoU ≥ `nms` (1, as published, drops none).
    """
    order = sorted((k for k in range(len(boxes)) if scores[k] > threshold), key=lambda k: -scores[k])
    indices: list[int] = []
    for k in order[:MAX_OBJECTS]:
        if nms >= 1 or all(box_iou(boxes[k], boxes[earlier]) < nms for earlier in indices):
            indices.append(k)
    return indices


def record_problem(record: Any) -> str | None:
    """Reason why a record cannot be read, or None."""
    form = 'needed is GenEval\'s layout, include: [{"class": "cat", "count": 1}, ...]'
    if not isinstance(record, Mapping) or not record.get("include"):
        return f"no metadata with 'include'; {form}"
    for part in ("include", "exclude"):
        clauses = record.get(part) or []
        if not isinstance(clauses, list | tuple):
            return f"the metadata's {part} is {excerpt(clauses)}; {form}"
        for number, clause in enumerate(clauses):
            if problem := _clause_problem(clause, number):
                return f"{part}[{number}] {problem}; {form}"
    return None


def _clause_problem(clause: Any, number: int) -> str | None:
    if not isinstance(clause, Mapping) or not isinstance(clause.get("class"), str):
        return "has no class"
    count, color, position = (clause.get(key) for key in ("count", "color", "position"))
    if type(count) is not int or count < 1:
        return f"has the count {excerpt(count)}, which must be a whole number from 1"
    if color is not None and color not in COLORS:
        return f"has the color {excerpt(color)}; allowed are {', '.join(COLORS)}"
    if position is None:
        return None
    is_pair = isinstance(position, list | tuple) and len(position) == 2 and position[0] in RELATIONS
    if not is_pair or type(position[1]) is not int or position[1] not in range(number):
        return f"has the position {excerpt(position)}; allowed is [{' | '.join(RELATIONS)}, an earlier clause]"
    return None


def colored_clauses(objects: Mapping[str, Sequence[Any]], record: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(class, number of boxes) of the clauses with a colour and enough boxes, whose colours `judge` reads."""
    return [
        (clause["class"], clause["count"])
        for clause in record["include"]
        if clause.get("color") is not None and len(objects.get(clause["class"], ())) >= clause["count"]
    ]


def judge(
    objects: Mapping[str, Sequence[Detected]],
    record: Mapping[str, Any],
    *,
    position_threshold: float = POSITION_THRESHOLD,
) -> GenEvalVerdict:
    """Apply the rules to the boxes of one image: class -> boxes, most confident first, coloured where a clause needs
    it.

    All includes must hold and no exclude may; colours and positions are read on the first `count` boxes of a class; a
    position fails where its target clause failed. "partial" follows the soft score of flow_grpo's reward server, with
    two deviations: it is never below 0, and a failed position earns 0 (there ½).
    """
    outcome = _Outcome()
    for number, clause in enumerate(record["include"]):
        outcome.add(number, clause, list(objects.get(clause["class"], ())), position_threshold)
    for number, clause in enumerate(record.get("exclude") or []):
        present = len(objects.get(clause["class"], ()))
        outcome.checks[f"exclude[{number}]"] = present < clause["count"]
        if present >= clause["count"]:
            outcome.reasons.append(f"expected {clause['class']}<{clause['count']}, found {present}")
    return GenEvalVerdict(
        correct=all(outcome.checks.values()),
        strict=outcome.strict,
        partial=sum(outcome.credit) / len(outcome.credit),
        checks=outcome.checks,
        reason="; ".join(outcome.reasons),
    )


class _Outcome:
    """Results of the clauses so far."""

    def __init__(self) -> None:
        self.checks: dict[str, bool] = {}
        self.credit: list[float] = []
        self.reasons: list[str] = []
        self.strict = True
        self._matched: list[list[Detected] | None] = []
        """Boxes of each include clause that holds; None where it failed."""
        self._matched_strictly: list[bool] = []

    def add(self, number: int, clause: Mapping[str, Any], boxes: list[Detected], threshold: float) -> None:
        name, kind, count = f"include[{number}]", clause["class"], clause["count"]
        used = boxes[:count]
        is_met, is_exact = len(used) == count, len(boxes) == count
        self.checks[f"{name}.count"] = is_met
        self.credit.append(_share(len(boxes), count))
        if not is_met:
            self.reasons.append(f"expected {kind}>={count}, found {len(boxes)}")
        if clause.get("color") is not None:
            right = sum(item.color == clause["color"] for item in used) if is_met else 0
            self.checks[f"{name}.color"] = right >= count
            self.credit.append(_share(right, count) if is_exact else 0.0)
            if is_met and right < count:
                colors = ", ".join(str(item.color) for item in used)
                self.reasons.append(f"expected {clause['color']} {kind}>={count}, found {colors}")
            is_met = is_met and right >= count
            is_exact = is_exact and is_met
        if clause.get("position") is not None:
            holds, strictly = self._position(clause, used if is_met else None, threshold)
            self.checks[f"{name}.position"] = holds
            self.credit.append(float(is_exact and strictly))
            is_met, is_exact = is_met and holds, is_exact and strictly
        self._matched.append(used if is_met else None)
        self._matched_strictly.append(is_exact)
        self.strict = self.strict and is_exact

    def _position(self, clause: Mapping[str, Any], used: list[Detected] | None, threshold: float) -> tuple[bool, bool]:
        """(True if each box has the relation to each target box, True if the target holds strictly)."""
        relation, target = clause["position"]
        target_boxes = self._matched[target]
        if used is None:
            return False, False
        if target_boxes is None:
            self.reasons.append(f"no target for {clause['class']} to be {relation}")
            return False, False
        for box in used:
            for target_box in target_boxes:
                relations = relative_position(box.box, target_box.box, threshold=threshold)
                if relation not in relations:
                    actual = " and ".join(relations) or "no relation to"
                    self.reasons.append(f"expected {clause['class']} {relation} target, found {actual} target")
                    return False, False
        return True, self._matched_strictly[target]


def _share(number: int, count: int) -> float:
    """1 − |count − number| / count, at least 0."""
    return max(0.0, 1 - abs(count - number) / count)
