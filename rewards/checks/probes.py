# SPDX-License-Identifier: Apache-2.0
"""What `check_reward` tries on a reward: one function per promise, giving problems with mends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import PointwiseReward, Scores
from visalign.rewards.base.attempt import Attempt
from visalign.rewards.base.images import to_pil


class Case:
    """One reward with the inputs that it is tried on; images are on the 8-bit grid that PIL can hold."""

    def __init__(
        self,
        reward: PointwiseReward,
        images: Tensor,
        prompts: list[str],
        metadata: list[Any] | None,
        tolerance: float,
    ) -> None:
        self.reward = reward
        self.images = images
        self.prompts = prompts
        self.metadata = metadata
        self.tolerance = tolerance
        self.scores = self.run(range(len(prompts)))

    def run(self, rows: Sequence[int], images: Any = None) -> Scores:
        """Score the chosen rows, with other images in their place if given."""
        rows = list(rows)
        metadata = None if self.metadata is None else [copy.deepcopy(self.metadata[row]) for row in rows]
        given = self.images[rows].clone() if images is None else images
        return self.reward.score(given, [self.prompts[row] for row in rows], metadata)

    def same(self, scores: Scores, rows: Sequence[int]) -> bool:
        """Whether `scores` of the chosen rows equal those of the whole batch."""
        index = list(rows)
        expected, valid = self.scores.value[index], self.scores.valid[index]
        if len(scores) != len(index) or not torch.equal(scores.valid, valid):
            return False
        return torch.allclose(scores.value[valid], expected[valid], rtol=self.tolerance, atol=self.tolerance)


def _validity(case: Case) -> list[str]:
    """`valid`, NaN and reasons tell the same story."""
    scores, problems = case.scores, []
    if not scores.valid.any():
        reason = scores.reason[0] if scores.reason else None
        return [
            f"it judged none of the images ({reason}): give check_reward images=, prompts=, metadata= that "
            "it can judge"
        ]
    if not torch.isfinite(scores.value[scores.valid]).all():
        problems.append("a valid score is NaN or infinite: set valid=False and a reason for that sample")
    if not torch.isnan(scores.value[~scores.valid]).all():
        problems.append("an invalid sample has a number as its value: make it NaN, a failure is no score")
    reasons = scores.reason or [None] * len(scores)
    if any(not ok and not reason for ok, reason in zip(scores.valid.tolist(), reasons, strict=True)):
        problems.append("an invalid sample has no reason: say in Scores.reason why it could not be judged")
    return problems


def _in_range(case: Case) -> list[str]:
    low, high = case.reward.range
    outside = [v for v in case.scores.value[case.scores.valid].tolist() if not low <= v <= high]
    if not outside:
        return []
    return [
        f"the score {outside[0]:g} is outside the declared range ({low:g}, {high:g}): declare the true range"
    ]


def _determinism(case: Case) -> list[str]:
    everyone = range(len(case.prompts))
    if case.same(case.run(everyone), everyone):
        return []
    return ["the same images got other scores the second time: seed it, and put the model into eval() mode"]


def _order(case: Case) -> list[str]:
    backwards = list(reversed(range(len(case.prompts))))
    if case.same(case.run(backwards), backwards):
        return []
    return ["the scores do not follow the images when their order is reversed: score each image by itself"]


def _independence(case: Case) -> list[str]:
    if all(case.same(case.run([row]), [row]) for row in range(len(case.prompts))):
        return []
    return [
        "an image alone scores otherwise than in a batch: take out whatever mixes samples (batch statistics, "
        "padding to the longest, z-scores over the batch)"
    ]


def _inputs_kept(case: Case) -> list[str]:
    images, prompts, metadata = case.images.clone(), list(case.prompts), copy.deepcopy(case.metadata)
    case.reward.score(images, prompts, metadata)
    kept = torch.equal(images, case.images) and prompts == case.prompts and metadata == case.metadata
    return [] if kept else ["it changed the images, prompts or metadata that it was given: work on copies"]


def _image_forms(case: Case) -> list[str]:
    everyone = range(len(case.prompts))
    levels = case.images.mul(255).round().to(torch.uint8)
    forms = {
        "a list of PIL images": [to_pil(image) for image in case.images],
        "a uint8 tensor [B, 3, H, W]": levels,
        "a uint8 array [B, H, W, 3]": levels.permute(0, 2, 3, 1).contiguous().numpy(),
    }
    problems = []
    for form, images in forms.items():
        with Attempt() as attempt:
            if not case.same(case.run(everyone, images), everyone):
                problems.append(
                    f"{form} gets other scores than the float tensor: read images with load_images"
                )
        if attempt.error is not None:
            problems.append(f"{form} raised {attempt.error!r}: read images with visalign.rewards.load_images")
    return problems


def _unreadable_image(case: Case) -> list[str]:
    pictures: list[Any] = [to_pil(image) for image in case.images]
    pictures[0] = "no/such/image.png"
    with Attempt() as attempt:
        scores = case.run(range(len(case.prompts)), pictures)
        others = list(range(1, len(case.prompts)))
        kept = Scores(value=scores.value[others], valid=scores.valid[others], unit=scores.unit)
        if scores.valid[0] or not case.same(kept, others):
            return [
                "an unreadable image must be invalid and leave the other scores alone: read images with "
                "load_images"
            ]
    if attempt.error is not None:
        return [
            f"one unreadable image stopped the batch ({attempt.error!r}): give valid=False and a reason for "
            "it"
        ]
    return []


def _lengths_refused(case: Case) -> list[str]:
    with Attempt() as attempt:
        case.reward.score(case.images.clone(), case.prompts[:-1], None)
    return [] if attempt.error is not None else ["it accepts fewer prompts than images: raise a ValueError"]


PROBES: dict[str, Callable[[Case], list[str]]] = {
    "failure is NaN, invalid, and has a reason": _validity,
    "values are inside the range": _in_range,
    "the same images get the same scores": _determinism,
    "scores follow the order of the images": _order,
    "a score does not depend on its neighbours": _independence,
    "inputs are left as they were": _inputs_kept,
    "PIL, uint8 and float images agree": _image_forms,
    "one unreadable image is invalid alone": _unreadable_image,
    "unequal lengths are refused": _lengths_refused,
}
