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

from visalign.data.sets.prompt_files import record_key
from visalign.errors import UserError
from visalign.flow.rollout import decode_images, encoder_inputs, middle_frames, rollout
from visalign.interfaces import DiffusionPolicy, PointwiseReward, with_capabilities
from visalign.seeds import sample_seed

from .correctness import Tally, check_asked, tags_of
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
    share: tuple[int, int] = (0, 1),
    solver: str = "euler",
    progress: Progress | None = None,
) -> HeldoutResult:
    """Sample every record once per seed without noise on the way, along the ODE, and judge them.

    The starting noise is a function of prompt, source and seed; no random state outside is read or moved.

    Args:
        policy: The model, with the weights it has now.
        rewards: name -> reward; each scores every image.
        records: Prompt records with `prompt`, `source` where an image is edited and, for categories, `tag`;
            the rewards' metadata.
        seeds: Images per prompt, one per seed.
        sigmas: [T + 1] timestep schedule from 1 to 0.
        batch_size: Samples denoised, decoded and scored at once.
        correctness: The reward that says correct or wrong: by its part `correct`, else by its best value.
        max_images: Images kept, evenly spaced over the samples.
        image_side: Their longer side at most.
        share: (r, w): the r-th of w equal stretches of the samples, w at most their number; see `joined`.
        solver: of the ODE, see `ODESolver`.
        progress: Called with (samples done, samples in all) after each batch.

    Returns:
        The result, records in the given order, the seeds of a record side by side.
    """
    check_asked(rewards, records, seeds, correctness)
    _check_sizes(batch_size, max_images, image_side)
    total = len(records) * len(seeds)
    first, end = (total * (share[0] + more) // share[1] for more in (0, 1))
    metadata = [record for record in records for _ in seeds][first:end]
    prompts, drawn = [str(record["prompt"]) for record in metadata], np.tile(seeds, len(records))[first:end]
    sources = ["".join(record_key(one)[1:]) for one in encoder_inputs(policy, records)]
    kept, thumbnails = _evenly(total, max_images) - first, []
    kept = kept[(kept >= 0) & (kept < len(prompts))]
    tally = Tally(correctness=correctness, samples="images")
    with _inference(policy):
        clips = [name for name, r in rewards.items() if with_capabilities(r).capabilities.takes_clips]
        for rows, frames, images in _drawn(policy, metadata, drawn, sigmas, batch_size, bool(clips), solver):
            own = kept[(kept >= rows.start) & (kept < rows.stop)] - rows.start
            thumbnails.extend(_as_bytes(images[own], image_side))
            for name, reward in rewards.items():
                given = frames if name in clips else images, prompts[rows], metadata[rows]
                tally.add(name, reward, reward.score(*given), len(images))
            if progress is not None:
                progress(rows.stop, len(prompts))
    return HeldoutResult(
        prompts=tuple(prompts),
        sources=tuple(source for source in sources for _ in seeds)[first:end] if any(sources) else (),
        tags=tags_of(metadata),
        seeds=drawn,
        images=np.stack(thumbnails) if thumbnails else np.zeros((0, 1, 1, 3), np.uint8),
        image_index=kept,
        **tally.fields(rewards, len(prompts)),
    )


def _drawn(
    policy: DiffusionPolicy,
    records: Sequence[Mapping[str, Any]],
    drawn: NDArray,
    sigmas: Tensor,
    batch_size: int,
    clips: bool,
    solver: str,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Batch by batch the rows; all frames of videos [B, F, 3, H, W] where `clips` are wanted, else what
    follows; and the images [B, 3, H, W], float32 in [0, 1] on the CPU.
    """
    asked = encoder_inputs(policy, records)
    condition, keys = policy.encode(asked), [record_key(one) for one in asked]
    for start in range(0, len(records), batch_size):
        rows = range(start, min(start + batch_size, len(records)))
        seeds = [sample_seed("heldout", *keys[row], int(drawn[row])) for row in rows]
        part = condition.select(torch.tensor(rows))
        latents = rollout(policy, part, sigmas=sigmas, seeds=seeds, solver=solver).latents
        frames = decode_images(policy, latents, clips=clips).detach().to("cpu", torch.float32)
        yield slice(rows.start, rows.stop), frames, middle_frames(frames)


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


def _check_sizes(batch_size: int, max_images: int, image_side: int) -> None:
    if batch_size < 1:
        raise UserError(f"batch_size is the number of samples at once, at least 1; got {batch_size}.")
    if max_images < 1 or image_side < 1:
        raise UserError(
            "The report needs at least 1 image of at least 1 pixel; "
            f"got max_images {max_images} and image_side {image_side}."
        )
