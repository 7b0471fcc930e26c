# SPDX-License-Identifier: Apache-2.0
"""GenEval: checks objects, counts, colours and positions with a transformers detector and CLIP.

Ghosh et al., GenEval, arXiv 2310.11513. Deviations: the detector is one of transformers, not mmdet's; images
are rotated by their EXIF orientation before detection, not only for the colours. `geneval_rules` has the
rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.data.assets import resolve_model
from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.rewards.base.contract import Request, check_choices, check_rules, make_scores, read_request, scatter
from visalign.rewards.base.identity import Identity, fingerprint
from visalign.rewards.base.images import ImageBatch
from visalign.rewards.clip.towers import ClipTowers

from .geneval_detectors import Detector, Found, TransformersDetector
from .geneval_rules import (
    COLORS,
    COUNTING_THRESHOLD,
    THRESHOLD,
    Detected,
    GenEvalVerdict,
    colored_clauses,
    judge,
    keep_boxes,
    record_problem,
)

DETECTOR = "facebook/mask2former-swin-small-coco-instance"
CLIP = "ViT-L-14:openai"
GREY = 0x99 / 255
"""Fill value outside an object's mask when its colour is read."""
TEMPLATES = ("a photo of a {color} {kind}", "a photo of a {color}-colored {kind}", "a photo of a {color} object")
VALUES = {"correct": "1 = correct", "strict": "1 = correct", "partial": "share of checks"}


class GenEval:
    """1 for a correct image and 0 otherwise, by the metadata record of its prompt.

    The parts hold "correct", "strict", "partial" (see `geneval_rules.GenEvalVerdict`), and one column per
    kind of check, "count", "color", "position", "exclude": 1 if all its checks hold, else 0; NaN if there is
    none. `text` says what is wrong. A row without a readable record is invalid.

    Args:
        detector: folder or hub id of a detector or instance segmenter of transformers, or an object with
            `detect` (`geneval_detectors.Detector`).
        clip: model for the colours, see `load_clip`; loaded where a record asks for a colour.
        value: "correct" (GenEval), "strict" (exact counts), or "partial" (a share, as a softer reward).
        batch_size: images in one pass of the detector.
        threshold: least confidence of a box.
        counting_threshold: the same for records with the tag "counting".
        nms: IoU from which the less confident of two boxes of a class is dropped; 1 drops none.
    """

    name = "geneval"
    range = (0.0, 1.0)
    higher_is_better = True
    capabilities = RewardCapabilities(needs_prompt=False)

    def __init__(
        self,
        detector: str | Path | Detector = DETECTOR,
        clip: str | Path = CLIP,
        *,
        value: str = "correct",
        device: str | torch.device = "cpu",
        batch_size: int = 8,
        threshold: float = THRESHOLD,
        counting_threshold: float = COUNTING_THRESHOLD,
        nms: float = 1.0,
    ) -> None:
        check_choices(self.name, value=(value, VALUES))
        self._limits = {"threshold": threshold, "counting_threshold": counting_threshold, "nms": nms}
        in_range = all(0 <= limit <= 1 for limit in self._limits.values())
        check_rules(self.name, {f"the limits are {self._limits}; allowed are numbers in [0, 1]": in_range})
        self.detector: Detector = (
            TransformersDetector(detector, device=device, batch_size=batch_size)
            if isinstance(detector, str | Path)
            else detector
        )
        self.towers = ClipTowers(clip, device=device)
        self.value, self.unit = value, VALUES[value]

    @cached_property
    def identity(self) -> Identity:
        folder = Path(resolve_model(self.towers.source))
        clip = fingerprint(folder) if folder.is_dir() else ""
        weights = [getattr(self.detector, "fingerprint", ""), clip]
        return Identity(
            judge=self.name,
            model=f"{self.detector.source} + {self.towers.source}",
            weights=" + ".join(weights) if any(weights) else "",
            template="\n".join(TEMPLATES),
            options=self._limits | {"value": self.value},
        )

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Check B images against B records in GenEval's layout; prompts are ignored."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows: list[int] = []
        readable_images: list[Tensor] = []
        records: list[Mapping[str, Any]] = []
        for row, image in request.images.readable():
            record = request.metadata[row]
            reasons[row] = record_problem(record)
            if reasons[row] is None:
                unknown = map(self.detector.problem, _kinds(record or {}))
                reasons[row] = next(filter(None, unknown), None)
            if reasons[row] is None:
                rows.append(row)
                readable_images.append(image)
                records.append(record or {})
        valid: dict[int, GenEvalVerdict] = {}
        for row, verdict in zip(rows, self._check(readable_images, records) if rows else (), strict=True):
            if isinstance(verdict, str):
                reasons[row] = verdict
            else:
                valid[row] = verdict
        size = len(request)
        columns = {key: [float(getattr(verdict, key)) for verdict in valid.values()] for key in VALUES}
        for kind in ("count", "color", "position", "exclude"):
            results = [[holds for name, holds in v.checks.items() if kind in name] for v in valid.values()]
            columns[kind] = [float(all(checks)) if checks else math.nan for checks in results]
        parts = {key: scatter(column, list(valid), size) for key, column in columns.items()}
        text = [valid[row].reason if row in valid else "" for row in range(size)]
        return make_scores(parts[self.value], reasons, self.unit, parts=parts, text=text)

    def _check(self, images: list[Tensor], records: list[Mapping[str, Any]]) -> list[GenEvalVerdict | str]:
        """Verdict for each image, or the reason why there is none."""
        detections = self.detector.detect(images, [_kinds(record) for record in records])
        objects: list[dict[str, list[Detected]]] = []
        crops: list[Tensor] = []
        crop_keys: list[tuple[int, str, int]] = []  # (image, class, object)
        for number, (image, record, boxes) in enumerate(zip(images, records, detections, strict=True)):
            threshold = self._limits["counting_threshold" if record.get("tag") == "counting" else "threshold"]
            limits = {"threshold": threshold, "nms": self._limits["nms"]}
            indices = {k: keep_boxes(b.boxes.tolist(), b.scores.tolist(), **limits) for k, b in boxes.items()}
            objects.append({kind: [_detected(boxes[kind], k) for k in numbers] for kind, numbers in indices.items()})
            for kind, count in dict.fromkeys(colored_clauses(objects[-1], record)):
                for at, k in enumerate(indices[kind][:count]):
                    crops.append(crop_object(image, boxes[kind], k))
                    crop_keys.append((number, kind, at))
        problems: dict[int, str] = {}
        colors = self._colors(crops, [kind for _, kind, _ in crop_keys])
        for (number, kind, at), (color, problem) in zip(crop_keys, colors, strict=True):
            objects[number][kind][at] = replace(objects[number][kind][at], color=color)
            if problem is not None:
                problems[number] = f"the color of a {kind} cannot be read: {problem}"
        return [
            problems.get(number) or judge(detected, record)
            for number, (detected, record) in enumerate(zip(objects, records, strict=True))
        ]

    def _colors(self, crops: list[Tensor], kinds: list[str]) -> list[tuple[str | None, str | None]]:
        """(colour, None) or (None, reason) of each crop: the likeliest of `COLORS` by zero-shot CLIP."""
        if not crops:
            return []
        classifiers = {kind: self._classifier(kind) for kind in dict.fromkeys(kinds)}
        reasons: list[str | None] = [None] * len(crops)
        batch = ImageBatch(list(crops), list(reasons))
        rows, features = self.towers.image_features(Request(batch, [""] * len(crops), [None] * len(crops)), reasons)
        answers: list[tuple[str | None, str | None]] = [(None, reason) for reason in reasons]
        for row, feature in zip(rows, features, strict=True):
            cosine = classifiers[kinds[row]] @ F.normalize(feature, dim=0)
            answers[row] = (COLORS[int(cosine.argmax())], None)
        return answers

    def _classifier(self, kind: str) -> Tensor:
        """Text embeddings [10, D] of the colours: means over the templates, normalised before and after."""
        texts = [template.format(color=color, kind=kind) for color in COLORS for template in TEMPLATES]
        features = F.normalize(self.towers.text_features(texts), dim=-1)
        return F.normalize(features.view(len(COLORS), len(TEMPLATES), -1).mean(1), dim=-1)


def crop_object(image: Tensor, boxes: Found, number: int) -> Tensor:
    """Crop an object [3, h, w] by its box, grey outside its mask if there is one."""
    if boxes.masks is not None:
        image = torch.where(boxes.masks[number][None], image, GREY)
    height, width = image.shape[1:]
    x0, y0, x1, y1 = (round(value) for value in boxes.boxes[number].tolist())
    x0, y0 = min(max(x0, 0), width - 1), min(max(y0, 0), height - 1)
    return image[:, y0 : min(max(y1, y0 + 1), height), x0 : min(max(x1, x0 + 1), width)]


def _detected(boxes: Found, number: int) -> Detected:
    x0, y0, x1, y1 = boxes.boxes[number].tolist()
    return Detected((x0, y0, x1, y1), float(boxes.scores[number]))


def _kinds(record: Mapping[str, Any]) -> list[str]:
    clauses = [*record.get("include", ()), *(record.get("exclude") or ())]
    return list(dict.fromkeys(clause["class"] for clause in clauses))
