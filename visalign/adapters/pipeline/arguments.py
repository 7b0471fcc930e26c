# SPDX-License-Identifier: Apache-2.0
"""Check the arguments of a pipeline's call against what the pipeline supports."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

from visalign.errors import UserError

from .condition import Source, image_of
from .families import FAMILIES, PIPELINES, REFUSED, Family


def known_family(kind: Any, what: str) -> Family:
    """The family of a pipeline's class.

    Args:
        kind: name of the class.
        what: which is so, for the message.

    Raises:
        UserError: no family has it.
    """
    if kind in REFUSED:
        raise UserError(f"{what} is a {kind}, which {REFUSED[kind]}.")
    if kind not in PIPELINES:
        supported = ", ".join(f"{pipeline} ({name})" for pipeline, name in PIPELINES.items())
        raise UserError(
            f"{what} is a {kind}, of no family that is known: {supported}. Add a row to "
            "visalign/adapters/pipeline/families.py, or name your own adapter (model.adapter=file.py:Class)."
        )
    return FAMILIES[PIPELINES[kind]]


def part_dtypes(
    index: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    encoder: torch.dtype | None,
    decoder: torch.dtype | None,
) -> dict[str, torch.dtype]:
    """Return the dtype in which diffusers loads each component.

    Args:
        index: of the pipeline.
        dtype: of the parts that no other one names.
        encoder: of the encoders of texts and images; None is `dtype`.
        decoder: of the autoencoder; None is `dtype`.
    """
    encoders = [part for part in index if part.startswith(("text_encoder", "image_encoder", "prompt_ups"))]
    chosen = {**dict.fromkeys(encoders, encoder), "vae": decoder if "vae" in index else None}
    return {
        "default": dtype,
        **{part: dtype_of_part for part, dtype_of_part in chosen.items() if dtype_of_part is not None},
    }


def checked_guidance(pipe: Any, family: Family, guidance: float | None) -> float:
    """The scale, if the pipeline can be guided by it.

    Args:
        pipe: the pipeline.
        family: its family.
        guidance: as asked for; None is the usual one.

    Raises:
        UserError: no number or out of range, or the model is distilled.
    """
    usual = family.off if family.usual is None else family.usual
    scale = usual if guidance is None else guidance
    number = isinstance(scale, int | float) and not isinstance(scale, bool) and math.isfinite(scale)
    if not number or scale < family.off:
        raise UserError(
            f"guidance is {guidance!r}; it must be at least {family.off:g}, and {family.off:g} switches "
            "guidance off."
        )
    config = getattr(pipe, family.networks[0]).config
    if getattr(config, "use_meanflow", False) or getattr(config, "flow_map", False):
        raise UserError(
            f"This {type(pipe).__name__} predicts the mean velocity of a whole step, which no single time "
            "has. Take the model that is not distilled."
        )
    embeds = family.guidance != "embedded" or getattr(config, "guidance_embeds", True)
    guides = family.scale != "-" or pipe.components.get("guider") is not None
    if pipe.config.get("is_distilled") or not embeds or not guides:
        if guidance is not None and scale > family.off:
            raise UserError(
                f"This {type(pipe).__name__} is distilled: it takes no guidance, and guidance is {guidance}. "
                "Leave model.guidance out."
            )
        return family.off
    return float(scale)


def call_arguments(
    pipe: Any,
    family: Family,
    image_size: int | tuple[int, int] | None,
    num_frames: int | None,
    more: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Arguments that every call gets.

    Args:
        pipe: the pipeline.
        family: its family.
        image_size: in pixels, a square's side or (height, width); None is the pipeline's own.
        num_frames: of a video; None is the pipeline's own.
        more: the user's.

    Raises:
        UserError: a size that the patches do not divide, frames of an image or out of step, an argument that
            is unknown or has a place of its own.
    """
    taken = list(inspect.signature(type(pipe).__call__).parameters)[1:]
    size = {} if image_size is None else _size(pipe, family, image_size)
    if size and "max_area" in taken:
        size["max_area"] = size["height"] * size["width"]
    if num_frames is not None:
        if family.frames is None:
            raise UserError(f"num_frames is {num_frames}, and {type(pipe).__name__} makes images.")
        step = getattr(pipe, "vae_scale_factor_temporal", None) or getattr(
            pipe, "vae_temporal_compression_ratio", 1
        )
        if num_frames < 1 or (num_frames - 1) % step:
            raise UserError(f"num_frames is {num_frames}; this model makes 1 + a multiple of {step} of them.")
        size["num_frames"] = num_frames
    if more is not None and not isinstance(more, Mapping):
        raise UserError(f"call is {more!r}; give arguments of the pipeline's call by name: {{NAME: VALUE}}.")
    unknown = sorted(set(more or ()) - set(taken))
    if unknown:
        raise UserError(
            f"The call of {type(pipe).__name__} takes no {', '.join(unknown)}. It takes {', '.join(taken)}."
        )
    reserved = {*_GIVEN, *_BY_INDEX, *family.fixed, family.scale}
    refused = sorted(n for n in more or () if n in reserved or "prompt" in n or n.startswith("callback"))
    if refused:
        raise UserError(
            f"call names {', '.join(refused)}, which the policy gives itself or which must be off in "
            "training. Use guidance, negative_prompt, image_size, num_frames and the settings of the rollout."
        )
    return {**size, **(more or {}), **family.fixed}


_GIVEN = (
    "latents generator output_type num_inference_steps return_dict height width num_frames image sigmas "
    "timesteps guidance_scale true_cfg_scale"
).split()
_BY_INDEX = ("skip_guidance_layers", "cfg_truncation", "cfg_trunc_ratio")
"""Guidance that depends on the step's index, which one-step calls do not have."""


def _size(pipe: Any, family: Family, image_size: Any) -> dict[str, int]:
    sides = (image_size, image_size) if isinstance(image_size, int) else image_size
    spatial = getattr(pipe, "vae_scale_factor_spatial", 8)
    unit = (getattr(pipe, "vae_scale_factor", None) or spatial) * family.unit
    pair = isinstance(sides, tuple | list) and len(sides) == 2 and all(isinstance(n, int) for n in sides)
    if family.own_size:
        raise UserError(
            f"image_size is {image_size}, and the call of {type(pipe).__name__} brings every size to an area "
            "of its own. Leave image_size out."
        )
    if not pair or any(side < unit or side % unit for side in sides):
        raise UserError(
            f"image_size is {image_size}; this model makes multiples of {unit} pixels, height and width "
            "alike or apart (one number or a pair)."
        )
    supported = [(height, width) for width, height in getattr(pipe, "resolutions", None) or ()]
    if supported and tuple(sides) not in supported:
        raise UserError(
            f"image_size is {image_size}; {type(pipe).__name__} brings it to one of its own (height, width): "
            f"{supported}. Give one of these."
        )
    return {"height": sides[0], "width": sides[1]}


def at_least_one(name: str, value: int) -> int:
    """The value.

    Args:
        name: for the message.
        value: a count.

    Raises:
        UserError: it is below 1.
    """
    if value < 1:
        raise UserError(f"{name} is {value}; it must be at least 1.")
    return value


def checked_negative(pipe: Any, family: Family, negative_prompt: str | None) -> str | None:
    """The negative prompt, if the call has a place for it.

    Args:
        pipe: the pipeline.
        family: its family.
        negative_prompt: as asked for; None is the usual one.

    Raises:
        UserError: nothing is guided by one.
    """
    if negative_prompt is None:
        return family.negative
    taken = inspect.signature(type(pipe).__call__).parameters
    if "negative_prompt" not in taken or family.guidance in ("embedded", "none"):
        raise UserError(
            f"negative_prompt is {negative_prompt!r}, and {type(pipe).__name__} is not guided by one. Leave "
            "it out."
        )
    return negative_prompt


def checked_source(pipe: Any, family: Family, source: Any, sized: bool) -> Source | None:
    """The images to edit; None where none is, or none is taken.

    Args:
        pipe: the pipeline.
        family: its family.
        source: see `image_of`; or a list of such.
        sized: whether the size of the result is set.

    Raises:
        UserError: it is missing, cannot be read, has more images than the pipeline takes, or would decide
            the size of the result.
    """
    if source is None and family.source == "needed":
        raise UserError(
            f"{type(pipe).__name__} edits an image, and a record has no 'source'. Give each record one: a "
            ".jsonl file of prompts with {prompt, source}, source being an image file."
        )
    if source is None or family.source == "none":
        return None
    if not sized:
        raise UserError(
            "An image is to be edited and image_size is not set: each would have its source's size, and "
            "a batch has one. Set model.image_size."
        )
    images = list(source) if isinstance(source, list | tuple) else [source]
    if not images or (len(images) > 1 and not family.several):
        supported = ", ".join(
            kind for other in FAMILIES.values() if other.several for kind in other.pipelines
        )
        raise UserError(
            f"The source of a record has {len(images)} images, and {type(pipe).__name__} edits "
            f"{'one or several' if family.several else 'one'}. Give one"
            + ("." if family.several else f", or take a pipeline that joins several: {supported}.")
        )
    return Source(tuple(image_of(other) for other in images))
