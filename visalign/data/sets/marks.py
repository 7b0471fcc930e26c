# SPDX-License-Identifier: Apache-2.0
"""Marks of voters next to their choice, from an export of `visalign collect`: boxes around faults, a checklist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visalign.errors import UserError, excerpt

from .columns import image_path, read_table

CELLS = 64  # Cells of a map of faults on each side


@dataclass(frozen=True, kw_only=True)
class MarkedImage:
    """An image with what its voters marked."""

    where: str  # Its row and file, for messages
    image: str
    prompt: str
    voters: int
    boxes: tuple[tuple[tuple[float, ...], ...], ...]
    """Boxes (left, top, right, bottom) of each voter who drew any, in shares of the image."""
    grade: float | None  # Mean grade from 0 to 1, where voters graded single images
    checklist: dict[str, float]  # Question -> share of yes

    def heat(self) -> NDArray[np.float32]:
        """[CELLS, CELLS] share of the voters whose boxes cover each cell."""
        heat = np.zeros((CELLS, CELLS), np.float32)
        for boxes in self.boxes:
            heat += np.max([np.outer(_covered(top, bottom), _covered(x0, x1)) for x0, top, x1, bottom in boxes], 0)
        return heat / np.float32(self.voters)

    @property
    def plausibility(self) -> float:
        """Mean grade; without grades the share of voters who marked no fault."""
        return 1 - len(self.boxes) / self.voters if self.grade is None else self.grade


def _covered(start: float, end: float) -> NDArray[np.float64]:
    """[CELLS] share of each cell of a side that lies between two ends."""
    cell = np.arange(CELLS)
    return (np.minimum(end * CELLS, cell + 1) - np.maximum(start * CELLS, cell)).clip(0, 1)


def load_marks(path: str | Path, *, limit: int | None = None) -> list[MarkedImage]:
    """Read the images of an export, a pair as two; `limit` counts images."""
    path, images = Path(path), list[MarkedImage]()
    remedy = "Write it: visalign collect VOTES.sqlite --export FILE.jsonl."
    if not path.is_file():
        raise UserError(f"There is no file '{path}'. {remedy}")
    for number, row in read_table(path, {}):
        try:
            images += _read_row(path, number, row)
        except UserError:
            raise
        except (TypeError, AttributeError, KeyError, ValueError, ZeroDivisionError) as error:
            fault = f"row {number} of '{path.name}' is no row of an export of visalign collect"
            raise UserError(f"{fault}: {error}. {remedy}") from error
    if not images:
        raise UserError(f"'{path}' has no row.")
    return images[:limit]


def _read_row(path: Path, number: int, row: dict[str, Any]) -> Iterator[MarkedImage]:
    where = f"row {number} of '{path.name}'"
    sides = ("left", "right") if "image_left" in row else ("left",)
    answers, voters = row.get("answers", []), row.get("voters", len(row.get("ballots", ())))
    if not isinstance(answers, list) or isinstance(voters, bool) or not isinstance(voters, int) or voters < 0:
        raise UserError(f"{where} has no count of voters. Give an export of visalign collect.")
    voters -= sum("prob" in answer for answer in answers)  # judges mark nothing
    mos, best = row.get("mos"), row.get("mos_best", 5)
    if mos is not None and not (isinstance(mos, int | float) and 1 <= mos <= best):
        raise UserError(f"{where} has mos {excerpt(mos)}; grades are from 1 to {best} (column mos_best).")
    boxes: dict[str, list[tuple[tuple[float, ...], ...]]] = {side: [] for side in sides}
    for answer in answers:
        voter = f"{where}, voter {excerpt(answer.get('annotator'))}"
        checked = [_read_box(voter, box, sides) for box in answer.get("boxes", ())]
        for side in sides:
            if on_side := tuple(ends for name, ends in checked if name == side):
                boxes[side].append(on_side)
    if any(len(of_side) > voters for of_side in boxes.values()):
        raise UserError(f"{where} has boxes of more voters than voted ({voters}). Give an export of visalign collect.")
    counts = {} if len(sides) == 2 else row.get("checklist", {})
    checklist = {question: yes / (yes + no) for question, (yes, no) in counts.items() if yes + no}
    grade = None if mos is None else (mos - 1) / (best - 1)
    common: dict[str, Any] = {"where": where, "prompt": str(row.get("prompt", "")), "voters": voters, "grade": grade}
    for side in sides if voters else ():
        image = image_path(row, f"image_{side}" if len(sides) == 2 else "image", path.parent)
        yield MarkedImage(image=image, boxes=tuple(boxes[side]), checklist=checklist, **common)


def _read_box(where: str, box: Any, sides: Sequence[str]) -> tuple[str, tuple[float, ...]]:
    try:
        side, *ends = box
        left, top, right, bottom = map(float, ends)
        is_inside = side in sides and 0 <= left < right <= 1 and 0 <= top < bottom <= 1
    except (TypeError, ValueError):
        is_inside = False
    if not is_inside:
        raise UserError(
            f"{where}: the box {excerpt(box)} does not lie inside an image. Boxes are [side, left, top, right, "
            f"bottom] with side {' or '.join(sides)} and shares of the image from 0 to 1."
        )
    return side, (left, top, right, bottom)
