# SPDX-License-Identifier: Apache-2.0
"""Clip intake: what a judge of clips accepts in the place of an image, and the frames that it asks for.

A clip is a sequence of images of one size, an array [F, ...], or an animated GIF, PNG or WebP (a path or a PIL image).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from visalign.interfaces import Metadata

from .contract import read_metadata
from .images import animation_length, load_animation, load_images, pixels_of
from .memory import max_pixels


def read_clips(
    name: str, images: Any, prompts: Sequence[str], metadata: Metadata | None
) -> tuple[list[Any], list[Mapping[str, Any] | None]]:
    """List the clips of a sequence, or of an array [B, F, ...] or [B, ...], and their records, lengths checked."""
    is_array = isinstance(images, Tensor | np.ndarray)
    if is_array and images.ndim not in (4, 5):
        raise ValueError(f"{name}: images has shape {tuple(images.shape)}; give [B, F, 3, H, W] or [B, 3, H, W].")
    if not is_array and (not isinstance(images, Sequence) or isinstance(images, str | bytes)):
        raise TypeError(
            f"{name}: images is a {type(images).__name__}; give a list of clips, lists of images or arrays."
        )
    if len(images) != len(prompts):
        raise ValueError(f"{name}: {len(images)} clips and {len(prompts)} prompts; give one each.")
    return list(images), read_metadata(name, metadata, len(images), noun="clip")


def read_clip(clip: Any, choose: Callable[[int], Sequence[int] | str]) -> tuple[list[Tensor], str | None]:
    """Read the frames of a clip that are judged, [3, H, W] float32 in [0, 1] each; or none of them, and why.

    They may together have as many pixels as one image. `choose` turns a number of frames into the numbers of those
    that are judged, rising from 0, or says why such a clip cannot be judged.
    """
    if isinstance(clip, Tensor | np.ndarray):
        frames: Any = clip[None] if clip.ndim == 3 else clip
    else:
        frames = clip if isinstance(clip, Sequence) and not isinstance(clip, str | bytes) else [clip]
    length = animation_length(clip)
    if len(frames) == 0:
        return [], "a clip of 0 frames; give at least one image"
    is_animated = length > 1
    chosen = choose(max(length, len(frames)))
    if isinstance(chosen, str):
        return [], chosen
    if is_animated:
        batch = load_animation(frames[0], chosen)
    elif isinstance(frames, Tensor | np.ndarray):
        batch = load_images(frames[chosen])
    else:
        picked = [frames[number] for number in chosen]
        files = [frame for frame in picked if isinstance(frame, str | os.PathLike)]
        if len(files) > 1 and sum(map(pixels_of, files)) > max_pixels():
            return [], (
                f"the {len(files)} frames to be judged have more than {max_pixels()} pixels together; judge "
                "fewer, shrink them, or raise the environment variable VISALIGN_MAX_PIXELS"
            )
        batch = load_images(picked)
    for number, reason in zip(chosen, batch.reasons, strict=True):
        if reason is not None:
            return [], reason if is_animated else f"frame {number}: {reason}"
    images = [image for _, image in batch.readable()]
    sizes = sorted({tuple(image.shape[1:]) for image in images})
    if len(sizes) > 1:
        listed = ", ".join(f"{height}×{width}" for height, width in sizes)
        return [], f"it has frames of the sizes {listed}; the frames of a clip have one size"
    return images, None
