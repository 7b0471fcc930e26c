# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation: the same prompts, seeds and ODE sampling, so that before and after can be paired."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from visalign.errors import UserError, suggestion
from visalign.flow.rollout import rollout
from visalign.interfaces import DiffusionPolicy, PointwiseReward
from visalign.seeds import sample_seed

from .correctness import Tally
from .result import HeldoutResult

Progress = Callable[[int, int], None]


def evaluate(
    policy: DiffusionPolicy,
    rewards: Mapping[str, PointwiseReward],
    records: Sequence[Mapping[str, Any]],
    *,
    seeds: Sequence[int],
    sigmas: Tensor,
    batch_size: int,
    correctness: str | None = "shapes_verifier",
    max_images: int = 1024,
    image_side: int = 256,
    progress: Progress | None = None,
) -> HeldoutResult:
    """Sample every record once per seed without noise on the way (Euler steps of the ODE) and judge them.

    The starting noise is a function of (prompt, seed) alone: neither the batch size, the order of the records
    nor the weights change it. No random state outside is read or moved.

    Args:
        policy: The model, with the weights it has now.
        rewards: name -> reward; each scores every picture.
        records: Prompt records with `prompt` and, for categories, `tag`; the rewards' metadata.
        seeds: Pictures per prompt, one per seed.
        sigmas: [T + 1] time grid from 1 to 0.
        batch_size: Samples denoised, decoded and scored at once.
        correctness: The reward that says correct or wrong: by its part `correct`, else by its best value.
        max_images: Pictures kept, evenly spaced over the samples.
        image_side: Kept pictures whose longer side is larger are reduced to it.
        progress: Called with (samples done, samples in all) after each batch.

    Returns:
        The result, records in the given order, the seeds of a record side by side.

    Raises:
        UserError: For no records, no or repeated seeds, a batch size below 1, an unknown `correctness`, one
            whose scores do not tell correct from wrong, or a reward that returns another number of scores.
    """
    _check(rewards, records, seeds, batch_size, correctness)
    _check_pictures(max_images, image_side)
    metadata = [record for record in records for _ in seeds]
    prompts = [str(record["prompt"]) for record in metadata]
    drawn = np.tile(np.array(seeds, dtype=np.int64), len(records))
    kept, pictures = _evenly(len(prompts), max_images), []
    tally = Tally(correctness=correctness, samples="images")
    with _inference(policy):
        condition = policy.encode(prompts)
        for start in range(0, len(prompts), batch_size):
            rows = slice(start, min(start + batch_size, len(prompts)))
            images = _pictures(policy, condition, rows, prompts, drawn, sigmas)
            own = kept[(kept >= rows.start) & (kept < rows.stop)] - start
            pictures.extend(_as_bytes(images[own], image_side))
            for name, reward in rewards.items():
                tally.add(name, reward, reward.score(images, prompts[rows], metadata[rows]), len(images))
            if progress is not None:
                progress(rows.stop, len(prompts))
    return HeldoutResult(
        prompts=tuple(prompts),
        tags=tuple(str(record.get("tag", "untagged")) for record in metadata),
        seeds=drawn,
        images=np.stack(pictures),
        image_index=kept,
        **tally.fields(rewards, len(prompts)),
    )


def _pictures(
    policy: DiffusionPolicy,
    condition: Any,
    rows: slice,
    prompts: Sequence[str],
    drawn: NDArray[np.int64],
    sigmas: Tensor,
) -> Tensor:
    """[B, 3, H, W] float32 in [0, 1] on the CPU, of some rows."""
    part = condition.select(torch.arange(rows.start, rows.stop))
    seeds = [sample_seed("heldout", prompts[row], int(drawn[row])) for row in range(rows.start, rows.stop)]
    latents = rollout(policy, part, sigmas=sigmas, seeds=seeds).latents
    return policy.decode(latents).detach().to("cpu", torch.float32)


def _as_bytes(images: Tensor, side: int) -> NDArray[np.uint8]:
    """[B, H, W, 3], the longer side at most `side` (area averaging)."""
    height, width = images.shape[-2:]
    scale = side / max(height, width)
    if scale < 1:
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        images = interpolate(images, size=size, mode="area")
    levels = images.clamp(0, 1).mul(255).round().to(torch.uint8)
    return levels.permute(0, 2, 3, 1).contiguous().numpy()


def _evenly(total: int, most: int) -> NDArray[np.int64]:
    """At most `most` of range(total), ascending and evenly spaced, the first always among them."""
    count = min(total, most)
    return (np.arange(count, dtype=np.int64) * total) // count


@contextmanager
def _inference(policy: DiffusionPolicy) -> Iterator[None]:
    """No gradients, and the network in evaluation mode (LoRA dropout off), as it was afterwards."""
    training = policy.module.training
    policy.module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        policy.module.train(training)


def _check(
    rewards: Mapping[str, PointwiseReward],
    records: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    batch_size: int,
    correctness: str | None,
) -> None:
    if not records:
        raise UserError("Held-out evaluation needs at least one prompt record; got none.")
    for number, record in enumerate(records):
        if not str(record.get("prompt", "")).strip():
            raise UserError(
                f"Held-out record {number} has no prompt; each record needs a non-empty 'prompt'. "
                f"Keys: {sorted(record)}."
            )
    if not seeds or len(set(seeds)) != len(seeds):
        raise UserError(
            f"Held-out evaluation needs one or more different seeds; got {list(seeds)}. Write e.g. [0, 1]."
        )
    if batch_size < 1:
        raise UserError(f"batch_size is the number of samples at once, at least 1; got {batch_size}.")
    if correctness is not None and correctness not in rewards:
        known = ", ".join(rewards) or "none"
        raise UserError(
            f"The judge of correctness '{correctness}' is not among the rewards. "
            f"{suggestion(correctness, rewards)}Rewards: {known}. Add it, or give None."
        )


def _check_pictures(max_images: int, image_side: int) -> None:
    if max_images < 1 or image_side < 1:
        raise UserError(
            "The report needs at least 1 picture of at least 1 pixel; "
            f"got max_images {max_images} and image_side {image_side}."
        )
