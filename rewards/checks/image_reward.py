# SPDX-License-Identifier: Apache-2.0
"""`check_reward`: the contract that every reward keeps, as a function for people who write their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Metadata, PointwiseReward
from visalign.rewards.base.attempt import Attempt
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.images import load_images
from visalign.rewards.catalogue import load_reward

from .form import declaration_problems, form_problems
from .probes import PROBES, Case

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
    problems = declaration_problems(
        subject, unit="cosine", signature="score(self, images, prompts, metadata=None) -> Scores"
    )
    if problems:
        raise _report(name, problems)
    tensor, texts = _inputs(images, prompts)
    with Attempt() as attempt:
        case = Case(subject, tensor, texts, None if metadata is None else list(metadata), tolerance)
    if attempt.error is not None:
        message = f"score(images, prompts, metadata) raised {type(attempt.error).__name__}: {attempt.error}"
        raise _report(name, [message]) from attempt.error
    problems = form_problems(case.scores, len(case.prompts), unit=subject.unit, noun="image")
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
        from visalign.rewards.base.callables import FunctionReward

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
