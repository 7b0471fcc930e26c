# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of images: the same prompts, seeds and ODE sampling, so that results can be paired."""

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
from visalign.flow.rollout import decode_images, encoder_inputs, middle_frames, rollout
from visalign.interfaces import DiffusionPolicy, PointwiseReward, score_named, with_capabilities
from visalign.seeds import sample_seed
from visalign.vision.pixels import rounded_levels

from .correctness import Tally, check_evaluation, record_tags
from .result import HeldoutResult


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
    on_images: Callable[[slice, Tensor], object] | None = None,
) -> HeldoutResult:
    """Sample every record once per seed along the ODE, from noise by prompt, source and seed, and score the images.

    The reward `correctness` gives the verdicts. At most `max_images` images, evenly spaced, are kept for a page, with
    `image_side` pixels at most. `share` (r, w) is the r-th of w equal shares of the samples, see
    `joined`. `on_images` gets the rows of each batch and its images [B, 3, H, W].
    """
    check_evaluation(rewards, records, seeds, correctness, batch_size)
    total = len(records) * len(seeds)
    first, end = (total * (share[0] + offset) // share[1] for offset in (0, 1))
    metadata = [record for record in records for _ in seeds][first:end]
    prompts = [str(record["prompt"]) for record in metadata]
    sample_seeds = np.tile(seeds, len(records))[first:end]
    sources = ["".join(record_key(record)[1:]) for record in encoder_inputs(policy, records)]
    count = min(total, max_images)
    image_index, thumbnails = np.arange(count, dtype=np.int64) * total // count - first, []  # evenly spaced
    image_index = image_index[(image_index >= 0) & (image_index < len(prompts))]
    tally = Tally(correctness=correctness)
    clips = {name for name, reward in rewards.items() if with_capabilities(reward).capabilities.takes_clips}
    with _inference(policy):
        batches = _sample(policy, metadata, sample_seeds, sigmas, batch_size, bool(clips), solver)
        for rows, frames, images in batches:
            if on_images is not None:
                on_images(rows, images)
            shown_rows = image_index[(image_index >= rows.start) & (image_index < rows.stop)] - rows.start
            thumbnails.extend(_as_bytes(images[shown_rows], image_side))
            for name, reward in rewards.items():
                samples = frames if name in clips else images
                scores = score_named(reward, samples, prompts[rows], metadata[rows], name=name)
                tally.add(name, reward, scores, len(images))
    return HeldoutResult(
        prompts=tuple(prompts),
        sources=tuple(source for source in sources for _ in seeds)[first:end] if any(sources) else (),
        tags=record_tags(metadata),
        seeds=sample_seeds,
        images=np.stack(thumbnails) if thumbnails else np.zeros((0, 1, 1, 3), np.uint8),
        image_index=image_index,
        **tally.fields(rewards, len(prompts)),
    )


def _sample(
    policy: DiffusionPolicy,
    records: Sequence[Mapping[str, Any]],
    seeds: NDArray,
    sigmas: Tensor,
    batch_size: int,
    clips: bool,
    solver: str,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the rows of each batch, its frames (videos [B, F, 3, H, W] with `clips`) and its images [B, 3, H, W]."""
    inputs = encoder_inputs(policy, records)
    condition, keys = policy.encode(inputs), [record_key(record) for record in inputs]
    for start in range(0, len(records), batch_size):
        rows = range(start, min(start + batch_size, len(records)))
        noise_seeds = [sample_seed("heldout", *keys[row], int(seeds[row])) for row in rows]
        part = condition.select(torch.tensor(rows))
        latents = rollout(policy, part, sigmas=sigmas, seeds=noise_seeds, solver=solver).latents
        frames = decode_images(policy, latents, clips=clips).detach().to("cpu", torch.float32)
        yield slice(rows.start, rows.stop), frames, middle_frames(frames)


def _as_bytes(images: Tensor, side: int) -> NDArray[np.uint8]:
    """Convert to bytes [B, H, W, 3], the longer side at most `side` (area averaging)."""
    height, width = images.shape[-2:]
    scale = side / max(height, width)
    if scale < 1:
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        images = interpolate(images, size=size, mode="area")
    return rounded_levels(images).permute(0, 2, 3, 1).contiguous().numpy()


@contextmanager
def _inference(policy: DiffusionPolicy) -> Iterator[None]:
    training = policy.module.training
    policy.module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        policy.module.train(training)
