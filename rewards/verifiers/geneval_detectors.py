# SPDX-License-Identifier: Apache-2.0
"""Object detectors for GenEval from transformers: DETR-type, Mask2Former-type, and zero-shot ones.

GenEval chose its confidence thresholds for Mask2Former Swin-S of mmdet 2; another detector may need others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from visalign.hub import go_offline_if_unreachable
from visalign.model_files import LOADING_ERRORS
from visalign.rewards.base.contract import RewardError, check_counts
from visalign.rewards.base.identity import fingerprint
from visalign.rewards.base.images import to_pil
from visalign.rewards.weights.checkpoint_files import quiet_loading

MIN_SCORE = 0.05
"""Least confidence of reported boxes; below all thresholds in use."""
PROMPT = "a photo of a {}"
"""Prompt of a zero-shot model for a class."""
ALIASES = {
    "airplane": "aeroplane",
    "computer keyboard": "keyboard",
    "computer mouse": "mouse",
    "couch": "sofa",
    "dining table": "diningtable",
    "motorcycle": "motorbike",
    "potted plant": "pottedplant",
    "tv": "tvmonitor",
    "tv remote": "remote",
}
"""GenEval's class names -> names of the same classes in some COCO checkpoints."""


@dataclass(frozen=True)
class Found:
    """Boxes of one class in one image, in any order."""

    boxes: Tensor  # [n, 4] x0, y0, x1, y1 in pixels of the image
    scores: Tensor  # [n] confidence in [0, 1]
    masks: Tensor | None = None  # [n, H, W] bool, where the detector segments


class Detector(Protocol):
    """Interface of GenEval's detectors."""

    source: str
    """Folder or hub id, for the record."""

    def problem(self, kind: str) -> str | None:
        """Reason why a class cannot be detected, or None."""
        ...

    def detect(self, images: Sequence[Tensor], kinds: Sequence[Sequence[str]]) -> list[dict[str, Found]]:
        """Detect the given classes in each image [3, H, W], independently of the other images."""
        ...


class TransformersDetector:
    """Detector of transformers, a folder or hub id; images of one size share a forward pass, so none is padded.

    Its kind is read from the configuration: "detection" (DETR, RT-DETR, YOLOS), "segmentation" (Mask2Former,
    MaskFormer: boxes around masks), or "zero_shot" (OWL-ViT, OWLv2, Grounding DINO: one class at a time). A batch has
    `batch_size` images, or (image, class) pairs for a zero-shot model.
    """

    def __init__(self, model: str | Path, *, device: str | torch.device = "cpu", batch_size: int = 8) -> None:
        check_counts("geneval", batch_size=batch_size)
        self.source, self.batch_size = str(model), batch_size
        self._device = torch.device(device)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the weight files; "" where they are not in a folder."""
        return fingerprint(self.source) if Path(self.source).is_dir() else ""

    @cached_property
    def _parts(self) -> tuple[Any, Any, str]:
        import transformers

        if not Path(self.source).exists():
            go_offline_if_unreachable()
        try:
            config = transformers.AutoConfig.from_pretrained(self.source, trust_remote_code=False)
            kind = _kind_of(config)
            maker = {
                "detection": transformers.AutoModelForObjectDetection,
                "segmentation": transformers.AutoModelForUniversalSegmentation,
                "zero_shot": transformers.AutoModelForZeroShotObjectDetection,
            }[kind]
            reader: Any = transformers.AutoProcessor if kind == "zero_shot" else transformers.AutoImageProcessor
            with quiet_loading():
                model, info = maker.from_pretrained(self.source, output_loading_info=True, trust_remote_code=False)
            processor = reader.from_pretrained(self.source, trust_remote_code=False)
        except LOADING_ERRORS as error:
            raise RewardError(
                f"geneval: the detector {self.source} cannot be loaded ({error}). Give one that transformers loads."
            ) from error
        if info["missing_keys"]:
            missing = ", ".join(sorted(info["missing_keys"])[:5])
            raise RewardError(f"geneval: the checkpoint {self.source} lacks weights: {missing}.")
        return model.eval().to(self._device), processor, kind

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Class name without blanks -> label of a closed-vocabulary model."""
        return {_key(name): int(number) for number, name in self._parts[0].config.id2label.items()}

    def _label(self, kind: str) -> int | None:
        for name in (kind, ALIASES.get(kind, kind)):
            if _key(name) in self._numbers:
                return self._numbers[_key(name)]
        return None

    def problem(self, kind: str) -> str | None:
        """Reason why a class cannot be detected, or None."""
        if self._parts[2] == "zero_shot" or self._label(kind) is not None:
            return None
        classes = ", ".join(list(self._parts[0].config.id2label.values())[:5])
        return f"the detector does not know the class {kind!r}; it knows {classes}, ..."

    def detect(self, images: Sequence[Tensor], kinds: Sequence[Sequence[str]]) -> list[dict[str, Found]]:
        """Detect the given classes in each image [3, H, W] in [0, 1]."""
        results: list[dict[str, Found]] = [{} for _ in images]
        # a zero-shot model is run once per class; "" stands for all classes
        zero_shot = self._parts[2] == "zero_shot"
        by_size: dict[tuple[int, int, str], list[int]] = {}
        for index, (image, classes) in enumerate(zip(images, kinds, strict=True)):
            for kind in dict.fromkeys(classes) if zero_shot else [""]:
                by_size.setdefault((image.shape[1], image.shape[2], kind), []).append(index)
        for (_, _, kind), indices in by_size.items():
            for start in range(0, len(indices), self.batch_size):
                chunk = indices[start : start + self.batch_size]
                detections = self._run([images[index] for index in chunk], kind)
                for index, (boxes, scores, labels, masks) in zip(chunk, detections, strict=True):
                    for name in [kind] if zero_shot else dict.fromkeys(kinds[index]):
                        chosen = labels == (0 if zero_shot else self._label(name))
                        part = None if masks is None else masks[chosen]
                        results[index][name] = Found(boxes[chosen], scores[chosen], part)
        return results

    @torch.no_grad()
    def _run(self, images: list[Tensor], class_name: str) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """(boxes [n, 4], scores [n], labels [n], masks [n, H, W] or None) of each image, on the CPU."""
        model, processor, kind = self._parts
        sizes = [(image.shape[1], image.shape[2]) for image in images]
        options: dict[str, Any] = {"images": [to_pil(image) for image in images], "return_tensors": "pt"}
        if kind == "zero_shot":
            options["text"] = [[PROMPT.format(class_name)]] * len(images)
            options["padding"] = True
        inputs = processor(**options).to(self._device)
        outputs = model(**inputs)
        if kind == "segmentation":
            items = processor.post_process_instance_segmentation(
                outputs, threshold=MIN_SCORE, target_sizes=sizes, return_binary_maps=True
            )
            return [_mask_boxes(item, size) for item, size in zip(items, sizes, strict=True)]
        if kind == "zero_shot":
            items = processor.post_process_grounded_object_detection(outputs, threshold=MIN_SCORE, target_sizes=sizes)
            for item in items:
                item["labels"] = torch.zeros(len(item["scores"]), dtype=torch.long)
        else:
            items = processor.post_process_object_detection(outputs, threshold=MIN_SCORE, target_sizes=sizes)
        return [(item["boxes"].cpu(), item["scores"].cpu(), item["labels"].cpu(), None) for item in items]


def _mask_boxes(item: dict[str, Any], size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    info = item["segments_info"]
    if not info:
        empty = torch.zeros(0)
        return torch.zeros(0, 4), empty, empty.long(), torch.zeros(0, *size, dtype=torch.bool)
    masks = item["segmentation"].cpu().bool()
    # A mask of a few cells may vanish when it is resized to the image.
    nonempty = masks.flatten(1).any(1)
    masks, info = masks[nonempty], [info[k] for k in nonempty.nonzero().flatten().tolist()]
    boxes = []
    for mask in masks:
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        boxes.append([float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)])
    scores = torch.tensor([float(entry["score"]) for entry in info])
    labels = torch.tensor([int(entry["label_id"]) for entry in info], dtype=torch.int64)
    return torch.tensor(boxes).reshape(-1, 4), scores, labels, masks


def _key(name: str) -> str:
    return name.lower().replace(" ", "").replace("_", "").replace("-", "")


def _kind_of(config: Any) -> str:
    import transformers

    maps: dict[str, Any] = {
        "zero_shot": transformers.MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING,
        "segmentation": transformers.MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING,
        "detection": transformers.MODEL_FOR_OBJECT_DETECTION_MAPPING,
    }
    architectures = getattr(config, "architectures", None) or [""]
    fitting = [kind for kind, mapping in maps.items() if type(config) in mapping]
    for kind in fitting:
        if maps[kind][type(config)].__name__ in architectures:  # DETR both detects and segments
            return kind
    if not fitting:
        raise ValueError(f"its type {config.model_type!r} is neither a detector nor a segmenter")
    return fitting[-1]
