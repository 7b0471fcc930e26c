# SPDX-License-Identifier: Apache-2.0
"""`check_reward`: the contract that every reward keeps, as a function for people who write their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Metadata, PointwiseReward, Scores

from .catalogue import load_reward
from .contract import RewardError
from .images import load_images
from .probes import PROBES, Attempt, Case

_PROMPTS = ("a red circle", "a blue square", "two green triangles", "a white cross left of a red circle")


def check_reward(
    reward: PointwiseReward | str | Callable[..., Any],
    *,
    images: Any = None,
    prompts: Sequence[str] | None = None,
    metadata: Metadata | None = None,
    tolerance: float = 1e-6,
) -> list[str]:
    """Try a reward against the contract.

    Args:
        reward: an object with the reward contract, a name for `load_reward`, or a plain function.
        images: B ≥ 2 images of one size that the reward can judge; four noisy 64×64 pictures when None.
        prompts: their prompts; shapes-world prompts when None.
        metadata: their records.
        tolerance: how much equal scores may differ, absolute and relative (bf16 towers need more).

    Returns:
        The names of the checks, all of which passed.

    Raises:
        RewardError: lists everything that is wrong, each with its mend.

    Example:
        >>> check_reward("sharpness")[0]
        'declares name, unit, range, direction'
    """
    subject = _resolve(reward)
    name = getattr(subject, "name", type(subject).__name__)
    problems = _declaration(subject)
    if problems:
        raise _report(name, problems)
    tensor, texts = _inputs(images, prompts)
    with Attempt() as attempt:
        case = Case(subject, tensor, texts, None if metadata is None else list(metadata), tolerance)
    if attempt.error is not None:
        message = f"score(images, prompts, metadata) raised {type(attempt.error).__name__}: {attempt.error}"
        raise _report(name, [message]) from attempt.error
    problems = _shapes(case)
    if problems:
        raise _report(name, problems)
    for promise, probe in PROBES.items():
        with Attempt() as attempt:
            problems += probe(case)
        if attempt.error is not None:
            problems.append(f"trying '{promise}' raised {attempt.error!r}: accept every allowed input")
    if problems:
        raise _report(name, problems)
    return ["declares name, unit, range, direction", "returns well-formed Scores", *PROBES]


def _resolve(reward: PointwiseReward | str | Callable[..., Any]) -> PointwiseReward:
    if isinstance(reward, str):
        return load_reward(reward)
    if callable(reward) and not hasattr(reward, "score"):
        from .callables import FunctionReward

        return FunctionReward(reward)
    return reward  # type: ignore[return-value]  # what it lacks is the first thing that is checked


def _inputs(images: Any, prompts: Sequence[str] | None) -> tuple[Tensor, list[str]]:
    """Images [B, 3, H, W] on the 8-bit grid, and prompts."""
    if images is None:
        generator = torch.Generator().manual_seed(0)
        count = 4 if prompts is None else len(prompts)
        images = torch.randint(0, 256, (count, 3, 64, 64), generator=generator, dtype=torch.uint8)
    batch = load_images(images)
    loaded = [image for _, image in batch.readable()]
    texts = (
        list(prompts) if prompts is not None else [_PROMPTS[row % len(_PROMPTS)] for row in range(len(batch))]
    )
    if len(loaded) != len(batch) or len(loaded) < 2 or len({image.shape for image in loaded}) != 1:
        raise ValueError("check_reward needs at least two readable images of one size; give such images.")
    if len(texts) != len(loaded):
        raise ValueError(
            f"check_reward got {len(loaded)} images and {len(texts)} prompts; give one prompt per image."
        )
    return torch.stack(loaded).mul(255).round() / 255, texts


def _report(name: str, problems: list[str]) -> RewardError:
    listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return RewardError(f"Reward {name!r} breaks its contract in {len(problems)} place(s):\n{listed}")


def _declaration(reward: Any) -> list[str]:
    """Attributes that say what the numbers mean."""
    problems = [
        f"it has no {key}: set it on the class ({mend})"
        for key, mend in (
            ("name", "a short string"),
            ("unit", 'what 1 means, e.g. "cosine"'),
            ("range", "(smallest, largest) possible value, infinities allowed"),
            ("higher_is_better", "True or False"),
            ("score", "score(self, images, prompts, metadata=None) -> Scores"),
        )
        if not hasattr(reward, key)
    ]
    if problems:
        return problems
    for key in ("name", "unit"):
        if not isinstance(getattr(reward, key), str) or not getattr(reward, key):
            problems.append(f"{key} is {getattr(reward, key)!r}: make it a non-empty string")
    ends = reward.range
    if (
        not isinstance(ends, tuple)
        or len(ends) != 2
        or any(math.isnan(end) for end in ends)
        or ends[0] >= ends[1]
    ):
        problems.append(f"range is {ends!r}: make it a pair (smallest, largest) with smallest < largest")
    if not isinstance(reward.higher_is_better, bool):
        problems.append(f"higher_is_better is {reward.higher_is_better!r}: make it True or False")
    return problems


def _shapes(case: Case) -> list[str]:
    """Types and lengths of what came back; everything after relies on them."""
    scores, size = case.scores, len(case.prompts)
    if not isinstance(scores, Scores):
        return [f"score() returned a {type(scores).__name__}: return visalign.interfaces.Scores"]
    problems = []
    if len(scores) != size:
        problems.append(
            f"score() gave {len(scores)} values for {size} images: give one per image, NaN where invalid"
        )
    for key, value, dtype in (("value", scores.value, torch.float32), ("valid", scores.valid, torch.bool)):
        if value.dtype != dtype:
            problems.append(f"{key} has dtype {value.dtype}: make it {dtype}")
    if scores.value.requires_grad:
        problems.append(
            "value carries a gradient graph, which keeps memory: detach it, or score under torch.no_grad()"
        )
    if scores.unit != case.reward.unit:
        problems.append(
            f"Scores.unit is {scores.unit!r}, the reward declares {case.reward.unit!r}: use one of them"
        )
    columns: Mapping[str, Tensor | None] = {"std": scores.std, **scores.parts}
    for key, column in columns.items():
        if column is not None and tuple(column.shape) != (size,):
            problems.append(f"{key!r} has shape {tuple(column.shape)}: make it [{size}]")
    for key, texts in (("text", scores.text), ("reason", scores.reason)):
        if texts is not None and len(texts) != size:
            problems.append(f"{key} has {len(texts)} entries for {size} images: give one per image")
    return problems
