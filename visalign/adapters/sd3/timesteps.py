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


def latent_shape(pipe: StableDiffusion3Pipeline, image_size: int | tuple[int, int] | None) -> tuple[int, int, int]:
    """Return C, H, W of the latents of an image of `image_size` pixels, one number for a square or (height,
    width); None is the size the model was made for.
    """
    config, scale = pipe.transformer.config, pipe.vae_scale_factor
    size = config.sample_size * scale if image_size is None else image_size
    height, width = (size, size) if isinstance(size, int) else size
    unit, largest = scale * config.patch_size, config.pos_embed_max_size * config.patch_size * scale
    if any(side < unit or side % unit or side > largest for side in (height, width)):
        raise UserError(
            f"image_size is {image_size}; this model makes multiples of {unit} up to {largest} pixels, "
            "as one number or a pair (height, width)."
        )
    return config.in_channels, height // scale, width // scale


def sampling_sigmas(
    pipe: StableDiffusion3Pipeline, steps: int, *, timestep_schedule: str, shape: tuple[int, int, int]
) -> Tensor:
    """Return the timestep schedule [steps + 1], float32, from 1 down to 0: "diffusers" is the pipeline's own,
    which applies the shift twice, "plain" the paper's, which applies it once.
    """
    scheduler = pipe.scheduler
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
