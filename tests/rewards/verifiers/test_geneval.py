# SPDX-License-Identifier: Apache-2.0
"""GenEval: rules by hand, planted detections, colours by CLIP, bad records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.clip import save_tiny_clip
from visalign.rewards import check_reward
from visalign.rewards.verifiers.geneval import GREY, GenEval, crop_object
from visalign.rewards.verifiers.geneval_detectors import Found
from visalign.rewards.verifiers.geneval_rules import (
    COLORS,
    Detected,
    colored_clauses,
    judge,
    keep_boxes,
    record_problem,
)

CAT = {"class": "cat", "count": 1}


def _at(x: float, y: float, *, color: str | None = None, score: float = 0.9, size: float = 10) -> Detected:
    return Detected((x, y, x + size, y + size), score, color)


# rules


def test_boxes_are_kept_by_confidence_number_and_overlap() -> None:
    boxes = [(0, 0, 9, 9), (0, 0, 9, 9), (20, 0, 29, 9), (0, 0, 9, 8)]
    scores = [0.5, 0.8, 0.3, 0.6]
    assert keep_boxes(boxes, scores, threshold=0.3) == [1, 3, 0]
    assert keep_boxes(boxes, scores, threshold=0.2, nms=0.5) == [1, 2]
    assert keep_boxes(boxes, scores, threshold=0.9) == []


def test_counts_are_at_least_and_strictly_exact() -> None:
    record = {"include": [{"class": "cat", "count": 2}], "exclude": [{"class": "cat", "count": 4}]}
    verdicts = {n: judge({"cat": [_at(20 * k, 0) for k in range(n)]}, record) for n in range(1, 5)}
    assert [verdicts[n].correct for n in (1, 2, 3, 4)] == [False, True, True, False]
    assert [verdicts[n].strict for n in (1, 2, 3, 4)] == [False, True, False, False]
    assert [verdicts[n].partial for n in (1, 2, 3, 4)] == [0.5, 1, 0.5, 0]
    assert verdicts[1].reason == "expected cat>=2, found 1" and verdicts[2].reason == ""
    assert verdicts[4].checks == {"include[0].count": True, "exclude[0]": False}
    assert verdicts[4].reason == "expected cat<4, found 4"
    many = judge({"cat": [_at(0, 0)] * 9}, record)
    assert many.partial == 0  # and not 1 − 7/2


def test_colours_are_read_on_the_surest_boxes() -> None:
    record = {"include": [{"class": "cat", "count": 1, "color": "red"}]}
    first_red = {"cat": [_at(0, 0, color="red"), _at(30, 0, color="blue")]}
    first_blue = {"cat": [_at(30, 0, color="blue"), _at(0, 0, color="red")]}
    assert judge(first_red, record).correct and not judge(first_red, record).strict
    wrong = judge(first_blue, record)
    assert not wrong.correct and wrong.reason == "expected red cat>=1, found blue"
    assert judge({"cat": [_at(0, 0, color="red")]}, record).partial == 1
    assert judge({"cat": [_at(0, 0, color="blue")]}, record).partial == 0.5
    assert colored_clauses(first_red, record) == [("cat", 1)] and colored_clauses({}, record) == []


def test_positions_hold_for_all_pairs_and_need_a_matched_target() -> None:
    record = {"include": [CAT, {"class": "dog", "count": 1, "position": ["left of", 0]}]}
    objects = {"cat": [_at(50, 0)], "dog": [_at(0, 0)]}
    assert judge(objects, record).strict and judge(objects, record).partial == 1
    swapped = judge({"cat": objects["dog"], "dog": objects["cat"]}, record)
    assert not swapped.correct and swapped.reason == "expected dog left of target, found right of target"
    assert swapped.partial == pytest.approx(2 / 3)
    red = {"include": [CAT | {"color": "red"}, record["include"][1]]}
    lost = judge({"cat": [_at(50, 0, color="blue")], "dog": [_at(0, 0)]}, red)
    assert "no target for dog to be left of" in lost.reason
    assert lost.checks["include[1].position"] is False and lost.checks["include[1].count"] is True


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (None, "no metadata with 'include'"),
        ({"include": "cat"}, "include is 'cat'"),
        ({"include": [{"count": 1}]}, "include[0] has no class"),
        ({"include": [{"class": "cat", "count": 0}]}, "has the count 0"),
        ({"include": [CAT | {"color": "beige"}]}, "has the color 'beige'; allowed are red"),
        ({"include": [CAT | {"position": ["near", 0]}]}, "has the position ['near', 0]"),
        ({"include": [CAT | {"position": ["above", 0]}]}, "an earlier clause"),
        ({"include": [CAT, CAT | {"position": ["above", 0.0]}]}, "an earlier clause"),
    ],
)
def test_records_that_cannot_be_read_are_named(record: Any, problem: str) -> None:
    assert problem in str(record_problem(record))
    scores = GenEval(Planted([])).score(torch.rand(1, 3, 8, 8), ["p"], [record])
    assert not scores.valid[0] and scores.reason is not None and problem in str(scores.reason[0])


# the reward, on planted detections


class Planted:
    """A detector that finds what an image's first pixel says."""

    source = "planted"

    def __init__(self, scenes: list[dict[str, list[tuple[list[float], float]]]]) -> None:
        self.scenes = scenes
        self.asked: list[list[str]] = []

    def problem(self, kind: str) -> str | None:
        return "the detector does not know the class 'unicorn'" if kind == "unicorn" else None

    def detect(self, images: Sequence[Tensor], kinds: Sequence[Sequence[str]]) -> list[dict[str, Found]]:
        self.asked = [list(part) for part in kinds]
        answers = []
        for image, classes in zip(images, kinds, strict=True):
            scene = self.scenes[round(float(image[0, 0, 0]) * 255)]
            detected = {}
            for kind in classes:
                boxes = scene.get(kind, [])
                detected[kind] = Found(
                    torch.tensor([box for box, _ in boxes]).reshape(-1, 4), torch.tensor([score for _, score in boxes])
                )
            answers.append(detected)
        return answers


def _numbered(count: int, size: int = 32) -> Tensor:
    images = torch.full((count, 3, size, size), 0.5)
    images[:, :, 0, 0] = torch.arange(count)[:, None] / 255
    return images


def test_planted_scenes_thresholds_and_parts() -> None:
    box = [1.0, 1.0, 9.0, 9.0]
    scenes = [{"cat": [(box, 0.6)]}, {"cat": [(box, 0.2)]}, {"cat": [(box, 0.95), (box, 0.6)]}]
    detector = Planted(scenes)
    record = {"tag": "single_object", "include": [CAT], "exclude": [{"class": "cat", "count": 2}]}
    scores = GenEval(detector).score(_numbered(3), ["p"] * 3, [record] * 3)
    assert scores.value.tolist() == [1, 0, 0] and scores.unit == "1 = correct"
    assert scores.parts["count"].tolist() == [1, 0, 1] and scores.parts["exclude"].tolist() == [1, 1, 0]
    assert bool(scores.parts["color"].isnan().all())
    assert scores.text == ["", "expected cat>=1, found 0", "expected cat<2, found 2"]
    counting = GenEval(detector).score(_numbered(3), ["p"] * 3, [record | {"tag": "counting"}] * 3)
    assert counting.value.tolist() == [0, 0, 1]  # only boxes above 0.9 count
    merged = GenEval(detector, nms=0.5).score(_numbered(3), ["p"] * 3, [record] * 3)
    assert merged.value.tolist() == [1, 0, 1] and detector.asked == [["cat"]] * 3
    partial = GenEval(detector, value="partial").score(_numbered(3), ["p"] * 3, [record] * 3)
    assert partial.value.tolist() == [1, 0, 0] and partial.unit == "share of checks"


def test_failures_stay_rows() -> None:
    scores = GenEval(Planted([{"cat": [([0.0, 0, 9, 9], 0.9)]}])).score(
        [_numbered(1)[0], "no.png", _numbered(1)[0], _numbered(1)[0]],
        ["p"] * 4,
        [{"include": [CAT]}, {"include": [CAT]}, {"include": [{"class": "unicorn", "count": 1}]}, None],
    )
    assert scores.valid.tolist() == [True, False, False, False] and scores.value[0] == 1
    assert scores.reason is not None
    assert scores.reason[1] == "no such image file: no.png" and "does not know the class" in str(scores.reason[2])


def test_the_contract_with_planted_detections() -> None:
    scenes = [{"cat": [([0.0, 0, 9, 9], 0.9)] * (k % 3)} for k in range(4)]
    reward = GenEval(Planted(scenes), value="partial")
    record = {"include": [{"class": "cat", "count": 2}]}
    assert check_reward(reward, images=_numbered(4), prompts=["p"] * 4, metadata=[record] * 4)
    assert reward.identity.digest != GenEval(Planted(scenes)).identity.digest
    packaged = GenEval(Planted(scenes), clip="shapes-clip").identity
    assert len(packaged.weights.split(" + ")[-1]) == 32


# colours


def test_colours_come_from_the_crops(tmp_path: Path) -> None:
    box = [4.0, 4.0, 20.0, 20.0]
    reward = GenEval(Planted([{"cat": [(box, 0.9)]}]), save_tiny_clip(tmp_path / "clip"))
    image = torch.full((3, 32, 32), 0.0)
    image[0, 4:20, 4:20] = 1
    image[:, 0, 0] = 0
    crop = crop_object(image, Found(torch.tensor([box]), torch.tensor([0.9])), 0)
    assert crop.shape == (3, 16, 16) and float(crop[0].min()) == 1
    (color, problem) = reward._colors([crop], ["cat"])[0]
    assert problem is None and color in COLORS
    records = [{"include": [CAT | {"color": name}]} for name in COLORS]
    scores = reward.score([image] * 10, ["p"] * 10, records)
    assert scores.parts["color"].sum() == 1 and COLORS[int(scores.value.argmax())] == color
    assert reward._classifier("cat").shape[0] == 10
    torch.testing.assert_close(reward._classifier("cat").norm(dim=1), torch.ones(10))


def test_crops_are_grey_outside_the_mask_and_stay_inside_the_image() -> None:
    image = torch.ones(3, 8, 8)
    mask = torch.zeros(1, 8, 8, dtype=torch.bool)
    mask[0, 2:4, 2:4] = True
    masked = Found(torch.tensor([[1.0, 1.0, 5.0, 5.0]]), torch.ones(1), mask)
    crop = crop_object(image, masked, 0)
    assert crop.shape == (3, 4, 4) and float(crop.sum()) == pytest.approx(3 * (4 + 12 * GREY))
    outside = Found(torch.tensor([[-3.0, 6.0, 40.0, 90.0], [7.9, 7.9, 7.9, 7.9]]), torch.ones(2))
    assert crop_object(image, outside, 0).shape == (3, 2, 8) and crop_object(image, outside, 1).numel() == 3


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="value is 'soft'; allowed are correct, strict, partial"):
        GenEval(Planted([]), value="soft")
    with pytest.raises(ValueError, match=r"'nms': 2\}; allowed are"):
        GenEval(Planted([]), nms=2)
