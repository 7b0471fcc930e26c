# SPDX-License-Identifier: Apache-2.0
"""The exact verifier of the shapes world: pixels -> detections -> GenEval's rules.

The rules are those of GenEval (Ghosh et al. 2023, arXiv 2310.11513, section 3): include, exclude, count,
color, position; here also size, and "nothing else" where a record says `only`. The same rules judge a
scene's own objects (`verify_scene`), which is the truth that the pixel detector is measured against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from .detector import Detection, detect
from .scenes import Scene, relations, size_word


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of the verifier for one image."""

    correct: bool  # True if every check holds
    score: float  # Partial credit in [0, 1]: mean of the checks, a count off by k of n earning 1 − k/n
    checks: dict[str, bool]  # Name of the check -> whether it holds
    reason: str  # Failed checks in words; empty when correct


def verify(images: Tensor | np.ndarray, metadata: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Verify images, [B, 3, 64, 64] float in [0, 1] or uint8 [B, 64, 64, 3], against B prompt records."""
    return [judge(detections, record) for detections, record in zip(detect(images), metadata, strict=True)]


def verify_scene(scene: Scene, record: Mapping[str, Any]) -> Verdict:
    """Verify a scene's own objects, as with a perfect detector."""
    return judge([Detection(**vars(item), overlap=1.0) for item in scene.objects], record)


def judge(detections: Sequence[Detection], record: Mapping[str, Any]) -> Verdict:
    """Apply GenEval's rules to detections."""
    checks: dict[str, bool] = {}
    credits: list[float] = []
    wrong: list[str] = []
    groups: list[list[Detection]] = []

    def note(name: str, holds: bool, credit: float, words: str) -> None:
        checks[name] = holds
        credits.append(1.0 if holds else min(credit, 0.99))
        if not holds:
            wrong.append(words)

    for i, entry in enumerate(record["include"]):
        shape, count = entry["class"], entry.get("count", 1)
        matched = [d for d in detections if d.shape == shape]
        note(
            f"{i}:{shape}:count",
            len(matched) >= count,
            len(matched) / count,
            f"expected {count} {shape}, found {len(matched)}",
        )
        for key in ("color", "size"):
            if key in entry:
                matched = [d for d in matched if (d.color if key == "color" else size_word(d.radius)) == entry[key]]
                words = f"expected {count} {entry[key]} {shape}, found {len(matched)}"
                note(f"{i}:{shape}:{key}", len(matched) >= count, len(matched) / count, words)
        if "position" in entry:
            relation, target = entry["position"]
            couples = [(s, t) for s in matched for t in groups[target] if s is not t]
            related = any(relation in relations((s.x, s.y), (t.x, t.y)) for s, t in couples)
            other = record["include"][target]["class"]
            note(f"{i}:{shape}:position", related, 0.0, f"{shape} is not {relation} {other}")
        groups.append(matched)
    for entry in record.get("exclude", ()):
        number = sum(d.shape == entry["class"] for d in detections)
        allowed = entry["count"] - 1
        words = f"expected at most {allowed} {entry['class']}, found {number}"
        credit = 1.0 - (number - allowed) / max(allowed, 1)
        note(f"exclude:{entry['class']}", number <= allowed, credit, words)
    if record.get("only", False):
        total = sum(entry.get("count", 1) for entry in record["include"])
        words = f"expected {total} objects in all, found {len(detections)}"
        note("only", len(detections) <= total, 1.0 - (len(detections) - total) / total, words)
    score = sum(max(c, 0.0) for c in credits) / len(credits) if credits else 1.0
    return Verdict(correct=not wrong, score=score, checks=checks, reason="; ".join(wrong))
