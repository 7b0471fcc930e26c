# SPDX-License-Identifier: Apache-2.0
"""Latent shape and timestep schedule of an SD3 pipeline."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from torch import Tensor

from visalign.errors import UserError
from visalign.flow.schedules import timestep_sigmas

TIMESTEP_SCHEDULES = ("diffusers", "plain")
"""The pipeline's own schedule, which applies the shift twice, and the paper's, which applies it once."""


def latent_shape(
    pipe: StableDiffusion3Pipeline, image_size: int | tuple[int, int] | None
) -> tuple[int, int, int]:
    """C, H, W of the latents of an image.

    Args:
        pipe: with its transformer and autoencoder.
        image_size: in pixels, one number for a square or (height, width); None is the size the model was made
            for.

    Raises:
        UserError: for a size that the patches do not divide or the position table does not reach.
    """
    config, scale = pipe.transformer.config, pipe.vae_scale_factor
    size = config.sample_size * scale if image_size is None else image_size
    height, width = (size, size) if isinstance(size, int) else size
    unit, largest = scale * config.patch_size, config.pos_embed_max_size * config.patch_size * scale
    if any(side < unit or side % unit or side > largest for side in (height, width)):
        raise UserError(
            f"image_size is {image_size}; this model makes multiples of {unit} up to {largest} pixels, "
            "height and width alike or apart (one number or a pair)."
        )
    return config.in_channels, height // scale, width // scale


def sampling_sigmas(
    pipe: StableDiffusion3Pipeline, steps: int, *, timestep_schedule: str, shape: tuple[int, int, int]
) -> Tensor:
    """The timestep schedule [steps + 1], float32, from 1 down to 0.

    Args:
        pipe: its scheduler decides the shift, and everything else about the "diffusers" schedule; it is not
            touched.
        steps: at least 1.
        timestep_schedule: "diffusers" or "plain".
        shape: of the latents; schedulers with dynamic shifting look at it.

    Raises:
        UserError: for fewer steps, another schedule, or a scheduler that is not the flow-matching Euler one.
    """
    scheduler = pipe.scheduler
    if steps < 1 or timestep_schedule not in TIMESTEP_SCHEDULES:
        raise UserError(
            f"steps={steps}, timestep_schedule={timestep_schedule!r}: steps must be at least 1 and "
            f"timestep_schedule one of {TIMESTEP_SCHEDULES}."
        )
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise UserError(
            f"The pipeline samples with {type(scheduler).__name__}, which is no plain flow. Set "
            "pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)."
        )
    config: Any = scheduler.config
    dynamic: dict[str, Any] = {}
    if config.use_dynamic_shifting:
        patch = pipe.transformer.config.patch_size
        dynamic["mu"] = calculate_shift(
            (shape[1] // patch) * (shape[2] // patch),
            config.base_image_seq_len,
            config.max_image_seq_len,
            config.base_shift,
            config.max_shift,
        )
    if timestep_schedule == "plain":
        return timestep_sigmas(steps, shift=math.exp(dynamic["mu"]) if dynamic else scheduler.shift)
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(steps, device="cpu", **dynamic)
    return torch.as_tensor(scheduler.sigmas, dtype=torch.float32)
